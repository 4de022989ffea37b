package hubtest

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
)

// Placed is a node that takes placed jobs, as the contract has it: it journals
// starts, sends output past the last ack again, and repeats results until they
// are recorded. It outlives its sessions. Its fields are knobs; set them before
// a session, or under Lock.
type Placed struct {
	Identity
	sync.Mutex
	State     wire.State
	Inventory wire.Inventory
	Beat      wire.Heartbeat
	Versions  wire.Range
	// Answer decides an offer ("" = accept, else the reason) and a start.
	Answer func(m wire.Message) (reason string)
	// Work is what a job prints and how it ends; nil result = it goes on until
	// End is called.
	Work func(*wire.Start) (output []byte, result *wire.JobResult)
	// Lose says that a message of the node's gets lost, as with the connection
	// that it would have gone over: the session ends.
	Lose  func(m wire.Message) bool
	Chunk int // bytes of output in a message
	Lease int // the most seconds that it grants; 0 = any

	Starts   map[string]int // how often a job was begun: 1, or there is a bug
	Canceled map[string]wire.CancelMode
	Offers   int
	held     map[string]wire.Envelope
	jobs     map[string]*placedJob
	sending  sync.Mutex
	order    []string
	client   *Client
	ctx      context.Context
}

type placedJob struct {
	start          *wire.Start
	out            []byte
	sent, acked    int64
	result         *wire.JobResult
	told, recorded bool
	wait           bool // for the ack that says from where on to send again
}

// NewPlaced makes a node of a hub with so many CPUs and so much memory, ready
// for jobs of a pool.
func NewPlaced(t testing.TB, h *hub.Hub, name, pool string, cpus int, mem int64) *Placed {
	t.Helper()
	n, err := MakePlaced(t.Context(), h, name, pool, cpus, mem)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// MakePlaced is NewPlaced for who is no test.
func MakePlaced(ctx context.Context, h *hub.Hub, name, pool string, cpus int, mem int64) (*Placed, error) {
	i, err := Join(ctx, h, name)
	if err != nil {
		return nil, err
	}
	n := PlacedAs(i, name, cpus, mem)
	if pool != "" {
		_, err = h.SetPools(ctx, "test", n.ID, []string{pool})
	}
	return n, err
}

// PlacedAs makes one of an identity that a hub has enrolled.
func PlacedAs(i Identity, name string, cpus int, mem int64) *Placed {
	return &Placed{Identity: i, State: wire.State{Node: wire.Ready, Acquisition: wire.Taking, Runner: wire.RunnerNone, Placed: &wire.Placed{}},
		Inventory: wire.Inventory{Hostname: name, CPUs: cpus, RAM: mem}, Versions: wire.Spoken, Chunk: wire.MaxOutput,
		Beat:   wire.Heartbeat{Admission: wire.Admission{Budget: mem}, Filesystems: []wire.FSReading{{Role: wire.RoleJobs, Free: 1 << 40}}},
		Starts: map[string]int{}, Canceled: map[string]wire.CancelMode{}, held: map[string]wire.Envelope{}, jobs: map[string]*placedJob{}}
}

// Session runs one session over c until it ends.
func (n *Placed) Session(ctx context.Context, c hub.Conn, channel []byte) error {
	defer c.CloseNow()
	cl, err := n.Dial(ctx, c, channel, wire.NewID(), n.Versions)
	if err != nil {
		return err
	}
	n.Lock()
	n.client, n.ctx = cl, ctx
	held := &wire.Held{Reservations: wire.IDs{}, Jobs: wire.IDs{}}
	for _, id := range n.order {
		if j := n.jobs[id]; !j.recorded {
			held.Jobs = append(held.Jobs, id)
			j.told, j.wait = false, true
		}
	}
	for id := range n.held {
		held.Reservations = append(held.Reservations, id)
	}
	st, inv, beat := n.State, n.Inventory, n.reading()
	n.Unlock()
	for _, m := range []wire.Message{&wire.Report{State: &st}, held, &inv, &beat} {
		if _, old := m.(*wire.Held); old && cl.Version < wire.VersionJobs {
			continue
		}
		if err := n.Say(m); err != nil {
			return err
		}
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		for {
			select {
			case <-time.After(time.Duration(cl.Welcome.HeartbeatSecs) * time.Second):
				n.Lock()
				b := n.reading()
				n.Unlock()
				_ = n.Say(&b)
			case <-stop:
				return
			}
		}
	}()
	for {
		m, err := cl.Receive(ctx)
		if err != nil {
			return err
		}
		if err := n.take(m); err != nil {
			return err
		}
	}
}

// reading is Beat with what is held and runs counted as committed.
func (n *Placed) reading() wire.Heartbeat {
	b := n.Beat
	for _, e := range n.held {
		b.Admission.Committed += e.Memory
	}
	for _, j := range n.jobs {
		if !j.recorded {
			b.Admission.Committed += j.start.Envelope.Memory
		}
	}
	return b
}

// Say sends a message, or loses it.
func (n *Placed) Say(m wire.Message) error {
	n.Lock()
	cl, ctx, lose := n.client, n.ctx, n.Lose
	n.Unlock()
	if lose != nil && lose(m) {
		cl.C.CloseNow()
		return fmt.Errorf("lost a %T", m)
	}
	return cl.Send(ctx, m)
}

// Raw sends what may be no message.
func (n *Placed) Raw(b []byte) error {
	n.Lock()
	cl, ctx := n.client, n.ctx
	n.Unlock()
	return cl.C.Write(ctx, b)
}

func (n *Placed) take(m wire.Message) error {
	answer := func() string {
		n.Lock()
		f := n.Answer
		n.Unlock()
		if f == nil {
			return ""
		}
		return f(m)
	}
	switch m := m.(type) {
	case *wire.Offer:
		reason := answer()
		n.Lock()
		n.Offers++
		if reason == "" {
			n.held[m.Reservation] = m.Envelope
		}
		n.Unlock()
		if reason != "" {
			return n.Say(&wire.OfferReply{Reservation: m.Reservation, Reply: wire.Answer{State: "refused", Reason: reason}})
		}
		return n.Say(&wire.OfferReply{Reservation: m.Reservation, Reply: wire.Answer{State: "accepted", LeaseSecs: n.grants(m.LeaseSecs)}})
	case *wire.Renew:
		n.Lock()
		_, ok := n.held[m.Reservation]
		n.Unlock()
		if ok {
			return n.Say(&wire.Lease{Reservation: m.Reservation, State: wire.LeaseState{State: "held", RemainingSecs: n.grants(m.LeaseSecs)}})
		}
		return n.Say(&wire.Lease{Reservation: m.Reservation, State: wire.LeaseState{State: "gone", Why: "unknown"}})
	case *wire.GiveBack:
		n.Lock()
		delete(n.held, m.Reservation)
		n.Unlock()
	case *wire.Start:
		return n.begin(m, answer())
	case *wire.OutputAck:
		n.Lock()
		if j := n.jobs[m.Job]; j != nil && !j.recorded {
			at := min(m.Offset, int64(len(j.out)))
			j.acked = max(j.acked, at)
			if j.wait {
				j.sent, j.wait = at, false
			}
		}
		n.Unlock()
		return n.pump(m.Job)
	case *wire.Cancel:
		n.Lock()
		n.Canceled[m.Job] = m.Mode
		j := n.jobs[m.Job]
		if j != nil && j.result == nil {
			j.result = &wire.JobResult{Failure: "canceled", Artifacts: []wire.ArtifactResult{}}
		}
		if j != nil && j.wait { // the hub does not follow it: no ack will come
			j.sent, j.wait = j.acked, false
		}
		n.Unlock()
		return n.pump(m.Job)
	case *wire.JobRecorded:
		n.Lock()
		if j := n.jobs[m.Job]; j != nil {
			j.recorded = true
		}
		n.Unlock()
	}
	return nil
}

func (n *Placed) grants(secs int) int {
	n.Lock()
	defer n.Unlock()
	if n.Lease > 0 {
		return min(secs, n.Lease)
	}
	return secs
}

func (n *Placed) begin(m *wire.Start, reason string) error {
	n.Lock()
	if n.jobs[m.Job] == nil && reason != "" {
		delete(n.held, m.Reservation)
		n.Unlock()
		return n.Say(&wire.JobState{Job: m.Job, State: wire.StateOfJob{State: "refused", Reason: reason}})
	}
	if n.jobs[m.Job] == nil {
		j := &placedJob{start: m}
		if n.Work != nil {
			j.out, j.result = n.Work(m)
		}
		n.jobs[m.Job] = j
		n.order = append(n.order, m.Job)
		n.Starts[m.Job]++
		delete(n.held, m.Reservation)
	}
	n.Unlock()
	if err := n.Say(&wire.JobState{Job: m.Job, State: wire.StateOfJob{State: "accepted"}}); err != nil {
		return err
	}
	return n.pump(m.Job)
}

// End has a job end that goes on.
func (n *Placed) End(id string, r *wire.JobResult) error {
	n.Lock()
	if j := n.jobs[id]; j != nil && j.result == nil {
		j.result = r
	}
	n.Unlock()
	return n.pump(id)
}

// Print adds to a job's output.
func (n *Placed) Print(id string, text []byte) error {
	n.Lock()
	j := n.jobs[id]
	if j != nil {
		j.out = append(j.out, text...)
	}
	n.Unlock()
	return n.pump(id)
}

// Acked is how much of a job's output the hub has acked.
func (n *Placed) Acked(id string) int64 {
	n.Lock()
	defer n.Unlock()
	if j := n.jobs[id]; j != nil {
		return j.acked
	}
	return 0
}

// pump sends a job's output that was not sent, and its result once all of it
// is acked.
func (n *Placed) pump(id string) error {
	n.sending.Lock() // pieces leave in their order, whoever sends them
	defer n.sending.Unlock()
	for {
		n.Lock()
		j := n.jobs[id]
		var m wire.Message
		switch {
		case j == nil || j.recorded || j.wait:
		case j.sent < int64(len(j.out)):
			end := min(j.sent+int64(n.Chunk), int64(len(j.out)))
			m = &wire.Output{Job: id, Offset: j.sent, Data: base64.StdEncoding.EncodeToString(j.out[j.sent:end])}
			j.sent = end
		case j.result != nil && j.acked >= int64(len(j.out)) && !j.told:
			r := *j.result
			r.OutputLen, j.told = int64(len(j.out)), true
			m = &wire.Result{Job: id, Result: r}
		}
		n.Unlock()
		if m == nil {
			return nil
		}
		if err := n.Say(m); err != nil {
			return err
		}
	}
}

// Holds lists the reservations that it holds, and the jobs that it has begun.
func (n *Placed) Holds() (reservations, jobs []string) {
	n.Lock()
	defer n.Unlock()
	for id := range n.held {
		reservations = append(reservations, id)
	}
	return reservations, slices.Clone(n.order)
}

// Start is what a job was begun with, nil for one that was not.
func (n *Placed) Start(id string) *wire.Start {
	n.Lock()
	defer n.Unlock()
	if j := n.jobs[id]; j != nil {
		return j.start
	}
	return nil
}

// NewRelay enrolls a relay and has a first inventory of it bind it to a server.
// The server and the project with ID 1 are approved.
func NewRelay(t testing.TB, h *hub.Hub, server, instance string) (hub.Owner, ed25519.PrivateKey) {
	t.Helper()
	o, key, err := MakeRelay(t.Context(), h, server, instance)
	if err != nil {
		t.Fatal(err)
	}
	return o, key
}

// MakeRelay is NewRelay for who is no test.
func MakeRelay(ctx context.Context, h *hub.Hub, server, instance string) (o hub.Owner, key ed25519.PrivateKey, err error) {
	token, err := h.CreateTokenOf(ctx, "test", hub.TokenGitLab, time.Hour)
	if err != nil {
		return o, nil, err
	}
	key = NewKey().Key
	r, err := h.EnrollRelay(ctx, dispatch.NewEnrollRequest(token, key, wire.Plaintext, "gw", "test"), wire.Plaintext, "test")
	if err != nil {
		return o, nil, err
	}
	if err := h.BindRelay(ctx, r.Relay, &dispatch.Inventory{Hostname: "gw", ServerURL: server, Runners: []dispatch.Runner{}}); err != nil {
		return o, nil, err
	}
	if _, err := h.ApproveServer(ctx, "test", server, instance); err != nil {
		return o, nil, err
	}
	if err := h.DecideProjects(ctx, "test", instance, []hub.ProjectRef{{ID: 1}}, dispatch.Approved); err != nil {
		return o, nil, err
	}
	o, _, e := h.ByRelay(r.Relay)
	if e != nil {
		return o, nil, e
	}
	return o, key, nil
}

// Job is a spec of project 1 at server; change (nil = nothing) is made to it.
func Job(t testing.TB, server string, id int64, change func(*job.CiJob)) json.RawMessage {
	t.Helper()
	b, err := MakeJob(server, id, change)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// MakeJob is Job for who is no test.
func MakeJob(server string, id int64, change func(*job.CiJob)) (json.RawMessage, error) {
	j := &job.CiJob{Kind: job.KindGitLabCI, ServerURL: server, Token: "glcbt-64_" + fmt.Sprintf("%020d", id), TimeoutSecs: 3600,
		Job:       job.Info{ID: id, Name: "test", Stage: "test", ProjectID: 1, ProjectName: "web", ProjectPath: "acme/web", RunnerID: 7},
		Sources:   job.Sources{RepoURL: server + "/acme/web.git", Ref: "main", SHA: "0123456789abcdef0123456789abcdef01234567", RefType: "branch"},
		Variables: []job.Variable{{Key: "CI", Value: "true", Public: true}, {Key: "PASSWORD", Value: "sesame-open-9", Masked: true}},
		Steps:     []job.Step{{Name: job.StepScript, Script: []string{"make test", "echo sesame-open-9"}, When: job.OnSuccess}}}
	if change != nil {
		change(j)
	}
	return j.Encode()
}
