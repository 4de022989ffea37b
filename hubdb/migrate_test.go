package hubdb_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fleet/hub"
	"virtkit/hubdb"
)

func version(t *testing.T, path string) (n int) {
	t.Helper()
	if err := raw(t, path).QueryRow("PRAGMA user_version").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestMigrate opens a database of each older version: what is in it stays, and
// the file as it was is beside it, and whole. A migration that fails leaves the
// version before, and is tried again.
func TestMigrate(t *testing.T) {
	last := hubdb.Versions()
	for from := 1; from < last; from++ {
		path := filepath.Join(t.TempDir(), "db")
		if err := hubdb.MakeAt(t.Context(), path, from); err != nil {
			t.Fatal(err)
		}
		exec(t, path, `INSERT INTO audit VALUES (1, 2, 'n', 'a', 'e', 'd')`,
			`INSERT INTO tokens (hash, created_at, expires_at, actor, spent_at, node) VALUES ('h', 1, 2, 'a', 0, '')`,
			// In the way of what is still to come.
			fmt.Sprintf(`CREATE VIEW %s AS SELECT 1`, hubdb.MadeBy(last)))
		// One whose transaction stays open would never be closed: the end of its
		// context rolls it back.
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		d, err := hubdb.Open(ctx, path)
		late := ctx.Err()
		cancel()
		if err == nil {
			d.Close()
			t.Fatalf("from version %d: a migration that cannot be made passes", from)
		}
		if late != nil {
			t.Fatalf("from version %d: a migration that failed leaves its transaction open: %v", from, err)
		}
		if v := version(t, path); v >= last {
			t.Errorf("from version %d: failed, it has version %d", from, v)
		}
		exec(t, path, fmt.Sprintf("DROP VIEW %s", hubdb.MadeBy(last)))
		before := version(t, path)
		d = open(t, path)
		l, err := d.Load(t.Context())
		if err != nil || l.LastAudit != 1 || len(l.Tokens) != 1 || l.Tokens[0].Kind != "" || len(l.Hub) != 32 {
			t.Errorf("from version %d: %+v, %v", from, l, err)
		}
		d.Close()
		if v := version(t, path); v != last {
			t.Errorf("from version %d: it has version %d", from, v)
		}
		// Each try has its own copy, none of which was replaced.
		for name, want := range map[string]int{"": from, ".2": before} {
			copied := fmt.Sprintf("%s.before-v%d%s", path, last, name)
			if err := hubdb.Check(t.Context(), copied); err != nil {
				t.Errorf("from version %d: %v", from, err)
				continue
			}
			var hash string
			if err := raw(t, copied).QueryRow("SELECT hash FROM tokens").Scan(&hash); err != nil || hash != "h" || version(t, copied) != want {
				t.Errorf("from version %d: the copy%s has version %d, %q, %v; want version %d", from, name, version(t, copied), hash, err, want)
			}
			info, err := os.Stat(copied)
			if err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("mode of the copy: %v, %v", info, err)
			}
		}
		open(t, path).Close() // nothing more to migrate, no other copy
		if all, _ := filepath.Glob(path + ".before-*"); len(all) != 2 {
			t.Errorf("copies: %q", all)
		}
	}
}

// TestRealDisk has a file system that is full, and one that is read-only.
func TestRealDisk(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to mount a tmpfs")
	}
	dir := t.TempDir()
	mount := func(flags uintptr, size string) {
		t.Helper()
		if err := unix.Mount("tmpfs", dir, "tmpfs", flags, "size="+size); err != nil {
			t.Fatal(err)
		}
	}
	mount(0, "1m")
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "db")
	d := open(t, path)
	acked := 0
	add := func() error {
		b := line(acked + 1)
		b.Durable = true
		err := d.Apply(t.Context(), &b)
		if err == nil {
			acked++
		}
		return err
	}
	var err error
	for err == nil && acked < 5000 {
		err = add()
	}
	if !errors.Is(err, hub.ErrFull) {
		t.Fatalf("after %d lines: %v, want %v", acked, err, hub.ErrFull)
	}
	if err := d.Backup(t.Context(), filepath.Join(dir, "copy")); !errors.Is(err, hub.ErrFull) {
		t.Errorf("a backup: %v, want %v", err, hub.ErrFull)
	}
	if l, err := d.Load(t.Context()); err != nil || l.LastAudit != uint64(acked) {
		t.Errorf("full, it has %d lines, %v; %d were acknowledged", l.LastAudit, err, acked)
	}
	mount(unix.MS_REMOUNT, "16m")
	if err := add(); err != nil {
		t.Errorf("once there is room: %v", err)
	}
	d.Close()
	mount(unix.MS_REMOUNT|unix.MS_RDONLY, "16m")
	if ro, err := hubdb.Open(t.Context(), path); !errors.Is(err, hub.ErrReadOnly) {
		t.Errorf("on a read-only file system: %v, want %v", err, hub.ErrReadOnly)
		if err == nil {
			ro.Close()
		}
	}
	mount(unix.MS_REMOUNT, "16m")
	d = open(t, path)
	if l, err := d.Load(t.Context()); err != nil || l.LastAudit != uint64(acked) {
		t.Errorf("at last it has %d lines, %v; %d were acknowledged", l.LastAudit, err, acked)
	}
	d.Close()
	if left, _ := filepath.Glob(filepath.Join(dir, ".backup-*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
