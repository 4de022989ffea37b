package nodehost_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/admit"
	"virtkit/core/fleet/nodehost"
	"virtkit/core/fleet/wire"
	"virtkit/core/runner"
	"virtkit/core/supervise"
)

// tree makes a root of files.
func tree(t *testing.T, files map[string]string) nodehost.Root {
	t.Helper()
	root := t.TempDir()
	for p, text := range files {
		write(t, filepath.Join(root, p), text, 0o644)
	}
	return nodehost.Root(root)
}

// ledger is a Ledger of values.
type ledger struct {
	claims   []nodehost.Claim
	guests   []nodehost.Guest
	budget   int64
	err      error
	problems []error
}

func (l *ledger) Claims(context.Context) ([]nodehost.Claim, []error, error) {
	return l.claims, l.problems, l.err
}
func (l *ledger) Guests(context.Context) ([]nodehost.Guest, []error, error) {
	return l.guests, nil, nil
}
func (l *ledger) Budget() (int64, error) { return l.budget, nil }

const mountinfo = `22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:30 / /dev/shm rw - tmpfs tmpfs rw
24 22 8:17 / /var/lib rw - xfs /dev/sdb1 rw
25 22 8:17 /x /srv/b\040c rw - xfs /dev/sdb1 rw
26 22 0:44 / /mnt/none rw - overlay none rw
`

func host(t *testing.T, files map[string]string, change func(*nodehost.Options)) *nodehost.Host {
	o := nodehost.Options{
		Root: tree(t, files), StateDir: t.TempDir(), Jobs: "/var/lib/vk/jobs", Checkouts: "/dev/shm/builds",
		Hostname: func() (string, error) { return "ci-7", nil },
		StatFS: func(p string) (nodehost.Usage, error) {
			if strings.HasPrefix(p, "/dev/shm") {
				return nodehost.Usage{Dev: nodehost.Dev{Minor: 30}, Size: 100, Free: 90, FreeInodes: 9, Tmpfs: true}, nil
			}
			return nodehost.Usage{Dev: nodehost.Dev{Major: 8, Minor: 17}, Size: 1000, Free: 700, FreeInodes: 70}, nil
		},
		Now:      time.Now,
		Resident: func(int) (int64, error) { return 0, nil },
		Ledger:   &ledger{},
	}
	if change != nil {
		change(&o)
	}
	return nodehost.New(o)
}

func TestInventory(t *testing.T) {
	exe := filepath.Join(t.TempDir(), "vk")
	write(t, exe, "abc", 0o755)
	h := host(t, map[string]string{
		"proc/cpuinfo":                           "processor\t: 0\nmodel name\t: AMD  EPYC 7543\nflags: x\n\nprocessor\t: 1\nmodel name\t: AMD  EPYC 7543\n",
		"proc/meminfo":                           "MemTotal:       32768000 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n",
		"proc/self/mountinfo":                    mountinfo,
		"proc/sys/kernel/osrelease":              "6.1.0-18-amd64\n",
		"sys/devices/system/node/node0/meminfo":  "Node 0 MemTotal:       16384000 kB\nNode 0 MemFree: 5 kB\n",
		"sys/devices/system/node/node0/cpulist":  "0-7,16-23\n",
		"sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:       1024 kB\n",
		"sys/devices/system/node/node10/cpulist": "8\n",
		"home/ci/.gitlab-runner/config.toml":     "concurrent = 6\n[[runners]]\nname = \"one\"\ntoken = \"glrt-secret\"\n[[runners]]\nname = \"two\"\n",
	}, func(o *nodehost.Options) {
		o.Version, o.Exe, o.ConfigHash, o.JobsSpeed, o.Labels = "1.2.3", exe, "c0ffee", "fast", []string{"large-memory"}
		o.Checks = func(context.Context) []wire.Check { return make([]wire.Check, 70) }
		o.Kernel = func(context.Context) string { return "6.12.50" }
		o.RunnerConfig = func() string { return "/home/ci/.gitlab-runner/config.toml" }
		o.RunnerVersion = func(context.Context) string { return "18.5.0" }
	})
	got, problems := h.Inventory(t.Context())
	if len(problems) > 0 {
		t.Errorf("problems: %v", problems)
	}
	want := wire.Inventory{
		Hostname: "ci-7", CPUs: 2, CPUModel: "AMD EPYC 7543", RAM: 32768000 << 10,
		MemoryNodes: []wire.MemoryNode{{ID: 0, Memory: 16384000 << 10, CPUs: 16}, {ID: 10, Memory: 1 << 20, CPUs: 1}},
		Checks:      make([]wire.Check, 64),
		Filesystems: []wire.Filesystem{
			{Role: "jobs", Path: "/var/lib/vk/jobs", Device: "/dev/sdb1", FSType: "xfs", Size: 1000, Speed: "fast"},
			{Role: "checkouts", Path: "/dev/shm/builds", Device: "tmpfs", FSType: "tmpfs", Size: 100, Tmpfs: true},
		},
		VK: "1.2.3", VKSHA256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
		GuestKernel: "6.12.50", HostKernel: "6.1.0-18-amd64", ConfigHash: "c0ffee",
		Runner: &wire.Runner{Config: "/home/ci/.gitlab-runner/config.toml", Concurrent: 6, Names: []string{"one", "two"}, Version: "18.5.0"},
		Labels: []string{"large-memory"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// What cannot be read is said, and everything else is still there.
func TestInventoryProblems(t *testing.T) {
	h := host(t, map[string]string{
		"proc/cpuinfo":        "nothing\n",
		"proc/self/mountinfo": "garbage\n",
		"c.toml":              "concurrent = \n token=\"glrt-secret\"",
	}, func(o *nodehost.Options) {
		o.RunnerConfig = func() string { return "/c.toml" }
		o.StatFS = func(p string) (nodehost.Usage, error) {
			if strings.HasPrefix(p, "/dev/shm") {
				return nodehost.Usage{}, errors.New("gone away")
			}
			return nodehost.Usage{Dev: nodehost.Dev{Major: 8, Minor: 17}, Size: 5}, nil
		}
	})
	got, problems := h.Inventory(t.Context())
	text := errors.Join(problems...).Error()
	for _, want := range []string{"/proc/cpuinfo", "meminfo", "gone away", "/c.toml"} {
		if !strings.Contains(text, want) {
			t.Errorf("problems lack %q: %s", want, text)
		}
	}
	if strings.Contains(text, "secret") {
		t.Errorf("a token is told: %s", text)
	}
	if len(got.Filesystems) != 1 || got.Filesystems[0].Device != "8:17" || got.Hostname != "ci-7" {
		t.Errorf("%+v", got)
	}
}

func disk(reads, readMS, writes, writeMS, busy int) string {
	return fmt.Sprintf("   8      16 sdb 1 0 0 0 1 0 0 0 0 0 0\n   8      17 sdb1 %d 0 0 %d %d 0 0 %d 0 %d 0 0 0 0 0\n 7 0 short\n", reads, readMS, writes, writeMS, busy)
}

func TestHeartbeat(t *testing.T) {
	now := time.Unix(1000, 0)
	l := &ledger{budget: 8192, claims: []nodehost.Claim{
		{ID: "1-a", Granted: admit.Amounts{MemMiB: 2048, Disk: 5}},
		{ID: "2-b", Waiting: true, Granted: admit.Amounts{MemMiB: 512}, Want: admit.Amounts{MemMiB: 4096}},
		{ID: "3-c", Granted: admit.Amounts{MemMiB: 1024, Disk: 7}},
		{ID: "reservation-9", Granted: admit.Amounts{MemMiB: 100}},
		{ID: "4-d", Granted: admit.Amounts{MemMiB: 1}},
		{ID: "6-f", Waiting: true, Granted: admit.Amounts{MemMiB: 1}}, // it runs, and grows
	}, guests: []nodehost.Guest{
		{ID: "1-a", Kind: "gitlab", Phase: supervise.Running, Live: true, PID: 1, Start: 1},
		{ID: "4-d", Kind: "gitlab", Phase: supervise.Stopping, Live: true},
		{ID: "5-e", Kind: "gitlab", Phase: supervise.Booting, Live: true}, // it has no claim
		{ID: "6-f", Kind: "gitlab", Phase: supervise.Running, Live: true},
		{ID: "7-g", Kind: "gitlab", Phase: supervise.Running},            // dead: its cleanup failed
		{ID: "run-1", Kind: "run", Phase: supervise.Running, Live: true}, // nobody's job
	}}
	var root nodehost.Root
	h := host(t, map[string]string{
		"proc/meminfo":         "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n",
		"proc/loadavg":         "1.25 0.50 0.10 1/200 12345\n",
		"proc/diskstats":       disk(100, 1000, 50, 400, 3000),
		"proc/self/mountinfo":  mountinfo,
		"proc/pressure/cpu":    "some avg10=1.50 avg60=2.50 avg300=0.00 total=10\n",
		"proc/pressure/memory": "some avg10=0.10 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.20 avg60=0.30 avg300=0.00 total=1\nodd x=1\n",
		"proc/pressure/io":     "some avg10=9.00 avg60=8.00 avg300=0.00 total=1 later=5\nfull avg10=7.00 avg60=6.00 avg300=0.00 total=1\n",
	}, func(o *nodehost.Options) {
		root = o.Root
		o.Ledger, o.Now = l, func() time.Time { return now }
		write(t, filepath.Join(o.StateDir, "schedule/desired-concurrency"), "5", 0o644)
	})
	first, problems := h.Heartbeat(t.Context())
	if len(problems) > 0 || first.Disks != nil {
		t.Errorf("%v, disks %v", problems, first.Disks)
	}
	// 20 reads of 5 ms each, 10 writes of 8 ms, busy for 2.5 of 10 seconds.
	now = now.Add(10 * time.Second)
	write(t, root.Path("/proc/diskstats"), disk(120, 1100, 60, 480, 5500), 0o644)
	load := 1.25
	want := wire.Heartbeat{
		Admission:   wire.Admission{Committed: (2048 + 512 + 1024 + 100 + 2) << 20, Budget: 8192 << 20, Running: 3, Waiting: 2, DiskClaimed: 12},
		Concurrency: 5, MemAvailable: 1 << 20,
		Filesystems: []wire.FSReading{{Role: "jobs", Free: 700, FreeInodes: 70}, {Role: "checkouts", Free: 90, FreeInodes: 9}},
		VMs:         map[string]int64{},
		Load1:       &load,
		Pressure: &wire.Pressure{
			CPU: &wire.Stall{Some10: 1.5, Some60: 2.5}, Memory: &wire.Stall{Some10: .1, Full10: .2, Full60: .3},
			IO: &wire.Stall{Some10: 9, Some60: 8, Full10: 7, Full60: 6},
		},
		Disks:  []wire.DiskReading{{Role: "jobs", Device: "/dev/sdb1", ReadMS: 5, WriteMS: 8, Busy: 25}},
		Stages: &wire.Stages{Preparing: 2, Waiting: 1, Running: 2, Cleaning: 1},
		Clock:  1010,
	}
	got, problems := h.Heartbeat(t.Context())
	if d := cmp.Diff(want, got); d != "" || len(problems) > 0 {
		t.Error(d, problems)
	}
	// A counter that went back, as after a device was replaced, says nothing.
	now = now.Add(time.Second)
	write(t, root.Path("/proc/diskstats"), disk(1, 1, 1, 1, 1), 0o644)
	if got, _ = h.Heartbeat(t.Context()); got.Disks != nil {
		t.Errorf("disks %v", got.Disks)
	}
}

// A host without PSI, load and a ledger that cannot be read still has a
// heartbeat, and says what is missing.
func TestHeartbeatProblems(t *testing.T) {
	h := host(t, map[string]string{"proc/loadavg": "NaN 1 2\n"}, func(o *nodehost.Options) {
		o.Ledger = &ledger{err: errors.New("the ledger is closed"), problems: []error{errors.New("x is no claim")}}
		write(t, filepath.Join(o.StateDir, "schedule/desired-concurrency"), "many", 0o644)
	})
	got, problems := h.Heartbeat(t.Context())
	text := errors.Join(problems...).Error()
	for _, want := range []string{"the ledger is closed", "x is no claim", "desired-concurrency", "meminfo", "NaN"} {
		if !strings.Contains(text, want) {
			t.Errorf("problems lack %q: %s", want, text)
		}
	}
	if got.Load1 != nil || got.Pressure != nil || len(got.Filesystems) != 2 {
		t.Errorf("%+v", got)
	}
}

// The host that the test runs on.
func TestRealHost(t *testing.T) {
	var root nodehost.Root
	n, _, err := root.CPUs()
	if err != nil || n < 1 {
		t.Errorf("%d CPUs, %v", n, err)
	}
	total, available, err := root.Memory()
	if err != nil || available <= 0 || available > total {
		t.Errorf("memory %d of %d, %v", available, total, err)
	}
	u, err := nodehost.StatFS(filepath.Join(t.TempDir(), "not/yet"))
	if err != nil || u.Size <= 0 || u.Free > u.Size {
		t.Errorf("%+v, %v", u, err)
	}
	h := nodehost.New(nodehost.Options{StateDir: t.TempDir(), Jobs: t.TempDir(), Checkouts: t.TempDir(), Ledger: &ledger{}})
	i, problems := h.Inventory(t.Context())
	if len(problems) > 0 || i.Hostname == "" || len(i.Filesystems) != 2 {
		t.Errorf("%+v, %v", i, problems)
	}
}

func TestWorkloads(t *testing.T) {
	self := supervise.Self()
	jobs := t.TempDir()
	rec := filepath.Join(jobs, "12-x")
	if err := os.MkdirAll(rec, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := runner.WriteRecord(rec, runner.Record{ID: "12-x", JobID: 12, Name: "build", Project: "group/app", Image: "debian:12", URL: "https://evil.example/-/jobs/12"}); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(jobs, "14-z")
	write(t, filepath.Join(bad, runner.RecordFile), "{", 0o600)
	l := &ledger{claims: []nodehost.Claim{{ID: "12-x", Granted: admit.Amounts{MemMiB: 3000}}}, guests: []nodehost.Guest{
		{ID: "12-x", Kind: "gitlab", Live: true, PID: self.PID, Start: self.Start, Created: time.Unix(20, 0), CPUs: 4, MemMiB: 4096, Dir: rec, Image: "x"},
		{ID: "13-y", Kind: "gitlab", Live: true, PID: self.PID, Start: self.Start + 1, Created: time.Unix(30, 0), MemMiB: 10, Dir: filepath.Join(jobs, "13-y")},
		{ID: "14-z", Kind: "gitlab", Live: true, Created: time.Unix(40, 0), Dir: bad},
		{ID: "run-1", Name: "mine", Kind: "run", Live: true, Created: time.Unix(10, 0), CPUs: 2, MemMiB: 512, Dir: filepath.Join(jobs, "run-1"), Image: "local/default"},
		{ID: "run-2", Kind: "run", Created: time.Unix(10, 0), Dir: filepath.Join(jobs, "run-2")},
	}}
	h := host(t, nil, func(o *nodehost.Options) { o.Ledger = l })
	list, problems, err := h.Workloads(t.Context())
	if err != nil || len(problems) != 1 || !strings.Contains(problems[0].Error(), "14-z") {
		t.Errorf("problems %v, %v", problems, err)
	}
	id := nodehost.WorkloadID
	want := []wire.Workload{
		{ID: id(filepath.Join(jobs, "run-1")), Kind: wire.KindRun, Image: "local/default", CPUs: 2, Reserved: 512 << 20, Started: 10, StateDir: filepath.Join(jobs, "run-1")},
		{ID: id(rec), Kind: wire.KindJob, Project: "group/app", Job: "build", JobID: "12", Image: "debian:12", PID: self.PID, CPUs: 4, Reserved: 3000 << 20, Started: 20, StateDir: rec},
		{ID: id(filepath.Join(jobs, "13-y")), Kind: wire.KindJob, JobID: "13", Reserved: 10 << 20, Started: 30, StateDir: filepath.Join(jobs, "13-y")},
		{ID: id(bad), Kind: wire.KindJob, JobID: "14", Started: 40, StateDir: bad},
	}
	if d := cmp.Diff(want, nodehost.Plain(list)); d != "" {
		t.Error(d)
	}
	if len(id("/x")) != 16 || id("/x") == id("/y") {
		t.Error("ids")
	}
}

func TestMeter(t *testing.T) {
	now := time.Unix(1000, 0)
	mem := map[int]int64{1: 1600, 2: 50}
	asked := 0
	m := nodehost.NewMeter(30*time.Second, func() time.Time { return now }, func(pid int) (int64, error) {
		asked++
		n, ok := mem[pid]
		if !ok {
			return 0, fmt.Errorf("process %d: %w", pid, os.ErrNotExist)
		}
		return n, nil
	})
	w := func(id string, pid int, start uint64) nodehost.Running {
		return nodehost.Running{Workload: wire.Workload{ID: id, PID: pid}, Start: start}
	}
	read := func(want map[string]int64, wantAsked int, list ...nodehost.Running) {
		t.Helper()
		asked = 0
		if got := m.Read(t.Context(), list); !cmp.Equal(got, want) || asked != wantAsked {
			t.Errorf("%v after %d measurements, want %v after %d", got, asked, want, wantAsked)
		}
	}
	a, b := w("a", 1, 5), w("b", 2, 6)
	read(map[string]int64{"a": 1600}, 1, a)
	mem[1] = 5000
	now = now.Add(29 * time.Second)
	read(map[string]int64{"a": 1600, "b": 50}, 1, a, b) // b appears
	mem[1], mem[2] = 1700, 54
	now = now.Add(time.Second)
	read(map[string]int64{"a": 1600, "b": 54}, 2, a, b) // 100 is a sixteenth of 1600; 4 is more than one of 50
	mem[1] = 1701
	now = now.Add(30 * time.Second)
	read(map[string]int64{"a": 1701, "b": 54}, 2, a, b)
	read(map[string]int64{"a": 1701}, 1, a, w("b", 3, 9)) // another process, gone already
	read(map[string]int64{"a": 1701}, 0, a, w("c", 0, 0)) // nobody knows its process
	now = now.Add(-time.Hour)                             // the clock was moved back
	mem[1] = 9
	read(map[string]int64{"a": 9}, 1, a)
}

func TestObserve(t *testing.T) {
	self := supervise.Self()
	observe := func(l *ledger) (nodehost.Observation, error) {
		return host(t, nil, func(o *nodehost.Options) { o.Ledger = l }).Observe(t.Context())
	}
	for _, tt := range []struct {
		name string
		l    ledger
		want nodehost.Observation
		idle bool
	}{
		{"nothing", ledger{}, nodehost.Observation{LedgerEmpty: true}, true},
		{"what a failed cleanup left", ledger{guests: []nodehost.Guest{{ID: "1-a", Kind: "gitlab", PID: self.PID, Start: self.Start + 1}}}, nodehost.Observation{LedgerEmpty: true}, true},
		{"a supervisor whose lock is not seen", ledger{guests: []nodehost.Guest{{ID: "1-a", Kind: "gitlab", PID: self.PID, Start: self.Start}}}, nodehost.Observation{LedgerEmpty: true, Supervisors: 1, Jobs: 1}, false},
		{"a supervisor", ledger{guests: []nodehost.Guest{{ID: "1-a", Kind: "gitlab", Live: true}}}, nodehost.Observation{LedgerEmpty: true, Supervisors: 1, Jobs: 1}, false},
		{"somebody's own guest", ledger{guests: []nodehost.Guest{{ID: "run-1", Kind: "run", Live: true}}}, nodehost.Observation{LedgerEmpty: true}, true},
		{"a job that waits", ledger{claims: []nodehost.Claim{{ID: "2-b", Waiting: true}}}, nodehost.Observation{Jobs: 1}, false},
		{"one with both", ledger{claims: []nodehost.Claim{{ID: "1-a"}}, guests: []nodehost.Guest{{ID: "1-a", Kind: "gitlab", Live: true}}}, nodehost.Observation{Supervisors: 1, Jobs: 1}, false},
		{"a reservation", ledger{claims: []nodehost.Claim{{ID: "reservation-1"}}}, nodehost.Observation{}, false},
	} {
		if got, err := observe(&tt.l); err != nil || got != tt.want || got.Idle() != tt.idle {
			t.Errorf("%s: %+v idle %v (%v), want %+v %v", tt.name, got, got.Idle(), err, tt.want, tt.idle)
		}
	}
	// What cannot be read may be a job.
	if _, err := observe(&ledger{problems: []error{os.ErrPermission}}); !errors.Is(err, os.ErrPermission) {
		t.Errorf("an entry that cannot be read: %v", err)
	}
	if _, err := observe(&ledger{err: errors.New("x")}); err == nil {
		t.Error("a ledger that cannot be read is empty")
	}
}

func TestMountOf(t *testing.T) {
	h := tree(t, map[string]string{"proc/self/mountinfo": mountinfo})
	for _, tt := range []struct {
		path         string
		dev          nodehost.Dev
		device, kind string
	}{
		{"/srv/b c/x", nodehost.Dev{Major: 8, Minor: 17}, "/dev/sdb1", "xfs"},
		{"/", nodehost.Dev{Major: 8, Minor: 1}, "/dev/sda1", "ext4"},
		{"/mnt/none", nodehost.Dev{Minor: 44}, "0:44", "overlay"},
		{"/mnt/unknown", nodehost.Dev{Major: 9, Minor: 9}, "9:9", ""},
	} {
		if device, kind := nodehost.MountOf(h, tt.path, tt.dev); device != tt.device || kind != tt.kind {
			t.Errorf("%s: %s %s, want %s %s", tt.path, device, kind, tt.device, tt.kind)
		}
	}
	if got := nodehost.Points(h); !slices.Contains(got, "/srv/b c") {
		t.Errorf("mount points %q", got)
	}
}
