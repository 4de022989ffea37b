package fleet_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"

	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
)

// meddler stands between nodes and a hub that speak plain text on loopback, and
// sees each message: filter says what passes in its place. Over TLS it could not
// (TestTerminatingProxy).
type meddler struct {
	to  string
	srv *httptest.Server

	mu     sync.Mutex
	filter func(p passing) [][]byte
	conns  map[*wsx.Conn]*sync.Mutex // the nodes' ends
	seen   []passing
}

// passing is a message on its way.
type passing struct {
	toHub   bool
	kind    string // of its type
	command string // its id, of a command, an ack or a recorded
	data    []byte
}

func newMeddler(t *testing.T, to string) *meddler {
	m := &meddler{to: to, conns: map[*wsx.Conn]*sync.Mutex{}}
	rest := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: to})
	m.srv = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != wire.SessionPath {
			rest.ServeHTTP(w, r)
			return
		}
		near, err := wsx.Accept(w, r)
		if err != nil {
			return
		}
		m.session(near)
	}))
	t.Cleanup(func() { m.cut(); m.srv.Close() })
	return m
}

func (m *meddler) addr() string { return strings.TrimPrefix(m.srv.URL, "http://") }

func (m *meddler) set(filter func(p passing) [][]byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.filter = filter
}

func (m *meddler) session(near *wsx.Conn) {
	defer near.CloseNow()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	far, err := wsx.Dialer{}.Dial(ctx, "ws://"+m.to+wire.SessionPath, nil)
	if err != nil {
		return
	}
	defer far.CloseNow()
	writing := &sync.Mutex{}
	m.mu.Lock()
	m.conns[near] = writing
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		delete(m.conns, near)
		m.mu.Unlock()
	}()
	var wg sync.WaitGroup
	pump := func(from, to *wsx.Conn, toHub bool) {
		defer cancel()
		for {
			b, err := from.Read(ctx)
			if err != nil {
				return
			}
			p := passing{toHub: toHub, data: b}
			var tag struct{ Type, ID, Command string }
			if json.Unmarshal(b, &tag) == nil {
				p.kind = tag.Type
				if p.command = tag.Command; p.kind == "command" {
					p.command = tag.ID
				}
			}
			m.mu.Lock()
			m.seen = append(m.seen, p)
			pass := [][]byte{b}
			if m.filter != nil {
				pass = m.filter(p)
			}
			m.mu.Unlock()
			for _, b := range pass {
				if !toHub {
					writing.Lock()
				}
				err := to.Write(ctx, b)
				if !toHub {
					writing.Unlock()
				}
				if err != nil {
					return
				}
			}
		}
	}
	wg.Go(func() { pump(near, far, true) })
	wg.Go(func() { pump(far, near, false) })
	wg.Wait()
}

// say sends nodes what their hub has not sent now.
func (m *meddler) say(t *testing.T, data ...[]byte) {
	t.Helper()
	m.mu.Lock()
	conns := map[*wsx.Conn]*sync.Mutex{}
	for c, mu := range m.conns {
		conns[c] = mu
	}
	m.mu.Unlock()
	if len(conns) == 0 {
		t.Error("no node is there to be spoken to")
	}
	for c, mu := range conns {
		for _, b := range data {
			mu.Lock()
			if err := c.Write(t.Context(), b); err != nil {
				t.Error(err)
			}
			mu.Unlock()
		}
	}
}

// cut ends all sessions; nodes dial again.
func (m *meddler) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		c.CloseNow()
	}
}

// count is how many such messages have come by.
func (m *meddler) count(kind, command string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.seen {
		if p.kind == kind && p.command == command {
			n++
		}
	}
	return n
}

// last is the one that came by last.
func (m *meddler) last(kind, command string) (b []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.seen {
		if p.kind == kind && p.command == command {
			b = p.data
		}
	}
	return b
}
