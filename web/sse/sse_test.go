package sse_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/web/sse"
)

// feeder is a hub on which things happen, and its stream.
type feeder struct {
	*hub.Hub
	t      *testing.T
	stream *sse.Stream
	served atomic.Int64
	url    string
	n      int
}

func start(t *testing.T, change func(*sse.Stream)) *feeder {
	t.Helper()
	h, err := hub.New(t.Context(), hubtest.NewMemory(), hub.Options{Log: logx.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	f := &feeder{Hub: h, t: t}
	f.stream = &sse.Stream{Feed: h.Feed(), Readers: &f.served, Snapshot: func() any {
		changes := 0
		for _, r := range h.Snapshot().Rules {
			changes += r.Version
		}
		return map[string]int{"changes": changes}
	}}
	if change != nil {
		change(f.stream)
	}
	s := httptest.NewUnstartedServer(f.stream)
	s.Config.ReadTimeout = 200 * time.Millisecond // of requests that end
	s.Start()
	t.Cleanup(s.Close)
	f.url = s.URL
	return f
}

// happen makes n changes, each of which is one event.
func (f *feeder) happen(n int) {
	f.t.Helper()
	for range n {
		everyone, mode, none := "*", hub.ModeDryRun, new(policy.Lists)
		if _, err := f.SetRule(context.Background(), "test", hub.RuleChange{Name: rule(f.n + 1), Subject: &everyone, Run: none, Build: none, Mode: &mode}); err != nil {
			f.t.Fatal(err)
		}
		f.n++
	}
}

// rule is the one that change n is of: neighbors differ.
func rule(n int) string { return fmt.Sprintf("web-%d", n%11) }

// got is one event as a browser would have it.
type got struct{ id, name, data string }

// reader reads a stream.
type reader struct {
	t     *testing.T
	resp  *http.Response
	lines *bufio.Scanner
	leave context.CancelFunc
	last  string // Last-Event-ID
	// guard ends a stream that says nothing for long, so that a test of it fails
	// instead of waiting.
	guard *time.Timer
}

const patience = 15 * time.Second

// scan reads a line.
func (r *reader) scan() bool {
	r.guard.Reset(patience)
	defer r.guard.Stop()
	return r.lines.Scan()
}

func (f *feeder) open(after string) *reader {
	f.t.Helper()
	ctx, leave := context.WithCancel(context.Background())
	f.t.Cleanup(leave)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	if after != "" {
		req.Header.Set("Last-Event-ID", after)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	guard := time.AfterFunc(patience, leave)
	guard.Stop()
	f.t.Cleanup(func() { guard.Stop(); resp.Body.Close() })
	return &reader{f.t, resp, bufio.NewScanner(resp.Body), leave, after, guard}
}

// next reads an event.
func (r *reader) next() got {
	r.t.Helper()
	var g got
	for r.scan() {
		name, value, _ := strings.Cut(r.lines.Text(), ": ")
		switch name {
		case "id":
			g.id, r.last = value, value
		case "event":
			g.name = value
		case "data":
			g.data = value
		case "":
			if g.data != "" {
				return g
			}
		}
	}
	r.t.Fatalf("the stream ended after %s: %v", r.last, r.lines.Err())
	return g
}

func number(t *testing.T, f *feeder, id string) int {
	t.Helper()
	var n int
	if _, err := fmt.Sscanf(id, f.Feed().Epoch()+"-%d", &n); err != nil {
		t.Fatalf("ID %q: %v", id, err)
	}
	return n
}

// TestReconnect is case S39: a reader that was cut off while 500 things happened
// is told each, once, in order.
func TestReconnect(t *testing.T) {
	f := start(t, nil)
	f.happen(2)
	r := f.open("")
	for k, v := range map[string]string{"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"} {
		if got := r.resp.Header.Get(k); got != v {
			t.Errorf("%s: %q, want %q", k, got, v)
		}
	}
	if g := r.next(); g.name != sse.Snapshot || g.data != `{"changes":2}` || number(t, f, g.id) != int(f.Feed().Last()) {
		t.Fatalf("first: %+v", g)
	}
	at := number(t, f, r.last)
	follow := func(r *reader, n int) {
		t.Helper()
		for range n {
			g := r.next()
			var e hub.Event
			if err := json.Unmarshal([]byte(g.data), &e); err != nil {
				t.Fatal(err)
			}
			at++
			if number(t, f, g.id) != at || g.name != "egress" || e.Kind != "egress" || e.Text != rule(at)+" set" || e.At == 0 {
				t.Fatalf("want event %d, got %+v", at, g)
			}
		}
	}
	f.happen(3)
	follow(r, 3)
	time.Sleep(300 * time.Millisecond) // past the server's limit of a request
	f.happen(1)
	follow(r, 1)
	r.leave()

	f.happen(500)
	r = f.open(r.last)
	follow(r, 500)
	f.happen(2)
	follow(r, 2)

	// Cut off after each event of some.
	for range 20 {
		r.leave()
		f.happen(3)
		r = f.open(r.last)
		follow(r, 1)
	}
	follow(r, 40)
}

// TestResync: what cannot be gone on from is said once, and a snapshot follows.
func TestResync(t *testing.T) {
	f := start(t, nil)
	f.happen(3)
	old := f.open("")
	old.next()
	f.happen(4200)
	epoch := f.Feed().Epoch()
	other := start(t, nil).Feed().Epoch()
	if other == epoch {
		t.Fatal("two starts have one epoch")
	}
	for id, why := range map[string]string{
		old.last:                             "held",
		epoch + "-0":                         "held",
		fmt.Sprintf("%s-%d", epoch, f.n+100): "no such event yet",
		epoch + "-18446744073709551615":      "no such event yet",
		epoch + "-18446744073709551616":      "no event's ID",
		epoch + "--1":                        "no event's ID",
		epoch + "-":                          "no event's ID",
		epoch:                                "no event's ID",
		"seven":                              "no event's ID",
		"-":                                  "no event's ID",
		"7":                                  "no event's ID",
		other + "-3":                         "started anew",
		strings.Repeat("9", 4000):            "no event's ID",
	} {
		name := id[:min(len(id), 40)]
		r := f.open(id)
		g := r.next()
		var said struct{ Why string }
		if err := json.Unmarshal([]byte(g.data), &said); err != nil {
			t.Fatal(err)
		}
		if g.name != sse.Resync || g.id != "" || !strings.Contains(said.Why, why) {
			t.Errorf("%s: %+v, want resync: %s", name, g, why)
		}
		if g = r.next(); g.name != sse.Snapshot || g.data != fmt.Sprintf(`{"changes":%d}`, f.n) {
			t.Errorf("%s: after resync: %+v", name, g)
		}
		at := number(t, f, g.id)
		f.happen(1)
		if g = r.next(); g.name != "egress" || number(t, f, g.id) != at+1 {
			t.Errorf("%s: after the snapshot: %+v", name, g)
		}
		r.leave()
	}
	// The oldest that is held is gone on from, exactly.
	last := int(f.Feed().Last())
	r := f.open(fmt.Sprintf("%s-%d", epoch, last-4096))
	if g := r.next(); g.name != "egress" || number(t, f, g.id) != last-4095 || !strings.Contains(g.data, rule(last-4095)+" set") {
		t.Errorf("from the oldest held: %+v", g)
	}
}

// TestSlowReader: one that takes nothing is cut off and costs nothing after.
func TestSlowReader(t *testing.T) {
	f := start(t, func(s *sse.Stream) { s.WriteTimeout = 100 * time.Millisecond })
	c, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: hub\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	quick := f.open("")
	quick.next()
	at := number(t, f, quick.last)
	// More than sockets take; the quick one is told all the same.
	for i := 0; ; i++ {
		f.happen(500)
		for range 500 {
			at++
			if g := quick.next(); number(t, f, g.id) != at {
				t.Fatalf("the quick reader got %s, want %d", g.id, at)
			}
		}
		if f.served.Load() == 1 {
			break // the slow one was cut off
		}
		if i == 400 {
			t.Fatalf("%d events on, the slow reader is still served", f.n)
		}
	}
}

// TestAlive: a reader that is told nothing hears from the hub all the same.
func TestAlive(t *testing.T) {
	f := start(t, func(s *sse.Stream) { s.Alive = time.Millisecond })
	r := f.open("")
	r.next()
	for range 3 {
		for r.scan() && r.lines.Text() == "" {
		}
		if r.lines.Text() != ": alive" {
			t.Fatalf("got %q, want a comment", r.lines.Text())
		}
	}
}

// TestKeep: what is not told still moves a reader on, so that it can come back
// when only that has happened for long.
func TestKeep(t *testing.T) {
	f := start(t, func(s *sse.Stream) { s.Keep = func(e *hub.Event) bool { return e.Kind == "token" } })
	r := f.open("")
	r.next()
	f.happen(4000)
	token := func() {
		t.Helper()
		if _, err := f.CreateToken(t.Context(), "test", time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	token()
	if g := r.next(); g.name != "token" || number(t, f, g.id) != 4001 {
		t.Fatalf("got %+v", g)
	}
	r.leave()
	f.happen(4000)
	token()
	r = f.open(r.last)
	if g := r.next(); g.name != "token" || number(t, f, g.id) != 8002 {
		t.Fatalf("got %+v", g)
	}
	// Moved on by IDs alone, also by what happens one by one.
	for range 400 {
		f.happen(1)
		time.Sleep(time.Millisecond)
	}
	for number(t, f, r.last) <= 8200 {
		if !r.scan() {
			t.Fatalf("the stream ended: %v", r.lines.Err())
		}
		if id, ok := strings.CutPrefix(r.lines.Text(), "id: "); ok {
			r.last = id
		}
	}
}

// TestMaxReaders: one too many is told to come back.
func TestMaxReaders(t *testing.T) {
	f := start(t, nil)
	f.served.Store(sse.MaxReaders)
	r := f.open("")
	if r.resp.StatusCode != http.StatusServiceUnavailable || r.resp.Header.Get("Retry-After") == "" {
		t.Fatalf("%s %v", r.resp.Status, r.resp.Header)
	}
	f.served.Store(sse.MaxReaders - 1)
	if r = f.open(""); r.resp.StatusCode != http.StatusOK {
		t.Fatal(r.resp.Status)
	}
}

// paused is a reader's connection whose server writes nothing until go is
// closed, and that tells of each write that waits.
type paused struct {
	http.ResponseWriter
	waits chan struct{}
	on    chan struct{}
	stop  atomic.Bool // at the next write
}

func (p *paused) Unwrap() http.ResponseWriter { return p.ResponseWriter }

func (p *paused) Write(b []byte) (int, error) {
	if p.stop.CompareAndSwap(true, false) {
		p.waits <- struct{}{}
		<-p.on
	}
	return p.ResponseWriter.Write(b)
}

// TestFallsBehind: a reader that is held up while more happens than the ring
// holds is cut off, and is told nothing that is not next.
func TestFallsBehind(t *testing.T) {
	f := start(t, nil)
	held := make(chan *paused, 2)
	stream := f.stream
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := &paused{ResponseWriter: w, waits: make(chan struct{}, 1), on: make(chan struct{})}
		held <- p
		stream.ServeHTTP(p, r)
	}))
	t.Cleanup(s.Close)
	f.url = s.URL
	r := f.open("")
	r.next()
	p := <-held
	p.stop.Store(true)
	f.happen(1)
	<-p.waits // the write of this event
	f.happen(4200)
	close(p.on)
	// What it is told before fits the connection.
	for n := 0; f.served.Load() > 0; n++ {
		if n == 1500 {
			t.Fatal("it is still served")
		}
		time.Sleep(10 * time.Millisecond)
	}
	at := number(t, f, r.last)
	told := 0
	for r.scan() {
		if id, ok := strings.CutPrefix(r.lines.Text(), "id: "); ok {
			told++
			if at++; number(t, f, id) != at {
				t.Fatalf("it is told event %s, %d is next", id, at)
			}
		}
	}
	if told == 0 || told > 4096 {
		t.Errorf("it was told %d events before it was cut off", told)
	}
	// It is told so when it comes back.
	r = f.open(fmt.Sprintf("%s-%d", f.Feed().Epoch(), at))
	if g := r.next(); g.name != sse.Resync {
		t.Errorf("back, it gets %+v", g)
	}
}

// deadlines keeps the read deadlines that a handler sets.
type deadlines struct {
	http.ResponseWriter
	read chan time.Time
}

func (d *deadlines) Unwrap() http.ResponseWriter { return d.ResponseWriter }

func (d *deadlines) SetReadDeadline(at time.Time) error {
	d.read <- at
	return http.NewResponseController(d.ResponseWriter).SetReadDeadline(at)
}

// TestNoReadDeadline: the server's limit of a request is lifted before the first
// event, since a stream does not end. No pause of a reader would show it: today's
// net/http lifts it as well, where it reads ahead, and does not say so.
func TestNoReadDeadline(t *testing.T) {
	f := start(t, nil)
	set := make(chan time.Time, 2)
	stream := f.stream
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		stream.ServeHTTP(&deadlines{w, set}, r)
	}))
	t.Cleanup(s.Close)
	f.url = s.URL
	r := f.open("")
	r.next()
	select {
	case at := <-set:
		if !at.IsZero() {
			t.Errorf("the read deadline is %v", at)
		}
	default:
		t.Error("the server's read deadline is left on")
	}
}
