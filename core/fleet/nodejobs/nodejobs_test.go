package nodejobs_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"virtkit/core/admit"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/nodejobs"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/numa"
)

// books is a ledger in memory: a budget of memory, and who has what.
type books struct {
	mu     sync.Mutex
	budget int64
	claims map[string]int64
	files  map[*os.File]string
	fail   error
}

func newBooks() *books {
	return &books{budget: 4096, claims: map[string]int64{}, files: map[*os.File]string{}}
}

func (b *books) Offer(_ context.Context, id string, want admit.Amounts) (admit.Held, string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	sum := want.MemMiB
	for _, n := range b.claims {
		sum += n
	}
	if b.fail != nil {
		return nil, "", b.fail
	}
	if sum > b.budget {
		return nil, "memory", nil
	}
	return b.hold("reservation-"+id, want.MemMiB)
}

func (b *books) hold(id string, n int64) (admit.Held, string, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, "", err
	}
	r.Close()
	b.claims[id], b.files[w] = n, id
	return &held{b: b, id: id, f: w}, "", nil
}

func (b *books) Name(_ context.Context, f *os.File, id string) (admit.Held, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.claims[id]; ok {
		return nil, errors.New("held already")
	}
	old, ok := b.files[f]
	if !ok {
		return nil, errors.New("no claim of mine")
	}
	n := b.claims[old]
	delete(b.claims, old)
	h, _, err := b.hold(id, n)
	return h, err
}

func (b *books) names() map[string]int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := map[string]int64{}
	for k, v := range b.claims {
		out[k] = v
	}
	return out
}

type held struct {
	b  *books
	id string
	f  *os.File
}

func (h *held) File() *os.File         { return h.f }
func (h *held) Place() *numa.Placement { return nil }
func (h *held) Close() error           { return h.f.Close() }
func (h *held) Release() error {
	h.b.mu.Lock()
	delete(h.b.claims, h.id)
	h.b.mu.Unlock()
	return h.f.Close()
}

// drivers are run by the test: each is a lock that it holds.
type drivers struct {
	mu      sync.Mutex
	fail    error
	locks   map[string]*os.File
	gone    map[string]chan struct{}
	claimed map[string]bool
	cleaned []string
	block   chan struct{} // nil = a clean-up ends at once
}

func newDrivers() *drivers {
	return &drivers{locks: map[string]*os.File{}, gone: map[string]chan struct{}{}, claimed: map[string]bool{}}
}

func dup(f *os.File) (*os.File, error) {
	n, err := dupFD(f)
	return n, err
}

func (d *drivers) Start(dir *jobdir.Dir, lock, claim *os.File) (<-chan struct{}, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail != nil {
		return nil, d.fail
	}
	l, err := dup(lock)
	if err != nil {
		return nil, err
	}
	d.locks[dir.ID()], d.claimed[dir.ID()] = l, claim != nil
	d.gone[dir.ID()] = make(chan struct{})
	return d.gone[dir.ID()], nil
}

// kill ends a driver as SIGKILL does.
func (d *drivers) kill(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.locks[id].Close()
	close(d.gone[id])
	delete(d.locks, id)
}

func (d *drivers) runs(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.locks[id] != nil
}

func (d *drivers) Cleanup(ctx context.Context, dir *jobdir.Dir, lock *os.File) error {
	d.mu.Lock()
	block := d.block
	d.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if lock == nil {
		return errors.New("no lock was passed on")
	}
	d.cleaned = append(d.cleaned, dir.ID())
	return nil
}

func (d *drivers) cleanups() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.cleaned...)
}

// rig is a node's jobs with a hub that the test speaks for.
type rig struct {
	t       *testing.T
	dir     string
	journal *jobdir.Store
	books   *books
	drivers *drivers
	config  nodejobs.Config
	jobs    *nodejobs.Jobs
	s       node.JobSession
	stop    func()

	mu  sync.Mutex
	now time.Time
}

func newRig(t *testing.T, change ...func(*nodejobs.Config)) *rig {
	r := &rig{t: t, dir: t.TempDir(), books: newBooks(), drivers: newDrivers(), now: time.Now()}
	r.config = nodejobs.Config{Ledger: r.books, Drivers: r.drivers, Log: logx.ForTest(t), Now: func() time.Time { r.mu.Lock(); defer r.mu.Unlock(); return r.now }}
	for _, c := range change {
		c(&r.config)
	}
	r.begin()
	t.Cleanup(func() { r.stop() })
	return r
}

// begin starts an incarnation of the node.
func (r *rig) begin() {
	r.t.Helper()
	var err error
	if r.journal, err = jobdir.Open(r.dir); err != nil {
		r.t.Fatal(err)
	}
	r.config.Journal = r.journal
	if r.jobs, err = nodejobs.New(r.config); err != nil {
		r.t.Fatal(err)
	}
	r.jobs.Steer(node.State{Node: wire.Ready})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.jobs.Run(ctx) }()
	r.stop = sync.OnceFunc(func() { cancel(); <-done })
	r.connect()
}

// connect begins a session.
func (r *rig) connect() *wire.Held {
	r.s = r.jobs.Open()
	return r.s.Held()
}

// pass moves the clock of leases.
func (r *rig) pass(d time.Duration) {
	r.mu.Lock()
	r.now = r.now.Add(d)
	r.mu.Unlock()
	r.jobs.Steer(node.State{Node: wire.Ready}) // a reason to look
}

func (r *rig) say(m wire.Message) wire.Message { return r.s.Handle(r.t.Context(), m) }

// next waits for a message of type T; others before it are dropped.
func next[T wire.Message](r *rig) T {
	r.t.Helper()
	m, ok := nextWithin[T](r, time.Minute)
	if !ok {
		r.t.Fatalf("no %T within a minute", m)
	}
	return m
}

func nextWithin[T wire.Message](r *rig, d time.Duration) (T, bool) {
	end := time.After(d)
	for {
		m := r.s.Next()
		if got, ok := m.(T); ok {
			return got, true
		}
		if m != nil {
			continue
		}
		select {
		case <-r.s.Ready():
		case <-end:
			var zero T
			return zero, false
		}
	}
}

// until waits for a condition.
func (r *rig) until(what string, ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("%s: not within a minute", what)
		}
	}
}

func envelope(mib int64) wire.Envelope { return wire.Envelope{Memory: mib << 20, CPUs: 2} }

func (r *rig) offer(id string, mib int64) wire.Answer {
	r.t.Helper()
	rep, ok := r.say(&wire.Offer{Reservation: id, Envelope: envelope(mib), LeaseSecs: 90}).(*wire.OfferReply)
	if !ok || rep.Reservation != id {
		r.t.Fatalf("an offer was answered by %+v", rep)
	}
	return rep.Reply
}

func spec(t *testing.T, gitlab, project int64) json.RawMessage {
	t.Helper()
	j := job.CiJob{
		Kind: job.KindGitLabCI, ServerURL: "https://gitlab.example.com", Token: "glcbt-secret", TimeoutSecs: 60,
		Job:   job.Info{ID: gitlab, ProjectID: project, ProjectPath: "group/project"},
		Steps: []job.Step{{Name: job.StepScript, Script: []string{"true"}, When: job.OnSuccess}},
	}
	b, err := j.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// start starts a job of a GitLab number.
func (r *rig) start(gitlab int64, reservation string) (string, wire.StateOfJob) {
	r.t.Helper()
	id := wire.NewID()
	st, ok := r.say(&wire.Start{Job: id, Reservation: reservation, Envelope: envelope(1024), Spec: spec(r.t, gitlab, 1)}).(*wire.JobState)
	if !ok || st.Job != id {
		r.t.Fatalf("a start was answered by %+v", st)
	}
	return id, st.State
}

func (r *rig) accepted(gitlab int64, reservation string) string {
	r.t.Helper()
	id, st := r.start(gitlab, reservation)
	if st.State != "accepted" {
		r.t.Fatalf("start: %+v", st)
	}
	return id
}

func (r *rig) of(id string) *jobdir.Dir {
	r.t.Helper()
	d, err := r.journal.Job(id)
	if err != nil {
		r.t.Fatal(err)
	}
	return d
}

// print has a driver print.
func (r *rig) print(id, text string) {
	r.t.Helper()
	f, err := r.of(id).AppendOutput()
	if err == nil {
		_, err = f.WriteString(text)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	f.Close()
}

// finish has a driver end well.
func (r *rig) finish(id string, res job.Result) {
	r.t.Helper()
	if err := r.of(id).Finish(res); err != nil {
		r.t.Fatal(err)
	}
	r.drivers.kill(id)
}

func data(t *testing.T, m *wire.Output) string {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func resID(n int) string {
	s := strconv.Itoa(n)
	return "00000000000000000000000000000000"[len(s):] + s
}

func dupFD(f *os.File) (*os.File, error) {
	n, err := dupOf(f)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(n), f.Name()), nil
}
