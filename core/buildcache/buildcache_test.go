package buildcache_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/buildcache"
)

func name(c string) string { return strings.Repeat(c, 64) }

// entry makes one of some KiB, used so long ago.
func entry(t *testing.T, dir, name string, kib int, ago time.Duration) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(path, "layer"), make([]byte, kib<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(-ago)
	if err := os.Chtimes(path, at, at); err != nil {
		t.Fatal(err)
	}
	return path
}

func collect(t *testing.T, dir string, o buildcache.Options) buildcache.Collected {
	t.Helper()
	r, err := buildcache.Collect(t.Context(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func there(t *testing.T, dir string, want ...string) {
	t.Helper()
	var got []string
	ents, _ := os.ReadDir(dir)
	for _, e := range ents {
		got = append(got, e.Name()[:min(5, len(e.Name()))])
	}
	if !slices.Equal(got, want) {
		t.Errorf("there is %q, want %q", got, want)
	}
}

const day = 24 * time.Hour

func TestCollect(t *testing.T) {
	dir := t.TempDir()
	if r := collect(t, filepath.Join(dir, "none"), buildcache.Options{Retention: day}); len(r.Entries)+len(r.Kept) != 0 {
		t.Errorf("%+v", r)
	}
	for i, c := range []string{"a", "b", "c", "d"} {
		entry(t, dir, name(c), 100, time.Duration(10*(i+1))*day)
	}
	// Neither age nor size.
	if r := collect(t, dir, buildcache.Options{Max: -1}); len(r.Entries) != 0 {
		t.Errorf("%+v", r)
	}
	// By age; the dry run tells the same and removes nothing.
	o := buildcache.Options{Retention: 35 * day, Max: -1, DryRun: true}
	dry := collect(t, dir, o)
	there(t, dir, "aaaaa", "bbbbb", "ccccc", "ddddd")
	o.DryRun = false
	r := collect(t, dir, o)
	if !slices.Equal(r.Entries, []string{name("d")}) || !slices.Equal(dry.Entries, r.Entries) || r.Bytes != dry.Bytes || r.Bytes < 100<<10 || len(r.Kept) != 0 {
		t.Errorf("%+v, dry %+v", r, dry)
	}
	there(t, dir, "aaaaa", "bbbbb", "ccccc")
	// By size: the least recently used go, and no more than needed; one that is
	// used now is not among them.
	if err := buildcache.Touch(dir, name("c")); err != nil {
		t.Fatal(err)
	}
	r = collect(t, dir, buildcache.Options{Max: 250 << 10})
	if !slices.Equal(r.Entries, []string{name("b")}) {
		t.Errorf("%+v", r)
	}
	there(t, dir, "aaaaa", "ccccc")
	collect(t, dir, buildcache.Options{Max: 0})
	there(t, dir)
}

// One that is used between the look at it and its removal stays, as does one
// that another has taken the name of; at the end of its time to the instant, an
// entry goes.
func TestUsedMeanwhile(t *testing.T) {
	dir := t.TempDir()
	path := entry(t, dir, name("a"), 1, 90*day)
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	at := fi.ModTime().Add(day)
	o := buildcache.Options{Retention: day, Max: -1}
	for what, change := range map[string]func() error{
		"used": func() error { return buildcache.Touch(dir, name("a")) },
		"another": func() error {
			return errors.Join(os.Rename(path, filepath.Join(dir, name("b"))), os.Mkdir(path, 0o700), os.Chtimes(path, fi.ModTime(), fi.ModTime()))
		},
	} {
		o.Now = func() time.Time {
			if err := change(); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			return at
		}
		if r := collect(t, dir, o); len(r.Entries) != 0 || len(r.Kept) != 0 && what == "used" {
			t.Errorf("%s: %+v", what, r)
		}
		os.RemoveAll(filepath.Join(dir, name("b")))
		os.RemoveAll(path)
		entry(t, dir, name("a"), 1, 90*day)
		if err := os.Chtimes(path, fi.ModTime(), fi.ModTime()); err != nil {
			t.Fatal(err)
		}
	}
	o.Now = func() time.Time { return at.Add(-1) }
	if r := collect(t, dir, o); len(r.Entries) != 0 {
		t.Errorf("an instant before: %+v", r)
	}
	o.Now = func() time.Time { return at }
	if r := collect(t, dir, o); !slices.Equal(r.Entries, []string{name("a")}) {
		t.Errorf("at its time: %+v", r)
	}
}

// What is held stays, and counts; what is no entry of ours is told.
func TestWhatStays(t *testing.T) {
	dir := t.TempDir()
	held := entry(t, dir, name("a"), 100, 90*day)
	entry(t, dir, name("b"), 100, 80*day)
	entry(t, dir, ".new-1", 1, 10*day)
	making := entry(t, dir, ".new-2", 1, 10*day)
	entry(t, dir, ".new-3", 1, 0)
	entry(t, dir, ".dead-4", 1, 10*day)
	outside := entry(t, t.TempDir(), "precious", 1, 90*day)
	if err := os.Symlink(outside, filepath.Join(dir, name("c"))); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(filepath.Join(dir, name("d")), nil, 0o600)
	os.WriteFile(filepath.Join(dir, "README"), nil, 0o600)
	os.Symlink(outside, filepath.Join(dir, name("b"), "link"))
	os.Chtimes(filepath.Join(dir, name("b")), time.Time{}, time.Now().Add(-80*day))
	for path, how := range map[string]int{held: unix.LOCK_SH, making: unix.LOCK_EX} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Flock(int(f.Fd()), how); err != nil {
			t.Fatal(err)
		}
	}
	r := collect(t, dir, buildcache.Options{Retention: day, Max: 0})
	if !slices.Equal(r.Entries, []string{name("b")}) || len(r.Kept) != 3 {
		t.Errorf("%+v", r)
	}
	there(t, dir, ".new-", ".new-", "READM", "aaaaa", "ccccc", "ddddd")
	if _, err := os.Stat(filepath.Join(outside, "layer")); err != nil {
		t.Error(err)
	}
	if n := buildcache.DefaultMax(100 << 30); n != 10<<30 {
		t.Error(n)
	}
	if n := buildcache.DefaultMax(1 << 40); n != 50<<30 {
		t.Error(n)
	}
	// Another user's, where a test may make one.
	if os.Geteuid() == 0 {
		other := entry(t, dir, name("e"), 1, 90*day)
		if err := os.Chown(other, 12345, 12345); err != nil {
			t.Fatal(err)
		}
		r := collect(t, dir, buildcache.Options{Retention: day})
		if !strings.Contains(strings.Join(r.Kept, "\n"), "belongs to uid 12345") {
			t.Errorf("%+v", r)
		}
		if _, err := os.Stat(other); err != nil {
			t.Error(err)
		}
		if err := unix.Mount("none", held, "tmpfs", 0, ""); err == nil {
			defer unix.Unmount(held, 0)
			if r := collect(t, dir, buildcache.Options{Retention: day}); !strings.Contains(strings.Join(r.Kept, "\n"), name("a")) {
				t.Errorf("%+v", r)
			}
		}
	}
}
