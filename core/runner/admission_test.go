package runner_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"virtkit/core/admit"
	"virtkit/core/fault"
	"virtkit/core/numa"
	"virtkit/core/runner"
	"virtkit/core/supervise"
	"virtkit/core/usage"
)

// gate admits everybody and remembers what was asked.
type gate struct {
	limits admit.Limits
	room   admit.Room
	err    error
	says   []string
	f      *os.File
	place  *numa.Placement

	asks []admit.Ask
	log  []string
}

func (g *gate) Limits() admit.Limits      { return g.limits }
func (g *gate) Room() (admit.Room, error) { return g.room, nil }
func (g *gate) Release(id string) error   { g.log = append(g.log, "forget "+id); return nil }
func (g *gate) File() *os.File            { return g.f }
func (g *gate) Close() error              { g.log = append(g.log, "close"); return nil }

type held struct{ *gate }

// Place is that of the claim.
func (h held) Place() *numa.Placement { return h.place }

func (h held) Release() error { h.log = append(h.log, "release"); return nil }

func (g *gate) Admit(_ context.Context, a admit.Ask, say func(string)) (admit.Held, error) {
	g.asks = append(g.asks, a)
	for _, l := range g.says {
		say(l)
	}
	return held{g}, g.err
}

// history is in memory; keys without a job are unknown.
type history struct {
	jobs map[string]usage.Job
	err  error
}

func (h *history) Job(key string) (usage.Job, error) { return h.jobs[key], h.err }

func (h *history) Add(key, name string, r usage.Run) error {
	if h.err != nil {
		return h.err
	}
	j := h.jobs[key]
	j.Name = name
	j.Runs = slices.Clone(j.Runs)
	j.Add(r)
	h.jobs[key] = j
	return nil
}

func (h *history) Project(name string) (usage.Project, []error, error) {
	p := usage.Project{Name: name}
	for key, j := range h.jobs {
		if strings.HasPrefix(key, name+"/") {
			p.Jobs = append(p.Jobs, j)
		}
	}
	if p.Jobs == nil {
		return p, nil, fs.ErrNotExist
	}
	return p, []error{errors.New("history/x line 3 is skipped")}, nil
}

const (
	mib = int64(1) << 20
	gib = int64(1) << 30
)

var then = time.Unix(1_800_000_000, 0)

// admitted is a world with admission, a history, and a job of a project.
func admitted(t *testing.T) (*world, *gate, *history, string) {
	w := newWorld(t)
	w.response(`{"id":77,"job_info":{"name":"test unit","project_id":42,"project_full_path":"acme/web"},"services":[{"name":"redis:7","alias":"db"}]}`)
	w.host.Images["redis:7"] = runner.Image{Root: supervise.Image{Ref: "redis:7", Digest: "sha256:redis"}, Cmd: []string{"redis-server"}}
	g := &gate{limits: admit.Limits{MemMiB: 8192, Disk: true}, room: admit.Room{Path: "/jobs", Size: 100 * gib, Free: 50 * gib, Inodes: 1 << 20, FreeInodes: 1 << 19}}
	h := &history{jobs: map[string]usage.Job{}}
	w.run.Gate, w.run.History, w.run.Set.Limits.BudgetMiB = g, h, 8192
	return w, g, h, "42-acme-web/test_unit-" + digest8("test unit")
}

// TestPlacedJobBringsItsClaim: what a reservation holds is not asked for twice.
func TestPlacedJobBringsItsClaim(t *testing.T) {
	w, g, _, _ := admitted(t)
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w.run.Prior = f
	w.prepare("VK_JOB_SERVER_URL=https://gitlab.example.com/")
	if len(g.asks) != 1 || g.asks[0].Prior != f {
		t.Errorf("asked %+v", g.asks)
	}
	// Its page is by the node's word, not by a variable of the job's.
	rec, err := runner.ReadRecord(w.host.Dir(w.id()))
	if err != nil || rec.Page != "https://gitlab.example.com/acme/web/-/jobs/77" {
		t.Errorf("page %q, %v", rec.Page, err)
	}
}

func TestAJobIsAdmittedBeforeItsImages(t *testing.T) {
	w, g, _, _ := admitted(t)
	g.says = []string{"waiting for 3072 MiB", "admitted after waiting 3s for memory"}
	g.f = os.Stdin
	w.prepare()
	if d := cmp.Diff([]admit.Ask{{ID: w.id(), Guest: numa.Guest{MemMiB: 2048, CPUs: 2}, Amounts: admit.Amounts{MemMiB: 2048 + 1024, CPUs: 4, Disk: 8 * gib, Inodes: 96}}}, g.asks); d != "" {
		t.Error(d)
	}
	tr := w.trace.String()
	if i, k := strings.Index(tr, "virtkit: admitted after waiting 3s for memory\n"), strings.Index(tr, "virtkit: image "); i < 0 || k < i {
		t.Errorf("%s", tr)
	}
	if len(w.host.Held) != 1 || w.host.Held[0] != os.Stdin {
		t.Error("the guest does not hold the claim")
	}
	if err := w.run.Cleanup(context.Background(), w.call()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"close", "forget " + w.id()}, g.log); d != "" {
		t.Error(d)
	}
}

func TestAFailedPrepareGivesItsClaimUp(t *testing.T) {
	for name, c := range map[string]struct {
		f    func(*world, *gate)
		want []string
	}{
		"no image":     {func(w *world, _ *gate) { delete(w.host.Images, "redis:7") }, []string{"release", "forget ID"}},
		"no boot":      {func(w *world, _ *gate) { w.host.LaunchErr = errors.New("boom") }, []string{"release", "forget ID"}},
		"not admitted": {func(_ *world, g *gate) { g.err = fault.New(fault.Busy, "gave up") }, []string{"release", "forget ID"}},
	} {
		t.Run(name, func(t *testing.T) {
			w, g, _, _ := admitted(t)
			c.f(w, g)
			call := w.call()
			err := w.run.Prepare(context.Background(), call)
			if runner.Status(call, err) != 2 {
				t.Errorf("%v", err)
			}
			want := slices.Clone(c.want)
			if name == "not admitted" {
				want = nil // there is nothing to give up
				g.log = slices.DeleteFunc(g.log, func(s string) bool { return strings.HasPrefix(s, "forget") })
			}
			for i := range want {
				want[i] = strings.ReplaceAll(want[i], "ID", w.id())
			}
			if d := cmp.Diff(want, g.log); d != "" && len(want)+len(g.log) > 0 {
				t.Error(d)
			}
		})
	}
}

func TestSizeOfAClaim(t *testing.T) {
	run := func(ceiling, memMiB int64, dir int64) usage.Run {
		n := int64(100)
		return usage.Run{ID: "x", Ended: then.Add(-time.Hour), CeilingMiB: ceiling, Figures: usage.Figures{Memory: memMiB * mib}, JobDir: &dir, Inodes: &n, Images: []string{"sha256:a", "sha256:b"}}
	}
	for _, tt := range []struct {
		name string
		env  string
		set  func(*world, *gate, *history, string)
		want admit.Amounts
		keep []string
		says string // "" = no word on it
	}{
		{"no history", "", func(w *world, _ *gate, _ *history, _ string) { w.run.Set.FromHistory = true }, admit.Amounts{MemMiB: 3072, CPUs: 4, Disk: 8 * gib, Inodes: 96}, nil, ""},
		{"a history that memory does not go by", "", func(_ *world, _ *gate, h *history, key string) {
			h.jobs[key] = usage.Job{Runs: []usage.Run{run(3072, 1000, gib)}}
		}, admit.Amounts{MemMiB: 3072, CPUs: 4, Disk: gib + gib/4, Inodes: 125}, []string{"sha256:a", "sha256:b"}, ""},
		{"from history", "", func(w *world, _ *gate, h *history, key string) {
			w.run.Set.FromHistory = true
			h.jobs[key] = usage.Job{Runs: []usage.Run{run(3072, 1000, gib)}}
		}, admit.Amounts{MemMiB: 1250, CPUs: 4, Disk: gib + gib/4, Inodes: 125}, []string{"sha256:a", "sha256:b"},
			"virtkit: reserving 1250 MiB from what this job has been using (it declares 3072 MiB)\n"},
		{"under another ceiling", "CUSTOM_ENV_MICROVM_MEM=4G", func(w *world, _ *gate, h *history, key string) {
			w.run.Set.FromHistory = true
			h.jobs[key] = usage.Job{Runs: []usage.Run{run(3072, 1000, gib)}}
		}, admit.Amounts{MemMiB: 5120, CPUs: 4, Disk: 8 * gib, Inodes: 96}, []string{"sha256:a", "sha256:b"}, ""},
		{"more than the filesystem", "", func(_ *world, g *gate, h *history, key string) {
			g.room.Size, g.room.Inodes = gib, 50
			h.jobs[key] = usage.Job{Runs: []usage.Run{run(3072, 1000, gib)}}
		}, admit.Amounts{MemMiB: 3072, CPUs: 4, Disk: gib, Inodes: 50}, []string{"sha256:a", "sha256:b"}, ""},
		{"unknown, on a small filesystem that counts no inodes", "", func(_ *world, g *gate, _ *history, _ string) { g.room.Size, g.room.Inodes = gib, 0 },
			admit.Amounts{MemMiB: 3072, CPUs: 4, Disk: gib, Inodes: 96}, nil, ""},
		{"disk_default", "", func(w *world, _ *gate, _ *history, _ string) { w.run.Set.DiskDefault = 3 * gib }, admit.Amounts{MemMiB: 3072, CPUs: 4, Disk: 3 * gib, Inodes: 96}, nil, ""},
		{"no disk admission", "", func(_ *world, g *gate, _ *history, _ string) { g.limits.Disk = false }, admit.Amounts{MemMiB: 3072, CPUs: 4}, nil, ""},
		{"a wish above the budget is lowered", "CUSTOM_ENV_MICROVM_MEM=4G", func(w *world, g *gate, _ *history, _ string) {
			g.limits.MemMiB, w.run.Set.Limits.BudgetMiB = 3072, 3072
			w.response(`{"id":77,"job_info":{"name":"test unit","project_id":42}}`)
		}, admit.Amounts{MemMiB: 3072, CPUs: 2, Disk: 8 * gib, Inodes: 64}, nil, "virtkit: MICROVM_MEM 4G is over this runner's ceiling: using 3G\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, g, h, key := admitted(t)
			tt.set(w, g, h, key)
			w.prepare(tt.env)
			if d := cmp.Diff([]admit.Ask{{ID: w.id(), Amounts: tt.want, Keep: tt.keep}}, g.asks, cmpopts.IgnoreFields(admit.Ask{}, "Guest")); d != "" {
				t.Error(d)
			}
			if tt.says != "" {
				w.wantTrace(tt.says)
			} else if strings.Contains(w.trace.String(), "reserving") {
				t.Error(w.trace.String())
			}
		})
	}
}

func TestWhatCanNeverBeAdmitted(t *testing.T) {
	for _, tt := range []struct {
		name   string
		set    func(*world, *gate)
		status int
		want   string
	}{
		{"job and services", func(w *world, g *gate) { g.limits.MemMiB, w.run.Set.Limits.BudgetMiB = 3000, 3000 }, 1,
			"the job and its 1 service(s) together declare 3072 MiB, more than the host's whole memory budget of 3000 MiB"},
		{"disk_default", func(w *world, _ *gate) { w.run.Set.DiskDefault = 101 * gib }, 2, "[executor.schedule] disk_default is 101.0 GiB, and the filesystem of /jobs holds 100.0 GiB"},
		{"a budget that is not known", func(w *world, _ *gate) {
			w.run.Set.BudgetErr = fault.New(fault.System, "cannot be read").Hint("give a size")
		}, 2, "cannot be read"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, g, _, _ := admitted(t)
			tt.set(w, g)
			c := w.call()
			err := w.run.Prepare(context.Background(), c)
			if runner.Status(c, err) != tt.status || !strings.Contains(err.Error(), tt.want) || fault.HintOf(err) == "" {
				t.Errorf("status %d, %v", runner.Status(c, err), err)
			}
			if len(g.asks) != 0 || len(w.host.Launched) != 0 {
				t.Error("it was asked for")
			}
		})
	}
}

func TestUsageEndsTheTrace(t *testing.T) {
	w, _, h, key := admitted(t)
	w.host.Cost = func() supervise.Usage {
		return supervise.Usage{Figures: usage.Figures{CPU: 134 * time.Second, Memory: 1638 * mib, Overlay: &usage.Overlay{Used: 1229 * mib, Size: 16 * gib},
			IO: &usage.IO{Read: 3482 * mib, Written: 812 * mib}, Net: &usage.Net{Sent: 3 * mib, Received: 941 * mib}},
			Killed: 3, Victims: []usage.Victim{{Name: "cc1plus", PID: 1234, RSS: 1946 * mib, Uptime: 48 * time.Second}}}
	}
	w.run.Set.FromHistory = true
	w.prepare("CUSTOM_ENV_MICROVM_USAGE_REPORT=yes")
	w.trace.Reset()
	w.host.Shell = exits(1, 0)
	w.stage("build_script", "x", nil)
	if w.trace.Len() != 0 {
		t.Errorf("before the last stage: %s", w.trace.String())
	}
	w.stage("cleanup_file_variables", "x", nil, "CUSTOM_ENV_MICROVM_USAGE_REPORT=yes")
	dir := "" // measured, and so not the same everywhere
	if r, ok := h.jobs[key].Last(); ok && r.JobDir != nil {
		dir = usage.Size(*r.JobDir)
	}
	want := `virtkit: guest OOM: the kernel killed cc1plus (pid 1234, 1.9 GiB RSS) at +48s (raise MICROVM_MEM)
virtkit: guest OOM: the kernel killed 2 more (raise MICROVM_MEM)
virtkit: job resource usage: cpu 2m14s, peak memory 1.6 GiB, overlay 1.2 GiB of 16.0 GiB, read 3.4 GiB, written 812 MiB, sent 3 MiB, received 941 MiB
virtkit: most this job has used lately: memory 1.6 GiB, overlay 1.2 GiB of 16.0 GiB, job dir ` + dir + `, read 3.4 GiB, written 812 MiB, sent 3 MiB, received 941 MiB over 1 run; the next run reserves 2.0 GiB
virtkit: warning: history/x line 3 is skipped
virtkit: 42-acme-web — what its jobs have been using lately:
  job         memory             overlay`
	if got := w.trace.String(); !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "\nvirtkit: 1 job; all at once they would reserve 2.0 GiB, against a budget of 8.0 GiB\n") {
		t.Errorf("%s\n%s", cmp.Diff(want, got), got)
	}
	j := h.jobs[key]
	if len(j.Runs) != 1 || j.Name != "test unit" || j.Runs[0].CeilingMiB != 3072 || j.Runs[0].Inodes == nil || j.Runs[0].ID != w.id() ||
		!cmp.Equal(j.Runs[0].Images, []string{"sha256:0123456789abcdef", "sha256:redis"}) {
		t.Errorf("%+v", j)
	}
	// Cleanup does not remember it again, nor without its last figures.
	w.host.Cost = func() supervise.Usage { return supervise.Usage{} }
	w.run.Cleanup(context.Background(), w.call())
	if r := h.jobs[key].Runs; len(r) != 1 || r[0].Memory != 1638*mib {
		t.Errorf("%+v", r)
	}
}

func TestACancelledJobIsRememberedAtCleanup(t *testing.T) {
	w, _, h, key := admitted(t)
	w.host.Cost = func() supervise.Usage { return supervise.Usage{Figures: usage.Figures{Memory: 7 * mib}} }
	w.prepare()
	if err := w.run.Cleanup(context.Background(), w.call()); err != nil {
		t.Fatal(err)
	}
	if r := h.jobs[key].Runs; len(r) != 1 || r[0].Memory != 7*mib {
		t.Errorf("%+v", r)
	}
	// Of a guest that died nothing is known, and nothing is guessed.
	w.prepare()
	w.host.KillGuest(w.id())
	w.run.Cleanup(context.Background(), w.call())
	if r := h.jobs[key].Runs; len(r) != 1 {
		t.Errorf("%+v", r)
	}
}

func TestUsageThatIsNotKnown(t *testing.T) {
	w, _, h, _ := admitted(t)
	w.response(`{"id":77,"job_info":{"name":"test unit"}}`) // an old runner
	w.env = append(w.env, "CUSTOM_ENV_CI_PROJECT_ID=42", "CUSTOM_ENV_MICROVM_USAGE_REPORT=1")
	w.host.Cost = func() supervise.Usage { return supervise.Usage{Figures: usage.Figures{Memory: 7 * mib}} }
	w.prepare()
	w.trace.Reset()
	w.stage("cleanup_file_variables", "x", nil)
	want := "virtkit: job resource usage: cpu 0s, peak memory 7 MiB\n" +
		"virtkit: warning: MICROVM_USAGE_REPORT: this runner does not say which project the job is of (JOB_RESPONSE_FILE), so that there is no report\n"
	if d := cmp.Diff(want, w.trace.String()); d != "" || len(h.jobs) != 0 {
		t.Error(d, h.jobs)
	}
	// A guest that is gone, and a history that cannot be written.
	w, _, h, key := admitted(t)
	w.prepare()
	w.trace.Reset()
	w.stage("cleanup_file_variables", "x", nil, "CUSTOM_ENV_MICROVM_USAGE_REPORT=on")
	if d := cmp.Diff("virtkit: nothing is remembered of 42-acme-web yet\n", w.trace.String()); d != "" {
		t.Error(d)
	}
	w.host.Cost = func() supervise.Usage { return supervise.Usage{} }
	h.err = errors.New("disk full")
	w.trace.Reset()
	if code, _, err := w.stage("cleanup_file_variables", "x", nil); code != 0 || err != nil {
		t.Error(code, err)
	}
	w.wantTrace("virtkit: job resource usage: cpu 0s, peak memory 0 B\n", "virtkit: warning: disk full\n")
	if _, ok := h.jobs[key]; ok {
		t.Error("remembered")
	}
	c := w.call("CUSTOM_ENV_MICROVM_USAGE_REPORT=maybe")
	if _, err := w.run.Config(c); runner.Status(c, err) != 1 || !strings.Contains(err.Error(), `MICROVM_USAGE_REPORT: "maybe" is neither on nor off`) {
		t.Errorf("%v", err)
	}
}

func TestAPrepareThatFindsNoRoomNamesTheFilesystem(t *testing.T) {
	w, g, _, _ := admitted(t)
	g.room.Free, g.room.FreeInodes = gib/2, 1<<18
	w.host.LaunchErr = fault.New(fault.System, "starting guest x: disk: write /jobs/x/upper.img: no space left on device")
	c := w.call()
	err := w.run.Prepare(context.Background(), c)
	if runner.Status(c, err) != 2 || !strings.Contains(err.Error(), "no room on the filesystem of /jobs, which is 100% used now that what this attempt wrote is removed (512 MiB free of 100.0 GiB; 75% of its inodes)") ||
		!strings.Contains(err.Error(), "upper.img") || fault.HintOf(err) == "" {
		t.Errorf("%v", err)
	}
}
