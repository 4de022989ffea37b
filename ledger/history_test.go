package ledger_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/usage"
	"virtkit/ledger"
)

func aRun(i int) usage.Run {
	n := int64(i)
	return usage.Run{ID: fmt.Sprint("job-", i), Ended: time.Unix(1_800_000_000+n, 0).UTC(), CeilingMiB: 2048, JobDir: &n,
		Figures: usage.Figures{CPU: time.Second, Memory: n << 20, Net: &usage.Net{Sent: n}}, Images: []string{"sha256:x"}}
}

func TestHistoryIsRemembered(t *testing.T) {
	state := t.TempDir()
	h := ledger.OpenHistory(state)
	const key = "42-acme/test_unit-0123abcd"
	if j, err := h.Job(key); err != nil || len(j.Runs) != 0 {
		t.Fatal(j, err)
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := ledger.OpenHistory(state).Add(key, "test:unit", aRun(i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := h.Add(key, "test:unit", aRun(7)); err != nil { // cleanup after the last stage
		t.Fatal(err)
	}
	j, err := h.Job(key)
	if err != nil || j.Name != "test:unit" || len(j.Runs) != 20 {
		t.Fatal(j.Name, len(j.Runs), err)
	}
	if d := cmp.Diff(aRun(7), j.Runs[7]); d != "" {
		t.Error(d)
	}
	st, err := os.Stat(filepath.Join(state, "history", key))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Error(st.Mode(), err)
	}
	h.Add("42-acme/build-1", "build", aRun(1))
	h.Add("421-acme/build-1", "build", aRun(1))
	p, problems, err := h.Project("42-acme")
	if err != nil || problems != nil || len(p.Jobs) != 2 {
		t.Error(p, problems, err)
	}
	names, err := h.Projects("2-ac")
	if d := cmp.Diff([]string{"42-acme"}, names); d != "" || err != nil {
		t.Error(d, err)
	}
	if _, _, err := h.Project("42"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("part of a name: %v", err)
	}
	for _, bad := range []string{"", "x", "../a/b", "a/..", "a/b/c"} {
		if err := h.Add(bad, "x", aRun(1)); err == nil {
			t.Errorf("%q is a key", bad)
		}
	}
	if _, err := os.Stat(filepath.Join(state, "history", ".lock")); err != nil {
		t.Error(err)
	}
	if none, err := ledger.OpenHistory(t.TempDir()).Projects(""); err != nil || none != nil {
		t.Error(none, err)
	}
}

func TestDamagedHistoryIsToldAndSkipped(t *testing.T) {
	state := t.TempDir()
	h := ledger.OpenHistory(state)
	dir := filepath.Join(state, "history", "42-acme")
	for i := range 3 {
		if err := h.Add("42-acme/build-1", "build", aRun(i)); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "build-1")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	head, rest, _ := strings.Cut(string(whole), "\n")
	// Cut anywhere, it has what was whole.
	for n := range whole {
		put("build-1", string(whole[:n]))
		j, err := h.Job("42-acme/build-1")
		if want := strings.Count(string(whole[:n]), "\n") - 1; n > len(head) && (len(j.Runs) < want || len(j.Runs) > want+1 || err != nil && !strings.Contains(err.Error(), path)) {
			t.Fatalf("cut at %d: %d runs, %v", n, len(j.Runs), err)
		}
	}
	put("build-1", head+"\ngarbage\n{\"ended\":\"2026-01-01T00:00:00Z\"}\n"+rest+"\xff\xfe")
	j, err := h.Job("42-acme/build-1")
	if len(j.Runs) != 3 || err == nil {
		t.Fatal(len(j.Runs), err)
	}
	for _, want := range []string{path + " line 2 is skipped", path + " line 3 is skipped", path + " line 7 is skipped"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nlacks %s", err, want)
		}
	}
	// The next run mends it.
	os.WriteFile(filepath.Join(dir, ".build-1.tmp-77"), nil, 0o600)
	if err := h.Add("42-acme/build-1", "build", aRun(3)); err != nil {
		t.Fatal(err)
	}
	if j, err := h.Job("42-acme/build-1"); err != nil || len(j.Runs) != 4 {
		t.Error(len(j.Runs), err)
	}
	if _, err := os.Stat(filepath.Join(dir, ".build-1.tmp-77")); err == nil {
		t.Error("the leavings of a killed process are still there")
	}
	// Others' files stay as they are.
	put("notes-1", "remember the milk\n")
	put("later-1", `{"schema":"vk.history/2"}`+"\n")
	put("empty-1", "")
	os.Symlink("/etc/passwd", filepath.Join(dir, "link-1"))
	os.Mkdir(filepath.Join(dir, "dir-1"), 0o700)
	p, problems, err := h.Project("42-acme")
	if err != nil || len(p.Jobs) != 1 || len(problems) != 4 {
		t.Errorf("%d jobs, %v, %v", len(p.Jobs), problems, err)
	}
	for _, n := range []string{"notes-1", "later-1", "link-1", "dir-1"} {
		if !strings.Contains(fmt.Sprint(problems), filepath.Join(dir, n)) {
			t.Errorf("%s is not told of: %v", n, problems)
		}
		if err := h.Add("42-acme/"+n, "x", aRun(1)); err == nil {
			t.Errorf("%s was replaced", n)
		}
	}
	if err := h.Add("42-acme/empty-1", "x", aRun(1)); err != nil {
		t.Error(err)
	}
}

// BenchmarkHistoryEstimate is what a job with 1,000 runs waits for.
func BenchmarkHistoryEstimate(b *testing.B) {
	state := b.TempDir()
	h := ledger.OpenHistory(state)
	var j usage.Job
	for i := range usage.MaxRuns {
		j.Add(aRun(i))
	}
	dir := filepath.Join(state, "history", "1-a")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		b.Fatal(err)
	}
	text, err := ledger.EncodeHistory(j)
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "b-1"), text, 0o600); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		j, err := h.Job("1-a/b-1")
		if err != nil || j.Lately(time.Unix(1_800_000_500, 0), 2048).Runs != usage.MaxRuns {
			b.Fatal(len(j.Runs), err)
		}
	}
}
