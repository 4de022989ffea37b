package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/node/nodetest"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// rig is a node under test with everything around it. All of it runs on a fake
// clock (testing/synctest).
type rig struct {
	t      *testing.T
	dir    string
	hub    *nodetest.Hub
	host   *nodetest.Host
	runner *nodetest.Runner
	node   *node.Node
	stop   context.CancelFunc
	mu     sync.Mutex
	err    error
	done   chan struct{}
	now    func() time.Time
}

func newRig(t *testing.T, mode wire.RunnerMode) *rig {
	r := &rig{t: t, dir: t.TempDir(), hub: nodetest.NewHub(), host: nodetest.NewHost(), runner: nodetest.NewRunner(mode)}
	nodetest.Enroll(t, r.dir)
	return r
}

// begin starts an incarnation.
func (r *rig) begin() {
	r.t.Helper()
	n, err := node.Open(context.Background(), node.Config{StateDir: r.dir, Dialer: r.hub, Host: r.host, Runner: r.runner, Log: logx.ForTest(r.t), Now: r.now, VK: "test"})
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r.node, r.stop, r.done = n, stop, make(chan struct{})
	go func() {
		defer close(r.done)
		err := n.Run(ctx)
		n.Close()
		r.mu.Lock()
		r.err = err
		r.mu.Unlock()
	}()
}

// end stops it and waits.
func (r *rig) end() error {
	r.stop()
	<-r.done
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *rig) open() *nodetest.Link {
	r.t.Helper()
	l := r.hub.Accept(r.t)
	l.Open()
	return l
}

func in(t *testing.T, mode wire.RunnerMode, fn func(*rig)) {
	synctest.Test(t, func(t *testing.T) { fn(newRig(t, mode)) })
}

// TestOrder: what a session begins with, in each version.
func TestOrder(t *testing.T) {
	for v := 1; v <= wire.Spoken.Max; v++ {
		in(t, wire.RunnerNone, func(r *rig) {
			r.hub.Range = wire.Range{Min: 1, Max: v}
			s, err := node.OpenStore(r.dir+"/node", &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID})
			if err != nil {
				t.Fatal(err)
			}
			c := cmd(wire.OpDrain)
			receive(t, s, c, 2000)
			r.begin()
			l := r.open()
			if l.Hello.Versions != wire.Spoken || l.Version != v || !wire.IsHex(l.Hello.Incarnation, wire.IDLen) {
				t.Errorf("hello %+v at version %d", l.Hello, l.Version)
			}
			if v >= 2 {
				rep := l.Next().(*wire.Report)
				mode := wire.RunnerExternal
				if v >= 5 {
					mode = wire.RunnerNone
				}
				if rep.State == nil || rep.State.Runner != mode || rep.State.LastCommand != c.ID {
					t.Errorf("version %d: state %+v", v, rep.State)
				}
				if a := l.Next().(*wire.Ack); a.Command != c.ID {
					t.Errorf("version %d: ack %+v", v, a)
				}
			}
			var kinds []string
			for range 12 {
				m := l.Next()
				ty, _ := wire.TypeOf(m)
				kinds = append(kinds, ty.Name())
				if _, ok := m.(*wire.Heartbeat); ok {
					break
				}
			}
			// The drain ends meanwhile, which is told where steering is.
			kinds = slices.DeleteFunc(kinds, func(k string) bool { return v >= 2 && (k == "report" || k == "ack") })
			want := []string{"inventory", "heartbeat"}
			if v >= 3 {
				want = append([]string{"job-held"}, want...)
			}
			if !slices.Equal(kinds, want) {
				t.Errorf("version %d: %v, want %v", v, kinds, want)
			}
			if v == 1 {
				if rep := l.Next().(*wire.Report); rep.State != nil {
					t.Errorf("version 1: state %+v", rep.State)
				}
			}
			if err := r.end(); err != nil {
				t.Error(err)
			}
			if l.Reason == "" {
				t.Error("the session was not closed with a word")
			}
		})
	}
}

// TestHandshakeRefused: what a hub may not do before the session is open.
func TestHandshakeRefused(t *testing.T) {
	nonce := wire.NewHex(wire.NonceLen)
	for name, play := range map[string]func(*nodetest.Link){
		"picks too low": func(l *nodetest.Link) {
			l.Next()
			l.Say(&wire.Challenge{Nonce: nonce, Versions: wire.Spoken, Version: 2})
		},
		"picks what the node lacks": func(l *nodetest.Link) {
			l.Next()
			l.Say(&wire.Challenge{Nonce: nonce, Versions: wire.Range{Min: 1, Max: 9}, Version: 9})
		},
		"picks below its own": func(l *nodetest.Link) {
			l.Next()
			l.Raw(`{"type":"challenge","nonce":"` + nonce + `","versions":{"min":3,"max":6},"version":1}`)
		},
		"welcomes at once":  func(l *nodetest.Link) { l.Next(); l.Raw(`{"type":"welcome","heartbeat_secs":5}`) },
		"commands at once":  func(l *nodetest.Link) { l.Next(); l.Version = 6; l.Say(cmd(wire.OpDrain)) },
		"short nonce":       func(l *nodetest.Link) { l.Next(); l.Raw(`{"type":"challenge","nonce":"aa"}`) },
		"garbage":           func(l *nodetest.Link) { l.Next(); l.Raw("\x00\xff") },
		"says nothing":      func(l *nodetest.Link) { l.Next() },
		"another challenge": func(l *nodetest.Link) { challengeTwice(l, nonce) },
	} {
		in(t, wire.RunnerNone, func(r *rig) {
			r.begin()
			l := r.hub.Accept(t)
			begin := time.Now()
			play(l)
			<-l.Closed()
			if took := time.Since(begin); took > wire.HandshakeStep {
				t.Errorf("%s: the node waited %v", name, took)
			}
			if name != "another challenge" {
				for m := l.Next(); m != nil; m = l.Next() {
					if _, ok := m.(*wire.Auth); ok {
						t.Errorf("%s: the node signed", name)
					}
				}
			}
			r.open() // it dials again
			if err := r.end(); err != nil {
				t.Error(name, err)
			}
			if st := r.node.Store().State(); st.Node != wire.Ready || len(st.Journal) != 0 {
				t.Errorf("%s: %+v", name, st)
			}
		})
	}
}

func challengeTwice(l *nodetest.Link, nonce string) {
	l.Next()
	c := &wire.Challenge{Nonce: nonce, Versions: wire.Spoken, Version: 6}
	l.Say(c)
	l.Next()
	l.Say(c)
}

// TestFinalRefusal: not_enrolled, bad_signature and revoked end the run, once
// the runner has finished its jobs; every other refusal is tried again.
func TestFinalRefusal(t *testing.T) {
	for code, final := range map[wire.Refusal]bool{wire.NotEnrolled: true, wire.BadSignature: true, wire.Revoked: true,
		wire.NoVersion: false, wire.Overloaded: false, "word_of_2030": false} {
		in(t, wire.RunnerManaged, func(r *rig) {
			r.runner.Quick = false
			r.begin()
			l := r.hub.Accept(t)
			l.Next()
			synctest.Wait() // the runner takes jobs
			l.Say(&wire.Refused{Code: code, Message: "because"})
			if !final {
				r.open()
				r.stop()
				synctest.Wait()
				r.runner.Exit()
				if err := r.end(); err != nil {
					t.Errorf("%s: %v", code, err)
				}
				return
			}
			synctest.Wait()
			select {
			case <-r.done:
				t.Errorf("%s: the run ended with a runner that still has jobs", code)
			default:
			}
			r.runner.Exit()
			<-r.done
			err := r.end()
			if node.RefusalOf(err) != code || fault.ExitCode(err) == 0 || fault.HintOf(err) == "" || !strings.Contains(err.Error(), "because") {
				t.Errorf("%s: %v", code, err)
			}
			if n := len(r.hub.Dials()); n != 1 {
				t.Errorf("%s: %d dials", code, n)
			}
		})
	}
}

// TestRevokedLater: a removal ends a running session for good too.
func TestRevokedLater(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.begin()
		l := r.open()
		l.Next()
		l.Say(&wire.Closing{Code: wire.Revoked})
		<-r.done
		if err := r.end(); node.RefusalOf(err) != wire.Revoked {
			t.Error(err)
		}
	})
}

// TestBackoff doubles from 1 to 60 seconds plus a quarter, and begins anew
// after a session of a minute.
func TestBackoff(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.hub.Refuse(errors.New("connection refused"))
		r.begin()
		time.Sleep(10 * time.Minute)
		r.hub.Refuse(nil)
		l := r.open()
		dials := r.hub.Dials()
		want := time.Second
		for i := 1; i < len(dials); i++ {
			if gap := dials[i].Sub(dials[i-1]); gap < want || gap > want+want/4+time.Millisecond {
				t.Errorf("wait %d took %v, want %v to %v", i, gap, want, want+want/4)
			}
			want = min(2*want, time.Minute)
		}
		if len(dials) < 12 {
			t.Errorf("%d dials in ten minutes", len(dials))
		}
		// A short session does not reset it.
		l.Cut()
		at := time.Now()
		l = r.open()
		if gap := time.Since(at); gap < time.Minute {
			t.Errorf("after a short session: redialed in %v", gap)
		}
		l.KeepAlive(5 * time.Second)
		go drainLink(l)
		time.Sleep(61 * time.Second)
		l.Cut()
		at = time.Now()
		r.open()
		if gap := time.Since(at); gap > 1250*time.Millisecond {
			t.Errorf("after a session of a minute: redialed in %v", gap)
		}
		r.end()
	})
}

// drainLink reads what the node says, and forgets it.
func drainLink(l *nodetest.Link) {
	for l.Next() != nil {
	}
}

// TestSuperseded: three times in a row, and the node redials every minute.
func TestSuperseded(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.begin()
		var gaps []time.Duration
		last := time.Now()
		for range 6 {
			l := r.open()
			gaps = append(gaps, time.Since(last))
			l.Next()
			l.Say(&wire.Closing{Code: wire.Superseded})
			<-l.Closed()
			last = time.Now()
		}
		if gaps[1] > 2*time.Second || gaps[2] > 3*time.Second || gaps[3] != time.Minute || gaps[4] != time.Minute {
			t.Errorf("redials after %v", gaps)
		}
		// Closed before the word was read: it is read all the same.
		l := r.open()
		l.Next()
		l.SayAndCut(&wire.Closing{Code: wire.Superseded})
		last = time.Now()
		l = r.open()
		if gap := time.Since(last); gap < time.Minute {
			t.Errorf("a word that came with the close was lost: redialed in %v", gap)
		}
		l.Cut()
		// A session that ends otherwise ends the row.
		l = r.open()
		l.KeepAlive(5 * time.Second)
		go drainLink(l)
		time.Sleep(2 * time.Minute)
		l.Cut()
		last = time.Now()
		r.open()
		if gap := time.Since(last); gap > 2*time.Second {
			t.Errorf("after a good session: redialed in %v", gap)
		}
		r.end()
	})
}

// TestSilence: the node gives up on a hub after three of the intervals it
// asked for, which are held to 1 to 300 seconds.
func TestSilence(t *testing.T) {
	for asked, every := range map[int]time.Duration{5: 5 * time.Second, 0: 5 * time.Second, -7: time.Second, 1: time.Second, 100000: 300 * time.Second} {
		in(t, wire.RunnerNone, func(r *rig) {
			r.hub.Beat = asked
			r.begin()
			l := r.open()
			opened := time.Now()
			beats := 0
			for m := l.Next(); m != nil; m = l.Next() {
				if _, ok := m.(*wire.Heartbeat); ok {
					beats++
				}
			}
			if took := time.Since(opened); took != 3*every {
				t.Errorf("asked for %d: gave up after %v, want %v", asked, took, 3*every)
			}
			if beats < 3 || beats > 4 {
				t.Errorf("asked for %d: %d heartbeats in 3 intervals", asked, beats)
			}
			r.hub.Beat = 5
			l = r.open()
			l.KeepAlive(4 * time.Second)
			go drainLink(l)
			time.Sleep(time.Hour)
			select {
			case <-l.Closed():
				t.Error("a hub that pings was given up")
			default:
			}
			r.end()
		})
	}
}

// TestAcksRepeated: dropped acks and duplicates. An outcome is said in every
// session until it is recorded, and a command has its effect once.
func TestAcksRepeated(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.host.SetDrain(wire.Drain{RunnerExited: true, AdmissionIdle: false, Jobs: 1}, nil)
		r.begin()
		l := r.open()
		c := cmd(wire.OpDrain)
		c.Expires = time.Now().Unix() + 3600
		l.Say(c)
		l.Say(c)
		for range 2 {
			nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == c.ID && a.Outcome == wire.Accepted })
		}
		// Lost: nothing was recorded, the network goes.
		for range 3 {
			l.Cut()
			l = r.open()
			nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == c.ID && a.Outcome == wire.Accepted })
		}
		l.Say(&wire.Recorded{Command: c.ID, Outcome: wire.Accepted})
		r.host.SetDrain(wire.Drain{RunnerExited: true, AdmissionIdle: true}, nil)
		nodetest.Find(l, func(a *wire.Ack) bool { return a.Outcome == wire.Done })
		rep := nodetest.Find[*wire.Report](l, nil)
		if rep.State.Node != wire.Drained {
			t.Errorf("the node is %s", rep.State.Node)
		}
		// A new incarnation repeats the final outcome, the recorded one not.
		l.Cut()
		r.end()
		r.begin()
		l = r.open()
		if a := nodetest.Find[*wire.Ack](l, nil); a.Outcome != wire.Done {
			t.Errorf("repeated %+v", a)
		}
		l.Say(&wire.Recorded{Command: c.ID, Outcome: wire.Done})
		l.Say(c) // delivered again, by a hub that forgot
		if a := nodetest.Find[*wire.Ack](l, nil); a.Outcome != wire.Done {
			t.Errorf("answered %+v", a)
		}
		l.Cut()
		l = r.open()
		for range 5 {
			if a, ok := l.Next().(*wire.Ack); ok {
				t.Errorf("a recorded outcome is repeated: %+v", a)
			}
		}
		if st := r.node.Store().State(); st.Node != wire.Drained || len(st.Journal) != 1 {
			t.Errorf("%s, %d entries", st.Node, len(st.Journal))
		}
		r.end()
	})
}

// TestSteered: desired state and drains reach the runner, and the report tells.
func TestSteered(t *testing.T) {
	in(t, wire.RunnerManaged, func(r *rig) {
		r.runner.Quick = false
		r.begin()
		l := r.open()
		nodetest.Find(l, func(m *wire.Report) bool { return m.State.Acquisition == wire.Taking })
		l.Say(&wire.Desired{Generation: 1, ID: wire.NewID(), Policy: wire.Policy{Ceiling: 3}})
		nodetest.Find(l, func(m *wire.Report) bool {
			return m.State.Applied != nil && m.State.Applied.Generation == 1 && m.State.Concurrency != nil && m.State.Concurrency.HubCeiling == 3
		})
		l.Say(&wire.Desired{Generation: 2, ID: wire.NewID(), Policy: wire.Policy{Ceiling: 3, Stop: true}})
		nodetest.Find(l, func(m *wire.Report) bool { return m.State.Acquisition == wire.Quitting })
		r.runner.Exit()
		nodetest.Find(l, func(m *wire.Report) bool { return m.State.Acquisition == wire.Stopped })
		// The hub goes; a stopped acquisition stays, through a restart too.
		l.Cut()
		r.hub.Refuse(errors.New("no route to host"))
		time.Sleep(time.Hour)
		r.end()
		starts := r.runner.Starts()
		r.begin()
		time.Sleep(time.Hour)
		if r.runner.Starts() != starts {
			t.Error("the runner was started again without its hub's leave")
		}
		r.hub.Refuse(nil)
		l = r.open()
		l.Say(&wire.Desired{Generation: 3, ID: wire.NewID()})
		nodetest.Find(l, func(m *wire.Report) bool { return m.State.Acquisition == wire.Taking })

		// A drain: not over while the runner has not exited, whatever else is idle.
		d := cmd(wire.OpDrain)
		d.Expires = time.Now().Unix() + 86400
		l.Say(d)
		nodetest.Find(l, func(m *wire.Report) bool {
			return m.State.Node == wire.Draining && m.State.Drain != nil && !m.State.Drain.RunnerExited
		})
		l.KeepAlive(5 * time.Second)
		time.Sleep(30 * time.Second)
		if st := r.node.Store().State(); st.Node != wire.Draining {
			t.Errorf("%s while the runner quits", st.Node)
		}
		r.runner.Exit()
		nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == d.ID && a.Outcome == wire.Done })
		r.end()
	})
}

// TestDrainConditions: drained is said only when all three hold at one look.
func TestDrainConditions(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.host.SetDrain(wire.Drain{}, nil)
		r.begin()
		l := r.open()
		l.KeepAlive(5 * time.Second)
		d := cmd(wire.OpDrain)
		d.Expires = time.Now().Unix() + 86400
		l.Say(d)
		for _, c := range []struct {
			d   wire.Drain
			err error
		}{
			{wire.Drain{RunnerExited: false, AdmissionIdle: true}, nil},
			{wire.Drain{RunnerExited: true, AdmissionIdle: false}, nil},
			{wire.Drain{RunnerExited: true, AdmissionIdle: true, Jobs: 1}, nil},
			{wire.Drain{RunnerExited: true, AdmissionIdle: true}, errors.New("the ledger cannot be read")},
		} {
			r.host.SetDrain(c.d, c.err)
			time.Sleep(10 * time.Second)
			if st := r.node.Store().State(); st.Node != wire.Draining {
				t.Fatalf("%+v, %v: %s", c.d, c.err, st.Node)
			}
		}
		r.host.SetDrain(wire.Drain{RunnerExited: true, AdmissionIdle: true}, nil)
		nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == d.ID && a.Outcome == wire.Done })
		r.end()
	})
}

// TestExternal: with a runner of the host's own a drain is carried out, and the
// report says what it cannot do.
func TestExternal(t *testing.T) {
	in(t, wire.RunnerExternal, func(r *rig) {
		r.begin()
		l := r.open()
		q := cmd(wire.OpQuarantine)
		q.Expires = time.Now().Unix() + 86400
		l.Say(q)
		nodetest.Find(l, func(m *wire.Report) bool {
			return m.State.Node == wire.Quarantined && len(m.State.Unsupported) == 1
		})
		r.end()
	})
}

// TestTells: inventory when it changes, the report when the VMs do, heartbeats
// on time while nothing does; a reading that hangs holds back no command.
func TestTells(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.begin()
		l := r.open()
		l.KeepAlive(4 * time.Second)
		count := func(d time.Duration) (beats, facts, reports int) {
			end := time.Now().Add(d)
			for time.Now().Before(end) {
				switch l.Next().(type) {
				case *wire.Heartbeat:
					beats++
				case *wire.Inventory:
					facts++
				case *wire.Report:
					reports++
				}
			}
			return beats, facts, reports
		}
		count(10 * time.Second)
		if b, f, p := count(100 * time.Second); b < 19 || b > 21 || f != 0 || p != 0 {
			t.Errorf("nothing changed: %d heartbeats, %d inventories, %d reports", b, f, p)
		}
		r.host.SetInventory(func(i *wire.Inventory) { i.RAM = 2 << 30 })
		if b, f, _ := count(100 * time.Second); b < 19 || f != 1 {
			t.Errorf("the facts changed: %d heartbeats, %d inventories", b, f)
		}
		r.host.SetVMs(wire.Workload{ID: "00000000000000ff", Kind: wire.KindJob})
		if rep := nodetest.Find[*wire.Report](l, nil); len(rep.Workloads) != 1 {
			t.Errorf("%+v", rep)
		}
		free := r.host.Hang()
		time.Sleep(time.Minute)
		q := cmd(wire.OpQuarantine)
		q.Expires = time.Now().Unix() + 60
		at := time.Now()
		l.Say(q)
		nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == q.ID })
		if time.Since(at) > time.Second {
			t.Errorf("a command waited %v for a reading", time.Since(at))
		}
		free()
		nodetest.Find[*wire.Heartbeat](l, nil)
		r.end()
	})
}

// TestOneNode: a second node on a state dir is refused with status 75, and a
// pass of vk tune is waited for.
func TestOneNode(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.begin()
		_, err := node.Open(context.Background(), node.Config{StateDir: r.dir, Host: r.host, Runner: r.runner})
		if fault.ExitCode(err) != 75 || fault.HintOf(err) == "" {
			t.Errorf("a second node: %v, status %d", err, fault.ExitCode(err))
		}
		r.open()
		r.end()
		pass, err := shared(r.dir)
		if err != nil {
			t.Fatal(err)
		}
		go func() { time.Sleep(5 * time.Second); pass.Close() }()
		r.begin()
		r.open()
		r.end()
	})
}
