package fleet_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
)

// command has the hub issue one.
func (f *fleet) command(id string, op wire.Op) string {
	f.t.Helper()
	c, err := f.admin.Issue(f.t.Context(), id, op)
	if err != nil {
		f.t.Fatal(err)
	}
	return c.ID
}

func (f *fleet) outcome(id, command string) wire.Outcome {
	for _, c := range f.node(id).Commands {
		if c.ID == command {
			return c.Outcome
		}
	}
	return ""
}

// journaled is a node's entry of a command, and how many there are.
func journaled(t *testing.T, dir, command string) (e node.Entry, n int) {
	t.Helper()
	st, err := persisted(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range st.Journal {
		if x.ID == command {
			e, n = x, n+1
		}
	}
	return e, n
}

// TestDroppedAcks loses acks, and what the hub says of them, over several
// sessions, doubles what passes, and sends commands that are over once more:
// each command is one entry of the journal, done once and recorded once.
func TestDroppedAcks(t *testing.T) {
	f := newFleet(t)
	r := f.record("dropped acknowledgements and duplicates")
	m := newMeddler(t, f.addr)
	p, id := f.join("ci-1", m.addr())
	dir := filepath.Join(f.dir, "ci-1")
	f.eventually("it is ready", func() bool { return f.state(id) == wire.Ready })
	cut := true
	again := func(what, kind, command string) { // in a new session
		t.Helper()
		was := m.count(kind, command)
		if cut {
			m.cut()
		} else { // a node that has redialled often waits long
			r.fault("kill -9 of the node")
			p.restart()
		}
		cut = !cut
		f.eventually(what, func() bool { return m.count(kind, command) > was })
	}
	drop := func(kind string) func(p passing) [][]byte {
		return func(p passing) [][]byte {
			if p.kind == kind {
				return nil
			}
			return [][]byte{p.data}
		}
	}

	r.fault("no ack reaches the hub, in three sessions")
	m.set(drop("ack"))
	drain := f.command(id, wire.OpDrain)
	f.eventually("the node is drained", func() bool { st, err := persisted(dir); return err == nil && st.Node == wire.Drained })
	for range 2 {
		again("the command comes again", "command", drain)
		again("its ack comes again", "ack", drain)
	}
	f.eventually("the hub sees the state", func() bool { return f.state(id) == wire.Drained })
	if n := f.node(id); n.Pending != 1 || f.outcome(id, drain) != "" {
		t.Errorf("without an ack the drain is %q, %d pending", f.outcome(id, drain), n.Pending)
	}
	if e, n := journaled(t, dir, drain); n != 1 || e.Outcome != wire.Done || e.Recorded == wire.Done {
		t.Errorf("the journal has it %d times: %+v", n, e)
	}

	r.fault("acks pass, and none of them is answered, in three sessions")
	m.set(drop("recorded"))
	for range 3 {
		again("the ack comes again", "ack", drain)
	}
	f.eventually("the outcome is recorded", func() bool { return f.outcome(id, drain) == wire.Done })
	if e, _ := journaled(t, dir, drain); e.Recorded == wire.Done {
		t.Errorf("nobody told the node that its ack is recorded: %+v", e)
	}

	r.fault("each command, ack and answer passes three times")
	m.set(func(p passing) [][]byte {
		if p.command != "" {
			return [][]byte{p.data, p.data, p.data}
		}
		return [][]byte{p.data}
	})
	var issued []string
	for _, step := range []struct {
		op   wire.Op
		then wire.NodeState
	}{{wire.OpUndrain, wire.Ready}, {wire.OpQuarantine, wire.Quarantined}, {wire.OpRelease, wire.Ready}} {
		c := f.command(id, step.op)
		issued = append(issued, c)
		f.eventually("it is "+string(step.then), func() bool { return f.state(id) == step.then && f.outcome(id, c) == wire.Done })
	}

	r.fault("commands that are over are sent again, in another order, and their acks too")
	m.set(nil)
	was := m.count("ack", issued[1])
	m.say(t, m.last("command", issued[2]), m.last("command", drain), m.last("command", issued[1]), m.last("command", issued[1]))
	f.eventually("they are answered", func() bool { return m.count("ack", issued[1]) >= was+2 })
	if st, err := persisted(dir); err != nil || st.Node != wire.Ready {
		t.Errorf("a drain and a quarantine that are over were done again: it is %s, %v", st.Node, err)
	}
	all := append(issued, drain)
	f.eventually("every outcome is recorded, and the node knows", func() bool {
		for _, c := range all {
			if e, n := journaled(t, dir, c); n != 1 || e.Outcome != wire.Done || e.Recorded != wire.Done {
				return false
			}
		}
		return f.node(id).Pending == 0
	})
	lines := wholeAudit(t, f)
	for _, c := range all {
		n, ends := 0, 0
		for _, l := range lines {
			if strings.HasSuffix(l.Detail, c) || strings.Contains(l.Detail, c+" ") || strings.Contains(l.Detail, c+":") {
				n++
				if l.Event == "command done" {
					ends++
				}
			}
		}
		if ends != 1 {
			t.Errorf("the audit log has %d ends of command %s in %d lines", ends, c, n)
		}
	}
}

// TestMovedClocks sets the wall clocks of the hub and a node forth and back,
// one by hours against the other, between the issue of commands, their expiry
// and their end.
func TestMovedClocks(t *testing.T) {
	f := newFleet(t)
	r := f.record("wall clocks moved both ways")
	dir, id := f.enroll("ci-1", f.addr)
	clock := func(where, by string) {
		t.Helper()
		r.fault("the clock of %s is off by %s", filepath.Base(where), by)
		tmp := filepath.Join(where, clockFile+".new")
		if err := os.WriteFile(tmp, []byte(by), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(where, clockFile)); err != nil {
			t.Fatal(err)
		}
	}
	clock(dir, "-7h")
	p := f.run("ci-1", dir)
	does := func(op wire.Op, then wire.NodeState) {
		t.Helper()
		c := f.command(id, op)
		f.eventually(string(op)+" is done", func() bool { return f.outcome(id, c).Final() && f.state(id) == then })
		if o := f.outcome(id, c); o != wire.Done {
			t.Errorf("the %s ended as %s: %+v", op, o, f.node(id).Commands[0])
		}
	}
	f.eventually("a node that is behind has a session", func() bool { return f.state(id) == wire.Ready })
	does(wire.OpDrain, wire.Drained)
	clock(dir, "9h") // during a session
	does(wire.OpUndrain, wire.Ready)
	r.fault("kill -9 of the node")
	p.restart()
	does(wire.OpQuarantine, wire.Quarantined)
	clock(dir, "-9h")
	does(wire.OpRelease, wire.Ready)

	// The hub's leaps two days: what the node never took is over, and a drain
	// under way is not.
	job := filepath.Join(dir, "job")
	if err := os.WriteFile(job, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	drain := f.command(id, wire.OpDrain)
	f.eventually("it drains", func() bool { return f.state(id) == wire.Draining && f.outcome(id, drain) == wire.Accepted })
	r.fault("the node is stopped")
	p.kill(syscall.SIGKILL)
	f.eventually("it is unreachable", func() bool { return f.node(id).Reach == hub.Unreachable })
	late := f.command(id, wire.OpQuarantine)
	clock(f.dir, "49h")
	p.start()
	f.eventually("it is there", func() bool { n := f.node(id); return n.Reach == hub.Connected && n.Reported != nil })
	does(wire.OpUndrain, wire.Ready) // behind whatever the session began with
	if o := f.outcome(id, drain); o != wire.Failed {
		t.Errorf("the drain that an undrain ended is %q", o)
	}
	if _, n := journaled(t, dir, late); n != 0 || f.state(id) != wire.Ready {
		t.Errorf("a command was delivered a day past its expiry")
	}
	if err := os.Remove(job); err != nil {
		t.Fatal(err)
	}
	does(wire.OpDrain, wire.Drained)
	does(wire.OpUndrain, wire.Ready) // two days later, the journal drops what is over
	if _, n := journaled(t, dir, drain); n != 0 {
		t.Errorf("the journal keeps what is settled and expired")
	}

	// It leaps further, and all the way back, with a restart of the hub.
	clock(f.dir, "80h")
	does(wire.OpDrain, wire.Drained)
	does(wire.OpUndrain, wire.Ready)
	clock(f.dir, "0s")
	does(wire.OpDrain, wire.Drained)
	r.fault("kill -9 of the hub")
	f.hub.restart()
	f.up()
	f.eventually("it is back", func() bool { return f.node(id).Reach == hub.Connected })
	does(wire.OpUndrain, wire.Ready)
	does(wire.OpQuarantine, wire.Quarantined)
	does(wire.OpRelease, wire.Ready)
	clock(f.dir, "-100h")
	does(wire.OpDrain, wire.Drained)
	f.must("nodes", "ceiling", id, "3")
	f.eventually("desired state is applied", func() bool { n := f.node(id); return n.Sync == "ok" && applied(n.Reported).Ceiling == 3 })
	does(wire.OpUndrain, wire.Ready)
	wholeAudit(t, f)
}

// TestTerminatingProxy puts a proxy that terminates TLS, with the hub's own
// certificate, between a node and its hub: the hub refuses the signature, which is
// bound to the other connection, and the node ends for good.
func TestTerminatingProxy(t *testing.T) {
	f := newFleetAt(t, "127.0.0.1", true)
	r := f.record("a proxy that terminates TLS")
	dir, id := f.enroll("ci-1", f.addr)
	cert, err := tls.LoadX509KeyPair(filepath.Join(f.dir, "cert.pem"), filepath.Join(f.dir, "key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				// It can reach the hub, and read all that passes.
				far, err := tls.Dial("tcp", f.addr, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13})
				if err != nil {
					return
				}
				defer far.Close()
				go func() { _, _ = io.Copy(far, c) }()
				_, _ = io.Copy(c, far)
			}()
		}
	}()
	file := filepath.Join(dir, "node", node.EnrollmentFile)
	was := read(file)
	through := bytes.Replace(was, []byte(f.addr), []byte(l.Addr().String()), 1)
	if err := os.WriteFile(file, through, 0o600); err != nil || bytes.Equal(was, through) {
		t.Fatalf("%v: %s", err, was)
	}
	r.fault("a proxy that terminates TLS is between node and hub")
	p := f.run("ci-1", dir)
	select {
	case <-p.end:
	case <-time.After(2 * time.Minute):
		t.Fatal("the node goes on")
	}
	if log := string(read(p.log)); p.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(log, string(wire.BadSignature)) || !strings.Contains(log, "proxy") {
		t.Errorf("the node ended with %v:\n%s", p.cmd.ProcessState, log)
	}
	if n := f.node(id); n.Reach != hub.Never || n.Reported != nil {
		t.Errorf("it had a session: %+v", n)
	}
	r.fault("the proxy is taken away")
	if err := os.WriteFile(file, was, 0o600); err != nil {
		t.Fatal(err)
	}
	p.start()
	f.eventually("it is ready", func() bool { return f.state(id) == wire.Ready })
	// Passed through as it is, TLS does not mind.
	px := newProxy(t, f.addr)
	r.fault("a proxy that passes TLS on is between node and hub")
	if err := os.WriteFile(file, bytes.Replace(was, []byte(f.addr), []byte(px.addr()), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	p.restart()
	f.eventually("it is back", func() bool {
		px.mu.Lock()
		defer px.mu.Unlock()
		return len(px.open) > 0
	})
	f.must("nodes", "drain", "--wait", id)
}
