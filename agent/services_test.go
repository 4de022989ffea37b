package agent

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

func TestParseServiceExec(t *testing.T) {
	lookup := func(k string) (string, bool) { return "of " + k, k == "HERE" }
	for _, c := range []struct {
		args string
		want serviceExec
		err  string
	}{
		{"--service db -- psql -c x", serviceExec{service: "db", req: guestwire.ExecRequest{Argv: []string{"psql", "-c", "x"}}}, ""},
		{"-service=db psql --service web", serviceExec{service: "db", req: guestwire.ExecRequest{Argv: []string{"psql", "--service", "web"}}}, ""},
		{"--service db -i -t -u app:www -w /srv -e A=1=2 --env HERE -e NOWHERE --clear-env sh", serviceExec{service: "db", stdin: true,
			req: guestwire.ExecRequest{Argv: []string{"sh"}, TTY: true, User: "app:www", Dir: "/srv", Env: []string{"A=1=2", "HERE=of HERE"}, Clear: true}}, ""},
		{"--service db --dir /d --user 5 -b sleep 1", serviceExec{service: "db", req: guestwire.ExecRequest{Argv: []string{"sleep", "1"}, Dir: "/d", User: "5", Detach: true}}, ""},
		{"psql", serviceExec{}, "--service"},
		{"--service db", serviceExec{}, "no command"},
		{"--service db -b -i cat", serviceExec{}, "detached"},
		{"--service db -e =x cat", serviceExec{}, "KEY=VALUE"},
		{"--service db --nosuch cat", serviceExec{}, "nosuch"},
	} {
		got, err := parseServiceExec(strings.Fields(c.args), lookup)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v, want %q", c.args, err, c.err)
			}
			continue
		}
		w, g := c.want.req, got.req
		if err != nil || got.service != c.want.service || got.stdin != c.want.stdin || !slices.Equal(g.Argv, w.Argv) || !slices.Equal(g.Env, w.Env) ||
			g.TTY != w.TTY || g.User != w.User || g.Dir != w.Dir || g.Clear != w.Clear || g.Detach != w.Detach {
			t.Errorf("%s: %+v, %v", c.args, got, err)
		}
	}
}

// host answers the streams that an agent opens: as the service "db" would, with
// cat for every program, and refuses others. A stream that ends before it said
// anything is one of a session that ends. It is over before the test is.
func host(t *testing.T, conn net.Conn) {
	sess, err := yamux.Client(guestwire.JoinFrames(conn), guestwire.MuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	var streams sync.WaitGroup
	t.Cleanup(func() { sess.Close(); streams.Wait() })
	streams.Go(func() { serve(t, sess, &streams) })
}

func serve(t *testing.T, sess *yamux.Session, streams *sync.WaitGroup) {
	stdio := make(chan net.Conn, 8)
	over := sess.CloseChan()
	for {
		st, err := sess.AcceptStream()
		if err != nil {
			return
		}
		streams.Go(func() {
			var h guestwire.Header
			var m guestwire.Service
			if err := guestwire.Recv(st, &h); err != nil {
				st.Close()
				return
			}
			if h.Op != guestwire.OpService || decode(h.Op, h.Body, &m) != nil {
				t.Errorf("a stream began with %+v", h)
				st.Close()
				return
			}
			switch {
			case m.Request.Op == guestwire.OpStdio:
				select {
				case stdio <- st:
				case <-over:
				}
			case m.Name != "db":
				guestwire.Send(st, guestwire.ExecEvent{Exited: true, Code: 125, Err: "no service " + m.Name})
				st.Close()
			default:
				guestwire.Send(st, guestwire.ExecEvent{PID: 7})
				var out []net.Conn
				for range 3 {
					select {
					case c := <-stdio:
						out = append(out, c)
					case <-over:
						return
					}
				}
				// Only the input says anything and comes to its end by itself.
				in := make(chan []byte, len(out))
				for _, c := range out {
					go func() {
						b, err := io.ReadAll(c)
						if err == nil {
							in <- b
						}
					}()
				}
				var b []byte
				select {
				case b = <-in:
				case <-over:
					return
				}
				for _, o := range out {
					o.Write(b)
				}
				for _, c := range out {
					c.Close()
				}
				guestwire.Send(st, guestwire.ExecEvent{Exited: true, Code: 9})
				st.Close()
			}
		})
	}
}

// A program of the guest reaches the host through the agent, as its streams are.
func TestRelay(t *testing.T) {
	near, far := net.Pipe()
	host(t, far)
	s := newServer(Options{}, nil)
	go s.session(t.Context(), near)
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for s.session1() == nil {
		time.Sleep(time.Millisecond)
	}
	go s.relay(ln)
	open := func(context.Context) (net.Conn, error) { return net.Dial("unix", ln.Addr().String()) }
	var out, errs bytes.Buffer
	x := serviceExec{service: "db", stdin: true, req: guestwire.ExecRequest{Argv: []string{"cat"}}}
	code, err := x.run(t.Context(), guestclient.FromOpener(guestclient.ForService(open, "db")), strings.NewReader("through"), &out, &errs)
	if code != 9 || err != nil || out.String() != "through" || errs.String() != "through" {
		t.Errorf("run = %d, %v, %q, %q", code, err, out.String(), errs.String())
	}
	x.service = "web"
	code, err = x.run(t.Context(), guestclient.FromOpener(guestclient.ForService(open, "web")), strings.NewReader(""), &out, &errs)
	if code != 125 || err == nil || err.Error() != "no service web" {
		t.Errorf("run in another = %d, %v", code, err)
	}
	x.req.Detach = true
	code, err = x.run(t.Context(), guestclient.FromOpener(guestclient.ForService(open, "web")), nil, nil, nil)
	if code != 125 || err == nil {
		t.Errorf("detached in another = %d, %v", code, err)
	}
}

func (s *server) session1() *yamux.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sess
}

func TestExecOutsideAGuest(t *testing.T) {
	if _, err := os.Stat(servicesWord); err == nil {
		t.Skip("this is a guest of virtkit's")
	}
	var out, errs bytes.Buffer
	code := Main(t.Context(), []string{"vk-agent", "exec", "--service", "db", "true"}, nil, &out, &errs)
	if code != 125 || !strings.Contains(errs.String(), "no guest of virtkit's") {
		t.Errorf("%d, %q", code, errs.String())
	}
	errs.Reset()
	if code := Main(t.Context(), []string{"vk-agent", "exec", "true"}, nil, &out, &errs); code != 2 || !strings.Contains(errs.String(), "usage: vk-agent exec") {
		t.Errorf("%d, %q", code, errs.String())
	}
	if code := Main(t.Context(), []string{"vk-agent", "exec", "--help"}, nil, &out, &errs); code != 0 || !strings.Contains(out.String(), "usage: vk-agent exec") {
		t.Errorf("%d, %q", code, out.String())
	}
}
