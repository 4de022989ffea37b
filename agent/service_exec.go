package agent

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

const execUsage = `usage: vk-agent exec --service NAME [OPTION…] [--] CMD…

Runs a command in a service of this job, by any of the service's names. The exit
status is the command's; 125 is that it could not be asked for, 2 that these
arguments are wrong.

  --service NAME          the service
  -i, --interactive       pass standard input on
  -t, --tty               give the command a terminal
  -b, -d, --detach        start the command and return; its output is dropped
  -u, --user USER[:GROUP] user that it runs as; default root
  -w, --dir, --workdir D  directory that it starts in; default the user's home
  -e, --env KEY[=VALUE]   set a variable; without a value, as it is here
      --clear-env         start from an empty environment instead of the image's
`

// Exit statuses that are not the command's: of one that could not be asked for,
// and of arguments that do not say what to ask for.
const (
	ownFailure   = 125
	badArguments = 2
)

type serviceExec struct {
	service string
	req     guestwire.ExecRequest
	stdin   bool
}

func parseServiceExec(args []string, lookup func(string) (string, bool)) (serviceExec, error) {
	var x serviceExec
	f := flag.NewFlagSet("exec", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&x.service, "service", "", "")
	for _, n := range []string{"i", "interactive"} {
		f.BoolVar(&x.stdin, n, false, "")
	}
	for _, n := range []string{"t", "tty"} {
		f.BoolVar(&x.req.TTY, n, false, "")
	}
	for _, n := range []string{"b", "d", "background", "detach"} {
		f.BoolVar(&x.req.Detach, n, false, "")
	}
	for _, n := range []string{"u", "user"} {
		f.StringVar(&x.req.User, n, "", "")
	}
	for _, n := range []string{"w", "dir", "workdir"} {
		f.StringVar(&x.req.Dir, n, "", "")
	}
	for _, n := range []string{"e", "env"} {
		f.Func(n, "", func(s string) error {
			k, _, has := strings.Cut(s, "=")
			if k == "" {
				return errors.New("expected KEY=VALUE or KEY")
			}
			if has {
				x.req.Env = append(x.req.Env, s)
			} else if v, ok := lookup(k); ok {
				x.req.Env = append(x.req.Env, k+"="+v)
			}
			return nil
		})
	}
	f.BoolVar(&x.req.Clear, "clear-env", false, "")
	if err := f.Parse(args); err != nil {
		return x, err
	}
	x.req.Argv = f.Args()
	switch {
	case x.service == "":
		return x, errors.New("which service? name it with --service")
	case len(x.req.Argv) == 0 || x.req.Argv[0] == "":
		return x, errors.New("no command was given")
	case x.req.Detach && (x.stdin || x.req.TTY):
		return x, errors.New("a detached command has no terminal and no input; leave out -i and -t")
	}
	return x, nil
}

// runServiceExec is `vk-agent exec`.
func runServiceExec(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	x, err := parseServiceExec(args, os.LookupEnv)
	if errors.Is(err, flag.ErrHelp) {
		io.WriteString(stdout, execUsage)
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "vk-agent exec: %v\n%s", err, execUsage)
		return badArguments
	}
	c := guestclient.FromOpener(guestclient.ForService(dialServices, x.service))
	code, err := x.run(ctx, c, stdin, stdout, stderr)
	if err != nil {
		fmt.Fprintf(stderr, "vk-agent exec: %v\n", err)
	}
	return code
}

func dialServices(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", servicesSocket)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return c, err
	}
	b, rerr := os.ReadFile(servicesWord)
	switch word := guestwire.ServiceExec(strings.TrimSpace(string(b))); {
	case rerr != nil:
		return nil, fmt.Errorf("this is no guest of virtkit's: %w", rerr)
	case word == guestwire.ServiceExecRefused:
		return nil, errors.New("this runner does not let jobs run commands in their services ([executor] guest_service_exec = false)")
	case word == guestwire.ServiceExecNone:
		return nil, errors.New("this job has no services")
	}
	return nil, err
}

func (x *serviceExec) run(ctx context.Context, c *guestclient.Client, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	if x.req.Detach {
		return x.detach(ctx, c)
	}
	sio := guestclient.Stdio{Out: stdout, Err: stderr}
	if x.stdin {
		sio.In = stdin
	}
	sigs := make(chan os.Signal, 8)
	signal.Notify(sigs, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	defer signal.Stop(sigs)
	if x.req.TTY {
		x.req.Rows, x.req.Cols = termSize(stdout)
		if t := os.Getenv("TERM"); t != "" {
			x.req.Env = append([]string{"TERM=" + t}, x.req.Env...)
		}
		if x.stdin {
			defer rawTerm(stdin)()
		}
	}
	ctl := make(chan guestwire.ExecControl)
	done := make(chan struct{})
	defer close(done)
	go passOn(sigs, ctl, done, stdout)
	r, err := c.Exec(ctx, x.req, sio, ctl)
	switch {
	case err != nil && r.PID == 0 && r.Err == "":
		return ownFailure, fmt.Errorf("service %s: %w", x.service, err)
	case err != nil:
		return ownFailure, fmt.Errorf("service %s: the command was lost: %w", x.service, err)
	case r.Err != "":
		return r.Code, errors.New(r.Err)
	}
	return r.Code, nil
}

// detach starts a program and returns once it runs, or with why it does not.
func (x *serviceExec) detach(ctx context.Context, c *guestclient.Client) (int, error) {
	conn, err := c.Open(ctx)
	if err != nil {
		return ownFailure, err
	}
	defer conn.Close()
	x.req.ID = guestclient.NewExecID()
	var ev guestwire.ExecEvent
	if err = guestwire.Open(conn, guestwire.OpExec, x.req); err == nil {
		err = guestwire.Recv(conn, &ev)
	}
	if err != nil {
		return ownFailure, fmt.Errorf("service %s: %w", x.service, err)
	}
	if ev.Err != "" {
		return ev.Code, errors.New(ev.Err)
	}
	return 0, nil
}

// passOn hands signals to the command: the first one that ends things as it is,
// the second as a kill.
func passOn(sigs <-chan os.Signal, ctl chan<- guestwire.ExecControl, done <-chan struct{}, tty io.Writer) {
	ending := 0
	for {
		select {
		case <-done:
			return
		case s := <-sigs:
			n := s.(syscall.Signal)
			m := guestwire.ExecControl{Signal: int(n)}
			switch n {
			case unix.SIGWINCH:
				rows, cols := termSize(tty)
				if rows == 0 {
					continue
				}
				m = guestwire.ExecControl{Resize: &guestwire.Resize{Rows: rows, Cols: cols}}
			case unix.SIGINT, unix.SIGTERM:
				if ending++; ending > 1 {
					m = guestwire.ExecControl{Kill: true}
				}
			}
			select {
			case ctl <- m:
			case <-done:
				return
			}
		}
	}
}

func termFD(v any) (int, bool) {
	f, ok := v.(*os.File)
	if !ok {
		return -1, false
	}
	fd := int(f.Fd())
	_, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	return fd, err == nil
}

func termSize(v any) (rows, cols uint16) {
	if fd, ok := termFD(v); ok {
		if w, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ); err == nil {
			return w.Row, w.Col
		}
	}
	return 0, 0
}

// rawTerm has a terminal pass every key on, until the returned function is
// called.
func rawTerm(v any) (restore func()) {
	fd, ok := termFD(v)
	if !ok {
		return func() {}
	}
	was, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return func() {}
	}
	raw := *was
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if unix.IoctlSetTermios(fd, unix.TCSETS, &raw) != nil {
		return func() {}
	}
	return func() { unix.IoctlSetTermios(fd, unix.TCSETS, was) }
}
