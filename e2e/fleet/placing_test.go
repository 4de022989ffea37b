package fleet_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/failpoint"
	"virtkit/e2e/host"
)

// armed is the file that says at which failpoint a process of a fleet ends, and
// what goes with it: "POINT self" or "POINT all". Whoever gets there takes it.
func armed(state string) string { return filepath.Join(filepath.Dir(state), "fail") }

// failHere is the hook of the stand-in's failpoints.
func failHere(point string) {
	state := os.Getenv("VIRTKIT_STATE_DIR")
	if state == "" {
		return
	}
	file := armed(state)
	b, err := os.ReadFile(file)
	if err != nil {
		return
	}
	name, mode, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	if name != point || os.Rename(file, file+".taken") != nil {
		return
	}
	if mode == "all" {
		killHost(state, func(args []string) bool { return !slices.Contains(args, "gitlabd") })
	}
	os.Rename(file+".taken", file+".hit") // now the test goes on
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// killHost kills what runs of a fleet's node and hub, as far as which says so.
// A process that is just being started has no environment yet and is not seen:
// none is left once there was none for a while.
func killHost(state string, which func(args []string) bool) {
	for none := 0; none < 5; none++ {
		for pid, args := range processesOf("VIRTKIT_STATE_DIR=" + state) {
			if which(args) {
				none = 0
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// fate is what becomes of a job whose process was killed.
type fate int

const (
	either fate = iota
	good        // it goes on as if nothing had been
	bad         // it fails, and says so
)

// idle says whether vk-gitlab and the node have no job.
func (l *light) idle() bool {
	jobs, _ := os.ReadDir(filepath.Join(l.state, "node", "jobs"))
	b, err := os.ReadFile(filepath.Join(l.Dir, "relay", "demo.json"))
	return len(jobs) == 0 && (err != nil || strings.Contains(string(b), `"jobs":[]`))
}

// fates are what a kill at a point makes of the job: of the process alone, and
// of the hub and all that is on the node's host.
var fates = map[string][2]fate{
	// The node and the hub know nothing of a job yet, or can tell that no node
	// has begun it: it is placed again.
	failpoint.Submitting: {good, good}, failpoint.StartReceived: {good, bad}, failpoint.HalfJournaled: {good, bad},
	// What the hub has stored and a node is not known to have is lost with the
	// hub's memory of its spec.
	failpoint.StartSending: {bad, bad},
	// It is the node's, and has no driver.
	failpoint.Journaled: {bad, bad},
	// A driver outlives node and hub; without a driver the job is interrupted.
	failpoint.DriverStarted: {good, bad}, failpoint.AcceptedStored: {good, bad}, failpoint.OutputStored: {good, bad},
	failpoint.DriverBegun: {bad, bad}, failpoint.Prepared: {bad, bad}, failpoint.StageBegun: {bad, bad}, failpoint.BeforeResult: {bad, bad},
	// There is a result: it is told, whoever dies.
	failpoint.ResultWritten: {good, good}, failpoint.ResultSending: {good, good}, failpoint.ResultStored: {good, good}, failpoint.RecordedTold: {good, good}, failpoint.Settled: {good, good},
}

// S44: hub, node, or a job's driver is killed at each step of placing a job, at
// that instruction; alone, and with all else but vk-gitlab, as a loss of power
// does. Each job has one end soon after all are back, no job is run twice, and
// what was reserved is free again.
func TestKilledAtEachStep(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes, which -short leaves out")
	}
	for n, mode := range []string{"self", "all"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // most of it is waiting
			killedAtEachStep(t, n, mode)
		})
	}
}

func killedAtEachStep(t *testing.T, n int, mode string) {
	l := newLight(t)
	id, longest := int64(0), time.Duration(0)
	for _, point := range failpoint.Placing {
		id++
		l.until("the one before is settled", l.idle)
		what := fmt.Sprintf("%s, %s", point, mode)
		if err := os.WriteFile(armed(l.state), []byte(point+" "+mode+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		count := filepath.Join(l.Dir, fmt.Sprint("ran-", id))
		l.add(id, "echo begun; echo x >> "+count, "sleep 1", "echo over")
		l.until(what+" is met", func() bool { _, err := os.Stat(armed(l.state) + ".hit"); return err == nil })
		if err := os.Remove(armed(l.state) + ".hit"); err != nil {
			t.Fatal(err)
		}
		back := time.Now()
		if mode == "all" || strings.HasPrefix(point, "hub.") {
			l.restart("hub", syscall.SIGKILL)
		}
		if mode == "all" || strings.HasPrefix(point, "node.") {
			l.restart("node", syscall.SIGKILL)
		}
		got, e := l.ends(id)
		took := time.Since(back)
		longest = max(longest, took)
		over := strings.Contains(string(got.Trace), "\nover\n")
		ran, _ := os.ReadFile(count)
		switch f := fates[point][n]; {
		case len(ran) > 2:
			t.Errorf("%s: job %d was run %d times", what, id, len(ran)/2)
		case f != bad && e.State == "success" && over:
		case f != good && e.State == "failed" && (e.Reason == "runner_interrupted" || e.Reason == "runner_system_failure"):
		default:
			t.Errorf("%s: job %d ended as %+v, expected fate %d:\n%s", what, id, e, f, got.Trace)
		}
		t.Logf("%-28s %s %s %v", what, e.State, e.Reason, took.Round(100*time.Millisecond))
	}
	t.Logf("the longest until an end: %v", longest)
	// What they held is free: of vk-gitlab's own reservations too, once it is gone.
	if err := l.Signal("vk-gitlab", syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	h := &host.Host{State: l.state}
	l.until("nothing is reserved", func() bool { return len(h.Claims()) == 0 })
	l.left()
}
