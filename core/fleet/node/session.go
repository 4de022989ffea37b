package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// session is one connection, from its dial to its end. Its loop is one
// goroutine; what may block (reading the connection, reading the host) runs
// beside it and hands over by channels.
type session struct {
	n       *Node
	conn    Conn
	opening *Opening
	version int
	every   time.Duration
	hubNow  func() int64 // Unix seconds by the hub's clock

	acked    map[string]wire.Outcome // said in this session, by command
	vms      []wire.Workload
	omitted  int
	jobs     JobSession // nil: below version 3, or of a node that takes none
	report   []byte     // as sent last
	facts    []byte     // inventory as sent last
	reported bool
}

// readings are what one look at the host gave; nil = not looked at, or failed.
type readings struct {
	facts   *wire.Inventory
	beat    *wire.Heartbeat
	vms     []wire.Workload
	omitted int
	seen    bool // vms were read
}

// session dials, opens a session and keeps it until it ends. opened says
// whether the hub welcomed the node.
func (n *Node) session(ctx context.Context) (opened bool, err error) {
	dialing, cancel := context.WithTimeout(ctx, 3*wire.HandshakeStep)
	conn, err := n.Dialer.Dial(dialing)
	cancel()
	if err != nil {
		return false, err
	}
	defer conn.CloseNow()
	e := n.enrollment
	s := &session{n: n, conn: conn, acked: map[string]wire.Outcome{}, opening: &Opening{
		As: AsNode, ID: e.Node, Incarnation: n.incarnation, VK: n.VK, Key: e.Key, Versions: n.Versions, URL: e.URL, Hub: e.Hub,
	}}
	if err := s.open(ctx); err != nil {
		return false, err
	}
	n.setConnected(true)
	n.Log.Info("session opened", "version", s.version, "heartbeat", s.every)
	if n.Jobs != nil && s.version >= wire.VersionJobs {
		s.jobs = n.Jobs.Open()
		defer s.jobs.Close()
	}
	return true, s.keep(ctx)
}

func (s *session) read(ctx context.Context) (wire.Message, error) {
	data, err := s.conn.Read(ctx)
	if err != nil {
		return nil, err
	}
	return wire.Decode(wire.FromHub, s.version, data)
}

func (s *session) send(ctx context.Context, m wire.Message) error {
	data, err := wire.Encode(s.version, m)
	if err != nil {
		return err
	}
	return Write(ctx, s.conn, s.every, data)
}

// errWrite is in the chain of what a broken connection does to a send.
var errWrite = errors.New("sending to the hub")

func (s *session) open(ctx context.Context) (err error) {
	var welcome *wire.Welcome
	if s.version, welcome, err = s.opening.On(ctx, s.conn); err != nil {
		return err
	}
	s.every = wire.Clamp(welcome.HeartbeatSecs)
	s.hubNow = func() int64 { return s.n.Now().Unix() }
	s.setHubClock(welcome.Time)
	return nil
}

// setHubClock takes what the hub says the time is now; 0 = it does not say. It
// goes on from there by this host's monotonic clock.
func (s *session) setHubClock(at int64) {
	if begin := time.Now(); at > 0 {
		s.hubNow = func() int64 { return at + int64(time.Since(begin)/time.Second) }
	}
}

// lastWord is how long a connection that cannot be written any more is read
// for why the hub ended it.
const lastWord = time.Second

// keep runs the session until it ends; the error says why, and is never nil.
func (s *session) keep(ctx context.Context) error {
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	inbox, broken := make(chan wire.Message), make(chan error, 1)
	go func() {
		for {
			m, err := s.read(inner)
			if err != nil {
				broken <- err
				return
			}
			select {
			case inbox <- m:
			case <-inner.Done():
				return
			}
		}
	}()
	err := s.loop(ctx, inner, inbox, broken)
	if ctx.Err() != nil || !errors.Is(err, errWrite) {
		return err
	}
	// A hub that said why and closed: what was being written met the close
	// before the word was read.
	wait := time.After(lastWord)
	for {
		select {
		case m := <-inbox:
			if why := s.opening.Ended(m); why != nil {
				return why
			}
		case <-broken:
			return err
		case <-wait:
			return err
		}
	}
}

// loop is the session's one goroutine.
func (s *session) loop(ctx, inner context.Context, inbox <-chan wire.Message, broken <-chan error) error {
	n := s.n
	looks := make(chan readings, 1)
	if err := s.start(inner, looks); err != nil {
		return err
	}
	beat, facts := time.NewTicker(s.every), time.NewTicker(inventoryTime)
	defer beat.Stop()
	defer facts.Stop()
	looking, wantFacts := true, false // start has begun a look
	silence := time.NewTimer(wire.MissedBeats * s.every)
	defer silence.Stop()
	var jobs <-chan struct{}
	if s.jobs != nil {
		jobs = s.jobs.Ready()
	}
	for {
		// Taken before the report is made: a change in between is not missed.
		stored := n.store.Changed()
		_, seen := n.look()
		if s.reported {
			if err := s.tellChanges(inner); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			s.conn.Close("the node stops")
			return context.Cause(ctx)
		case err := <-broken:
			return err
		case m := <-inbox:
			silence.Reset(wire.MissedBeats * s.every)
			if err := s.handle(inner, m); err != nil {
				return err
			}
		case <-silence.C:
			return errSilent
		case <-jobs:
			if err := s.tellJobs(inner); err != nil {
				return err
			}
		case <-stored:
		case <-seen:
		case <-facts.C:
			wantFacts = true
		case <-beat.C:
			if !looking { // the last look is not over: its beat comes when it is
				looking = true
				go s.look(inner, looks, wantFacts)
				wantFacts = false
			}
		case r := <-looks:
			looking = false
			if err := s.tell(inner, r); err != nil {
				return err
			}
		}
	}
}

// start sends what a session begins with: from version 2 the report and the
// acks, from version 3 what is held. Inventory and the first heartbeat follow
// when the host has been read.
func (s *session) start(ctx context.Context, looks chan<- readings) error {
	if s.version >= wire.VersionSteer {
		reading, cancel := context.WithTimeout(ctx, wire.HandshakeStep)
		s.readVMs(reading)
		cancel()
		s.reported = true
		st := s.n.store.State()
		if err := s.tellReport(ctx, st); err != nil {
			return err
		}
		if err := s.tellAcks(ctx, st); err != nil {
			return err
		}
	}
	if s.version >= wire.VersionJobs {
		held := &wire.Held{Reservations: wire.IDs{}, Jobs: wire.IDs{}}
		if s.jobs != nil {
			held = s.jobs.Held()
		}
		if err := s.send(ctx, held); err != nil {
			return err
		}
	}
	go s.look(ctx, looks, true)
	return nil
}

func (s *session) readVMs(ctx context.Context) {
	list, omitted, err := s.n.Host.Workloads(ctx)
	if err != nil {
		s.n.Log.Warn("the VMs cannot be listed", logx.Err, err)
		return
	}
	s.vms, s.omitted = list, omitted
}

// look reads the host. It runs beside the session, since a disk that hangs must
// not keep commands from being read.
func (s *session) look(ctx context.Context, to chan<- readings, facts bool) {
	var r readings
	var err error
	n := s.n
	if facts {
		if r.facts, err = n.Host.Inventory(ctx); err != nil {
			n.Log.Warn("the inventory is not whole", logx.Err, err)
		}
	}
	if r.beat, err = n.Host.Heartbeat(ctx); err != nil {
		n.Log.Warn("the readings are not whole", logx.Err, err)
	}
	if r.vms, r.omitted, err = n.Host.Workloads(ctx); err != nil {
		n.Log.Warn("the VMs cannot be listed", logx.Err, err)
	}
	r.seen = err == nil
	select {
	case to <- r:
	case <-ctx.Done():
	}
}

// tell sends what a look gave: facts that changed, the heartbeat, and with it
// the report when the VMs changed.
func (s *session) tell(ctx context.Context, r readings) error {
	if r.facts != nil {
		b, err := json.Marshal(r.facts)
		if err != nil {
			return err
		}
		if !bytes.Equal(b, s.facts) {
			if err := s.send(ctx, r.facts); err != nil {
				return err
			}
			s.facts = b
		}
	}
	if r.beat != nil {
		r.beat.Clock = s.n.Now().Unix()
		if err := s.send(ctx, r.beat); err != nil {
			return err
		}
	}
	if r.seen {
		same := slices.EqualFunc(s.vms, r.vms, func(a, b wire.Workload) bool { return a.ID == b.ID })
		s.vms, s.omitted = r.vms, r.omitted
		if !same {
			select {
			case s.n.retune <- struct{}{}:
			default: // it is to look already
			}
		}
		s.reported = true
		if err := s.tellChanges(ctx); err != nil || s.version >= wire.VersionSteer {
			return err
		}
		return s.tellReport(ctx, s.n.store.State())
	}
	return nil
}

// tellChanges sends what is not said yet: outcomes, then the state that they
// led to, both of one moment.
func (s *session) tellChanges(ctx context.Context) error {
	if s.version < wire.VersionSteer {
		return nil
	}
	st := s.n.store.State()
	if err := s.tellAcks(ctx, st); err != nil {
		return err
	}
	return s.tellReport(ctx, st)
}

// tellReport sends the report unless it was said as it is.
func (s *session) tellReport(ctx context.Context, st State) error {
	r := &wire.Report{Workloads: s.vms, Omitted: s.omitted}
	if r.Workloads == nil {
		r.Workloads = []wire.Workload{}
	}
	if s.version >= wire.VersionSteer {
		r.State = s.n.state(st)
	}
	b, err := wire.Encode(s.version, r)
	if err != nil {
		return err
	}
	if bytes.Equal(b, s.report) {
		return nil
	}
	if err := s.send(ctx, r); err != nil {
		return err
	}
	s.report = b
	return nil
}

// tellAcks sends each outcome that the hub has not recorded and that this
// session has not said.
func (s *session) tellAcks(ctx context.Context, st State) error {
	for _, a := range st.Unrecorded() {
		if s.acked[a.Command] == a.Outcome {
			continue
		}
		if err := s.ack(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) ack(ctx context.Context, a *wire.Ack) error {
	if err := s.send(ctx, a); err != nil {
		return err
	}
	s.acked[a.Command] = a.Outcome
	return nil
}

// burst is how many messages of jobs are sent before the session looks at what
// else there is.
const burst = 8

// tellJobs sends what there is to say of jobs.
func (s *session) tellJobs(ctx context.Context) error {
	for range burst {
		m := s.jobs.Next()
		if m == nil {
			return nil
		}
		if t, ok := wire.TypeOf(m); ok && t.Since > s.version {
			continue // the hub does without: a running job's egress is in its result, too
		}
		if err := s.send(ctx, m); err != nil {
			return err
		}
	}
	s.jobs.More()
	return nil
}

// handleJobs does what a message of placed jobs asks.
func (s *session) handleJobs(ctx context.Context, m wire.Message) error {
	if s.jobs == nil {
		return s.refuseJobs(ctx, m)
	}
	// What a command changed holds for the message behind it.
	s.n.Jobs.Steer(s.n.store.State())
	if answer := s.jobs.Handle(ctx, m); answer != nil {
		return s.send(ctx, answer)
	}
	return nil
}

// refuseJobs answers for a node that takes no placed jobs.
func (s *session) refuseJobs(ctx context.Context, m wire.Message) error {
	switch m := m.(type) {
	case *wire.Offer:
		return s.send(ctx, &wire.OfferReply{Reservation: m.Reservation, Reply: wire.Answer{State: "refused", Reason: "policy", Message: noJobs}})
	case *wire.Renew:
		return s.send(ctx, &wire.Lease{Reservation: m.Reservation, State: wire.LeaseState{State: "gone", Why: "unknown"}})
	case *wire.GiveBack:
		return s.send(ctx, &wire.Lease{Reservation: m.Reservation, State: wire.LeaseState{State: "gone", Why: "unknown"}})
	case *wire.Start:
		return s.send(ctx, &wire.JobState{Job: m.Job, State: wire.StateOfJob{State: "refused", Reason: "policy", Message: noJobs}})
	case *wire.Cancel:
		return s.send(ctx, &wire.JobState{Job: m.Job, State: wire.StateOfJob{State: "finished", Message: "this node does not have the job"}})
	}
	return nil
}

// handle does what a message of the hub asks. An error ends the session.
func (s *session) handle(ctx context.Context, m wire.Message) error {
	n := s.n
	if err := s.opening.Ended(m); err != nil {
		return err
	}
	switch m := m.(type) {
	case *wire.Ping:
	case *wire.Desired:
		changed, err := n.store.Apply(m)
		if err != nil {
			return err
		}
		if changed {
			n.Log.Info("desired state applied", "generation", m.Generation, "ceiling", m.Policy.Ceiling, "stop", m.Policy.Stop)
		} else if c := n.store.Conflict(); c != "" {
			n.Log.Warn("desired state ignored: it conflicts with what this node has applied", logx.Err, c)
		}
	case *wire.Command:
		s.setHubClock(m.Sent) // it may have been set since the session began
		ack, err := n.store.Receive(m, s.hubNow())
		if err != nil {
			return err // unanswered: it comes again in the next session
		}
		n.Log.Info("command", "command", m.ID, "op", string(m.Op), "outcome", string(ack.Outcome), "message", ack.Message)
		return s.ack(ctx, ack)
	case *wire.Recorded:
		return n.store.Recorded(m, s.hubNow())
	case *wire.Offer, *wire.Renew, *wire.GiveBack, *wire.Start, *wire.Cancel, *wire.OutputAck, *wire.JobRecorded:
		return s.handleJobs(ctx, m)
	default:
		return errors.Join(wire.ErrProtocol, fmt.Errorf("a %T after the handshake", m))
	}
	return nil
}

const noJobs = "this node takes no placed jobs"
