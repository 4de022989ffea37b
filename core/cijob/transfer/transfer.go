// Package transfer is what artifacts and caches share: the archiver in the
// job's guest, and the lines that a job's trace shows of a transfer.
//
// The lines are those of gitlab-runner's helper, whose log goes to the trace
// (vectors/artifacts-*, dependencies*): a text of at least 50 columns, then
// fields by name, coloured by level.
package transfer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"virtkit/core/archive"
	"virtkit/core/archive/pack"
	"virtkit/core/cijob"
	"virtkit/core/guestwire"
	"virtkit/core/runner"
	"virtkit/core/version"
)

// MaxArchive is how large what a transfer keeps whole on the host may be, in
// bytes: it is on the disk that all jobs share.
const MaxArchive = 10 << 30

// Fields are a line's, by name.
type Fields map[string]any

// Log writes lines to a job's trace. It may be used by several goroutines.
type Log struct {
	mu sync.Mutex
	w  io.Writer
}

// NewLog writes to w, one Write a line.
func NewLog(w io.Writer) *Log { return &Log{w: w} }

const (
	reset  = "\x1b[0;m"
	yellow = "\x1b[0;33m"
	red    = "\x1b[31;1m"
)

func (l *Log) line(colour, text string, f Fields) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s%-50s%s ", colour, text, reset)
	for _, k := range slices.Sorted(maps.Keys(f)) {
		fmt.Fprintf(&b, " %s%s%s=%v", colour, k, reset, f[k])
	}
	b.WriteByte('\n')
	l.mu.Lock()
	defer l.mu.Unlock()
	io.WriteString(l.w, b.String())
}

// Info tells something.
func (l *Log) Info(text string, f Fields) { l.line("", text, f) }

// Warning tells what is wrong and goes on.
func (l *Log) Warning(text string, f Fields) { l.line(yellow, "WARNING: "+text, f) }

// Error tells what went wrong.
func (l *Log) Error(text string, f Fields) { l.line(red, "ERROR: "+text, f) }

// Fatal tells why it ends.
func (l *Log) Fatal(text string) { l.line(red, "FATAL: "+text, nil) }

// CheckLevel tells of a compression level that is none.
func (l *Log) CheckLevel(level string) {
	if !pack.Level(level).Known() {
		l.Warning(fmt.Sprintf("compression level %q is invalid, falling back to default", level), nil)
	}
}

// Begin is the first line of each transfer: what does it.
func (l *Log) Begin() {
	l.Info("Runtime platform", Fields{"arch": runtime.GOARCH, "os": runtime.GOOS, "pid": os.Getpid(), "revision": version.Build, "version": version.Version})
}

// raw passes another program's line on.
func (l *Log) raw(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	io.WriteString(l.w, line+"\n")
}

// maxNote bounds a line of the guest's, in bytes.
const maxNote = 64 << 10

// notes turns the agent's notes into lines.
type notes struct {
	log   *Log
	buf   []byte
	fatal string // the text of the last fatal one
}

// Write implements io.Writer.
func (n *notes) Write(p []byte) (int, error) {
	n.buf = append(n.buf, p...)
	for {
		line, rest, ok := bytes.Cut(n.buf, []byte("\n"))
		if !ok && len(n.buf) < maxNote {
			return len(p), nil
		}
		if !ok {
			line, rest = n.buf, nil
		}
		n.note(line)
		n.buf = append(n.buf[:0], rest...)
		if len(n.buf) == 0 {
			return len(p), nil
		}
	}
}

func (n *notes) end() {
	if len(n.buf) > 0 {
		n.note(n.buf)
		n.buf = nil
	}
}

func (n *notes) note(line []byte) {
	var m archive.Note
	if json.Unmarshal(line, &m) != nil || m.Text == "" {
		n.log.raw(string(line))
		return
	}
	switch m.Level {
	case archive.Info:
		n.log.Info(m.Text, nil)
	case archive.Fatal:
		n.fatal = m.Text // told by who fails of it
	default:
		n.log.Warning(m.Text, nil)
	}
}

// run runs the agent's archiver in the job's guest.
func run(ctx context.Context, t cijob.Transfer, log *Log, in io.Reader, out io.Writer, args ...string) error {
	n := &notes{log: log}
	req := guestwire.ExecRequest{Argv: append([]string{"vk-agent"}, args...), Dir: t.Project, User: t.User}
	ev, err := t.Guest.Exec(ctx, req, runner.Stdio{In: in, Out: out, Err: n}, nil)
	n.end()
	switch {
	case err != nil:
		return err
	case ev.Err != "":
		return fmt.Errorf("vk-agent %s: %s", args[0], ev.Err)
	case n.fatal != "":
		return errors.New(n.fatal)
	case ev.Code != 0:
		return fmt.Errorf("vk-agent %s has ended with status %d", args[0], ev.Code)
	}
	return nil
}

// Selection are the files of a transfer.
type Selection struct {
	Paths, Exclude []string // not expanded yet
	Untracked      bool
}

// Archive has the guest send the selected files; consume reads the tar stream.
// What cannot be read by consume ends the guest's side.
func Archive(ctx context.Context, t cijob.Transfer, s Selection, log *Log, consume func(io.Reader) error) error {
	args := []string{"archive"}
	for _, p := range s.Paths {
		args = append(args, "--path="+Words(t, p))
	}
	for _, p := range s.Exclude {
		args = append(args, "--exclude="+Words(t, p))
	}
	if s.Untracked {
		args = append(args, "--untracked")
	}
	r, w := io.Pipe()
	consumed := make(chan error, 1)
	go func() {
		err := consume(r)
		r.CloseWithError(errors.Join(err, io.ErrClosedPipe))
		consumed <- err
	}()
	err := run(ctx, t, log, nil, w, args...)
	if err != nil {
		w.CloseWithError(err)
	} else {
		w.Close()
	}
	if cerr := <-consumed; cerr != nil && !errors.Is(cerr, err) {
		return cerr // the guest's end follows from it
	}
	return err
}

// Extract has the guest make the files of the tar stream that produce writes.
func Extract(ctx context.Context, t cijob.Transfer, log *Log, produce func(io.Writer) error) error {
	r, w := io.Pipe()
	produced := make(chan error, 1)
	go func() {
		err := produce(w)
		w.CloseWithError(err)
		produced <- err
	}()
	err := run(ctx, t, log, r, nil, "extract")
	r.CloseWithError(io.ErrClosedPipe)
	if perr := <-produced; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return perr
	}
	return err
}

// ErrTooLarge is of an archive over MaxArchive.
var ErrTooLarge = fmt.Errorf("the archive is larger than %d GiB", MaxArchive>>30)

// Capped is a writer that fails once more than N bytes would be written.
type Capped struct {
	W io.Writer
	N int64
}

// Write implements io.Writer.
func (c *Capped) Write(p []byte) (int, error) {
	if c.N -= int64(len(p)); c.N < 0 {
		return 0, ErrTooLarge
	}
	return c.W.Write(p)
}

// Temp makes a file in the driver's directory that has no name: it goes with
// this process at the latest.
func Temp(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "transfer-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
