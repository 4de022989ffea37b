package vkcmd

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

type logsOptions struct {
	follow  bool
	exact   bool
	command bool
	service string
}

func newLogs(a *app) *cli.Command {
	var o logsOptions
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "logs",
		Usage:     "print a guest's console",
		ArgsUsage: "NAME",
		Description: "Prints what the guest wrote to its console: its kernel's messages, the agent's,\n" +
			"and what its programs write there. With --command the output of the command of a\n" +
			"detached guest instead, with --service that of a service of a GitLab job. Terminal\n" +
			"control sequences are removed unless --exact is given. The oldest part is dropped\n" +
			"once it has grown too large.",
		Flags: []cli.Flag{
			cliutil.Bool(&o.follow, "follow", "go on until the guest ends").Short("f"),
			cliutil.Bool(&o.exact, "exact", "print every byte as it came"),
			cliutil.Bool(&o.command, "command", "print the output of a detached guest's command instead"),
			cliutil.String(&o.service, "service", "NAME", "print the log of this service of the guest's job instead"),
		},
		Action: a.withJob(func(ctx context.Context, _ *wire.Host, j ledger.Job) error {
			if o.service != "" {
				spec, err := supervise.ReadSpec(j.Dir)
				if err != nil {
					return err
				}
				if j.Dir, err = spec.ServiceDir(j.Dir, o.service); err != nil {
					return err
				}
				o.command = true
			}
			return printLogs(ctx, a.env.Stdout, j.Dir, o, func() bool { return gone(j.Dir) })
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "there is no such guest"})
}

// gone says whether no supervisor looks after the directory any more.
func gone(dir string) bool {
	_, err := supervise.Dial(dir)
	return err != nil
}

// printLogs copies a job directory's console or command output to w; with follow until ended
// reports true and all is printed.
func printLogs(ctx context.Context, w io.Writer, dir string, o logsOptions, ended func() bool) error {
	out := w
	if !o.exact {
		out = &plainWriter{w: w}
	}
	name := "console.log"
	if o.command {
		name = supervise.CommandFile
	}
	if err := copyFile(out, filepath.Join(dir, name+".1")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tail := &follower{path: filepath.Join(dir, name)}
	defer tail.close()
	for {
		over := !o.follow || ended()
		if err := tail.copy(out); err != nil {
			return err
		}
		if over {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func copyFile(w io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return err
}

// follower reads a file that grows and is replaced when it is full: it ends
// the old one, which it holds open, before it opens the new one.
type follower struct {
	path string
	f    *os.File
}

func (t *follower) copy(w io.Writer) error {
	for {
		if t.f == nil {
			f, err := os.Open(t.path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			t.f = f
		}
		// Asked before the copy: what was written to the old file before it
		// was replaced is then in this copy.
		replaced := t.replaced()
		if _, err := io.Copy(w, t.f); err != nil {
			return err
		}
		if !replaced {
			return nil
		}
		t.close()
	}
}

func (t *follower) replaced() bool {
	a, err := t.f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(t.path)
	return err == nil && !os.SameFile(a, b)
}

func (t *follower) close() {
	if t.f != nil {
		t.f.Close()
		t.f = nil
	}
}

// plainWriter removes terminal control from a console's text: escape
// sequences, carriage returns before line feeds, and other control bytes but
// tab and line feed.
type plainWriter struct {
	w     io.Writer
	state int // 0 text, 1 after ESC, 2 in CSI, 3 in OSC, 4 OSC after ESC
	cr    bool
	buf   bytes.Buffer
}

func (p *plainWriter) Write(b []byte) (int, error) {
	p.buf.Reset()
	for _, c := range b {
		p.take(c)
	}
	if _, err := p.w.Write(p.buf.Bytes()); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (p *plainWriter) take(c byte) {
	switch p.state {
	case 1:
		switch {
		case c == '[':
			p.state = 2
		case c == ']':
			p.state = 3
		case c >= 0x20 && c <= 0x2f: // an intermediate byte, such as that of ESC ( B
		default:
			p.state = 0
		}
		return
	case 2:
		if c >= 0x40 && c <= 0x7e {
			p.state = 0
		}
		return
	case 3, 4:
		switch {
		case c == 7, p.state == 4 && c == '\\':
			p.state = 0
		case c == 0x1b:
			p.state = 4
		default:
			p.state = 3
		}
		return
	}
	if p.cr {
		p.cr = false
		if c != '\n' && c != '\r' {
			p.buf.WriteByte('\n') // a bare return starts a line again
		}
	}
	switch {
	case c == 0x1b:
		p.state = 1
	case c == '\r':
		p.cr = true
	case c == '\n' || c == '\t' || c >= 0x20 && c != 0x7f:
		p.buf.WriteByte(c)
	}
}
