package vkcmd

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/appenv"
	"virtkit/core/atop"
	"virtkit/core/atop/view"
)

func TestKeysOf(t *testing.T) {
	for in, want := range map[string][]view.Key{
		"":                       nil,
		"q":                      {'q'},
		"\x1b[D\x1b[C":           {view.Left, view.Right},
		"\x1b[H\x1bOF\x1b[1~":    {view.Home, view.End, view.Home},
		"\x1b":                   {view.Escape},
		"\x1bx":                  {view.Escape, 'x'},
		"\x1b[1;5Dm":             {'m'},
		"\x1b[":                  nil,
		"/ab\x7f\r":              {'/', 'a', 'b', view.Backspace, view.Enter},
		"\x03":                   {3},
		"\x1b[200~é\x1b[15~\x1b": {0xc3, 0xa9, view.Escape},
	} {
		if d := cmp.Diff(want, keysOf([]byte(in))); d != "" {
			t.Errorf("%q: %s", in, d)
		}
	}
}

// pty is a terminal: what is written to its master is typed.
func pty(t *testing.T) (master, slave *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("needs /dev/ptmx: ", err)
	}
	master = os.NewFile(uintptr(fd), "ptmx")
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Skip("needs /dev/pts: ", err)
	}
	t.Cleanup(func() { slave.Close() })
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 20, Col: 100}); err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// screen collects what a terminal is sent and waits for parts of it.
type screen struct {
	t    *testing.T
	got  chan string
	seen string
}

func (s *screen) until(part string) {
	s.t.Helper()
	limit := time.After(time.Minute)
	for !strings.Contains(s.seen, part) {
		select {
		case more := <-s.got:
			s.seen += more
		case <-limit:
			s.t.Fatalf("%q did not come in %q", part, s.seen)
		}
	}
	_, s.seen, _ = strings.Cut(s.seen, part)
}

// TestAtopPanel types at a real terminal.
func TestAtopPanel(t *testing.T) {
	state := t.TempDir()
	dir := filepath.Join(state, "atop", "2026-08-12", "42137-acme-web-test_unit")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(dir, atop.LogFile)
	sample := func(i int64) []byte {
		return atop.AppendSample(nil, &atop.Sample{Reset: i == 0, Host: "h", Epoch: 1786519309 + i, Interval: 1,
			Procs: []atop.Proc{{PID: 1, Name: "init", State: 'S', Hertz: 100}}})
	}
	var b []byte
	for i := range int64(3) {
		b = append(b, sample(i)...)
	}
	if err := os.WriteFile(log, b, 0o600); err != nil {
		t.Fatal(err)
	}
	var master, slave *os.File
	var s *screen
	// A terminal for each: whoever read the last one's keys may still do.
	run := func(flag string) chan int {
		master, slave = pty(t)
		s = &screen{t: t, got: make(chan string, 64)}
		go func(s *screen, master *os.File) {
			buf := make([]byte, 4096)
			for {
				n, err := master.Read(buf)
				if err != nil {
					return
				}
				s.got <- string(buf[:n])
			}
		}(s, master)
		env := appenv.OS()
		env.Args = []string{"vk", "--state-dir", state, "atop", "42137", flag}
		env.Stdin, env.Stdout, env.Stderr = slave, slave, io.Discard
		env.Getenv = func(k string) string { return map[string]string{"TERM": "xterm", "HOME": state}[k] }
		env.LookupEnv = func(k string) (string, bool) { v := env.Getenv(k); return v, v != "" }
		done := make(chan int, 1)
		go func() { done <- Main(context.Background(), env) }()
		return done
	}
	done := run("--view")
	s.until("\x1b[?1049h")
	s.until("sample 1/3 at 07:21:49")
	master.WriteString("\x1b[C")
	s.until("sample 2/3")
	master.WriteString("\x1b[F")
	s.until("sample 3/3")
	master.WriteString("q")
	s.until("\x1b[?25h\x1b[?1049l")
	ends(t, done)
	if after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS); err != nil || after.Lflag&(unix.ICANON|unix.ECHO) != unix.ICANON|unix.ECHO {
		t.Errorf("the terminal is not as it was: %v", err)
	}
	done = run("--follow")
	s.until("sample 3/3 at 07:21:51")
	f, err := os.OpenFile(log, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.Write(sample(3))
	f.Close()
	s.until("sample 4/4 at 07:21:52")
	master.WriteString("\x03")
	ends(t, done)
}

func ends(t *testing.T, done chan int) {
	t.Helper()
	select {
	case code := <-done:
		if code != 0 {
			t.Errorf("exit %d", code)
		}
	case <-time.After(time.Minute):
		t.Fatal("the panel does not end")
	}
}
