package hubdb_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
	"virtkit/hubdb"
)

var update = flag.Bool("update", false, "write schema.sql")

func open(t *testing.T, path string) *hubdb.DB {
	t.Helper()
	d, err := hubdb.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func TestSuite(t *testing.T) {
	hubtest.RunSuite(t, func(t *testing.T) (hub.Store, func() hub.Store) {
		path := filepath.Join(t.TempDir(), "a db?#%20.sqlite") // a name that a URL would change
		d := open(t, path)
		return d, func() hub.Store {
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			return open(t, path)
		}
	})
}

// TestSchema holds schema.sql to what the migrations make.
func TestSchema(t *testing.T) {
	got, err := hubdb.Made(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile("schema.sql", []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the migrations make\n%s\nschema.sql has\n%s\ngo test ./hubdb -run TestSchema -update", got, want)
	}
	for stmt := range strings.SplitSeq(got, ";\n") {
		if strings.HasPrefix(stmt, "CREATE TABLE") && !strings.Contains(stmt[strings.LastIndex(stmt, ")"):], "STRICT") {
			t.Errorf("a table that is not STRICT: %s", stmt)
		}
	}
}

// raw opens the file beside the package.
func raw(t *testing.T, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func exec(t *testing.T, path string, stmts ...string) {
	t.Helper()
	db := raw(t, path)
	for _, s := range stmts {
		if _, err := db.Exec(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
	db.Close()
}

func TestOpenRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		stmts []string
		kind  fault.Kind
		text  string
	}{
		"another program's":   {[]string{"PRAGMA application_id = 7", "CREATE TABLE x (y)"}, fault.Usage, "no hub's database"},
		"no program's":        {[]string{"CREATE TABLE x (y)"}, fault.Usage, "no hub's database"},
		"a newer one":         {[]string{"PRAGMA application_id = 1986750562", "PRAGMA user_version = 99"}, fault.Usage, "version 99"},
		"one without a table": {[]string{"DROP TABLE heartbeats"}, fault.System, "heartbeats is missing"},
		"one changed":         {[]string{"ALTER TABLE tokens ADD COLUMN x TEXT"}, fault.System, "tokens is"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "db")
			if strings.HasPrefix(name, "one") {
				open(t, path).Close()
			}
			exec(t, path, tc.stmts...)
			d, err := hubdb.Open(t.Context(), path)
			if err == nil {
				d.Close()
			}
			if err == nil || fault.KindOf(err) != tc.kind || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("Open: %v (%s), want %q (%s)", err, fault.KindOf(err), tc.text, tc.kind)
			}
		})
	}
	path := filepath.Join(t.TempDir(), "db")
	open(t, path).Close()
	exec(t, path, "CREATE TABLE somebodys (x)")
	open(t, path) // a table that is not known does no harm
	if _, err := hubdb.Open(t.Context(), path); fault.KindOf(err) != fault.Busy {
		t.Errorf("a second Open: %v, want busy", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
}

func line(n int) hub.Batch {
	return hub.Batch{Durable: n%2 == 0, Audit: []hub.AuditLine{{Seq: uint64(n), Actor: "a", Event: "e", Detail: strings.Repeat("x", 1000)}},
		Heartbeats: []hub.Heartbeat{{Node: "n", At: int64(n), Beat: &wire.Heartbeat{}}}}
}

func TestBackup(t *testing.T) {
	dir := t.TempDir()
	d := open(t, filepath.Join(dir, "db"))
	for n := 1; n <= 10; n++ {
		b := line(n)
		if err := d.Apply(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
	}
	to := filepath.Join(dir, "copy")
	if err := d.Backup(t.Context(), to); err != nil {
		t.Fatal(err)
	}
	if err := d.Backup(t.Context(), to); fault.KindOf(err) != fault.Conflict {
		t.Errorf("over a file that exists: %v", err)
	}
	b := line(11)
	if err := d.Apply(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(to)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the copy: %v, %v", info.Mode(), err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, ".backup-*"))
	if len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	was, err := d.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := open(t, to)
	l, err := c.Load(t.Context())
	if err != nil || l.LastAudit != 10 || l.Hub != was.Hub || len(l.Heartbeats) != 1 {
		t.Errorf("the copy: %+v, %v", l, err)
	}
	// A copy that is not whole is none.
	if err := d.Exec(t.Context(), "DELETE FROM audit WHERE seq = 5"); err != nil {
		t.Fatal(err)
	}
	to = filepath.Join(dir, "broken")
	if err := d.Backup(t.Context(), to); !errors.Is(err, hub.ErrBroken) {
		t.Errorf("a copy with a gap in its audit log: %v", err)
	}
	if _, err := os.Lstat(to); err == nil {
		t.Error("a copy that is not whole is kept")
	}
}

func TestCheck(t *testing.T) {
	fresh := func(t *testing.T) string {
		path := filepath.Join(t.TempDir(), "db")
		d := open(t, path)
		for n := 1; n <= 300; n++ {
			b := line(n)
			if err := d.Apply(t.Context(), &b); err != nil {
				t.Fatal(err)
			}
		}
		if err := hubdb.Check(t.Context(), path); err != nil {
			t.Errorf("while it is in use: %v", err)
		}
		d.Close()
		return path
	}
	path := fresh(t)
	if err := hubdb.Check(t.Context(), path); err != nil {
		t.Error(err)
	}
	exec(t, path, "DELETE FROM audit WHERE seq = 5")
	if err := hubdb.Check(t.Context(), path); !errors.Is(err, hub.ErrBroken) || !strings.Contains(err.Error(), "audit lines 1 to 300 are 299") {
		t.Errorf("a gap: %v", err)
	}
	path = fresh(t)
	exec(t, path, "UPDATE heartbeats SET beat = '{'")
	if err := hubdb.Check(t.Context(), path); !errors.Is(err, hub.ErrBroken) {
		t.Errorf("a document that is none: %v", err)
	}
	path = fresh(t)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	info, _ := f.Stat()
	for off := int64(8 * 4096); off < info.Size(); off += 4096 {
		f.WriteAt(make([]byte, 2048), off)
	}
	f.Close()
	if err := hubdb.Check(t.Context(), path); !errors.Is(err, hub.ErrBroken) {
		t.Errorf("pages that were overwritten: %v", err)
	}
	if err := hubdb.Check(context.Background(), filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}
