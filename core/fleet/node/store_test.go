package node_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/node/nodetest"
	"virtkit/core/fleet/wire"
)

func openStore(t *testing.T, dir string) *node.Store {
	t.Helper()
	s, err := node.OpenStore(dir, &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func receive(t *testing.T, s *node.Store, c *wire.Command, now int64) *wire.Ack {
	t.Helper()
	a, err := s.Receive(c, now)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func record(t *testing.T, s *node.Store, id string, o wire.Outcome, now int64) {
	t.Helper()
	if err := s.Recorded(&wire.Recorded{Command: id, Outcome: o}, now); err != nil {
		t.Fatal(err)
	}
}

func TestGenerations(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	d := func(gen uint64, id string, p wire.Policy) *wire.Desired {
		return &wire.Desired{Generation: gen, ID: id, Policy: p}
	}
	a, b := wire.NewID(), wire.NewID()
	for i, c := range []struct {
		d        *wire.Desired
		changed  bool
		conflict string
	}{
		{d(5, a, wire.Policy{Stop: true}), true, ""},
		{d(5, a, wire.Policy{Stop: true}), false, ""},                  // delivered again
		{d(4, b, wire.Policy{}), false, "generation 4"},                // a restored hub
		{d(5, b, wire.Policy{Stop: true}), false, "another"},           // the same words by another hand
		{d(5, a, wire.Policy{}), false, "another"},                     // other words
		{d(5, "", wire.Policy{Stop: true}), false, "another"},          // a hub that tells no ids: nothing new is known
		{d(6, b, wire.Policy{Ceiling: 3}), true, ""},                   // resolved
		{d(1, a, wire.Policy{Ceiling: 100000}), false, "generation 1"}, // and again
	} {
		changed, err := s.Apply(c.d)
		if err != nil || changed != c.changed || !strings.Contains(s.Conflict(), c.conflict) || (c.conflict == "") != (s.Conflict() == "") {
			t.Errorf("%d: changed %v, conflict %q, %v", i, changed, s.Conflict(), err)
		}
	}
	want := wire.Applied{Generation: 6, ID: b, Policy: wire.Policy{Ceiling: 3}}
	for _, st := range []node.State{s.State(), openStore(t, dir).State()} { // in memory, on disk
		if st.Applied == nil || *st.Applied != want {
			t.Errorf("applied %+v", st.Applied)
		}
	}
}

// TestJournal: one command, one effect, one outcome, however often it comes.
func TestJournal(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	c := cmd(wire.OpDrain)
	for range 3 {
		if a := receive(t, s, c, 2000); a.Outcome != wire.Accepted || a.Command != c.ID {
			t.Fatalf("%+v", a)
		}
	}
	if n := len(s.State().Journal); n != 1 {
		t.Fatalf("%d entries", n)
	}
	if err := s.Drained(); err != nil {
		t.Fatal(err)
	}
	u := cmd(wire.OpUndrain)
	receive(t, s, u, 2001)
	// Again, after the node moved on: the drain is answered from its entry.
	if a := receive(t, s, c, 2002); a.Outcome != wire.Done || s.State().Node != wire.Ready {
		t.Errorf("a drain that was done is answered %s and leaves the node %s", a.Outcome, s.State().Node)
	}
	s = openStore(t, dir)
	if a := receive(t, s, c, 2003); a.Outcome != wire.Done || s.State().Node != wire.Ready {
		t.Errorf("after a restart: %s, %s", a.Outcome, s.State().Node)
	}
	if got := s.State().Unrecorded(); len(got) != 2 || got[0].Command != c.ID || got[1].Command != u.ID {
		t.Errorf("unrecorded: %v", got)
	}
	// What the hub stored of an earlier outcome does not settle a later one.
	record(t, s, c.ID, wire.Accepted, 2004)
	record(t, s, wire.NewID(), wire.Done, 2004)
	if got := s.State().Unrecorded(); len(got) != 2 {
		t.Errorf("unrecorded: %v", got)
	}
	record(t, s, c.ID, wire.Done, 2005)
	record(t, s, c.ID, wire.Accepted, 2006) // said late, of the outcome before
	if got := openStore(t, dir).State().Unrecorded(); len(got) != 1 || got[0].Command != u.ID {
		t.Errorf("unrecorded: %v", got)
	}
	if s.State().LastCommand != u.ID {
		t.Error("the last command is another one")
	}
}

// TestClocks: expiries by the hub's clock, moved both ways.
func TestClocks(t *testing.T) {
	s := openStore(t, t.TempDir())
	late := cmd(wire.OpQuarantine)
	if a := receive(t, s, late, late.Expires+1); a.Outcome != wire.Expired || s.State().Node != wire.Ready {
		t.Fatalf("past its expiry: %+v, %s", a, s.State().Node)
	}
	// The clock goes back: what was answered stays answered.
	if a := receive(t, s, late, late.Expires-100); a.Outcome != wire.Expired || s.State().Node != wire.Ready {
		t.Errorf("the clock revived an expired command: %+v", a)
	}
	in := cmd(wire.OpDrain)
	in.Issued, in.Expires = 2000, 2000+86400
	if a := receive(t, s, in, in.Expires); a.Outcome != wire.Accepted {
		t.Errorf("at its expiry: %+v", a)
	}
	if err := s.Drained(); err != nil {
		t.Fatal(err)
	}
	// Settled; the clock leaps forward, and the entries are dropped.
	record(t, s, in.ID, wire.Done, 2000)
	record(t, s, late.ID, wire.Expired, 2000)
	other := cmd(wire.OpUndrain)
	other.Issued, other.Expires = 500000, 500000+86400
	receive(t, s, other, 400000)
	if n := len(s.State().Journal); n != 1 {
		t.Fatalf("%d entries are left", n)
	}
	// It goes back again, and a hub that was restored delivers the old drain.
	if a := receive(t, s, in, 2100); a.Outcome != wire.Expired || s.State().Node != wire.Ready {
		t.Errorf("a completed drain was revived: %+v, the node is %s", a, s.State().Node)
	}
	// A new command is not held up by any of this.
	fresh := cmd(wire.OpDrain)
	fresh.Issued, fresh.Expires = 2001, 2001+3600
	if a := receive(t, s, fresh, 2100); a.Outcome != wire.Accepted {
		t.Errorf("a new command: %+v", a)
	}
	// A hub that tells no times of issue is judged by the expiry.
	silent := cmd(wire.OpUndrain)
	silent.Issued, silent.Expires = 0, in.Expires
	if a := receive(t, s, silent, 2100); a.Outcome != wire.Expired {
		t.Errorf("without a time of issue: %+v", a)
	}
}

// TestJournalBound: an entry is kept until it is recorded and expired; past
// the bound the oldest recorded go first, and without any a command is refused.
func TestJournalBound(t *testing.T) {
	dir := t.TempDir()
	var st node.State
	st.Version, st.Hub, st.NodeID, st.Node = 1, nodetest.HubID, nodetest.NodeID, wire.Ready
	for i := range node.MaxJournal {
		e := node.Entry{Command: wire.Command{ID: wire.NewID(), Op: wire.OpUndrain, Issued: int64(1000 + i), Expires: 90000}, Outcome: wire.Done}
		if i < 3 {
			e.Recorded = wire.Done
		}
		st.Journal = append(st.Journal, e)
	}
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, node.StateFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	first := st.Journal[0].Command
	for i := range 3 {
		c := cmd(wire.OpUndrain)
		c.Issued = int64(8000 + i)
		if a := receive(t, s, c, 8000); a.Outcome != wire.Done {
			t.Fatalf("%d: %+v", i, a)
		}
	}
	if got := s.State(); len(got.Journal) != node.MaxJournal || got.DroppedIssued != 1002 {
		t.Errorf("%d entries, dropped up to %d", len(got.Journal), got.DroppedIssued)
	}
	if a := receive(t, s, &first, 8000); a.Outcome != wire.Declined && a.Outcome != wire.Expired {
		t.Errorf("a dropped entry's command was carried out: %+v", a)
	}
	c := cmd(wire.OpQuarantine)
	c.Issued = 9000
	if a := receive(t, s, c, 9000); a.Outcome != wire.Declined || s.State().Node != wire.Ready || len(s.State().Journal) != node.MaxJournal {
		t.Errorf("a full journal: %+v, %s", a, s.State().Node)
	}
}

// TestReenrolled: generations and commands count for one hub and enrollment;
// the node's own state is its own.
func TestReenrolled(t *testing.T) {
	for name, e := range map[string]*node.Enrollment{
		"another hub": {Hub: wire.NewID(), Node: nodetest.NodeID},
		"anew":        {Hub: nodetest.HubID, Node: wire.NewID()},
	} {
		dir := t.TempDir()
		s := openStore(t, dir)
		if _, err := s.Apply(&wire.Desired{Generation: 9, Policy: wire.Policy{Stop: true}}); err != nil {
			t.Fatal(err)
		}
		receive(t, s, cmd(wire.OpDrain), 2000)
		if err := s.Drained(); err != nil {
			t.Fatal(err)
		}
		receive(t, s, cmd(wire.OpQuarantine), 2000)
		s2, err := node.OpenStore(dir, e)
		if err != nil {
			t.Fatal(err)
		}
		st := s2.State()
		if st.Applied != nil || len(st.Journal) != 0 || st.LastCommand != "" || st.Node != wire.Quarantined || !st.WasDrained || st.MayTake() {
			t.Errorf("%s: %+v", name, st)
		}
		// It is on disk already: a crash here does not bring the old hub's back.
		if st := reopen(t, dir, e); st.Applied != nil || st.Node != wire.Quarantined {
			t.Errorf("%s, reopened: %+v", name, st)
		}
	}
}

func reopen(t *testing.T, dir string, e *node.Enrollment) node.State {
	s, err := node.OpenStore(dir, e)
	if err != nil {
		t.Fatal(err)
	}
	return s.State()
}

// TestBadState: a state that is not understood is not guessed at.
func TestBadState(t *testing.T) {
	for name, text := range map[string]string{
		"half":        `{"version":1,"state":"rea`,
		"empty":       ``,
		"newer":       `{"version":2,"state":"ready"}`,
		"no state":    `{"version":1}`,
		"odd state":   `{"version":1,"state":"dancing"}`,
		"maintenance": `{"version":1,"state":"maintenance"}`,
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, node.StateFile)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := node.OpenStore(dir, &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID})
		if err == nil || !strings.Contains(err.Error(), path) || fault.HintOf(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWriteFails: what could not be written did not happen.
func TestWriteFails(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "node")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if a, err := s.Receive(cmd(wire.OpQuarantine), 2000); err == nil || a != nil {
		t.Errorf("a command was answered %v, %v with no disk", a, err)
	}
	if ok, err := s.Apply(&wire.Desired{Generation: 1, Policy: wire.Policy{Stop: true}}); err == nil || ok {
		t.Errorf("a desired state was applied, %v", err)
	}
	if st := s.State(); st.Node != wire.Ready || st.Applied != nil || len(st.Journal) != 0 {
		t.Errorf("the state in memory has moved: %+v", st)
	}
}

// TestKilled: a node that is killed (SIGKILL) at each step of a command's life
// finds, at its next start, the state before the step or after it, and a
// redelivery has the effect once. The child is this test binary again.
func TestKilled(t *testing.T) {
	if at := os.Getenv("NODE_TEST_KILL"); at != "" {
		killedChild(os.Getenv("NODE_TEST_DIR"), at)
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	drain, undrain := killCommands()
	for _, at := range killSteps {
		t.Run(at, func(t *testing.T) {
			dir := t.TempDir()
			c := exec.Command(exe, "-test.run=^TestKilled$")
			c.Env = append(os.Environ(), "NODE_TEST_KILL="+at, "NODE_TEST_DIR="+dir)
			out, err := c.CombinedOutput()
			if ws, ok := c.ProcessState.Sys().(syscall.WaitStatus); !ok || !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
				t.Fatalf("the child was not killed at %s: %v\n%s", at, err, out)
			}
			said := func(what string) bool { return strings.Contains(string(out), "said "+what) }
			s := openStore(t, dir)
			st := s.State()
			// An ack that went out is on disk; one that is on disk and did not go
			// out is repeated.
			if said("drain accepted") && len(st.Journal) == 0 {
				t.Fatal("an ack went out before its entry was on disk")
			}
			for _, e := range st.Journal {
				if e.Op == wire.OpDrain && e.Outcome == wire.Done && !said("undrain done") && st.Node != wire.Drained && st.Node != wire.Ready {
					t.Errorf("the drain is done and the node is %s", st.Node)
				}
			}
			// The hub delivers both again: each has its effect once.
			if a := receive(t, s, drain, 2000); !said("undrain done") && a.Outcome != wire.Accepted && a.Outcome != wire.Done {
				t.Errorf("redelivered drain: %+v", a)
			}
			if err := s.Drained(); err != nil {
				t.Fatal(err)
			}
			if a := receive(t, s, undrain, 2000); a.Outcome != wire.Done {
				t.Errorf("redelivered undrain: %+v", a)
			}
			if a := receive(t, s, drain, 2000); a.Outcome != wire.Done || s.State().Node != wire.Ready {
				t.Errorf("the drain ran again: %+v, %s", a, s.State().Node)
			}
			if n := len(s.State().Journal); n != 2 {
				t.Errorf("%d entries", n)
			}
			files, err := os.ReadDir(dir)
			if err != nil || len(files) == 0 {
				t.Fatal(files, err)
			}
		})
	}
}

var killSteps = []string{"before drain", "in drain", "drain", "drain said", "in drained", "drained", "in undrain", "undrain", "undrain said", "in recorded", "recorded"}

func killCommands() (drain, undrain *wire.Command) {
	drain = &wire.Command{ID: strings.Repeat("d", 32), Op: wire.OpDrain, Issued: 1000, Expires: 87400}
	undrain = &wire.Command{ID: strings.Repeat("e", 32), Op: wire.OpUndrain, Issued: 1001, Expires: 87401}
	return drain, undrain
}

func killedChild(dir, at string) {
	die := func(step string) {
		if step == at {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	step := ""
	s, err := node.OpenStore(dir, &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID})
	check(err)
	node.OnWrite(s, func() { die("in " + step) })
	drain, undrain := killCommands()
	die("before drain")
	step = "drain"
	_, err = s.Receive(drain, 2000)
	check(err)
	die("drain")
	fmt.Println("said drain accepted")
	die("drain said")
	step = "drained"
	check(s.Drained())
	die("drained")
	step = "undrain"
	_, err = s.Receive(undrain, 2000)
	check(err)
	die("undrain")
	fmt.Println("said undrain done")
	die("undrain said")
	step = "recorded"
	check(s.Recorded(&wire.Recorded{Command: drain.ID, Outcome: wire.Done}, 2000))
	die("recorded")
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// TestFallback: the egress layer of the desired state is a file before it is said
// to be applied, across restarts and hubs that are away, and goes with it.
func TestFallback(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, node.FallbackFile)
	want := func(when, content string) {
		t.Helper()
		b, err := os.ReadFile(file)
		if string(b) != content || (content == "") != errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %q, %v; want %q", when, b, err, content)
		}
	}
	apply := func(s *node.Store, gen uint64, layer string) {
		t.Helper()
		d := &wire.Desired{Generation: gen, ID: wire.NewID(), Policy: wire.Policy{Ceiling: 2}}
		if layer != "" {
			raw := json.RawMessage(layer)
			d.Policy.Layer = &raw
		}
		if changed, err := s.Apply(d); err != nil || !changed {
			t.Fatalf("generation %d: %v, %v", gen, changed, err)
		}
	}
	const one, two = `{"rules":["default"],"run":{"names":["a.example"]},"build":{}}`, `{"rules":[],"run":{"names":[]},"build":{"names":[]}}`
	s := openStore(t, dir)
	want("before anything", "")
	apply(s, 1, one)
	want("applied", one)
	if _, err := s.Apply(&wire.Desired{Generation: 1, ID: wire.NewID()}); err != nil {
		t.Fatal(err)
	}
	want("after one that is not newer", one)
	s = openStore(t, dir)
	want("after a restart", one)
	apply(s, 2, two)
	want("changed", two)
	// A crash between the file and the state leaves the file of another.
	if err := os.WriteFile(file, []byte(one), 0o600); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir)
	want("after a crash", two)
	node.OnWrite(s, func() { want("as the state is written", one) })
	apply(s, 3, one)
	node.OnWrite(s, nil)
	apply(s, 4, "")
	want("lifted", "")
	apply(s, 5, one)
	if _, err := node.OpenStore(dir, &node.Enrollment{Hub: wire.NewID(), Node: nodetest.NodeID}); err != nil {
		t.Fatal(err)
	}
	want("under another hub", "")
}
