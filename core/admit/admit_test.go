package admit_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/admit"
	"virtkit/core/conf"
	"virtkit/core/fault"
)

const (
	mib = int64(1) << 20
	gib = int64(1) << 30
)

func gibs(f float64) int64 { return int64(f * float64(gib)) }

func claim(seq uint64, waiting bool, mem, disk, used int64) admit.Claim {
	return admit.Claim{Seq: seq, Waiting: waiting, Granted: admit.Amounts{MemMiB: mem, Disk: disk, Inodes: 10}, Used: used, UsedInodes: 4}
}

func TestDecide(t *testing.T) {
	room := func(free int64) *admit.Room {
		return &admit.Room{Path: "/j", Size: 1000, Free: free, Inodes: 1000, FreeInodes: 100}
	}
	both := admit.Limits{MemMiB: 100, Disk: true}
	for _, tt := range []struct {
		name   string
		mem    int64
		disk   int64
		inodes int64
		others []admit.Claim
		l      admit.Limits
		room   *admit.Room
		want   admit.Verdict
	}{
		{"no limits", 1000, 1000, 0, nil, admit.Limits{}, nil, admit.Verdict{OK: true}},
		{"the whole budget", 100, 0, 0, nil, both, room(0), admit.Verdict{OK: true}},
		{"memory is full", 50, 0, 0, []admit.Claim{claim(1, false, 51, 0, 0)}, both, room(0), admit.Verdict{Memory: true, Reserved: 51}},
		{"it fits exactly", 50, 0, 0, []admit.Claim{claim(1, false, 50, 0, 0)}, both, room(0), admit.Verdict{OK: true, Reserved: 50}},
		{"an earlier one waits", 1, 0, 0, []admit.Claim{claim(1, true, 0, 0, 0)}, both, room(0), admit.Verdict{Ahead: 1}},
		{"a later one waits", 1, 0, 0, []admit.Claim{claim(9, true, 0, 0, 0)}, both, room(0), admit.Verdict{OK: true}},
		{"one that waits for more holds what it has", 50, 0, 0, []admit.Claim{claim(9, true, 60, 0, 0)}, both, room(0), admit.Verdict{Memory: true, Reserved: 60}},
		{"alone on the disk, whatever it expects", 1, 5000, 9000, []admit.Claim{claim(1, false, 1, 0, 0)}, both, room(10), admit.Verdict{OK: true, Reserved: 1, Free: 10, FreeInodes: 100, Short: 4990}},
		{"room for both", 1, 60, 1, []admit.Claim{claim(1, false, 1, 100, 70)}, both, room(90), admit.Verdict{OK: true, Reserved: 1, Free: 90, FreeInodes: 100, Yet: 30, YetInodes: 6}},
		{"a byte too few", 1, 61, 1, []admit.Claim{claim(1, false, 1, 100, 70)}, both, room(90), admit.Verdict{Disk: true, Reserved: 1, Free: 90, FreeInodes: 100, Yet: 30, YetInodes: 6, Short: 1}},
		{"one that wrote more than expected has nothing to write", 1, 90, 1, []admit.Claim{claim(1, false, 1, 100, 170)}, both, room(90), admit.Verdict{OK: true, Reserved: 1, Free: 90, FreeInodes: 100, YetInodes: 6}},
		{"it expects the whole filesystem: no more than could come free", 1, 1000, 1, []admit.Claim{claim(1, false, 1, 0, 0), claim(2, false, 0, 1, 0)}, both, room(990), admit.Verdict{Disk: true, Reserved: 1, Free: 990, FreeInodes: 100, Yet: 1, YetInodes: 6, Short: 11}},
		{"inodes alone are short", 1, 1, 95, []admit.Claim{claim(1, false, 1, 100, 100)}, both, room(90), admit.Verdict{Inodes: true, Reserved: 1, Free: 90, FreeInodes: 100, YetInodes: 6}},
		{"no disk admission", 1, 1000, 95, []admit.Claim{claim(1, false, 1, 100, 0)}, admit.Limits{MemMiB: 100}, room(90), admit.Verdict{OK: true, Reserved: 1, Yet: 100, YetInodes: 6}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := admit.Ask{Seq: 5, Amounts: admit.Amounts{MemMiB: tt.mem, Disk: tt.disk, Inodes: tt.inodes}}
			if d := cmp.Diff(tt.want, admit.Decide(a, tt.others, tt.l, tt.room)); d != "" {
				t.Error(d)
			}
		})
	}
}

// The lines that the specification quotes.
func TestLines(t *testing.T) {
	l, room := admit.Limits{MemMiB: 49152, Disk: true}, &admit.Room{Path: "/var/lib/virtkit/jobs"}
	a := admit.Ask{Amounts: admit.Amounts{MemMiB: 8192, Disk: 25 * gib, Inodes: 9}}
	memory := "waiting for 8192 MiB of the host's 49152 MiB memory budget (45056 MiB reserved, 1 job(s) asked first)"
	disk := "waiting for 25.0 GiB of room in /var/lib/virtkit/jobs (31.2 GiB free, 18.5 GiB still to be written by the jobs admitted there, 0 job(s) asked first)"
	for _, tt := range []struct {
		v    admit.Verdict
		l    admit.Limits
		want []string
		res  string
	}{
		{admit.Verdict{Memory: true, Reserved: 45056, Ahead: 1}, l, []string{memory}, "memory"},
		{admit.Verdict{Reserved: 45056, Ahead: 1}, l, []string{memory}, "memory"},
		{admit.Verdict{Disk: true, Free: gibs(31.2), Yet: gibs(18.5)}, l, []string{disk}, "disk space"},
		{admit.Verdict{Ahead: 2}, admit.Limits{Disk: true}, []string{"waiting for 25.0 GiB of room in /var/lib/virtkit/jobs (0 B free, 0 B still to be written by the jobs admitted there, 2 job(s) asked first)"}, "disk space"},
		{admit.Verdict{Memory: true, Inodes: true, Reserved: 45056, Ahead: 1, FreeInodes: 3, YetInodes: 2}, l,
			[]string{memory, "waiting for 9 inodes in /var/lib/virtkit/jobs (3 free, 2 still to be made by the jobs admitted there, 1 job(s) asked first)"}, "memory and inodes"},
	} {
		if d := cmp.Diff(tt.want, tt.v.WaitLines(a, tt.l, room)); d != "" || tt.v.Resource(tt.l) != tt.res {
			t.Errorf("%s (%s)", d, tt.v.Resource(tt.l))
		}
	}
	if got := admit.AdmittedLine(34*time.Second, "memory"); got != "admitted after waiting 34s for memory" {
		t.Error(got)
	}
	if got := admit.AdmittedLine(412700*time.Millisecond, "disk space"); got != "admitted after waiting 412s for disk space" {
		t.Error(got)
	}
	e := admit.Evicted{Images: 3, Chunks: 41, Bytes: gibs(12.9)}
	if got, want := e.Line("/var/lib/virtkit", room.Path, gibs(12.3)), "evicted 3 unused image(s) and 41 unreferenced cache chunk file(s) under /var/lib/virtkit for room in /var/lib/virtkit/jobs: 12.9 GiB freed of the 12.3 GiB needed"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	// Its own example: short of 12.3 GiB.
	a2 := admit.Ask{Seq: 2, Amounts: admit.Amounts{Disk: 25 * gib}}
	v := admit.Decide(a2, []admit.Claim{claim(1, false, 0, gibs(18.5), 0)}, admit.Limits{Disk: true}, &admit.Room{Free: gibs(31.2)})
	if !v.Disk || v.Short/mib != gibs(12.3)/mib {
		t.Errorf("%+v", v)
	}
}

func TestBudget(t *testing.T) {
	info := filepath.Join(t.TempDir(), "meminfo")
	percent := func(p int, total string) (int64, error) {
		if err := os.WriteFile(info, []byte("MemTotal:       "+total+"\nMemFree: 1 kB\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return admit.Budget(conf.Amount{Percent: p}, info)
	}
	for _, tt := range []struct {
		p     int
		total string
		gib   int64
	}{
		{50, "32768000 kB", 16},  // 31.25 GiB: 15.6 is rounded up
		{50, "67108864 kB", 32},  // 64 GiB
		{100, "32768000 kB", 31}, // not past the machine
		{99, "32768000 kB", 31},
		{1, "32768000 kB", 1},
	} {
		if got, err := percent(tt.p, tt.total); err != nil || got != tt.gib<<10 {
			t.Errorf("%d%% of %s = %d MiB, %v; want %d GiB", tt.p, tt.total, got, err, tt.gib)
		}
	}
	if got, err := admit.Budget(conf.Amount{Bytes: 48 * gib}, "/nonexistent"); err != nil || got != 48<<10 {
		t.Error(got, err)
	}
	if got, err := admit.Budget(conf.Amount{}, "/nonexistent"); err != nil || got != 0 {
		t.Error(got, err)
	}
	for _, bad := range []string{"12 kB extra", "x kB", "12345 kB"} {
		if got, err := percent(50, bad); err == nil || fault.HintOf(err) == "" || !strings.Contains(err.Error(), "mem_budget is 50%") {
			t.Errorf("%q: %d, %v", bad, got, err)
		}
	}
	if _, err := admit.Budget(conf.Amount{Percent: 50}, "/nonexistent"); err == nil {
		t.Error("a memory that cannot be read was guessed")
	}
}
