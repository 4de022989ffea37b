package web_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
	"virtkit/web"
)

const gitlab = "https://gitlab.example.com"

var small = dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 1}}

// answered is what a request got.
type answered struct {
	status int
	header http.Header
	body   []byte
}

func (a answered) code() string {
	var f dispatch.Failure
	json.Unmarshal(a.body, &f)
	return strings.TrimSpace(fmt.Sprint(a.status, " ", string(f.Code)))
}

// signer changes how a request is signed; nil = as it should be.
type signer func(q *dispatch.Request, h http.Header)

// ask makes a request as a relay does: signed, on a connection of its own.
func (b *bench) ask(relay string, key ed25519.PrivateKey, method, target string, body any, change signer) answered {
	b.t.Helper()
	raw, err := net.Dial("tcp", b.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	defer raw.Close()
	conf := b.tls.Clone()
	conf.ServerName = "127.0.0.1"
	conn := tls.Client(raw, conf)
	if err := conn.HandshakeContext(b.ctx()); err != nil {
		b.t.Fatal(err)
	}
	state := conn.ConnectionState()
	channel, err := wire.Channel(&state)
	if err != nil {
		b.t.Fatal(err)
	}
	var data []byte
	switch v := body.(type) {
	case nil:
	case string:
		data = []byte(v)
	default:
		if data, err = json.Marshal(v); err != nil {
			b.t.Fatal(err)
		}
	}
	req, err := http.NewRequestWithContext(b.ctx(), method, b.url("http", target), bytes.NewReader(data))
	if err != nil {
		b.t.Fatal(err)
	}
	q := dispatch.Request{Relay: relay, Method: method, Target: target, Body: data, Unix: time.Now().Unix(), Channel: channel}
	if change != nil {
		change(&q, req.Header)
	}
	if key != nil {
		q.Sign(key, req.Header)
	}
	tr := &http.Transport{DisableKeepAlives: true, DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return answered{resp.StatusCode, resp.Header, out}
}

// placed connects a node that runs jobs.
func (b *bench) placed(name string) *hubtest.Placed {
	b.t.Helper()
	n := hubtest.NewPlaced(b.t, b.Hub, name, "ci", 16, 8<<30)
	c, err := wsx.Dialer{TLS: b.tls}.Dial(b.ctx(), b.url("ws", wire.SessionPath), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	channel, err := wire.Channel(c.TLS())
	if err != nil {
		b.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); n.Session(context.Background(), c, channel) }()
	b.t.Cleanup(func() { c.CloseNow(); <-done })
	return n
}

func into[T any](t *testing.T, a answered, want int) (v T) {
	t.Helper()
	if a.status != want {
		t.Fatalf("%d %s, want %d", a.status, a.body, want)
	}
	if err := json.Unmarshal(a.body, &v); err != nil {
		t.Fatalf("%s: %v", a.body, err)
	}
	return v
}

func TestClientAPI(t *testing.T) {
	b := start(t, true)
	o, key := hubtest.NewRelay(t, b.Hub, gitlab, "gl")
	n := b.placed("ci-1")
	n.Work = func(*wire.Start) ([]byte, *wire.JobResult) {
		return []byte("hello\n"), &wire.JobResult{Artifacts: []wire.ArtifactResult{}}
	}
	ask := func(method, target string, body any) answered { return b.ask(o.ID, key, method, target, body, nil) }

	// Capacity is held until the node's room is known.
	var c dispatch.Capacity
	for deadline := time.Now().Add(time.Minute); c.Fits != 8; {
		c = into[dispatch.Capacity](t, ask("POST", dispatch.CapacityPath, dispatch.CapacityRequest{Placement: small, After: c.Revision, WaitSecs: 10}), 200)
		if time.Now().After(deadline) {
			t.Fatalf("capacity %+v", c)
		}
	}
	g := into[dispatch.ReservationGrant](t, ask("POST", dispatch.ReservationsPath, dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: small, LeaseSecs: 90, WaitSecs: 10}), 201)
	g = into[dispatch.ReservationGrant](t, ask("POST", dispatch.RenewPath(g.Reservation), dispatch.RenewRequest{LeaseSecs: 60}), 200)
	if g.LeaseSecs != 60 || g.Node != n.ID {
		t.Errorf("renewed: %+v", g)
	}
	q := dispatch.JobSubmission{RequestID: wire.NewID(), Placement: small, Reservation: g.Reservation, PlaceWithinSecs: 60, Spec: hubtest.Job(t, gitlab, 77, nil)}
	v := into[dispatch.JobView](t, ask("POST", dispatch.JobsPath, q), 201)
	if again := into[dispatch.JobView](t, ask("POST", dispatch.JobsPath, q), 201); again.ID != v.ID {
		t.Errorf("submitted again it is %s, was %s", again.ID, v.ID)
	}
	id := v.ID
	for deadline := time.Now().Add(time.Minute); v.State != dispatch.Finished; {
		v = into[dispatch.JobView](t, ask("GET", dispatch.JobPath(id, v.Revision, 10), nil), 200)
		if time.Now().After(deadline) {
			t.Fatalf("the job is %+v after a minute", v)
		}
	}
	a := ask("GET", dispatch.OutputPath(id, 2, 10), nil)
	if a.status != 200 || string(a.body) != "llo\n" || a.header.Get(dispatch.HeaderOffset) != "2" || a.header.Get(dispatch.HeaderLength) != "6" || a.header.Get(dispatch.HeaderComplete) != "true" {
		t.Errorf("output: %d %q %v", a.status, a.body, a.header)
	}
	if a := ask("GET", dispatch.OutputPath(id, 7, 0), nil); a.status != 416 || a.header.Get(dispatch.HeaderLength) != "6" {
		t.Errorf("past the end: %d %v", a.status, a.header)
	}
	if v := into[dispatch.JobView](t, ask("POST", dispatch.CancelPath(id), dispatch.CancelRequest{Mode: wire.CancelGraceful}), 202); v.State != dispatch.Finished {
		t.Errorf("a finished job canceled: %+v", v)
	}
	for range 2 {
		if a := ask("POST", dispatch.SettlePath(id), nil); a.status != 204 || len(a.body) != 0 {
			t.Errorf("settled: %d %s", a.status, a.body)
		}
	}
	other, otherKey := hubtest.NewRelay(t, b.Hub, gitlab, "gl")
	changed := q
	changed.PlaceWithinSecs++
	free := func(change func(*job.CiJob)) dispatch.JobSubmission {
		return dispatch.JobSubmission{RequestID: wire.NewID(), Placement: small, PlaceWithinSecs: 1, Spec: hubtest.Job(t, gitlab, 78, change)}
	}
	nowhere := small
	nowhere.Pool = "none"
	for _, tc := range []struct {
		what   string
		got    answered
		want   string
		header string
	}{
		{"a released reservation", ask("POST", dispatch.RenewPath(g.Reservation), dispatch.RenewRequest{LeaseSecs: 60}), "410 reservation_gone", ""},
		{"one released again", ask("DELETE", dispatch.ReservationPath(g.Reservation), nil), "204", ""},
		{"no JSON", ask("POST", dispatch.JobsPath, "{"), "400 invalid", ""},
		{"no placement", ask("POST", dispatch.CapacityPath, "{}"), "400 invalid", ""},
		{"a malformed ID", ask("GET", dispatch.JobPath("x", 0, 0), nil), "400 invalid", ""},
		{"a malformed offset", ask("GET", dispatch.JobsPath+"/"+id+"/output?offset=-1", nil), "400 invalid", ""},
		{"no such job", ask("GET", dispatch.JobPath(wire.NewID(), 0, 0), nil), "404 not_found", ""},
		{"another relay's job", b.ask(other.ID, otherKey, "GET", dispatch.JobPath(id, 0, 0), nil, nil), "404 not_found", ""},
		{"another body", ask("POST", dispatch.JobsPath, changed), "409 conflict", ""},
		{"a pending project", ask("POST", dispatch.JobsPath, free(func(j *job.CiJob) { j.Job.ProjectID = 5 })), "403 approval_pending", ""},
		{"another server's job", ask("POST", dispatch.JobsPath, free(func(j *job.CiJob) { j.ServerURL = "https://x.example.com" })), "403 forbidden", ""},
		{"a relay's hello", ask("POST", dispatch.ClientsPath, dispatch.ClientHello{Program: "x"}), "403 forbidden", ""},
		{"a large body", ask("POST", dispatch.CapacityPath, strings.Repeat(" ", dispatch.MaxBody+1)), "413 too_large", ""},
		{"a larger one", ask("POST", dispatch.JobsPath, strings.Repeat(" ", dispatch.MaxSubmission+1)), "413 too_large", ""},
		{"no node", ask("POST", dispatch.ReservationsPath, dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: nowhere, LeaseSecs: 90}), "503 no_capacity", strconv.Itoa(dispatch.PlaceRetrySecs)},
		{"no signature", b.ask(o.ID, nil, "POST", dispatch.CapacityPath, "{}", nil), "401 unauthorized", ""},
		{"no relay of ours", b.ask(wire.NewID(), key, "POST", dispatch.CapacityPath, "{}", nil), "401 unauthorized", ""},
		{"another relay's key", b.ask(o.ID, otherKey, "POST", dispatch.CapacityPath, "{}", nil), "401 unauthorized", ""},
		{"another connection", b.ask(o.ID, key, "POST", dispatch.CapacityPath, "{}", func(q *dispatch.Request, _ http.Header) { q.Channel = make([]byte, wire.ChannelLen) }), "401 unauthorized", ""},
		{"another target", b.ask(o.ID, key, "POST", dispatch.CapacityPath, "{}", func(q *dispatch.Request, _ http.Header) { q.Target += "?" }), "401 unauthorized", ""},
		{"an old request", b.ask(o.ID, key, "POST", dispatch.CapacityPath, "{}", func(q *dispatch.Request, _ http.Header) { q.Unix -= 301 }), "401 unauthorized", ""},
	} {
		if got := tc.got.code(); got != tc.want || tc.got.header.Get("Retry-After") != tc.header {
			t.Errorf("%s: %s %s (Retry-After %q), want %s", tc.what, got, tc.got.body, tc.got.header.Get("Retry-After"), tc.want)
		}
	}
	if _, err := b.RemoveRelay(t.Context(), "test", o.ID); err != nil {
		t.Fatal(err)
	}
	if a := ask("POST", dispatch.CapacityPath, dispatch.CapacityRequest{Placement: small}); a.code() != "401 unauthorized" {
		t.Errorf("a removed relay: %s", a.code())
	}
	// The server may see the end of the last ones a little later.
	for deadline := time.Now().Add(time.Minute); b.nodes.Unauthenticated() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections count as unauthenticated", b.nodes.Unauthenticated())
		}
	}
}

func TestKeyOnTheClientAPI(t *testing.T) {
	b := start(t, true)
	text, err := b.CreateKey(t.Context(), "test", hub.Key{Name: "k", Pools: []string{"ci"}, Scopes: []string{hub.ScopeCapacity}}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	bear := func(_ *dispatch.Request, h http.Header) { h.Set("Authorization", "Bearer "+text) }
	if a := b.ask("", nil, "POST", dispatch.CapacityPath, dispatch.CapacityRequest{Placement: small}, bear); a.status != 200 {
		t.Errorf("capacity: %d %s", a.status, a.body)
	}
	if a := b.ask("", nil, "POST", dispatch.ClientsPath, dispatch.ClientHello{Program: "x"}, bear); a.status != 204 {
		t.Errorf("hello: %d %s", a.status, a.body)
	}
	if a := b.ask("", nil, "GET", dispatch.JobPath(wire.NewID(), 0, 0), nil, bear); a.code() != "403 forbidden" {
		t.Errorf("a key of capacity alone asked for a job: %s", a.code())
	}
}

// TestRelay enrolls a relay and follows its session.
func TestRelay(t *testing.T) {
	b := start(t, true)
	key := hubtest.NewKey().Key
	nodes, err := b.admin.Token(b.ctx(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	token, err := b.admin.TokenOf(b.ctx(), "gitlab", 3600)
	if err != nil {
		t.Fatal(err)
	}
	enroll := func(token string) (int, []byte) {
		return b.postTo(dispatch.EnrollPath, func(ch []byte) any { return dispatch.NewEnrollRequest(token, key, ch, "gw-1", "test") })
	}
	if status, reply := enroll(nodes); status != 403 || !strings.Contains(string(reply), string(wire.TokenInvalid)) {
		t.Errorf("a node's token: %d %s", status, reply)
	}
	if status, reply := b.post(func(ch []byte) any { return hubtest.NewKey().EnrollRequest(token, "x", ch) }); status != 403 {
		t.Errorf("a relay's token spent by a node: %d %s", status, reply)
	}
	status, reply := enroll(token)
	var r dispatch.EnrollReply
	if err := json.Unmarshal(reply, &r); err != nil || status != 200 || r.Check() != nil || r.Hub != b.ID() {
		t.Fatalf("enrolled: %d %s", status, reply)
	}
	if status, _ := enroll(token); status != 403 {
		t.Errorf("a spent token: %d", status)
	}
	c, err := wsx.Dialer{TLS: b.tls}.Dial(b.ctx(), b.url("ws", dispatch.SessionPath), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	channel, err := wire.Channel(c.TLS())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (hubtest.Identity{ID: r.Relay, Key: key}).Dial(b.ctx(), c, channel, wire.NewID(), dispatch.Versions); err != nil {
		t.Fatal(err)
	}
	say := func(m dispatch.Message) {
		t.Helper()
		data, err := dispatch.Encode(m)
		if err == nil {
			err = c.Write(b.ctx(), data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	status1 := func() *dispatch.ServerStatus {
		t.Helper()
		for {
			data, err := c.Read(b.ctx())
			if err != nil {
				t.Fatal(err)
			}
			m, err := dispatch.Decode(dispatch.FromHub, data)
			if err != nil {
				t.Fatal(err)
			}
			if s, ok := m.(*dispatch.ServerStatus); ok {
				return s
			}
		}
	}
	inv := &dispatch.Inventory{Version: "test", Hostname: "gw-1", ServerURL: gitlab + "/", ServerKey: strings.Repeat("ab", 32), Runners: []dispatch.Runner{{Name: "ci", Placement: small, Verified: true}}}
	say(inv)
	if s := status1(); s.Status != dispatch.Pending || !strings.Contains(s.Message, "vk-hub gitlabs approve "+gitlab) {
		t.Errorf("at first %+v", s)
	}
	list, err := b.admin.GitLabs(b.ctx())
	if err != nil || len(list.Pending) != 1 || list.Pending[0].Key != inv.ServerKey || list.Pending[0].Relays[0] != r.Relay {
		t.Errorf("pending: %+v, %v", list, err)
	}
	if err := b.admin.SetGitLab(b.ctx(), hubGitLab("reject", gitlab, "")); err != nil {
		t.Fatal(err)
	}
	if s := status1(); s.Status != dispatch.Rejected {
		t.Errorf("rejected: %+v", s)
	}
	if err := b.admin.SetGitLab(b.ctx(), hubGitLab("approve", gitlab, "gl")); err != nil {
		t.Fatal(err)
	}
	if s := status1(); s.Status != dispatch.Approved || s.Name != "gl" {
		t.Errorf("approved: %+v", s)
	}
	say(&dispatch.RunnerState{Runner: "ci", State: dispatch.Polling})
	say(&dispatch.Heartbeat{Runners: []dispatch.RunnerBeat{{Name: "ci", Requests: 1}}})
	moved := *inv
	moved.ServerURL = "https://other.example.com"
	say(&moved)
	if s := status1(); s.Status != dispatch.Rebound || s.Bound != gitlab {
		t.Errorf("another server: %+v", s)
	}
	v, err := b.admin.Relay(b.ctx(), "gw-1")
	if err != nil || v.ID != r.Relay || !v.Connected || v.Server != gitlab || len(v.States) != 1 || v.Heartbeat == nil || v.Status.Status != dispatch.Rebound {
		t.Errorf("shown: %+v, %v", v, err)
	}
	if _, err := b.admin.RemoveRelay(b.ctx(), "gw-1"); err != nil {
		t.Fatal(err)
	}
	for {
		data, err := c.Read(b.ctx())
		if err != nil {
			t.Fatal(err)
		}
		if m, err := dispatch.Decode(dispatch.FromHub, data); err != nil {
			t.Fatal(err)
		} else if e, ok := m.(*dispatch.Closing); ok {
			if e.Code != wire.Revoked {
				t.Errorf("closed with %+v", e)
			}
			break
		}
	}
}

// TestClientsAreLetIn: a client's connection gives its place among the
// unauthenticated back once a request was, and what is past the limit of
// requests is told to come again.
func TestClientsAreLetIn(t *testing.T) {
	b := start(t, false)
	key, err := b.CreateKey(t.Context(), "uid 0", hub.Key{Name: "k", Pools: []string{"*"}, Scopes: []string{hub.ScopeCapacity}}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	in := bufio.NewReader(c)
	ask := func() *http.Response {
		t.Helper()
		body := `{"placement":{"pool":"ci","envelope":{"mem_bytes":1,"cpus":1}}}`
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", dispatch.CapacityPath, key, len(body), body)
		r, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
		return r
	}
	// The connection stays open for another request.
	if r := ask(); r.StatusCode != 200 || b.nodes.Unauthenticated() != 0 {
		t.Errorf("status %d, %d connections count as unauthenticated", r.StatusCode, b.nodes.Unauthenticated())
	}
	web.HoldClients(b.nodes, web.MaxClients)
	if r := ask(); r.StatusCode != 503 || !r.Close {
		t.Errorf("one request past the limit: status %d, closed %v", r.StatusCode, r.Close)
	}
}
