package ledger_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

func open(t *testing.T) *ledger.Jobs {
	t.Helper()
	j, err := ledger.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func reserve(t *testing.T, j *ledger.Jobs, s supervise.Spec) *ledger.Reservation {
	t.Helper()
	r, err := j.Reserve(t.Context(), s)
	if err != nil {
		t.Fatalf("Reserve(%s, %s) = %v", s.ID, s.Name, err)
	}
	t.Cleanup(func() { r.Lock.Close() })
	return r
}

func writeState(t *testing.T, dir string, st supervise.State) {
	t.Helper()
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, supervise.StateFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestReserve(t *testing.T) {
	j := open(t)
	r := reserve(t, j, supervise.Spec{Kind: "run"})
	if !strings.HasPrefix(r.Spec.ID, "run-") || len(r.Spec.ID) != 12 || r.Spec.Name != r.Spec.ID || r.Dir != filepath.Join(j.Dir(), r.Spec.ID) {
		t.Errorf("Reserve = %+v", r.Spec)
	}
	if fi, err := os.Stat(r.Dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("mode = %v, %v", fi.Mode(), err)
	}
	web := reserve(t, j, supervise.Spec{Name: "web"})
	for _, s := range []supervise.Spec{{Name: "web"}, {Name: web.Spec.ID}, {ID: web.Spec.ID}} {
		if _, err := j.Reserve(t.Context(), s); fault.KindOf(err) != fault.Conflict || fault.HintOf(err) == "" {
			t.Errorf("Reserve(%q, %q) = %v, want a conflict with a hint", s.ID, s.Name, err)
		}
	}
	for _, bad := range []string{"../x", ".x", "-x", "a b", strings.Repeat("x", 200), "é"} {
		if _, err := j.Reserve(t.Context(), supervise.Spec{Name: bad}); fault.KindOf(err) != fault.Usage {
			t.Errorf("Reserve(%q) = %v, want usage", bad, err)
		}
	}
	if err := web.Release(); err != nil {
		t.Fatal(err)
	}
	if err := web.Release(); err != nil {
		t.Errorf("second Release = %v", err)
	}
	reserve(t, j, supervise.Spec{Name: "web"})
}

// Of many who want the same name at once, one gets it.
func TestReserveRace(t *testing.T) {
	j := open(t)
	var mu sync.Mutex
	got := 0
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			r, err := j.Reserve(t.Context(), supervise.Spec{Name: "one"})
			if err == nil {
				mu.Lock()
				got++
				mu.Unlock()
				t.Cleanup(func() { r.Lock.Close() })
			} else if fault.KindOf(err) != fault.Conflict {
				t.Errorf("Reserve = %v", err)
			}
		})
	}
	wg.Wait()
	if got != 1 {
		t.Errorf("%d got the name, want 1", got)
	}
}

func TestGitLabID(t *testing.T) {
	for _, c := range []struct {
		id   int64
		slug string
		want string
	}{
		{42, "Test: Unit/É", "42-test-unit"},
		{7, "", "7"},
		{7, "../..", "7"},
		{1, strings.Repeat("ab/", 100), "1" + strings.Repeat("-ab", 26) + "-"},
	} {
		got := ledger.GitLabID(c.id, c.slug)
		if c.id != 1 && got != c.want || len(got) > 82 || !ledger.ValidName(got) {
			t.Errorf("GitLabID(%d, %.20q) = %q, want %q", c.id, c.slug, got, c.want)
		}
	}
}

func TestList(t *testing.T) {
	j := open(t)
	now := time.Now().UTC().Truncate(time.Second)
	img := supervise.Image{Ref: "local/default", Digest: "sha256:1"}
	live := reserve(t, j, supervise.Spec{ID: "run-b", Name: "live", Kind: "run", Created: now.Add(time.Second), Image: img, CPUs: 2, MemMiB: 512})
	writeState(t, live.Dir, supervise.State{Phase: supervise.Running, Stage: "running", PID: 10, VMMPID: 11, Boots: 1, Addr: "10.0.0.2/24", Accel: "tcg"})
	dead := reserve(t, j, supervise.Spec{ID: "run-a", Name: "dead", Kind: "run", Created: now})
	writeState(t, dead.Dir, supervise.State{Phase: supervise.Running, PID: 12})
	dead.Lock.Close()
	ended := reserve(t, j, supervise.Spec{ID: "9-job", Name: "ended", Kind: "gitlab", Keep: true, Created: now.Add(2 * time.Second)})
	writeState(t, ended.Dir, supervise.State{Phase: supervise.Ended, Exit: &supervise.Exit{Reason: "panic"}})
	ended.Lock.Close()
	reserve(t, j, supervise.Spec{ID: "run-c", Name: "young", Created: now.Add(3 * time.Second)})
	os.WriteFile(filepath.Join(j.Dir(), "notes.txt"), nil, 0o600)
	os.Mkdir(filepath.Join(j.Dir(), "foreign"), 0o700)

	jobs, problems, err := j.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []ledger.Job{
		{ID: "run-a", Name: "dead", Kind: "run", Status: ledger.Dead, Created: now, Dir: dead.Dir},
		{ID: "run-b", Name: "live", Kind: "run", Status: "running", Stage: "running", Image: "local/default", Digest: "sha256:1",
			Created: now.Add(time.Second), CPUs: 2, MemMiB: 512, Accel: "tcg", Addr: "10.0.0.2/24", PID: 10, VMMPID: 11, Boots: 1, Dir: live.Dir},
		{ID: "9-job", Name: "ended", Kind: "gitlab", Status: "ended", Created: now.Add(2 * time.Second), Keep: true,
			Exit: &supervise.Exit{Reason: "panic"}, Dir: ended.Dir},
		{ID: "run-c", Name: "young", Status: "starting", Created: now.Add(3 * time.Second), Dir: j.Path("run-c")},
	}
	if d := cmp.Diff(want, jobs); d != "" {
		t.Errorf("List (-want +got):\n%s", d)
	}
	if len(problems) != 2 {
		t.Errorf("problems = %v, want one for the file and one for the foreign directory", problems)
	}
	for q, id := range map[string]string{"run-a": "run-a", "live": "run-b", "ended": "9-job", "9-": "9-job"} {
		if got, err := j.Find(t.Context(), q); err != nil || got.ID != id {
			t.Errorf("Find(%q) = %q, %v; want %q", q, got.ID, err, id)
		}
	}
	if _, err := j.Find(t.Context(), "nobody"); fault.KindOf(err) != fault.NotFound || !strings.Contains(fault.HintOf(err), "live") {
		t.Errorf("Find(nobody) = %v, hint %q", err, fault.HintOf(err))
	}
	if _, err := j.Find(t.Context(), "run-"); fault.KindOf(err) != fault.Usage {
		t.Errorf("Find(run-) = %v, want usage", err)
	}
}

func TestJobJSONIsStable(t *testing.T) {
	b, err := json.Marshal(ledger.Job{ID: "i", Created: time.Unix(0, 0).UTC(), Exit: &supervise.Exit{Reason: "panic"}})
	if err != nil {
		t.Fatal(err)
	}
	want := `{"id":"i","name":"","kind":"","status":"","image":"","created":"1970-01-01T00:00:00Z","cpus":0,"mem_mib":0,"exit":{"reason":"panic"},"dir":""}`
	if string(b) != want {
		t.Errorf("Job = %s\nwant  %s", b, want)
	}
}

// sleeper is a process that stands for a VMM.
func sleeper(t *testing.T) supervise.Owner {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go cmd.Wait()
	t.Cleanup(func() { cmd.Process.Kill() })
	o, err := supervise.ProcessOwner(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestSweep(t *testing.T) {
	j := open(t)
	dead := func(s supervise.Spec) *ledger.Reservation {
		r := reserve(t, j, s)
		r.Lock.Close()
		return r
	}
	runner, gone := sleeper(t), supervise.Owner{PID: os.Getpid(), Start: 1}
	vmm, other := sleeper(t), sleeper(t)
	service := sleeper(t) // the VMM of a dead job's service
	now := time.Now()
	reserve(t, j, supervise.Spec{ID: "live"})
	d := dead(supervise.Spec{ID: "dead"})
	writeState(t, d.Dir, supervise.State{Phase: supervise.Running, VMMPID: vmm.PID, VMMStart: vmm.Start})
	sd := supervise.ServiceDir(d.Dir, "db")
	if err := os.MkdirAll(sd, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sd, supervise.LockFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	writeState(t, sd, supervise.State{Phase: supervise.Running, VMMPID: service.PID, VMMStart: service.Start})
	d = dead(supervise.Spec{ID: "reused"}) // its VMM's number is another process's now
	writeState(t, d.Dir, supervise.State{Phase: supervise.Running, VMMPID: other.PID, VMMStart: other.Start + 1})
	dead(supervise.Spec{ID: "kept", Kind: "run", Keep: true})
	dead(supervise.Spec{ID: "kept-gitlab", Kind: "gitlab", Keep: true, Owner: runner})
	dead(supervise.Spec{ID: "kept-no-runner", Kind: "gitlab", Keep: true, Owner: gone})
	dead(supervise.Spec{ID: "kept-deadline", Kind: "gitlab", Keep: true, Owner: runner, Deadline: now.Add(-time.Hour)})
	for _, n := range []string{".new-abandoned", ".new-young", ".dead-x", "foreign"} {
		if err := os.Mkdir(filepath.Join(j.Dir(), n), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	old := now.Add(-time.Hour)
	os.Chtimes(filepath.Join(j.Dir(), ".new-abandoned"), old, old)
	busy := filepath.Join(j.Dir(), ".new-busy")
	os.Mkdir(busy, 0o700)
	lock, err := fsx.TryLock(filepath.Join(busy, supervise.LockFile), false)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	os.WriteFile(filepath.Join(j.Dir(), "notes.txt"), nil, 0o600)
	if err := os.Symlink("/", filepath.Join(j.Dir(), "link")); err != nil {
		t.Fatal(err)
	}

	before := names(t, j.Dir())
	dry, err := j.Sweep(t.Context(), ledger.SweepOptions{DryRun: true})
	if err != nil || !slices.Equal(dry.Killed, []int{vmm.PID, service.PID}) || !vmm.Alive() || !service.Alive() {
		t.Errorf("dry run = %+v, %v; want the VMMs %d and %d told and alive", dry, err, vmm.PID, service.PID)
	}
	// The sweep's own lock file is all that may be new.
	left := slices.DeleteFunc(names(t, j.Dir()), func(n string) bool { return n == ".sweep" })
	if !slices.Equal(left, before) {
		t.Errorf("after a dry run there is %q, before %q", left, before)
	}
	w, err := j.Sweep(t.Context(), ledger.SweepOptions{})
	if err != nil || len(w.Problems) > 0 {
		t.Fatalf("Sweep = %+v, %v", w, err)
	}
	if !slices.Equal(dry.Removed, w.Removed) {
		t.Errorf("a dry run tells of %q, but %q went", dry.Removed, w.Removed)
	}
	slices.Sort(w.Removed)
	if want := []string{".dead-x", ".new-abandoned", "dead", "kept-deadline", "kept-no-runner", "reused"}; !slices.Equal(w.Removed, want) {
		t.Errorf("Removed = %q, want %q", w.Removed, want)
	}
	slices.Sort(w.Skipped)
	if want := []string{"foreign", "link", "notes.txt"}; !slices.Equal(w.Skipped, want) {
		t.Errorf("Skipped = %q, want %q", w.Skipped, want)
	}
	if !slices.Equal(w.Killed, []int{vmm.PID, service.PID}) || vmm.Alive() || service.Alive() || !other.Alive() {
		t.Errorf("Killed = %v; want the VMMs %d and %d alone", w.Killed, vmm.PID, service.PID)
	}
	left = names(t, j.Dir())
	if want := []string{".lock", ".new-busy", ".new-young", ".sweep", "foreign", "kept", "kept-gitlab", "link", "live", "notes.txt"}; !slices.Equal(left, want) {
		t.Errorf("left = %q, want %q", left, want)
	}
	// In ten days.
	w, err = j.Sweep(t.Context(), ledger.SweepOptions{Now: func() time.Time { return now.Add(240 * time.Hour) }})
	slices.Sort(w.Removed)
	if want := []string{".new-young", "kept", "kept-gitlab"}; err != nil || !slices.Equal(w.Removed, want) {
		t.Errorf("later Removed = %q, %v; want %q", w.Removed, err, want)
	}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	ents, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range ents {
		out = append(out, e.Name())
	}
	return out
}

func TestSweepNeverWaits(t *testing.T) {
	j := open(t)
	reserve(t, j, supervise.Spec{ID: "dead"}).Lock.Close()
	l, err := fsx.TryLock(filepath.Join(j.Dir(), ".sweep"), false)
	if err != nil {
		t.Fatal(err)
	}
	if w, err := j.Sweep(t.Context(), ledger.SweepOptions{}); err != nil || !w.Busy || len(w.Removed) != 0 {
		t.Errorf("Sweep beside another = %+v, %v; want busy", w, err)
	}
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if w, err := j.Sweep(ctx, ledger.SweepOptions{}); !errors.Is(err, context.Canceled) || len(w.Removed) != 0 {
		t.Errorf("Sweep with no time = %+v, %v", w, err)
	}
}

func TestSweepRefusesMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts a tmpfs")
	}
	j := open(t)
	r := reserve(t, j, supervise.Spec{ID: "dead"})
	r.Lock.Close()
	mnt := filepath.Join(r.Dir, "mnt")
	os.Mkdir(mnt, 0o700)
	if err := unix.Mount("tmpfs", mnt, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	f := filepath.Join(mnt, "precious")
	os.WriteFile(f, nil, 0o600)
	w, err := j.Sweep(t.Context(), ledger.SweepOptions{})
	if err != nil || len(w.Problems) != 1 || !errors.Is(w.Problems[0], fsx.ErrMounted) {
		t.Errorf("Sweep = %+v, %v; want a problem that names the mount", w, err)
	}
	ents := names(t, j.Dir())
	i := slices.IndexFunc(ents, func(n string) bool { return strings.HasPrefix(n, ".dead-dead-") })
	if i < 0 {
		t.Fatalf("left = %q", ents)
	}
	mnt = filepath.Join(j.Dir(), ents[i], "mnt")
	if _, err := os.Stat(filepath.Join(mnt, "precious")); err != nil {
		t.Errorf("the mounted file is gone: %v", err)
	}
	if err := unix.Unmount(mnt, 0); err != nil {
		t.Fatal(err)
	}
	if w, err := j.Sweep(t.Context(), ledger.SweepOptions{}); err != nil || len(w.Removed) != 1 {
		t.Errorf("Sweep after the unmount = %+v, %v", w, err)
	}
}

func TestRemove(t *testing.T) {
	j := open(t)
	r := reserve(t, j, supervise.Spec{ID: "1-job", Kind: "gitlab", Keep: true})
	if err := j.Remove(t.Context(), "1-job"); fault.KindOf(err) != fault.Conflict {
		t.Errorf("Remove of a live job = %v, want a conflict", err)
	}
	vmm := sleeper(t)
	writeState(t, r.Dir, supervise.State{VMMPID: vmm.PID, VMMStart: vmm.Start})
	r.Lock.Close()
	for range 2 {
		if err := j.Remove(t.Context(), "1-job"); err != nil {
			t.Errorf("Remove = %v", err)
		}
	}
	if vmm.Alive() {
		t.Error("the VMM lives")
	}
	if _, err := os.Lstat(r.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
	if err := j.Remove(t.Context(), "../x"); fault.KindOf(err) != fault.Usage {
		t.Errorf("Remove(../x) = %v", err)
	}
}

// A removal that was killed half-way is ended by the next one, one that goes on
// is left to whoever does it, and other jobs' are none of its business.
func TestRemoveEndsWhatWasBegun(t *testing.T) {
	j := open(t)
	dirs := []string{".dead-1-job-0123abcd", ".dead-1-job-4567cdef", ".dead-1-job-beside-01234567", ".dead-1-job-89ab0123", ".dead-1-job-0123ab"}
	for i, n := range dirs {
		dir := filepath.Join(j.Dir(), n)
		if err := os.MkdirAll(filepath.Join(dir, "vmm"), 0o700); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			continue // its lock is gone already
		}
		l, err := fsx.TryLock(filepath.Join(dir, supervise.LockFile), false)
		if err != nil {
			t.Fatal(err)
		}
		if n == ".dead-1-job-89ab0123" {
			defer l.Close()
		} else {
			l.Close()
		}
	}
	check := func(when string, want ...string) {
		t.Helper()
		var got []string
		for _, n := range names(t, j.Dir()) {
			if strings.HasPrefix(n, ".dead-") {
				got = append(got, n)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: left = %q, want %q", when, got, want)
		}
	}
	if err := j.Remove(t.Context(), "1-job"); err != nil {
		t.Errorf("Remove = %v", err)
	}
	check("of a job that is gone", ".dead-1-job-0123ab", ".dead-1-job-89ab0123", ".dead-1-job-beside-01234567")
	reserve(t, j, supervise.Spec{ID: "1-job-beside", Kind: "gitlab", Keep: true}).Lock.Close()
	if err := j.Remove(t.Context(), "1-job-beside"); err != nil {
		t.Errorf("Remove = %v", err)
	}
	check("of a job that is there", ".dead-1-job-0123ab", ".dead-1-job-89ab0123")
}

func TestOpenOfWhatCannotBe(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	os.WriteFile(file, nil, 0o600)
	if _, err := ledger.Open(file); err == nil || fault.HintOf(err) == "" || !strings.Contains(err.Error(), file) {
		t.Errorf("Open of a file = %v, hint %q", err, fault.HintOf(err))
	}
}
