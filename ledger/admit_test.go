package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/admit"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/ledger"
)

// gate is the admission of a host with a budget of memory alone.
func gate(t testing.TB, j *ledger.Jobs, budget int64, more ...func(*ledger.AdmitOptions)) *ledger.Admissions {
	t.Helper()
	o := ledger.AdmitOptions{Limits: admit.Limits{MemMiB: budget}, Wait: time.Minute}
	for _, f := range more {
		f(&o)
	}
	a, err := j.Admissions(o)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func mem(id string, mib int64) admit.Ask {
	return admit.Ask{ID: id, Amounts: admit.Amounts{MemMiB: mib}}
}

// lines collects what an ask says.
type lines struct {
	mu  sync.Mutex
	all []string
	// first is closed by the first line.
	first chan struct{}
}

func newLines() *lines { return &lines{first: make(chan struct{})} }

func (l *lines) say(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all = append(l.all, s); len(l.all) == 1 {
		close(l.first)
	}
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.all, "\n")
}

// admitNow wants an ask to be granted without a word.
func admitNow(t testing.TB, a *ledger.Admissions, ask admit.Ask) admit.Held {
	t.Helper()
	h, err := a.Admit(t.Context(), ask, func(s string) { t.Errorf("%s: %s", ask.ID, s) })
	if err != nil {
		t.Fatalf("Admit(%s) = %v", ask.ID, err)
	}
	t.Cleanup(func() { h.Release() })
	return h
}

type outcome struct {
	h   admit.Held
	err error
}

// admitLater starts an ask and returns once it waits.
func admitLater(t testing.TB, a *ledger.Admissions, ask admit.Ask) (*lines, <-chan outcome) {
	t.Helper()
	l, done := newLines(), make(chan outcome, 1)
	go func() {
		h, err := a.Admit(t.Context(), ask, l.say)
		done <- outcome{h, err}
	}()
	select {
	case <-l.first:
	case o := <-done:
		t.Fatalf("%s did not wait: %v", ask.ID, o.err)
	}
	return l, done
}

func granted(t testing.TB, done <-chan outcome) admit.Held {
	t.Helper()
	o := <-done
	if o.err != nil {
		t.Fatal(o.err)
	}
	t.Cleanup(func() { o.h.Release() })
	return o.h
}

func claims(t testing.TB, a *ledger.Admissions) map[string]bool {
	t.Helper()
	all, problems, err := a.Claims(t.Context())
	if err != nil || problems != nil {
		t.Fatal(err, problems)
	}
	out := map[string]bool{}
	for _, c := range all {
		out[c.ID] = c.Waiting
	}
	return out
}

func TestAJobWaitsForMemoryInItsTurn(t *testing.T) {
	j := open(t)
	a := admitNow(t, gate(t, j, 4096), mem("1-a", 3072))
	large, largeDone := admitLater(t, gate(t, j, 4096), mem("2-large", 4096))
	// It would fit, and asked later.
	small, smallDone := admitLater(t, gate(t, j, 4096), mem("3-small", 512))
	if d := cmp.Diff(map[string]bool{"1-a": false, "2-large": true, "3-small": true}, claims(t, gate(t, j, 4096))); d != "" {
		t.Error(d)
	}
	for _, id := range []string{"1-a", "2-large"} {
		st, err := os.Stat(filepath.Join(filepath.Dir(j.Dir()), "admit", id))
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", id, st, err)
		}
	}
	if err := a.Release(); err != nil {
		t.Fatal(err)
	}
	h := granted(t, largeDone)
	select {
	case <-smallDone:
		t.Error("the small one did not wait for the large one, which fills the budget")
	default:
	}
	h.Release()
	granted(t, smallDone)
	after := " after waiting 0s for memory"
	if got, want := large.text(), "waiting for 4096 MiB of the host's 4096 MiB memory budget (3072 MiB reserved, 0 job(s) asked first)\nadmitted"+after; got != want && !strings.HasPrefix(got, want[:90]) {
		t.Errorf("large:\n%s\nwant\n%s", got, want)
	}
	if got := small.text(); !strings.HasPrefix(got, "waiting for 512 MiB of the host's 4096 MiB memory budget (3072 MiB reserved, 1 job(s) asked first)\n") {
		t.Errorf("small:\n%s", got)
	}
}

func TestWaitingEndsAtItsLimitAndWithItsContext(t *testing.T) {
	j := open(t)
	admitNow(t, gate(t, j, 1024), mem("1-a", 1024))
	_, err := gate(t, j, 1024, func(o *ledger.AdmitOptions) { o.Wait = 0 }).Admit(t.Context(), mem("2-b", 512), func(string) {})
	if fault.KindOf(err) != fault.Busy || fault.HintOf(err) == "" ||
		err.Error() != "gave up after 0s of waiting for 512 MiB of the host's 1024 MiB memory budget (1024 MiB reserved, 0 job(s) asked first)" {
		t.Errorf("%v", err)
	}
	_, err = gate(t, j, 1024, func(o *ledger.AdmitOptions) { o.Wait = time.Millisecond }).Admit(t.Context(), mem("2-b", 512), func(string) {})
	if fault.KindOf(err) != fault.Busy {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("terminated")
	_, err = gate(t, j, 1024).Admit(ctx, mem("2-b", 512), func(string) { cancel(stop) })
	if !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
	if d := cmp.Diff(map[string]bool{"1-a": false}, claims(t, gate(t, j, 1024))); d != "" {
		t.Error(d)
	}
	if _, err := gate(t, j, 1024).Admit(t.Context(), mem("3-c", 1025), nil); err == nil || fault.HintOf(err) == "" {
		t.Errorf("more than the budget: %v", err)
	}
	if _, err := gate(t, j, 1024).Admit(t.Context(), mem("1-a", 1), nil); fault.KindOf(err) != fault.Conflict {
		t.Errorf("the same job again: %v", err)
	}
}

func TestWithoutLimitsNothingIsClaimed(t *testing.T) {
	j := open(t)
	g := gate(t, j, 0)
	h := admitNow(t, g, mem("1-a", 1<<40))
	if h.File() != nil || len(claims(t, g)) != 0 {
		t.Error("a claim")
	}
	if h, refused, err := g.Offer(t.Context(), "x", admit.Amounts{MemMiB: 1 << 40}); err != nil || refused != "" || h.File() != nil {
		t.Error(refused, err)
	}
}

func TestStrangersInTheLedgerAreToldAndLeft(t *testing.T) {
	j := open(t)
	g := gate(t, j, 1024)
	dir := filepath.Join(filepath.Dir(j.Dir()), "admit")
	for name, text := range map[string]string{"notes.txt": "hello", "9-later": `{"schema":"vk.claim/2"}`, "8-cut": `{"schema":"vk.cl`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, ".new-dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	// Dead: the leavings of a process that was killed, and of a power loss.
	for name, text := range map[string]string{"7-dead": `{"schema":"vk.claim/1","granted":{"mem_mib":1024}}`, "6-lost": "\x00\x00\x00", ".new-1": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l := newLines()
	h, err := g.Admit(t.Context(), mem("1-a", 1024), l.say)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	for _, n := range []string{"notes.txt", "9-later", "8-cut", "link", ".new-dir"} {
		if !strings.Contains(l.text(), "warning: ") || !strings.Contains(l.text(), filepath.Join(dir, n)) {
			t.Errorf("%s is not told of:\n%s", n, l.text())
		}
		if _, err := os.Lstat(filepath.Join(dir, n)); err != nil {
			t.Error(err)
		}
	}
	for _, n := range []string{"7-dead", "6-lost", ".new-1"} {
		if _, err := os.Lstat(filepath.Join(dir, n)); err == nil {
			t.Errorf("%s is still there", n)
		}
	}
}

// The claim of a process that is killed is free at once, and one that was handed
// over lives as long as who inherited it.
func TestTheKernelDropsAClaim(t *testing.T) {
	j := open(t)
	g := gate(t, j, 1024)
	h := admitNow(t, g, mem("1-a", 1024))
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	holder := exec.Command("/bin/sh", "-c", "read line")
	holder.Stdin, holder.ExtraFiles = in, []*os.File{h.File()}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	defer out.Close()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	l, done := admitLater(t, gate(t, j, 1024), mem("2-b", 1024))
	if err := g.Release("1-a"); err != nil {
		t.Fatal(err)
	}
	if !claims(t, g)["2-b"] || claims(t, g)["1-a"] {
		t.Errorf("a claim that is held was taken: %v", claims(t, g))
	}
	holder.Process.Kill()
	holder.Wait()
	granted(t, done)
	if !strings.Contains(l.text(), "\nadmitted after waiting ") {
		t.Error(l.text())
	}
	if _, there := claims(t, g)["1-a"]; there {
		t.Error("the dead claim is still there")
	}
	for _, id := range []string{"1-a", "nosuch", "../x"} {
		if err := g.Release(id); err != nil {
			t.Errorf("Release(%s) = %v", id, err)
		}
	}
}

func TestReservations(t *testing.T) {
	j := open(t)
	g := gate(t, j, 4096)
	offer := func(id string, mib int64) (admit.Held, string) {
		t.Helper()
		h, refused, err := g.Offer(t.Context(), id, admit.Amounts{MemMiB: mib})
		if err != nil {
			t.Fatal(err)
		}
		return h, refused
	}
	r, refused := offer("r1", 2048)
	if refused != "" || r.File() == nil {
		t.Fatal(refused)
	}
	if _, refused := offer("r2", 2049); refused != "memory" {
		t.Errorf("refused %q, want memory", refused)
	}
	if _, ok := claims(t, g)["reservation-r1"]; !ok {
		t.Error(claims(t, g))
	}
	// It becomes a job's, whose driver holds it by descriptor.
	h, err := g.Name(t.Context(), r.File(), "77-job")
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	if d := cmp.Diff(map[string]bool{"77-job": false}, claims(t, g)); d != "" {
		t.Error(d)
	}
	if _, err := g.Name(t.Context(), h.File(), "77-job"); err == nil {
		t.Error("named twice")
	}
	// The job needs more, and waits for that alone, before who asks later.
	other := admitNow(t, gate(t, j, 4096), mem("78-other", 2048))
	more := admit.Ask{ID: "77-job", Amounts: admit.Amounts{MemMiB: 3072}, Prior: h.File()}
	_, done := admitLater(t, gate(t, j, 4096), more)
	h.Close()
	_, later := admitLater(t, gate(t, j, 4096), mem("79-later", 2048))
	if _, refused := offer("r3", 0); refused != "memory" {
		t.Errorf("an offer overtakes who waits: refused %q", refused)
	}
	other.Release()
	h = granted(t, done)
	if !claims(t, g)["79-later"] {
		t.Error("later one was admitted beside 3072 of 4096")
	}
	// Another one needs less, and gives the rest back.
	less := admitNow(t, gate(t, j, 4096), admit.Ask{ID: "77-job", Amounts: admit.Amounts{MemMiB: 512}, Prior: h.File()})
	h.Close()
	granted(t, later)
	less.Release()
	if _, err := gate(t, j, 4096).Admit(t.Context(), admit.Ask{ID: "77-job", Prior: devNull(t)}, func(string) {}); err == nil {
		t.Error("/dev/null was taken for a claim")
	}
}

// A job that is handed a reservation by descriptor holds that, not two.
func TestAReservationBecomesTheJobs(t *testing.T) {
	j := open(t)
	g := gate(t, j, 4096)
	r, refused, err := g.Offer(t.Context(), "r1", admit.Amounts{MemMiB: 2048})
	if err != nil || refused != "" {
		t.Fatal(refused, err)
	}
	defer r.Close() // who held it keeps its descriptor for a while
	h := admitNow(t, gate(t, j, 4096), admit.Ask{ID: "77-job", Amounts: admit.Amounts{MemMiB: 2048}, Prior: r.File()})
	if d := cmp.Diff(map[string]bool{"77-job": false}, claims(t, g)); d != "" {
		t.Error(d)
	}
	admitNow(t, gate(t, j, 4096), mem("78-other", 2048)).Release()
	// What was handed over is nobody else's any more.
	if _, err := gate(t, j, 4096).Admit(t.Context(), admit.Ask{ID: "79-thief", Amounts: admit.Amounts{MemMiB: 1}, Prior: r.File()}, func(string) {}); err == nil {
		t.Error("one reservation became the claims of two jobs")
	}
	// Nor is a claim that was replaced under its name.
	newer := admitNow(t, gate(t, j, 4096), admit.Ask{ID: "77-job", Amounts: admit.Amounts{MemMiB: 1}, Prior: h.File()})
	defer newer.Release()
	if _, err := gate(t, j, 4096).Admit(t.Context(), admit.Ask{ID: "77-job", Amounts: admit.Amounts{MemMiB: 1}, Prior: h.File()}, func(string) {}); err == nil {
		t.Error("a descriptor of an older claim was taken for the one of that name")
	}
	// Giving the older one up leaves the newer.
	h.Release()
	if c := claims(t, g); len(c) != 1 {
		t.Errorf("the newer claim is gone with the older: %v", c)
	}
}

func devNull(t *testing.T) *os.File {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// disk is a filesystem of a size, of which the job directories take theirs.
func disk(size int64, evict func(need int64, keep []string) admit.Evicted) func(*ledger.AdmitOptions) {
	return func(o *ledger.AdmitOptions) {
		o.Limits = admit.Limits{Disk: true}
		o.Room = func(dir string) (admit.Room, error) {
			used, _, err := fsx.Taken(dir)
			return admit.Room{Path: dir, Size: size, Free: size - used, Inodes: 1000, FreeInodes: 100}, err
		}
		if evict != nil {
			o.Evict = func(_ context.Context, need int64, keep []string) (admit.Evicted, error) {
				return evict(need, keep), nil
			}
		}
	}
}

const mib = 1 << 20

func room(id string, bytes, inodes int64) admit.Ask {
	return admit.Ask{ID: id, Amounts: admit.Amounts{Disk: bytes, Inodes: inodes}}
}

func write(t *testing.T, path string, n int) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, n), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAJobWaitsForRoom(t *testing.T) {
	j := open(t)
	g := func(more ...func(*ledger.AdmitOptions)) *ledger.Admissions {
		return gate(t, j, 0, append([]func(*ledger.AdmitOptions){disk(100*mib, nil)}, more...)...)
	}
	// Alone it never waits, whatever it expects.
	a := admitNow(t, g(), room("1-a", 400*mib, 1<<40))
	a.Release()
	a = admitNow(t, g(), room("1-a", 60*mib, 1))
	// What it has written is gone from the free space already.
	write(t, filepath.Join(j.Path("1-a"), "upper.img"), 50*mib)
	b := admitNow(t, g(), room("2-b", 39*mib, 1))
	l, done := admitLater(t, g(), room("3-c", 2*mib, 1))
	want := fmt.Sprintf("waiting for 2 MiB of room in %s (50 MiB free, 49 MiB still to be written by the jobs admitted there, 0 job(s) asked first)", j.Dir())
	if got, _, _ := strings.Cut(l.text(), "\n"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	b.Release()
	c := granted(t, done)
	if !strings.HasSuffix(l.text(), "s for disk space") {
		t.Error(l.text())
	}
	// One that expects all there is asks for no more than could come free.
	big, bigDone := admitLater(t, g(), room("4-big", 400*mib, 1))
	a.Release()
	os.RemoveAll(j.Path("1-a"))
	// 3-c has its 2 MiB still to write, and then holds them.
	write(t, filepath.Join(j.Path("3-c"), "f"), 2*mib)
	select {
	case o := <-bigDone:
		t.Errorf("admitted beside one that holds what it asks for: %v", o.err)
	case <-time.After(200 * time.Millisecond): // several decisions
	}
	c.Release()
	granted(t, bigDone)
	if got := big.text(); !strings.HasPrefix(got, "waiting for 400 MiB of room in ") {
		t.Error(got)
	}
}

func TestInodesAreCountedToo(t *testing.T) {
	j := open(t)
	g := func() *ledger.Admissions { return gate(t, j, 0, disk(100*mib, nil)) }
	a := admitNow(t, g(), room("1-a", mib, 60))
	write(t, filepath.Join(j.Path("1-a"), "f"), 0) // 2 inodes: the directory and the file
	l, done := admitLater(t, g(), room("2-b", mib, 43))
	want := fmt.Sprintf("waiting for 43 inodes in %s (100 free, 58 still to be made by the jobs admitted there, 0 job(s) asked first)", j.Dir())
	if got, _, _ := strings.Cut(l.text(), "\n"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	a.Release()
	granted(t, done)
	if !strings.HasSuffix(l.text(), " for inodes") {
		t.Error(l.text())
	}
}

func TestImagesMakeRoom(t *testing.T) {
	j := open(t)
	cache := int64(30 * mib) // that could be evicted
	var asked []int64
	var kept []string
	opt := disk(100*mib, func(need int64, keep []string) admit.Evicted {
		asked, kept = append(asked, need), keep
		if need > cache {
			return admit.Evicted{Could: cache}
		}
		os.RemoveAll(j.Path("cache"))
		return admit.Evicted{Images: 3, Chunks: 41, Bytes: 40 * mib}
	})
	write(t, filepath.Join(j.Path("cache"), "blob"), 40*mib)
	admitNow(t, gate(t, j, 0, opt), room("1-a", 20*mib, 1))
	ask := room("2-b", 50*mib, 1)
	ask.Keep = []string{"sha256:x"}
	l := newLines()
	h, err := gate(t, j, 0, opt).Admit(t.Context(), ask, l.say)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	state := filepath.Dir(j.Dir())
	want := fmt.Sprintf("evicted 3 unused image(s) and 41 unreferenced cache chunk file(s) under %s for room in %s: 40 MiB freed of the 10 MiB needed", state, j.Dir())
	if d := cmp.Diff(want, l.text()); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"sha256:x"}, kept); d != "" || len(asked) != 1 || asked[0]>>20 != 10 {
		t.Error(d, asked)
	}
	// Too little could come free: it waits, and asks again once it would be
	// enough.
	asked = nil
	clock := time.Now()
	var mu sync.Mutex
	now := func(o *ledger.AdmitOptions) {
		o.Now = func() time.Time { mu.Lock(); defer mu.Unlock(); return clock }
	}
	tries := make(chan int64, 10)
	never := disk(100*mib, func(need int64, _ []string) admit.Evicted {
		tries <- need
		return admit.Evicted{Could: 5 * mib}
	})
	_, done := admitLater(t, gate(t, j, 0, never, now), room("3-c", 40*mib, 1))
	if n := <-tries; n>>20 != 10 {
		t.Errorf("asked for %d", n)
	}
	select {
	case n := <-tries:
		t.Errorf("asked for %d again at once", n)
	default:
	}
	mu.Lock()
	clock = clock.Add(61 * time.Second)
	mu.Unlock()
	<-tries
	// Who is not the first makes no room: it would be another's.
	var behind atomic.Int64
	_, last := admitLater(t, gate(t, j, 0, disk(100*mib, func(int64, []string) admit.Evicted {
		behind.Add(1)
		return admit.Evicted{}
	})), room("4-d", 40*mib, 1))
	if n := behind.Load(); n != 0 {
		t.Errorf("one that waits behind another evicted %d times", n)
	}
	h.Release()
	granted(t, done).Release()
	granted(t, last)
}

func TestBothAreWaitedForInOneQueue(t *testing.T) {
	j := open(t)
	both := func() *ledger.Admissions {
		return gate(t, j, 0, disk(100*mib, nil), func(o *ledger.AdmitOptions) { o.Limits.MemMiB = 1000 })
	}
	ask := func(id string, m, d int64) admit.Ask {
		return admit.Ask{ID: id, Amounts: admit.Amounts{MemMiB: m, Disk: d, Inodes: 1}}
	}
	a := admitNow(t, both(), ask("1-a", 900, 90*mib))
	l, done := admitLater(t, both(), ask("2-b", 200, 20*mib))
	a.Release()
	granted(t, done)
	want := fmt.Sprintf(`waiting for 200 MiB of the host's 1000 MiB memory budget (900 MiB reserved, 0 job(s) asked first)
waiting for 20 MiB of room in %s (100 MiB free, 90 MiB still to be written by the jobs admitted there, 0 job(s) asked first)
admitted after waiting 0s for memory and disk space`, j.Dir())
	if got := l.text(); got[:strings.LastIndex(got, "waiting")] != want[:strings.LastIndex(want, "waiting")] || !strings.HasSuffix(got, "for memory and disk space") {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	// Offers say disk where there is no budget.
	g := gate(t, j, 0, disk(100*mib, nil))
	if _, refused, err := g.Offer(t.Context(), "r", admit.Amounts{Disk: 90 * mib}); refused != "disk" || err != nil {
		t.Error(refused, err)
	}
}
