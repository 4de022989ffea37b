package archive_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/core/atop"
	"virtkit/core/atop/archive"
	"virtkit/core/fault"
)

func open(t *testing.T, days int) (*archive.Archive, *time.Time, *[]string) {
	t.Helper()
	now := time.Date(2026, 8, 11, 23, 59, 0, 0, time.FixedZone("west", -3600*5)) // the 12th in UTC
	var warned []string
	a := &archive.Archive{Root: filepath.Join(t.TempDir(), "atop"), Days: days, Now: func() time.Time { return now },
		Warn: func(l string) { warned = append(warned, l) }}
	return a, &now, &warned
}

func begin(t *testing.T, a *archive.Archive, name string) string {
	t.Helper()
	dir, err := a.Begin(name)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func text(epochs ...int64) []byte {
	var b []byte
	for _, e := range epochs {
		b = atop.AppendSample(b, &atop.Sample{Host: "h", Epoch: e, Interval: 10, Has: atop.HasCPL})
	}
	return b
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func epochs(t *testing.T, path string) (out []int64, st atop.ReadStats, err error) {
	t.Helper()
	st, err = archive.Samples(path, false, func(s *atop.Sample) bool { out = append(out, s.Epoch); return true })
	return out, st, err
}

func TestName(t *testing.T) {
	for want, in := range map[string][2]string{
		"42137-acme-web-test_unit":            {"acme/web", "test:unit"},
		"42137-acme-web-build__1_2___":        {"acme/web", "build [1/2] é"},
		"42137-x":                             {"", "x"},
		"42137-a-" + strings.Repeat("b", 192): {"a", strings.Repeat("b", 500)},
	} {
		if got := archive.Name(42137, in[0], in[1]); got != want {
			t.Errorf("Name(%q) = %q, want %q", in, got, want)
		}
	}
}

// TestLife: a log is begun, packed, found, read.
func TestLife(t *testing.T) {
	a, _, _ := open(t, 14)
	dir := begin(t, a, "42137-acme-web-test_unit")
	if filepath.Base(filepath.Dir(dir)) != "2026-08-12" {
		t.Errorf("%s", dir)
	}
	if _, err := a.Find("42137"); fault.KindOf(err) != fault.NotFound {
		t.Errorf("a recording without a log: %v", err)
	}
	log := filepath.Join(dir, atop.LogFile)
	write(t, log, text(1, 2, 3))
	if r, err := a.Find("42137"); err != nil || r.Path != log {
		t.Errorf("plain: %+v, %v", r, err)
	}
	// While it is written it stays.
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	unix.Flock(int(f.Fd()), unix.LOCK_EX)
	if err := a.Finish(dir); fault.KindOf(err) != fault.Busy {
		t.Errorf("packing what is written: %v", err)
	}
	f.Close()
	for range 2 {
		if err := a.Finish(dir); err != nil {
			t.Fatal(err)
		}
	}
	r, err := a.Find("test_unit")
	if err != nil || filepath.Base(r.Path) != atop.PackedFile || r.Name != "42137-acme-web-test_unit" {
		t.Errorf("packed: %+v, %v", r, err)
	}
	got, st, err := epochs(t, r.Path)
	if err != nil || !slices.Equal(got, []int64{1, 2, 3}) || st.Skipped+st.Torn > 0 {
		t.Errorf("read %v, %+v, %v", got, st, err)
	}
	if e, _ := os.ReadDir(dir); len(e) != 1 {
		t.Errorf("left: %v", e)
	}
	again := begin(t, a, "42137-acme-web-test_unit")
	if filepath.Base(again) != "42137-acme-web-test_unit-2" {
		t.Errorf("again: %s", again)
	}
}

// TestOlderLog (S38): what another version, or atop itself, has left under a
// recording's name on the same day is never written to. The new recording is in a
// file of its own, and each is read as what it is.
func TestOlderLog(t *testing.T) {
	for what, old := range map[string][]byte{
		"raw log of atop 2.8":  append([]byte{0xef, 0xbe, 0xed, 0xfe, 0x08, 0x82}, make([]byte, 500)...),
		"raw log of atop 2.7":  append([]byte{0xef, 0xbe, 0xed, 0xfe, 0x07, 0x82}, make([]byte, 500)...),
		"text of a later form": []byte("RESET\nCPX v9 1786488000 2026/08/12 00:00:00 10 1 2 3\nSEP\n"),
	} {
		a, _, _ := open(t, 14)
		const name = "42137-acme-web-test_unit"
		dir := begin(t, a, name)
		before := filepath.Join(dir, atop.LogFile)
		write(t, before, old)
		next := begin(t, a, name)
		if filepath.Base(next) != name+"-2" {
			t.Fatalf("%s: the new recording is in %s", what, next)
		}
		write(t, filepath.Join(next, atop.LogFile), text(7, 8))
		if b, err := os.ReadFile(before); err != nil || !bytes.Equal(b, old) {
			t.Errorf("%s was changed (%v)", what, err)
		}
		if got, st, err := epochs(t, filepath.Join(next, atop.LogFile)); err != nil || !slices.Equal(got, []int64{7, 8}) || st.Skipped+st.Torn > 0 {
			t.Errorf("%s: the new one reads as %v, %+v, %v", what, got, st, err)
		}
		if got, _, _ := epochs(t, before); len(got) != 0 {
			t.Errorf("%s reads as samples of %v", what, got)
		}
	}
}

// TestCrashes: whatever instruction of Finish is the last one, the log is whole
// and Finish ends what it began.
func TestCrashes(t *testing.T) {
	a, _, _ := open(t, 14)
	dir := begin(t, a, "7-x")
	log, packed := filepath.Join(dir, atop.LogFile), filepath.Join(dir, atop.PackedFile)
	write(t, log, text(1, 2))
	write(t, filepath.Join(dir, "."+atop.PackedFile+".new"), []byte("half")) // died while packing
	if r, _ := a.Find("7"); r.Path != log {
		t.Errorf("found %+v", r)
	}
	if err := a.Finish(dir); err != nil {
		t.Fatal(err)
	}
	write(t, log, text(1, 2)) // died before the plain one was removed
	if r, _ := a.Find("7"); r.Path != log {
		t.Errorf("found %+v", r)
	}
	if err := a.Finish(dir); err != nil {
		t.Fatal(err)
	}
	if got, _, err := epochs(t, packed); err != nil || len(got) != 2 {
		t.Errorf("%v, %v", got, err)
	}
	if e, _ := os.ReadDir(dir); len(e) != 1 {
		t.Errorf("left: %v", e)
	}
}

// TestFind: the newest answers; a number is a job's id.
func TestFind(t *testing.T) {
	a, now, _ := open(t, 14)
	put := func(name string, at time.Time) {
		*now = at
		dir := begin(t, a, name)
		write(t, filepath.Join(dir, atop.LogFile), text(at.Unix()))
		os.Chtimes(filepath.Join(dir, atop.LogFile), at, at)
	}
	d := time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)
	put("42137-acme-web-test_unit", d)
	put("42138-acme-web-test_unit", d.Add(time.Hour))
	put("42139-acme-web-lint", d.Add(2*time.Hour))
	put("42120-acme-web-lint", d.Add(25*time.Hour)) // a retry of an older id
	put("42140-acme-web-99", d.Add(26*time.Hour))
	put("4214-x", d.Add(27*time.Hour))
	// What is no recording.
	os.MkdirAll(filepath.Join(a.Root, "2026-09-01", "42137-empty"), 0o700)
	os.MkdirAll(filepath.Join(a.Root, "kept", "42137-mine"), 0o700)
	os.MkdirAll(filepath.Join(a.Root, "2026-13-45", "42137-x"), 0o700)
	write(t, filepath.Join(a.Root, "2026-13-45", "42137-x", atop.LogFile), text(1))
	os.Symlink(filepath.Join(a.Root, "2026-08-01", "42137-acme-web-test_unit"), filepath.Join(a.Root, "2026-09-01", "42137-link"))
	write(t, filepath.Join(a.Root, "2026-08-09"), nil)
	for want, name := range map[string]string{
		"42137": "42137-acme-web-test_unit", "test_unit": "42138-acme-web-test_unit", "lint": "42120-acme-web-lint",
		"42138": "42138-acme-web-test_unit", "4214": "4214-x", "web-99": "42140-acme-web-99", "acme": "42140-acme-web-99",
	} {
		if r, err := a.Find(want); err != nil || r.Name != name {
			t.Errorf("Find(%q) = %+v, %v; want %s", want, r, err, name)
		}
	}
	for _, want := range []string{"421", "99", "nothing", "", "empty", "mine"} {
		if r, err := a.Find(want); err == nil {
			t.Errorf("Find(%q) = %+v", want, r)
		}
	}
	if n := len(a.List()); n != 6 {
		t.Errorf("%d recordings", n)
	}
}

// TestSweep: what is older goes, what is no day of the archive stays, and logs
// of the days before are packed.
func TestSweep(t *testing.T) {
	a, now, warned := open(t, 2)
	outside := filepath.Join(t.TempDir(), "precious")
	write(t, outside, []byte("x"))
	for i := range 6 {
		*now = time.Date(2026, 8, 1+i, 1, 0, 0, 0, time.UTC)
		dir := begin(t, a, "1-x")
		write(t, filepath.Join(dir, atop.LogFile), text(1))
		os.Symlink(outside, filepath.Join(dir, "link"))
	}
	other := []string{"2026-08-01-kept", "notes", "1-8-2026", "2026-8-1"}
	for _, n := range other {
		os.MkdirAll(filepath.Join(a.Root, n, "1-x"), 0o700)
	}
	write(t, filepath.Join(a.Root, "2020-01-01"), nil)                     // a file
	os.Symlink(filepath.Dir(outside), filepath.Join(a.Root, "2020-01-02")) // a symlink
	os.MkdirAll(filepath.Join(a.Root, "2026-08-05", "2-locked"), 0o700)    // one that still runs
	locked := filepath.Join(a.Root, "2026-08-05", "2-locked", atop.LogFile)
	write(t, locked, text(1))
	f, _ := os.Open(locked)
	defer f.Close()
	unix.Flock(int(f.Fd()), unix.LOCK_EX)
	write(t, filepath.Join(a.Root, "2026-08-05", "stray"), nil)
	a.Sweep()
	var got []string
	e, _ := os.ReadDir(a.Root)
	for _, x := range e {
		got = append(got, x.Name())
	}
	want := append([]string{".swept", "2026-08-04", "2026-08-05", "2026-08-06", "2020-01-01", "2020-01-02"}, other...)
	slices.Sort(want)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for path, there := range map[string]bool{
		"2026-08-04/1-x/atop.log.zst": true, "2026-08-05/1-x/atop.log.zst": true, "2026-08-05/1-x/atop.log": false,
		"2026-08-06/1-x/atop.log": true, "2026-08-05/2-locked/atop.log": true,
	} {
		if _, err := os.Lstat(filepath.Join(a.Root, path)); (err == nil) != there {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := os.Stat(outside); err != nil {
		t.Errorf("what a symlink names is gone: %v", err)
	}
	if len(*warned) > 0 {
		t.Errorf("warned: %q", *warned)
	}
	// Once a day, also when it was killed in the middle.
	write(t, filepath.Join(a.Root, "2026-08-05", "1-x", atop.LogFile), text(1))
	a.Sweep()
	if r, _ := archive.At(filepath.Join(a.Root, "2026-08-05", "1-x")); filepath.Base(r.Path) != atop.LogFile {
		t.Errorf("swept twice on one day: %+v", r)
	}
	// 0 keeps today's alone.
	a.Days = 0
	os.Truncate(filepath.Join(a.Root, ".swept"), 0)
	a.Sweep()
	if _, err := os.Stat(filepath.Join(a.Root, "2026-08-05")); err == nil {
		t.Error("yesterday is still there")
	}
}

// TestLarge: one over the limit stays plain.
func TestLarge(t *testing.T) {
	a, _, _ := open(t, 2)
	dir := begin(t, a, "1-x")
	log := filepath.Join(dir, atop.LogFile)
	write(t, log, text(1))
	if err := os.Truncate(log, archive.PackMax+1); err != nil {
		t.Fatal(err)
	}
	if err := a.Finish(dir); err != nil {
		t.Fatal(err)
	}
	if r, _ := a.Find("1"); r.Path != log {
		t.Errorf("%+v", r)
	}
}

// TestDamaged: what of a log can be read is.
func TestDamaged(t *testing.T) {
	a, _, _ := open(t, 2)
	dir := begin(t, a, "1-x")
	log, packed := filepath.Join(dir, atop.LogFile), filepath.Join(dir, atop.PackedFile)
	var many []int64
	for i := range int64(20000) {
		many = append(many, i+1)
	}
	write(t, log, text(many...))
	if err := a.Finish(dir); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(packed)
	if err != nil {
		t.Fatal(err)
	}
	// Cut short: the samples before the cut, and an error that says so.
	write(t, packed, whole[:len(whole)-20])
	got, _, err := epochs(t, packed)
	if err == nil || !strings.Contains(err.Error(), packed) || len(got) > len(many) {
		t.Errorf("cut: %d samples, %v", len(got), err)
	}
	bad := slices.Clone(whole)
	for i := len(bad) / 2; i < len(bad)/2+50; i++ {
		bad[i] ^= 0x55
	}
	write(t, packed, bad)
	if _, _, err := epochs(t, packed); err == nil {
		t.Error("damage in the middle is not told")
	}
	for name, b := range map[string][]byte{"empty": nil, "short": []byte("P"), "foreign": bytes.Repeat([]byte{0, 1, 2, 0xff}, 1<<18)} {
		write(t, packed, b)
		if got, _, err := epochs(t, packed); err != nil || len(got) != 0 {
			t.Errorf("%s: %d samples, %v", name, len(got), err)
		}
	}
	// A packed log under the name of a plain one is read as what it is.
	write(t, log, whole)
	if got, _, err := epochs(t, log); err != nil || len(got) != len(many) {
		t.Errorf("packed as plain: %d samples, %v", len(got), err)
	}
	os.Remove(log)
	unix.Mkfifo(log, 0o600)
	if _, err := archive.Open(log); err == nil {
		t.Error("a pipe is opened")
	}
}

// TestStopEarly: a reader may end before the log does.
func TestStopEarly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	var many []int64
	for i := range int64(100000) {
		many = append(many, i)
	}
	write(t, path, text(many...))
	n := 0
	if _, err := archive.Samples(path, true, func(*atop.Sample) bool { n++; return n < 3 }); err != nil || n != 3 {
		t.Errorf("%d samples, %v", n, err)
	}
	if _, err := archive.Samples(path+"none", true, nil); err == nil {
		t.Error("no file is no error")
	}
}

// Many that finish one recording at once: one packs it, the others find it
// being packed or done.
func TestFinishAtOnce(t *testing.T) {
	for range 20 {
		a, _, _ := open(t, 14)
		dir := begin(t, a, "7-test")
		write(t, filepath.Join(dir, atop.LogFile), bytes.Repeat(text(1), 2000))
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				if err := a.Finish(dir); err != nil && fault.KindOf(err) != fault.Busy {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != atop.PackedFile {
			t.Fatalf("left %v, %v", left, err)
		}
	}
}
