// Package agent is what a guest runs: PID 1 of the microVM and, for the host,
// the hands inside it. Main decides by its process number and its name what
// it is; Serve answers the host's requests (core/guestwire) over any listener
// and needs no guest, which is how it is tested.
//
// PID 1 never exits. It mounts what a program may expect, loads the modules
// its initramfs carries, waits for the host on the control channel, and on
// Setup turns the bare guest into the job's machine. Stages are told on the
// console as "vk-agent: stage NAME".
//
// The package is linked into a small binary of its own (see DESIGN.md, Init):
// nothing but the standard library without net/http, x/sys, yamux and core.
package agent

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"virtkit/agent/reap"
	"virtkit/core/version"
)

const usage = `usage: vk-agent exec --service NAME CMD... | archive ... | extract | shell [ARG...] | serve --stdio | version | nop

The agent of a guest. As process 1 it is the guest's init and takes no
arguments. Otherwise:

  exec            run a command in a service of the job; see vk-agent exec --help
  archive         write files of the working directory to standard output, as a
                  tar stream: [--path PATTERN]... [--exclude PATTERN]...
                  [--untracked]; notes on standard error, a line of JSON each
  extract         make the files of such a stream, from standard input:
                  [--max-bytes N]
  serve --stdio   answer one session on standard input and output
  shell           run bash, or sh where there is none (also by the name vk-shell)
  version         print the version
  nop             do nothing, to measure the start
`

// ShellName is the name by which the agent is a shell.
const ShellName = "vk-shell"

// Main runs the agent and returns its exit status. args begins with the name
// it was called by. stdin and stdout carry the session of serve --stdio.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if os.Getpid() == 1 {
		runInit()
		return 1 // not reached
	}
	if len(args) > 0 && filepath.Base(args[0]) == ShellName {
		return execShell(args[1:], stderr)
	}
	if len(args) < 2 {
		return badUsage(stderr, "no command given")
	}
	wrong := fmt.Sprintf("unknown command %q", args[1])
	switch rest := args[2:]; args[1] {
	case "shell":
		return execShell(rest, stderr)
	case "exec":
		return runServiceExec(ctx, rest, stdin, stdout, stderr)
	case "archive":
		return runArchive(rest, stdout, stderr)
	case "extract":
		return runExtract(rest, stdin, stderr)
	case "nop":
		if len(rest) == 0 {
			return 0
		}
		wrong = fmt.Sprintf("unexpected argument %q", rest[0])
	case "version":
		if len(rest) == 0 {
			fmt.Fprintln(stdout, version.String())
			return 0
		}
		wrong = fmt.Sprintf("unexpected argument %q", rest[0])
	case "serve":
		switch {
		case len(rest) == 0:
			wrong = "serve: --stdio is missing"
		case rest[0] != "--stdio":
			wrong = fmt.Sprintf("serve: unknown argument %q", rest[0])
		case len(rest) > 1:
			wrong = fmt.Sprintf("serve: unexpected argument %q", rest[1])
		default:
			return serveStdio(ctx, stdin, stdout, stderr)
		}
	case "-h", "--help", "help":
		fmt.Fprint(stdout, usage)
		return 0
	default:
		if strings.HasPrefix(args[1], "-") {
			wrong = fmt.Sprintf("unknown flag %q", args[1])
		}
	}
	return badUsage(stderr, wrong)
}

// badUsage says what is wrong with the arguments, and what the right ones are.
func badUsage(stderr io.Writer, wrong string) int {
	fmt.Fprintf(stderr, "vk-agent: %s\n%s", wrong, usage)
	return 2
}

// serveStdio answers one session. It takes over the orphans of its programs,
// as an init does.
func serveStdio(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) int {
	r, err := subreaper()
	if err != nil {
		fmt.Fprintf(stderr, "vk-agent: becoming the reaper of orphans: %v\n", err)
		return 1
	}
	ln := newOneConn(pollable(stdin).(io.Reader), pollable(stdout).(io.Writer))
	err = Serve(ctx, ln, Options{Reaper: r, Log: stderr})
	if err != nil && err != io.EOF && ctx.Err() == nil && !ln.ended() {
		fmt.Fprintf(stderr, "vk-agent: %v\n", err)
		return 1
	}
	return 0
}

// pollable returns a file as one of the runtime's poller, whose blocked reads
// end with its Close; anything else as it is. Not blocking is a property of
// the open file, so both ends of a socket must be made so.
func pollable(v any) any {
	f, ok := v.(*os.File)
	if !ok {
		return v
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil || unix.SetNonblock(fd, true) != nil {
		return v
	}
	return os.NewFile(uintptr(fd), f.Name())
}

func subreaper() (*reap.Reaper, error) {
	if err := setSubreaper(); err != nil {
		return nil, err
	}
	r := reap.New(true)
	go r.Run()
	return r, nil
}

// oneConn is a listener with one connection, over a reader and a writer; it
// ends when that connection is closed.
type oneConn struct {
	r    io.Reader
	w    io.Writer
	got  bool
	once sync.Once
	done chan struct{}
}

func newOneConn(r io.Reader, w io.Writer) *oneConn {
	return &oneConn{r: r, w: w, done: make(chan struct{})}
}

// Accept implements net.Listener.
func (o *oneConn) Accept() (net.Conn, error) {
	if !o.got {
		o.got = true
		return &pairConn{o}, nil
	}
	<-o.done
	return nil, io.EOF
}

// Close implements net.Listener.
func (o *oneConn) Close() error { o.once.Do(func() { close(o.done) }); return nil }

// Addr implements net.Listener.
func (o *oneConn) Addr() net.Addr { return addr("stdio") }

func (o *oneConn) ended() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}
