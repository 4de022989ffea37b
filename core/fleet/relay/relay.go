// Package relay is vk-gitlab: GitLab's side of a fleet. It holds the tokens of
// a GitLab server's runners, asks GitLab for jobs, has the fleet's hub run each
// on a node, and brings its trace and its outcome back.
//
// Vocabulary. A relay is an enrolled vk-gitlab: a key that the hub pinned. A
// runner is one that GitLab knows, with the placement of its jobs. A job is
// held from when GitLab gave it until the hub has settled it; its Record says
// how far it has come. A slot is the right to hold one more job.
//
// # Invariants
//
//   - Capacity first: a job is asked for only with a reservation in hand, since
//     GitLab cannot take a job back. A request in flight is never aborted.
//   - A job is on disk before the hub hears of it, and each step before the
//     next one follows from it. A restart goes on with the first step that is
//     not there; the hub's view and GitLab's offset say the rest. Every call
//     that is made again because of it is idempotent.
//   - A job is committed to GitLab once a node has accepted it, never before; one
//     that no node took is failed uncommitted.
//   - What the hub has of a job's output reaches GitLab byte for byte. What the
//     relay itself has to say comes before all of it or after.
//   - Tokens and specs are in the state files (0600 in a directory of 0700) and
//     in requests, never in a log or an error.
//   - Each request to the hub is signed for its own connection.
//
// Files, below state_dir (0700): lock, system_id, <runner>.json, and hub/ with
// the enrollment (key.pk8, enrollment.json, ca.pem). Traces under way are in
// files without a name.
//
// Spec: gitlab-dispatch.txt; vectors/README.md 3, 4 and 6.
package relay

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/relayconf"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
	"virtkit/core/gitlab"
	"virtkit/core/logx"
)

// Pace is how long a relay waits for what.
type Pace struct {
	HubMin, HubMax time.Duration // before a call of the hub's is tried again
	LongPoll       int           // seconds that a hub may hold a call
	Lease          int           // seconds of a reservation
	Place          int           // seconds that a job may wait for a node
	Request        time.Duration // for GitLab's answer to begin
	Check          time.Duration // between requests for a job
	Unhealthy      time.Duration // that a refused runner does not ask
	Silence        time.Duration // at most, that a runner does not ask a GitLab that does not answer
	Verify         time.Duration // between two looks at a token
	Again          time.Duration // before an outcome that was not delivered is told again
	GiveUp         time.Duration // after which it is not told any more
	Follow         gitlab.Timing
}

// DefaultPace is what gitlab-dispatch says, with a configuration's interval.
func DefaultPace(check time.Duration) Pace {
	return Pace{
		HubMin: time.Second, HubMax: 30 * time.Second, LongPoll: dispatch.MaxWaitSecs, Lease: dispatch.DefaultLease, Place: dispatch.DefaultPlace,
		Request: 60 * time.Second, Check: check, Unhealthy: time.Hour, Silence: time.Minute, Verify: 24 * time.Hour,
		Again: 10 * time.Minute, GiveUp: 24 * time.Hour, Follow: gitlab.DefaultTiming(),
	}
}

// Options are what a Daemon is made of.
type Options struct {
	Conf *relayconf.Config
	Info gitlab.Info // what GitLab is told of this program
	VK   string      // version, for the hub
	Log  *slog.Logger

	// In tests:
	Pace    *Pace
	Agent   string           // User-Agent; "" = of Info
	Now     func() time.Time // wall clock; nil = time.Now
	Dial    func(ctx context.Context, network, addr string) (net.Conn, error)
	writing func(done bool)
	Hub     Hub           // nil = a Client of the enrollment
	Peers   SessionDialer // nil = the enrollment's hub
}

// Daemon is vk-gitlab run.
type Daemon struct {
	conf       *relayconf.Config
	stateDir   string
	enrollment *Enrollment
	lock       *fsx.Lock
	systemID   string
	serverCA   string
	info       gitlab.Info
	vk         string
	client     *gitlab.Client
	hub        Hub
	dialer     SessionDialer
	pace       Pace
	now        func() time.Time
	log        *slog.Logger
	runners    []*runner
	slots      *slots
	changed    *signal

	mu       sync.Mutex
	status   dispatch.ServerStatus // "" before the first
	version  string                // of GitLab
	spki     string                // sha256 of its key
	jobs     sync.WaitGroup
	jobsCtx  context.Context
	bg       sync.WaitGroup
	stopJobs context.CancelCauseFunc
}

// Ours is what GitLab is told of this build.
func Ours(version, revision, platform, arch string) gitlab.Info {
	return gitlab.Info{Name: "vk-gitlab", Version: version, Revision: revision, Platform: platform, Architecture: arch,
		Executor: "vk", Shell: "bash", Features: gitlab.Ours()}
}

// Agent is the User-Agent of a program.
func Agent(i gitlab.Info) string {
	return fmt.Sprintf("%s %s (%s; %s/%s)", i.Name, i.Version, i.Revision, i.Platform, i.Architecture)
}

// Open takes the state dir's lock and reads its identity, the tokens and the
// state files. The lock is held until Close: there is one vk-gitlab on it.
func Open(ctx context.Context, o Options) (_ *Daemon, err error) {
	d := &Daemon{conf: o.Conf, stateDir: o.Conf.StateDir, info: o.Info, vk: o.VK, log: o.Log, now: o.Now, hub: o.Hub, dialer: o.Peers,
		pace: DefaultPace(o.Conf.Check()), changed: newSignal()}
	if d.log == nil {
		d.log = logx.Discard()
	}
	if d.now == nil {
		d.now = time.Now
	}
	if o.Pace != nil {
		d.pace = *o.Pace
	}
	if err := own(d.stateDir, false); err != nil {
		return nil, err
	}
	if d.lock, err = hold(ctx, d.stateDir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.lock.Close()
		}
	}()
	// What a killed one was writing has tokens in it.
	if err := errors.Join(fsx.SweepWrites(d.stateDir), fsx.SweepWrites(filepath.Join(d.stateDir, HubDir))); err != nil {
		return nil, fmt.Errorf("removing what a vk-gitlab before has left: %w", err)
	}
	if d.enrollment, err = LoadEnrollment(d.stateDir); err != nil {
		return nil, err
	}
	if d.systemID, err = SystemID(d.stateDir); err != nil {
		return nil, err
	}
	if err := d.connect(o); err != nil {
		return nil, err
	}
	d.slots = newSlots(d.conf.Concurrent)
	for i := range d.conf.Runners {
		if err := d.addRunner(d.conf.Runners[i], o.writing); err != nil {
			return nil, err
		}
	}
	d.strangers()
	return d, nil
}

// connect makes the clients of GitLab and the hub.
func (d *Daemon) connect(o Options) error {
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}, TLSHandshakeTimeout: 10 * time.Second,
		ResponseHeaderTimeout: d.pace.Request, IdleConnTimeout: 90 * time.Second, MaxIdleConnsPerHost: 256, ExpectContinueTimeout: time.Second,
	}
	if f := d.conf.GitLab.TLSCAFile; f != "" {
		pem, err := os.ReadFile(f)
		if err != nil {
			return fault.New(fault.Usage, "reading [gitlab] tls_ca_file").Because(err)
		}
		t.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
			return fault.Newf(fault.Usage, "tls_ca_file %s holds no certificate in PEM", f)
		}
		d.serverCA = string(pem)
	}
	agent := o.Agent
	if agent == "" {
		agent = Agent(d.info)
	}
	var err error
	if d.client, err = gitlab.New(d.conf.GitLab.URL, agent, d.info, &http.Client{Transport: &keyWatch{t, d.sawKey}}); err != nil {
		return err
	}
	if d.hub == nil {
		if d.hub, err = NewClient(d.enrollment, o.Dial); err != nil {
			return err
		}
	}
	if d.dialer == nil {
		u, err := node.ParseHub(d.enrollment.URL)
		if err != nil {
			return err
		}
		d.dialer = &node.HubDialer{URL: u, CA: d.enrollment.CA, Path: dispatch.SessionPath, Net: o.Dial}
	}
	return nil
}

func (d *Daemon) addRunner(c relayconf.Runner, writing func(done bool)) error {
	token, err := c.ReadToken()
	if err != nil {
		return err
	}
	r := &runner{d: d, conf: c, token: token, short: relayconf.Short(token.Reveal()), placement: placementOf(&c), state: dispatch.ServerPending}
	if r.name = c.Name; r.name == "" {
		r.name = r.short
		d.log.Warn("a runner without a name keeps its jobs under its token's short form: give it a name before its token changes", "runner", r.name)
	}
	if err := relayconf.CheckName(r.name); err != nil {
		return fault.Newf(fault.Usage, "the runner of token_file %s: its token makes no name for its state file", c.TokenFile).Hint("give it a name")
	}
	for _, other := range d.runners {
		if other.name == r.name {
			return fault.Newf(fault.Usage, "two runners have the name %s", r.name).Hint("give each [[runners]] a name of its own")
		}
		if other.token == r.token {
			return fault.Newf(fault.Usage, "runners %s and %s have the same token", other.name, r.name).Hint("a runner is configured once")
		}
	}
	if err := r.placement.Check(); err != nil {
		return fault.Newf(fault.Usage, "runner %s: %v", r.name, err)
	}
	r.log = d.log.With("runner", r.name)
	if r.store, err = openStore(d.stateDir, r.name, d.enrollment); err != nil {
		return err
	}
	r.store.writing = writing
	d.runners = append(d.runners, r)
	return nil
}

// strangers warns about state files that no configured runner owns.
func (d *Daemon) strangers() {
	held, err := HeldJobs(d.stateDir)
	if err != nil {
		d.log.Warn("the state files cannot be looked through", logx.Err, err)
	}
	for file, n := range held {
		name := strings.TrimSuffix(file, ".json")
		owned := false
		for _, r := range d.runners {
			owned = owned || r.name == name
		}
		if !owned {
			d.log.Warn("a state file holds jobs, and no configured runner has its name: they are not gone on with",
				"file", filepath.Join(d.stateDir, file), "jobs", n, "next_step", "configure a runner with this name, and the token that took them")
		}
	}
}

// Enrollment is who this relay is.
func (d *Daemon) Enrollment() *Enrollment { return d.enrollment }

// Close gives the lock back.
func (d *Daemon) Close() error { return d.lock.Close() }

// Run is the daemon's life. When ctx ends, no job is asked for any more;
// requests in flight are waited for, and jobs that are held have the shutdown
// timeout to end. Those that do not stay recorded, and go on at the next start.
// A hub that refuses the relay for good stops the asking too; the error then is
// the refusal, once the jobs are over.
func (d *Daemon) Run(ctx context.Context) error {
	asking, stopAsking := context.WithCancel(ctx)
	defer stopAsking()
	d.jobsCtx, d.stopJobs = context.WithCancelCause(context.WithoutCancel(ctx))
	defer d.stopJobs(errShutdown)
	for _, r := range d.runners {
		for _, rec := range r.store.records() {
			r.log.Info("going on with a job", logx.Job, fmt.Sprint(rec.ID))
			d.start(r.newHeld(rec, d.slots.take(r)))
		}
	}
	var workers, session sync.WaitGroup
	var refused error
	talking, stopTalking := context.WithCancel(context.WithoutCancel(ctx))
	defer stopTalking()
	session.Go(func() {
		if refused = d.sessions(talking); refused != nil {
			stopAsking()
		}
	})
	for _, r := range d.runners {
		workers.Go(func() { r.verify(asking) })
		for range r.conf.RequestConcurrency {
			workers.Go(func() { r.work(asking) })
		}
	}
	<-asking.Done()
	if ctx.Err() != nil {
		d.log.Info("stopping: no job is asked for any more", "shutdown_timeout", d.conf.Shutdown())
	}
	workers.Wait()
	d.drain(ctx)
	stopTalking()
	session.Wait()
	d.bg.Wait()
	return refused
}

// drain waits for the jobs: for as long as they take while ctx lasts, then for
// the shutdown timeout.
func (d *Daemon) drain(ctx context.Context) {
	over := make(chan struct{})
	go func() { d.jobs.Wait(); close(over) }()
	select {
	case <-over:
		return
	case <-ctx.Done():
	}
	t := time.NewTimer(d.conf.Shutdown())
	defer t.Stop()
	select {
	case <-over:
	case <-t.C:
		d.stopJobs(errShutdown)
		<-over
	}
}

// start sets a job going.
func (d *Daemon) start(h *held) {
	d.jobs.Go(func() { h.live(d.jobsCtx) })
	d.changed.signal()
}

// background does what nothing waits for but the end of Run.
func (d *Daemon) background(f func(context.Context)) {
	d.bg.Go(func() { f(context.WithoutCancel(d.jobsCtx)) })
}

// server is what the hub holds of the GitLab server; "" before it said.
func (d *Daemon) server() dispatch.Approval {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status.Status
}

func (d *Daemon) setServer(s dispatch.ServerStatus) {
	d.mu.Lock()
	was := d.status
	d.status = s
	d.mu.Unlock()
	if was == s {
		return
	}
	d.changed.signal()
	log := d.log.With("status", string(s.Status), "url", d.conf.GitLab.URL)
	if s.Status == dispatch.Approved {
		log.Info("the hub takes jobs of this GitLab server", "name", s.Name)
	} else {
		log.Warn("the hub takes no jobs of this GitLab server", "message", wire.Clean(s.Message, wire.MaxReason), "bound", s.Bound)
	}
}

func (d *Daemon) sawVersion(v string) {
	d.mu.Lock()
	changed := v != "" && d.version != v
	if changed {
		d.version = wire.Clean(v, 64)
	}
	d.mu.Unlock()
	if changed {
		d.changed.signal()
	}
}

func (d *Daemon) sawKey(digest string) {
	d.mu.Lock()
	changed := d.spki != digest
	d.spki = digest
	d.mu.Unlock()
	if changed {
		d.changed.signal()
	}
}

// keyWatch looks at the certificate that GitLab answers with.
type keyWatch struct {
	http.RoundTripper
	saw func(digest string)
}

func (k *keyWatch) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := k.RoundTripper.RoundTrip(req)
	if err == nil && resp.TLS != nil && len(resp.TLS.PeerCertificates) > 0 {
		sum := sha256.Sum256(resp.TLS.PeerCertificates[0].RawSubjectPublicKeyInfo)
		k.saw(hex.EncodeToString(sum[:]))
	}
	return resp, err
}

// signal wakes whoever waits for a change.
type signal struct {
	mu sync.Mutex
	c  chan struct{}
}

func newSignal() *signal { return &signal{c: make(chan struct{})} }

// next is closed at the next change. It is to be taken before the state is
// read: a change in between is not missed.
func (s *signal) next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.c
}

func (s *signal) signal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.c)
	s.c = make(chan struct{})
}

// slots bound the jobs that are held or asked for, of all runners and of each.
type slots struct {
	max  int // 0 = no bound
	mu   sync.Mutex
	all  int
	of   map[*runner]int
	wake *signal
}

func newSlots(max int) *slots { return &slots{max: max, of: map[*runner]int{}, wake: newSignal()} }

// acquire waits for a slot. What it returns gives it back, once.
func (s *slots) acquire(ctx context.Context, r *runner) (free func(), err error) {
	for {
		next := s.wake.next()
		s.mu.Lock()
		if (s.max == 0 || s.all < s.max) && (r.conf.Limit == 0 || s.of[r] < r.conf.Limit) {
			free := s.takeLocked(r)
			s.mu.Unlock()
			return free, nil
		}
		s.mu.Unlock()
		select {
		case <-next:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// take takes a slot for a job that is held already, whether there is one or not.
func (s *slots) take(r *runner) (free func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeLocked(r)
}

func (s *slots) takeLocked(r *runner) (free func()) {
	s.all++
	s.of[r]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		s.all--
		s.of[r]--
		s.mu.Unlock()
		s.wake.signal()
	})
}

// errFinal is in the chain of a refusal that lasts.
var errFinal = errors.New("the hub refuses this relay for good")
