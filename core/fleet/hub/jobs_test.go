package hub_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/outstore"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

const gitlab = "https://gitlab.example.com"

var small = dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 1, Disk: 1 << 30}}

// fleet is a hub that takes jobs, and a relay.
type fleet struct {
	*hub.Hub
	t     *testing.T
	store *hubtest.Memory
	dir   string
	relay hub.Owner
	ctx   context.Context
	stop  func() // the hub, as a crash would but for what it stores
	wg    sync.WaitGroup
	n     int64
}

// run starts a hub on a store and a directory.
func run(t *testing.T, store *hubtest.Memory, dir string, o hub.JobOptions) *fleet {
	t.Helper()
	out, err := outstore.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	o.Outputs = out
	ctx, cancel := context.WithCancel(context.Background())
	h, err := hub.New(ctx, store, hub.Options{Log: logx.ForTest(t), Jobs: o})
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{Hub: h, t: t, store: store, dir: dir}
	var hangUp func()
	f.ctx, hangUp = context.WithCancel(context.Background())
	var g sync.WaitGroup
	g.Go(func() { h.Run(ctx) })
	g.Go(func() { out.Run(ctx, h.Synced) })
	f.stop = sync.OnceFunc(func() { hangUp(); f.wg.Wait(); cancel(); g.Wait() })
	return f
}

// inFleet runs f with a hub of its own, in a bubble of synctest.
func inFleet(t *testing.T, o hub.JobOptions, f func(*testing.T, *fleet)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		b := run(t, hubtest.NewMemory(), dir, o)
		defer b.stop()
		b.relay, _ = hubtest.NewRelay(t, b.Hub, gitlab, "gl")
		f(t, b)
	})
}

// again is the hub after a restart, kill: as after a crash.
func (f *fleet) again(o hub.JobOptions) *fleet {
	f.stop()
	b := run(f.t, f.store, f.dir, o)
	b.relay, b.n = f.relay, f.n
	return b
}

// node makes one with room for so many small envelopes, and connects it.
func (f *fleet) node(name string, room int) *hubtest.Placed {
	f.t.Helper()
	n := hubtest.NewPlaced(f.t, f.Hub, name, "ci", 16, int64(room)<<30)
	f.connect(n)
	return n
}

// connect runs a session of a node's; hang ends it.
func (f *fleet) connect(n *hubtest.Placed) (hang func()) {
	near, far := hubtest.Pipe()
	f.wg.Go(func() { f.Serve(f.ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) })
	f.wg.Go(func() { n.Session(context.Background(), near, wire.Plaintext) })
	time.Sleep(3 * time.Second) // an inventory is taken over with the next flush
	synctest.Wait()
	return func() { near.CloseNow(); synctest.Wait() }
}

func (f *fleet) reserve(wait int) (*dispatch.ReservationGrant, *dispatch.Error) {
	q := &dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: small, LeaseSecs: 90, WaitSecs: wait}
	return f.Reserve(f.t.Context(), f.relay, q, "body")
}

func (f *fleet) mustReserve() *dispatch.ReservationGrant {
	f.t.Helper()
	g, e := f.reserve(10)
	if e != nil {
		f.t.Fatal(e)
	}
	return g
}

func (f *fleet) submission(reservation string, change func(*job.CiJob)) *dispatch.JobSubmission {
	f.n++
	return &dispatch.JobSubmission{RequestID: wire.NewID(), Placement: small, Reservation: reservation, PlaceWithinSecs: 300, Spec: hubtest.Job(f.t, gitlab, f.n, change)}
}

func hash(v any) string {
	b, _ := json.Marshal(v)
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func (f *fleet) submit(q *dispatch.JobSubmission) (*dispatch.JobView, *dispatch.Error) {
	return f.Submit(f.t.Context(), f.relay, q, hash(q))
}

func (f *fleet) mustSubmit(reservation string) string {
	f.t.Helper()
	v, e := f.submit(f.submission(reservation, nil))
	if e != nil {
		f.t.Fatal(e)
	}
	synctest.Wait()
	return v.ID
}

func (f *fleet) view(id string) *dispatch.JobView {
	f.t.Helper()
	v, e := f.View(f.t.Context(), f.relay, id, 0, 0)
	if e != nil {
		f.t.Fatal(e)
	}
	return v
}

func (f *fleet) want(id string, state dispatch.State, failure string) *dispatch.JobView {
	f.t.Helper()
	synctest.Wait()
	v := f.view(id)
	got := ""
	if v.Result != nil {
		got = v.Result.Failure
	}
	if v.State != state || got != failure {
		f.t.Errorf("job %s is %s %q, want %s %q", id, v.State, got, state, failure)
	}
	return v
}

// outputOf reads a job's output as a producer does, until it is complete.
func (f *fleet) outputOf(id string) (out []byte) {
	f.t.Helper()
	for {
		p, e := f.Output(f.t.Context(), f.relay, id, int64(len(out)), 10*time.Second)
		if e != nil {
			f.t.Fatal(e)
		}
		out = append(out, p.Data...)
		if p.Complete {
			return out
		}
	}
}

func code(e *dispatch.Error) string {
	if e == nil {
		return ""
	}
	return fmt.Sprintf("%d %s", e.Status, e.Code)
}

func success() *wire.JobResult { return &wire.JobResult{Artifacts: []wire.ArtifactResult{}} }

// prints makes a node's Work of an output, and an end at once.
func prints(text string) func(*wire.Start) ([]byte, *wire.JobResult) {
	return func(*wire.Start) ([]byte, *wire.JobResult) { return []byte(text), success() }
}

func TestJobOnAReservation(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("ci-1", 4)
		n.Work = prints("hello\nworld\n")
		n.Chunk = 5
		g := f.mustReserve()
		if g.Node != n.ID || g.LeaseSecs != 90 || g.Envelope != small.Envelope {
			t.Errorf("the grant is %+v", g)
		}
		if c, e := f.Capacity(t.Context(), f.relay, &dispatch.CapacityRequest{Placement: small}); e != nil || c.Fits != 3 {
			t.Errorf("capacity %+v, %v with one of 4 reserved", c, e)
		}
		q := f.submission(g.Reservation, nil)
		v, e := f.submit(q)
		if e != nil || v.State != dispatch.Starting || v.Node != n.ID {
			t.Fatalf("submitted: %+v, %v", v, e)
		}
		again, e := f.submit(q)
		if e != nil || again.ID != v.ID {
			t.Errorf("submitted again: %+v, %v, want job %s", again, e, v.ID)
		}
		v = f.want(v.ID, dispatch.Finished, "")
		if v.OutputLen != 12 || v.Result.OutputLen != 12 {
			t.Errorf("the view is %+v", v)
		}
		if out := f.outputOf(v.ID); string(out) != "hello\nworld\n" {
			t.Errorf("output %q", out)
		}
		if s := n.Start(v.ID); s.Reservation != g.Reservation || !bytes.Contains(s.Spec, []byte("sesame-open-9")) || s.Envelope != small.Envelope {
			t.Errorf("the start is %+v", s)
		}
		if held, jobs := n.Holds(); len(held) != 0 || len(jobs) != 1 {
			t.Errorf("the node holds %v, %v", held, jobs)
		}
		if e := f.Settle(t.Context(), f.relay, v.ID); e != nil {
			t.Fatal(e)
		}
		if e := f.Settle(t.Context(), f.relay, v.ID); e != nil {
			t.Errorf("settled again: %v", e)
		}
		if _, e := f.Output(t.Context(), f.relay, v.ID, 0, 0); code(e) != "404 not_found" {
			t.Errorf("output of a settled job: %v", e)
		}
		f.want(v.ID, dispatch.Finished, "")
		j, err := f.Store().Job(t.Context(), v.ID)
		if err != nil || j.Settled == 0 || j.Path != "acme/web" || j.Instance != "gl" {
			t.Errorf("the record is %+v, %v", j, err)
		}
		spec, err := f.Spec(t.Context(), j)
		if err != nil || !bytes.Contains(spec, []byte(`"make test"`)) || bytes.Contains(spec, []byte("sesame")) || bytes.Contains(spec, []byte("glcbt")) {
			t.Errorf("the spec kept is %s, %v", spec, err)
		}
		end, err := f.Ending(t.Context(), j)
		if err != nil || end == nil || string(end.Data) != "hello\nworld\n" || end.Start != 0 || end.Size != 12 {
			t.Errorf("the end kept is %+v, %v", end, err)
		}
		if c, _ := f.Capacity(t.Context(), f.relay, &dispatch.CapacityRequest{Placement: small}); c.Fits != 4 {
			t.Errorf("fits %d after the job, want 4", c.Fits)
		}
	})
}

func TestOrder(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		a, b := f.node("a", 25), f.node("b", 22)
		got := map[string]int{}
		var order []string
		for range 6 {
			node := f.mustReserve().Node
			got[node]++
			order = append(order, node)
		}
		if got[a.ID] != 3 || got[b.ID] != 3 || order[0] != a.ID {
			t.Errorf("6 reservations went to %v, want each in turn, from %s on", order, a.ID)
		}
		// A busy host comes last, whatever its room.
		c := f.node("c", 100)
		load := 15.5
		c.Lock()
		c.Beat.Load1 = &load
		c.Unlock()
		time.Sleep(6 * time.Second)
		synctest.Wait()
		for range 4 {
			if node := f.mustReserve().Node; node == c.ID {
				t.Errorf("a host with a load of 15.5 on 16 CPUs came before idle ones")
			}
		}
	})
}

func TestWhatNodesAreAsked(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("ci-1", 8)
		fits := func(p dispatch.Placement) int {
			t.Helper()
			synctest.Wait()
			c, e := f.Capacity(t.Context(), f.relay, &dispatch.CapacityRequest{Placement: p})
			if e != nil {
				t.Fatal(e)
			}
			return c.Fits
		}
		check := func(what string, p dispatch.Placement, want int) {
			t.Helper()
			if got := fits(p); got != want {
				t.Errorf("%s: fits %d, want %d", what, got, want)
			}
		}
		with := func(change func(*dispatch.Placement)) dispatch.Placement {
			p := small
			change(&p)
			return p
		}
		check("plain", small, 8)
		check("another pool", with(func(p *dispatch.Placement) { p.Pool = "gpu" }), 0)
		check("a label that it has not", with(func(p *dispatch.Placement) { p.Labels = []string{"big"} }), 0)
		check("more CPUs than it has", with(func(p *dispatch.Placement) { p.Envelope.CPUs = 17 }), 0)
		check("half of its memory", with(func(p *dispatch.Placement) { p.Envelope.Memory = 4 << 30 }), 2)
		check("more disk than is free", with(func(p *dispatch.Placement) { p.Envelope.Disk = 1 << 41 }), 0)
		report := func(change func(*wire.State)) {
			t.Helper()
			n.Lock()
			change(&n.State)
			st := n.State
			n.Unlock()
			if err := n.Say(&wire.Report{State: &st}); err != nil {
				t.Fatal(err)
			}
		}
		report(func(s *wire.State) { s.Placed = &wire.Placed{Limit: 3} })
		check("a limit of its own", small, 3)
		if _, err := f.SetPolicy(t.Context(), "test", n.ID, hub.PolicyChange{Ceiling: ptr(2)}); err != nil {
			t.Fatal(err)
		}
		check("a lower ceiling", small, 2)
		f.mustReserve()
		check("one of the ceiling used", small, 1)
		report(func(s *wire.State) { s.Placed = &wire.Placed{Runner: "gitlab-runner.service"} })
		check("a runner of its own", small, 0)
		report(func(s *wire.State) { s.Placed, s.Node = &wire.Placed{}, wire.Draining })
		check("draining", small, 0)
		report(func(s *wire.State) { s.Node, s.Acquisition = wire.Ready, wire.Stopped })
		check("acquisition stopped", small, 0)
		report(func(s *wire.State) { s.Acquisition = wire.Taking })
		check("ready again", small, 1)
	})
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := hubtest.NewPlaced(t, f.Hub, "old", "ci", 16, 8<<30)
		n.Versions = wire.Range{Min: 1, Max: 2}
		f.connect(n)
		if c, _ := f.Capacity(t.Context(), f.relay, &dispatch.CapacityRequest{Placement: small}); c.Fits != 0 {
			t.Errorf("a node of version 2 fits %d", c.Fits)
		}
	})
}

func TestReservations(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		if _, e := f.reserve(1); code(e) != "503 no_capacity" || e.RetryAfterSecs != 5 {
			t.Errorf("with no node: %v", e)
		}
		n := f.node("ci-1", 1)
		n.Lock()
		n.Answer = func(wire.Message) string { return "memory" }
		n.Unlock()
		began := time.Now()
		if _, e := f.reserve(5); code(e) != "503 no_capacity" || time.Since(began) != 5*time.Second {
			t.Errorf("a node that refuses: %v after %v", e, time.Since(began))
		}
		if n.Offers != 3 {
			t.Errorf("it was asked %d times in 5 s, want every 2 s", n.Offers)
		}
		n.Lock()
		n.Answer = nil
		n.Unlock()
		q := &dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: small, LeaseSecs: 90, WaitSecs: 5}
		g, e := f.Reserve(t.Context(), f.relay, q, "1")
		if e != nil {
			t.Fatal(e)
		}
		if same, e := f.Reserve(t.Context(), f.relay, q, "1"); e != nil || *same != *g {
			t.Errorf("the same request again: %+v, %v, want %+v", same, e, g)
		}
		if _, e := f.Reserve(t.Context(), f.relay, q, "2"); code(e) != "409 conflict" {
			t.Errorf("the same request_id, another body: %v", e)
		}
		if _, e := f.reserve(0); code(e) != "503 no_capacity" {
			t.Errorf("a second one of a room of 1: %v", e)
		}
		if r, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 60}); e != nil || r.LeaseSecs != 60 || r.Node != n.ID {
			t.Errorf("renewed: %+v, %v", r, e)
		}
		other, _ := hubtest.NewRelay(t, f.Hub, gitlab, "gl")
		if _, e := f.Renew(t.Context(), other, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 60}); code(e) != "404 not_found" {
			t.Errorf("another relay's: %v", e)
		}
		if e := f.Release(t.Context(), other, g.Reservation); code(e) != "404 not_found" {
			t.Errorf("another relay's released: %v", e)
		}
		for range 2 {
			if e := f.Release(t.Context(), f.relay, g.Reservation); e != nil {
				t.Errorf("released: %v", e)
			}
		}
		synctest.Wait()
		if held, _ := n.Holds(); len(held) != 0 {
			t.Errorf("the node holds %v", held)
		}
		if _, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 60}); code(e) != "410 reservation_gone" {
			t.Errorf("renewed once released: %v", e)
		}
		if _, e := f.Renew(t.Context(), f.relay, "x", &dispatch.RenewRequest{LeaseSecs: 60}); code(e) != "400 invalid" {
			t.Errorf("a malformed ID: %v", e)
		}
		g = f.mustReserve()
		if err := n.Say(&wire.Lease{Reservation: g.Reservation, State: wire.LeaseState{State: "gone", Why: "expired"}}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 60}); code(e) != "410 reservation_gone" {
			t.Errorf("renewed once expired: %v", e)
		}
		lines, _ := f.store.Audit(t.Context(), hub.AuditQuery{Limit: 100})
		if !slices.ContainsFunc(lines, func(l hub.AuditLine) bool {
			return l.Event == "reservation ended" && strings.Contains(l.Detail, "expired")
		}) {
			t.Errorf("the audit log does not say that a reservation expired: %+v", lines)
		}
	})
}

func TestApprovalGate(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("ci-1", 4)
		n.Work = prints("")
		of := func(project int64, path string) *dispatch.JobSubmission {
			return f.submission("", func(j *job.CiJob) { j.Job.ProjectID, j.Job.ProjectPath = project, path })
		}
		pending := of(12, "acme/new")
		for range 2 {
			if _, e := f.submit(pending); code(e) != "403 approval_pending" || e.Text != "project acme/new (ID 12) is waiting for approval on the hub" {
				t.Errorf("a project that nobody approved: %v", e)
			}
		}
		list := f.Snapshot().ProjectList("", dispatch.Pending)
		if len(list) != 1 || list[0].Refused != 1 || list[0].Path != "acme/new" || list[0].FirstJob != 1 {
			t.Errorf("pending projects: %+v", list)
		}
		if err := f.DecideProjects(t.Context(), "uid 0", "gl", []hub.ProjectRef{{ID: 12}}, dispatch.Approved); err != nil {
			t.Fatal(err)
		}
		if _, e := f.submit(pending); code(e) != "403 approval_pending" {
			t.Errorf("the same request once it is approved: %v, want the first answer", e)
		}
		good := of(12, "acme/newer")
		v, e := f.submit(good)
		if e != nil {
			t.Fatal(e)
		}
		if p := f.Snapshot().Projects[hub.ProjectKey{Instance: "gl", ID: 12}]; p.Path != "acme/newer" {
			t.Errorf("the path seen last is %q", p.Path)
		}
		if err := f.DecideProjects(t.Context(), "uid 0", "gl", []hub.ProjectRef{{ID: 12}}, dispatch.Rejected); err != nil {
			t.Fatal(err)
		}
		if _, e := f.submit(of(12, "acme/newer")); code(e) != "403 project_rejected" {
			t.Errorf("a rejected project: %v", e)
		}
		if again, e := f.submit(good); e != nil || again.ID != v.ID {
			t.Errorf("a job that was taken before the rejection: %+v, %v", again, e)
		}
		if _, e := f.submit(f.submission("", func(j *job.CiJob) { j.ServerURL = "https://other.example.com" })); code(e) != "403 forbidden" {
			t.Errorf("a job of another server: %v", e)
		}
		if err := f.BindRelay(t.Context(), f.relay.ID, &dispatch.Inventory{ServerURL: "https://other.example.com"}); err != nil {
			t.Fatal(err)
		}
		if _, e := f.submit(f.submission("", nil)); code(e) != "403 forbidden" {
			t.Errorf("a job of a relay that is rebound: %v", e)
		}
		if _, e := f.Submit(t.Context(), hub.Owner{ID: "k", Name: "key k", Key: &hub.Key{Pools: []string{"*"}}}, f.submission("", nil), ""); code(e) != "403 forbidden" {
			t.Errorf("a job of an API key: %v", e)
		}
		bad := f.submission("", nil)
		bad.Spec = json.RawMessage(`{"kind":"gitlab_ci"}`)
		if _, e := f.submit(bad); code(e) != "400 invalid" {
			t.Errorf("a job without a project: %v", e)
		}
		bad.Spec = json.RawMessage(`"` + strings.Repeat("x", dispatch.MaxSpec) + `"`)
		if _, e := f.submit(bad); code(e) != "413 too_large" {
			t.Errorf("a huge spec: %v", e)
		}
	})
}

func TestServers(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		if err := f.RemoveInstance(t.Context(), "uid 0", "gl"); err == nil {
			t.Error("an instance that a relay is bound to was removed")
		}
		if _, err := f.ApproveServer(t.Context(), "uid 0", "https://other.example.com", "gl"); err == nil {
			t.Error("two servers have one name")
		}
		if err := f.RejectServer(t.Context(), "uid 0", "https://bad.example.com/"); err != nil {
			t.Fatal(err)
		}
		bad := f.Snapshot().Servers["https://bad.example.com"]
		if bad.URL == "" || bad.Name != "" {
			t.Errorf("the rejected server is %+v", bad)
		}
		if err := f.ForgetServer(t.Context(), "uid 0", "https://bad.example.com"); err != nil {
			t.Fatal(err)
		}
		if _, known := f.Snapshot().Servers["https://bad.example.com"]; known {
			t.Error("a forgotten server is known")
		}
		if _, err := f.RemoveRelay(t.Context(), "uid 0", f.relay.ID); err != nil {
			t.Fatal(err)
		}
		if err := f.RemoveInstance(t.Context(), "uid 0", "gl"); err != nil {
			t.Error(err)
		}
		if len(f.Snapshot().Projects) != 0 {
			t.Errorf("its projects are known still: %v", f.Snapshot().Projects)
		}
		if _, _, e := f.ByRelay(f.relay.ID); code(e) != "401 unauthorized" {
			t.Errorf("a removed relay: %v", e)
		}
	})
}
