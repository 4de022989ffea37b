package node_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"

	"virtkit/core/fleet/node"
	"virtkit/core/fleet/node/nodetest"
	"virtkit/core/fleet/wire"
)

// FuzzState opens any state.json: it is refused, or taken and then of use.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{}`))
	dir := f.TempDir()
	s, err := node.OpenStore(dir, &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID})
	if err != nil {
		f.Fatal(err)
	}
	for _, op := range []wire.Op{wire.OpDrain, wire.OpQuarantine} {
		if _, err := s.Receive(&wire.Command{ID: wire.NewID(), Op: op, Expires: 1 << 40}, 1); err != nil {
			f.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, node.StateFile))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, node.StateFile), data, 0o600); err != nil {
			t.Fatal(err)
		}
		e := &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID}
		s, err := node.OpenStore(dir, e)
		if err != nil {
			return
		}
		if _, err := s.Receive(&wire.Command{ID: wire.NewID(), Op: wire.OpQuarantine, Expires: 1 << 40}, 1); err != nil {
			t.Errorf("it takes no command: %v", err)
		}
		if _, err := node.OpenStore(dir, e); err != nil {
			t.Errorf("what it wrote is refused: %v", err)
		}
	})
}

// FuzzEnrollment reads any identity.
func FuzzEnrollment(f *testing.F) {
	f.Add([]byte(`{"url":"https://hub.example.com:8443","node":"`+nodetest.NodeID+`","hub":"`+nodetest.HubID+`"}`), []byte("ab\n"), []byte("-----BEGIN CERTIFICATE-----"))
	f.Fuzz(func(t *testing.T, enrollment, key, ca []byte) {
		dir := t.TempDir()
		for name, b := range map[string][]byte{node.EnrollmentFile: enrollment, node.KeyFile: key, node.CAFile: ca} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		e, err := node.LoadEnrollment(dir)
		if err == nil && (!wire.IsHex(e.Node, wire.IDLen) || len(e.Key) == 0) {
			t.Errorf("taken: %+v", e)
		}
	})
}

// FuzzSession has the node's own hub send anything, a message a line: the session
// may end, the node goes on, and nothing but a command or a desired state
// changes what it holds to.
func FuzzSession(f *testing.F) {
	for _, m := range []wire.Message{
		&wire.Ping{}, &wire.Desired{Generation: 6, ID: wire.NewID(), Policy: wire.Policy{Ceiling: 2, Stop: true}},
		&wire.Command{ID: wire.NewID(), Op: wire.OpDrain, Issued: 1, Expires: 1 << 40, Sent: 2}, &wire.Recorded{Command: wire.NewID(), Outcome: wire.Done},
		&wire.Closing{Code: wire.Superseded}, &wire.Offer{Reservation: wire.NewID(), Envelope: wire.Envelope{Memory: 1, CPUs: 1}, LeaseSecs: 5},
		&wire.Cancel{Job: wire.NewID(), Mode: "now"},
	} {
		b, err := wire.Encode(wire.VersionEgress, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(b, "\n"+`{"type":"ping"}`...))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		in(t, wire.RunnerNone, func(r *rig) {
			r.begin()
			l := r.open()
			go drainLink(l)
			commands := false
			for line := range bytes.SplitSeq(data, []byte("\n")) {
				if m, err := wire.Decode(wire.FromHub, l.Version, line); err == nil {
					switch m.(type) {
					case *wire.Command, *wire.Desired:
						commands = true
					}
				}
				l.Raw(string(line))
			}
			synctest.Wait()
			l.Cut()
			if st := r.node.Store().State(); !commands && (st.Node != wire.Ready || st.Applied != nil || len(st.Journal) > 0) {
				t.Errorf("it holds %+v", st)
			}
			if _, err := node.OpenStore(filepath.Join(r.dir, node.Dir), r.node.Enrollment()); err != nil {
				t.Errorf("what it wrote is refused: %v", err)
			}
			r.end()
		})
	})
}

// FuzzEnroll has a hub answer an enrollment with anything: nothing of it is kept
// unless it is a hub's answer.
func FuzzEnroll(f *testing.F) {
	f.Add(200, []byte(`{"node":"`+nodetest.NodeID+`","hub":"`+nodetest.HubID+`"}`))
	f.Add(403, []byte(`{"code":"token_invalid","message":"no"}`))
	f.Add(302, []byte(`<html>`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		if status < 200 || status > 999 {
			return // nothing that a server of net/http says
		}
		dir := t.TempDir()
		near, far := net.Pipe()
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(status)
			_, _ = w.Write(body)
		})}
		go func() { _ = srv.Serve(&oneListener{c: far, done: make(chan struct{})}) }()
		defer srv.Close()
		_, err := node.Join(t.Context(), node.JoinOptions{StateDir: dir, Hub: "http://127.0.0.1:1", Token: token, Hostname: "ci-1",
			Dial: func(context.Context, string, string) (net.Conn, error) { return near, nil }})
		e, lerr := node.LoadEnrollment(filepath.Join(dir, node.Dir))
		if (err == nil) != (lerr == nil) {
			t.Errorf("the join: %v; what is kept: %v", err, lerr)
		}
		if lerr == nil && (status != 200 || !wire.IsHex(e.Node, wire.IDLen) || !wire.IsHex(e.Hub, wire.IDLen)) {
			t.Errorf("an answer of status %d is kept: %+v", status, e)
		}
	})
}

// oneListener gives one connection.
type oneListener struct {
	c    net.Conn
	once sync.Once
	done chan struct{}
}

func (l *oneListener) Accept() (c net.Conn, err error) {
	l.once.Do(func() { c = l.c })
	if c != nil {
		return c, nil
	}
	<-l.done
	return nil, net.ErrClosed
}
func (l *oneListener) Close() error   { close(l.done); return nil }
func (l *oneListener) Addr() net.Addr { return l.c.LocalAddr() }
