package vkcmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

// script is a program in a guest that exists in a test alone.
type script struct {
	mu   sync.Mutex
	req  guestwire.ExecRequest
	seen []guestwire.ExecControl
	// on is called for each control; true ends the program with res.
	on  func(guestwire.ExecControl) bool
	res guestclient.ExecResult
}

func (p *script) exec(ctx context.Context, req guestwire.ExecRequest, sio guestclient.Stdio, ctl <-chan guestwire.ExecControl) (guestclient.ExecResult, error) {
	p.mu.Lock()
	p.req = req
	p.mu.Unlock()
	if p.on == nil {
		fmt.Fprint(sio.Out, "out")
		fmt.Fprint(sio.Err, "err")
		return p.res, nil
	}
	for {
		select {
		case c := <-ctl:
			p.mu.Lock()
			p.seen = append(p.seen, c)
			p.mu.Unlock()
			if p.on(c) {
				return p.res, nil
			}
		case <-ctx.Done():
			return guestclient.ExecResult{}, context.Cause(ctx)
		}
	}
}

func (p *script) signals() []int {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []int
	for _, c := range p.seen {
		out = append(out, c.Signal)
	}
	return out
}

func newSession(p *script, signals chan os.Signal) (*session, *bytes.Buffer) {
	said := &bytes.Buffer{}
	return &session{
		exec: p.exec, stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{}, signals: signals,
		say: func(f string, a ...any) { fmt.Fprintf(said, f+"\n", a...) },
	}, said
}

func TestFirstCtrlCGoesToTheProgram(t *testing.T) {
	sig := make(chan os.Signal, 4)
	p := &script{res: guestclient.ExecResult{Code: 3}}
	p.on = func(c guestwire.ExecControl) bool { return c.Signal == int(unix.SIGINT) }
	s, _ := newSession(p, sig)
	sig <- unix.SIGINT
	res, err := s.run(t.Context(), guestwire.ExecRequest{Argv: []string{"x"}})
	if err != nil || res.Code != 3 {
		t.Fatalf("run = %+v, %v; want code 3", res, err)
	}
}

func TestSecondCtrlCEndsIt(t *testing.T) {
	sig := make(chan os.Signal, 4)
	p := &script{}
	p.on = func(guestwire.ExecControl) bool { sig <- unix.SIGINT; return false } // the program ignores it
	s, _ := newSession(p, sig)
	sig <- unix.SIGINT
	_, err := s.run(t.Context(), guestwire.ExecRequest{Argv: []string{"x"}})
	if fault.KindOf(err) != fault.Interrupted || fault.ExitCode(err) != 130 {
		t.Fatalf("err = %v (status %d), want interrupted, 130", err, fault.ExitCode(err))
	}
	if d := cmp.Diff([]int{int(unix.SIGINT)}, p.signals()); d != "" {
		t.Error(d)
	}
}

func TestTermIsPassedOnThenEndsIt(t *testing.T) {
	for _, n := range []syscall.Signal{unix.SIGTERM, unix.SIGHUP} {
		sig := make(chan os.Signal, 4)
		grace := make(chan time.Time)
		p := &script{}
		p.on = func(guestwire.ExecControl) bool { close(grace); return false }
		s, _ := newSession(p, sig)
		s.after = func(d time.Duration) <-chan time.Time {
			if d != termGrace {
				t.Errorf("waits %v, want %v", d, termGrace)
			}
			return grace
		}
		sig <- n
		_, err := s.run(t.Context(), guestwire.ExecRequest{Argv: []string{"x"}})
		if want := 128 + int(n); fault.ExitCode(err) != want {
			t.Errorf("%v: err = %v, status %d, want %d", n, err, fault.ExitCode(err), want)
		}
		if d := cmp.Diff([]int{int(n)}, p.signals()); d != "" {
			t.Errorf("%v: %s", n, d)
		}
	}
}

func TestResizeIsPassedOnWithATerminalOnly(t *testing.T) {
	sig := make(chan os.Signal, 4)
	p := &script{}
	p.on = func(c guestwire.ExecControl) bool { return c.Resize != nil || c.Signal == int(unix.SIGUSR1) }
	s, _ := newSession(p, sig)
	sig <- unix.SIGWINCH
	if _, err := s.run(t.Context(), guestwire.ExecRequest{Argv: []string{"x"}, TTY: true}); err != nil {
		t.Fatal(err)
	}
	if r := p.seen[0].Resize; r == nil || r.Rows != 24 || r.Cols != 80 || p.req.Rows != 24 {
		t.Errorf("resize %+v, request %d rows; want 24x80 without a terminal here", r, p.req.Rows)
	}
	p.seen = nil
	sig <- unix.SIGWINCH
	sig <- unix.SIGUSR1
	if _, err := s.run(t.Context(), guestwire.ExecRequest{Argv: []string{"x"}}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]int{int(unix.SIGUSR1)}, p.signals()); d != "" {
		t.Errorf("without a terminal: %s", d)
	}
}

func TestUntilSignal(t *testing.T) {
	sig := make(chan os.Signal, 4)
	ctx, release := untilSignal(t.Context(), sig)
	sig <- unix.SIGWINCH // asks for nothing
	sig <- unix.SIGTERM
	<-ctx.Done()
	release()
	if c := fault.ExitCode(context.Cause(ctx)); c != 143 {
		t.Errorf("status %d, want 143", c)
	}
	ctx, release = untilSignal(t.Context(), sig)
	release()
	sig <- unix.SIGINT
	if ctx.Err() != nil {
		t.Error("a released context ended")
	}
}

func TestEnded(t *testing.T) {
	for _, tc := range []struct {
		res  guestclient.ExecResult
		code int
		want []string
	}{
		{guestclient.ExecResult{Code: 0}, 0, nil},
		{guestclient.ExecResult{Code: 42}, 42, nil},
		{guestclient.ExecResult{Code: 143, Signal: 15}, 143, []string{"signal 15 (SIGTERM)"}},
		{guestclient.ExecResult{Code: 137, Signal: 9, OOM: true}, 137, []string{"out of memory", "hint: ", "--mem"}},
		{guestclient.ExecResult{Code: 127, Err: "nosuch: not found"}, 127, []string{"nosuch: not found"}},
	} {
		var said strings.Builder
		code := ended(tc.res, func(f string, a ...any) { fmt.Fprintf(&said, f+"\n", a...) })
		if code != tc.code || tc.want == nil && said.Len() > 0 {
			t.Errorf("%+v: status %d, said %q", tc.res, code, said.String())
		}
		for _, w := range tc.want {
			if !strings.Contains(said.String(), w) {
				t.Errorf("%+v: %q lacks %q", tc.res, said.String(), w)
			}
		}
	}
}

func TestOwn125(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("x"), 125},
		{fault.New(fault.NotFound, "no image"), 125},
		{cliutil.Exit(7), 7},
		{signalled(unix.SIGINT), 130},
	} {
		if got := cliutil.StatusFor(own125(tc.err)); got != tc.want {
			t.Errorf("own125(%v): status %d, want %d", tc.err, got, tc.want)
		}
	}
	err := own125(fmt.Errorf("resolving: %w", fault.New(fault.NotFound, "no image").Hint("pull it")))
	if err.Error() != "resolving: no image" || fault.HintOf(err) != "pull it" || fault.KindOf(err) != fault.NotFound {
		t.Errorf("own125 lost something: %v, hint %q, kind %s", err, fault.HintOf(err), fault.KindOf(err))
	}
}
