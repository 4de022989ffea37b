// Package transfertest has a guest that is a directory of this host, for tests
// of transfers.
package transfertest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"virtkit/core/archive"
	"virtkit/core/cijob"
	"virtkit/core/fleet/job"
	"virtkit/core/guestwire"
	"virtkit/core/runner"
)

// Guest does what vk-agent archive and extract do, in this process.
type Guest struct{}

// Exec implements cijob.Guest.
func (Guest) Exec(_ context.Context, r guestwire.ExecRequest, s runner.Stdio, _ <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
	say := func(n archive.Note) {
		b, _ := json.Marshal(n)
		fmt.Fprintf(s.Err, "%s\n", b)
	}
	var err error
	switch {
	case len(r.Argv) > 1 && r.Argv[0] == "vk-agent" && r.Argv[1] == "archive":
		sel := archive.Selection{Tree: r.Dir, Stderr: s.Err}
		for _, a := range r.Argv[2:] {
			switch k, v, _ := strings.Cut(a, "="); k {
			case "--path":
				sel.Paths = append(sel.Paths, v)
			case "--exclude":
				sel.Exclude = append(sel.Exclude, v)
			case "--untracked":
				sel.Untracked = true
			}
		}
		var list []archive.Entry
		if list, err = archive.Select(sel, say); err == nil {
			err = archive.Write(s.Out, r.Dir, list, say)
		}
	case len(r.Argv) > 1 && r.Argv[1] == "extract":
		err = archive.Extract(s.In, r.Dir, archive.Limits{}, say)
	default:
		return guestwire.ExecEvent{Exited: true, Code: 127, Err: "no such program"}, nil
	}
	if err != nil {
		say(archive.Note{Level: archive.Fatal, Text: err.Error()})
		return guestwire.ExecEvent{Exited: true, Code: 1}, nil
	}
	return guestwire.ExecEvent{Exited: true}, nil
}

// Trace collects lines.
type Trace struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (t *Trace) Write(p []byte) (int, error) { t.mu.Lock(); defer t.mu.Unlock(); return t.b.Write(p) }

// Lines are what was written so far but the first of each transfer, which tells
// of this build.
func (t *Trace) Lines() (out []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for l := range strings.Lines(t.b.String()) {
		if !strings.HasPrefix(l, "Runtime platform  ") {
			out = append(out, strings.TrimSuffix(l, "\n"))
		}
	}
	return out
}

// New is a transfer of job 7 of a GitLab, its project directory, and its trace.
func New(t testing.TB, server string, vars map[string]string) (cijob.Transfer, *Trace) {
	t.Helper()
	trace := &Trace{}
	j := &job.CiJob{ServerURL: server, Token: "glcbt-64_jobtoken1046ABCDEFGHIJ", Job: job.Info{ID: 1046, ProjectID: 12, ProjectPath: "group/project"}}
	return cijob.Transfer{
		Job: j, Project: t.TempDir(), Work: t.TempDir(), Guest: Guest{}, Out: trace, Err: trace,
		Lookup: func(k string) (string, bool) { v, ok := vars[k]; return v, ok },
		Env:    func(k string) (string, bool) { v, ok := vars[k]; return v, ok },
	}, trace
}

// File makes a file of the project.
func File(t testing.TB, tr cijob.Transfer, name, text string) {
	t.Helper()
	path := filepath.Join(tr.Project, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
