package nodehost_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"virtkit/core/fleet/node"
	"virtkit/core/fleet/nodehost"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/supervise"
	"virtkit/core/tune"
)

func TestManagedRunner(t *testing.T) {
	dir := fake(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, err := nodehost.NewManagedRunner(options(dir, exe))
	if err != nil {
		t.Fatal(err)
	}
	var n node.Runner = r
	joined := nodehost.Join(nodehost.NodeOptions{Host: host(t, nil, nil), Runner: n})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	t.Cleanup(func() { killRunners(dir) })
	status := func(want wire.Acquisition, exited bool) {
		t.Helper()
		until(t, string(want), func() bool { return n.Status().Acquisition == want })
		until(t, string(want)+": the drain's look", func() bool { // until it is known whether one was left
			d, err := joined.Drain(t.Context())
			return err == nil && d == (wire.Drain{RunnerExited: exited, AdmissionIdle: true})
		})
	}
	status(wire.Stopped, true) // nothing was said yet
	n.SetAcquire(true)
	<-n.Changed()
	until(t, "a runner", func() bool { return len(said(dir, "ready")) == 1 })
	status(wire.Taking, false)
	write(t, filepath.Join(dir, "job"), "", 0o600)
	n.SetAcquire(false)
	status(wire.Quitting, false)
	os.Remove(filepath.Join(dir, "job"))
	status(wire.Stopped, true)
	n.SetAcquire(true)
	until(t, "another runner", func() bool { return len(said(dir, "ready")) == 2 })
	// The node's end waits for the jobs, and abandoning them ends it.
	write(t, filepath.Join(dir, "job"), "", 0o600)
	cancel()
	until(t, "the word", func() bool { return len(said(dir, "quit")) == 2 })
	select {
	case err := <-ended:
		t.Fatalf("it did not wait for the jobs: %v", err)
	default:
	}
	n.Abandon()
	if err := <-ended; err != nil || len(said(dir, "term")) != 1 {
		t.Errorf("%v, %q", err, said(dir, "term"))
	}
	if n.Mode() != wire.RunnerManaged {
		t.Error(n.Mode())
	}
}

func TestOtherRunner(t *testing.T) {
	found := &nodehost.Runner{Program: "/usr/bin/gitlab-runner"}
	for _, tt := range []struct {
		d           nodehost.Detection
		mode        wire.RunnerMode
		unsupported string
	}{
		{nodehost.Detection{Mode: nodehost.ModeNone}, wire.RunnerNone, ""},
		{nodehost.Detection{Mode: nodehost.ModeNone, Found: found}, wire.RunnerNone, ""},
		{nodehost.Detection{Mode: nodehost.ModeExternal}, wire.RunnerExternal, ""},
		{nodehost.Detection{Mode: nodehost.ModeExternal, Found: found}, wire.RunnerExternal, "may still take jobs: /usr/bin/gitlab-runner"},
	} {
		r := nodehost.NewOtherRunner(tt.d)
		if s := r.Status(); s.Acquisition != wire.Stopped || s.Unsupported != nil {
			t.Errorf("before anything is said: %+v", s)
		}
		r.SetAcquire(true)
		<-r.Changed()
		r.SetAcquire(true)
		select {
		case <-r.Changed():
			t.Error("told of no change")
		default:
		}
		if s := r.Status(); s.Acquisition != wire.Taking || s.Unsupported != nil || r.Mode() != tt.mode {
			t.Errorf("%+v %v", s, r.Mode())
		}
		r.SetAcquire(false)
		<-r.Changed()
		s := r.Status()
		if s.Acquisition != wire.Stopped || strings.Contains(strings.Join(s.Unsupported, ""), "may still take jobs") != (tt.unsupported != "") ||
			!strings.Contains(strings.Join(s.Unsupported, ""), tt.unsupported) {
			t.Errorf("%+v: %+v", tt.d, s)
		}
	}
}

// What cannot be read is logged once until it is something else, and a refusal of
// the kernel is explained.
func TestJoined(t *testing.T) {
	var log bytes.Buffer
	l := &ledger{problems: []error{errors.New("x is no claim")}}
	j := nodehost.Join(nodehost.NodeOptions{
		Host:    host(t, nil, func(o *nodehost.Options) { o.Ledger = l }),
		Explain: func(error) error { return errors.New("the jobs run as root") },
		Log:     logx.New(&log, slog.LevelInfo, false),
	})
	beat := func() {
		t.Helper()
		if b, err := j.Heartbeat(t.Context()); err != nil || b == nil {
			t.Fatal(err)
		}
	}
	count := func(text string, want int) {
		t.Helper()
		if n := strings.Count(log.String(), text); n != want {
			t.Errorf("%q is logged %d times, want %d:\n%s", text, n, want, log.String())
		}
	}
	beat()
	beat()
	count("x is no claim", 1)
	l.problems = []error{os.ErrPermission}
	beat()
	beat()
	count("the jobs run as root", 1)
	if _, err := j.Drain(t.Context()); err == nil || err.Error() != "the jobs run as root" {
		t.Errorf("drain: %v", err)
	}
	l.problems = nil
	beat()
	l.problems = []error{os.ErrPermission}
	beat()
	count("the heartbeat is incomplete", 4)

	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("over"))
	if _, err := j.Inventory(ctx); err == nil || err.Error() != "over" {
		t.Errorf("after the end: %v", err)
	}
	if c := j.Concurrency(t.Context(), 3, true); c != (wire.Concurrency{HubCeiling: 3}) {
		t.Errorf("without a runner: %+v", c)
	}
	if i, err := j.Inventory(t.Context()); err != nil || i.Hostname != "ci-7" {
		t.Errorf("%+v, %v", i, err)
	}
}

// A report and a heartbeat of a thousand guests stay within their bounds, and
// name the same guests.
func TestJoinedBounds(t *testing.T) {
	self := supervise.Self()
	l := &ledger{}
	for i := range 1000 {
		l.guests = append(l.guests, nodehost.Guest{ID: "r", Kind: "run", Live: true, PID: self.PID, Start: self.Start, Dir: filepath.Join("/j", string(rune('a'+i%26)), strings.Repeat("x", i))})
	}
	j := nodehost.Join(nodehost.NodeOptions{Host: host(t, nil, func(o *nodehost.Options) { o.Ledger = l })})
	list, omitted, err := j.Workloads(t.Context())
	if err != nil || len(list) != 256 || omitted != 744 {
		t.Errorf("%d, %d omitted, %v", len(list), omitted, err)
	}
	b, err := j.Heartbeat(t.Context())
	if err != nil || len(b.VMs) != 256 || b.Check() != nil {
		t.Errorf("%d VMs, %v, %v", len(b.VMs), err, b.Check())
	}
	for _, w := range list {
		if _, ok := b.VMs[w.ID]; !ok {
			t.Fatalf("%s is listed without its memory", w.ID)
		}
	}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	status := nodehost.ManagedStatus{PID: 7, Quitting: true, Restarts: 3}
	m := nodehost.NewMetrics(reg, "1.2.3", func() nodehost.ManagedStatus { return status })
	j := nodehost.Join(nodehost.NodeOptions{Metrics: m,
		Host: host(t, map[string]string{
			"proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n", "proc/loadavg": "1.25 0 0 1/2 3\n",
			"proc/pressure/cpu": "some avg10=50.00 avg60=2.50 avg300=0 total=1\n", "proc/pressure/memory": "some avg10=0 avg60=0 avg300=0 total=1\n", "proc/pressure/io": "some avg10=0 avg60=0 avg300=0 total=1\n",
		}, func(o *nodehost.Options) { o.Ledger = &ledger{budget: 8} }),
		Tuner: nodehost.NewTuner(nodehost.TunerOptions{StateDir: t.TempDir(), LocalCeiling: 4,
			Input: func(context.Context) (tune.Input, error) { return tune.Input{Ceilings: []int{4}}, nil }}),
	})
	if c := j.Concurrency(t.Context(), 2, true); c.Effective != 2 {
		t.Fatalf("%+v", c)
	}
	b, err := j.Heartbeat(t.Context())
	if err != nil || b.Concurrency != 2 {
		t.Fatalf("%+v, %v", b, err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
	want := `
# HELP vk_node_admission_budget_bytes Memory budget of guests; 0 without one.
# TYPE vk_node_admission_budget_bytes gauge
vk_node_admission_budget_bytes 8.388608e+06
# HELP vk_node_concurrency Jobs that the runner is asked to accept; 0 when nothing is asked.
# TYPE vk_node_concurrency gauge
vk_node_concurrency 2
# HELP vk_node_concurrency_ceiling Ceilings of the concurrency; 0 = none.
# TYPE vk_node_concurrency_ceiling gauge
vk_node_concurrency_ceiling{of="hub"} 2
vk_node_concurrency_ceiling{of="local"} 4
# HELP vk_node_filesystem_free_bytes Free space of the filesystems of jobs and checkouts.
# TYPE vk_node_filesystem_free_bytes gauge
vk_node_filesystem_free_bytes{role="checkouts"} 90
vk_node_filesystem_free_bytes{role="jobs"} 700
# HELP vk_node_info The node's vk, always 1.
# TYPE vk_node_info gauge
vk_node_info{version="1.2.3"} 1
# HELP vk_node_load1 Load average of the last minute.
# TYPE vk_node_load1 gauge
vk_node_load1 1.25
# HELP vk_node_memory_available_bytes Memory of the host that is available.
# TYPE vk_node_memory_available_bytes gauge
vk_node_memory_available_bytes 1.048576e+06
# HELP vk_node_runner_restarts_total Starts of gitlab-runner by this node after the first.
# TYPE vk_node_runner_restarts_total counter
vk_node_runner_restarts_total 3
# HELP vk_node_runner_quitting Whether it was told to quit and its jobs are waited for.
# TYPE vk_node_runner_quitting gauge
vk_node_runner_quitting 1
`
	var names []string
	for l := range strings.SplitSeq(want, "\n") {
		if f := strings.Fields(l); len(f) > 2 && f[1] == "TYPE" {
			names = append(names, f[2])
		}
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(reg, "vk_node_pressure_stalled_ratio"); err != nil || n != 12 {
		t.Errorf("%d pressures, %v", n, err)
	}
	// Of what was not read no old value stays.
	m.Heartbeat(wire.Heartbeat{})
	if n, err := testutil.GatherAndCount(reg, "vk_node_pressure_stalled_ratio", "vk_node_filesystem_free_bytes"); err != nil || n != 0 {
		t.Errorf("%d old values, %v", n, err)
	}
	var none *nodehost.Metrics
	none.Heartbeat(wire.Heartbeat{})
	none.Concurrency(wire.Concurrency{})
}
