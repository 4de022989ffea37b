// Package hubdb is the hub's store: one SQLite file, reached through
// modernc.org/sqlite.
//
// Pools: one connection writes, BEGIN IMMEDIATE, for the hub's one writer;
// a few others read, with query_only. The file is in WAL mode (the log beside
// it is FILE-wal): readers do not wait for the writer nor it for them. A read
// ends before the function that makes it returns, so no reader keeps the log
// from being reset for longer than a query takes; the log is checkpointed
// every walPages pages and begun anew before it has walBytes, however readers
// overlap. Only a backup, which is one long read, may let it grow longer.
//
// Durability: a durable batch is committed with synchronous=FULL, which syncs
// the log; any other with synchronous=NORMAL, which does not, and survives
// what the process does but not a loss of power.
//
// Schema: numbered files in migrations/, each applied in a transaction of its
// own that also sets user_version. Before the first one that an existing
// database needs, the file is copied to FILE.before-vN, or FILE.before-vN.2 and so
// on when that is there. schema.sql is what the
// sum of them must give, and Open refuses a database that lacks a table,
// column or index of it, or has another one; tables that it does not know are
// let be. Migrations are only ever added.
package hubdb

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

// appID marks the file as a hub's database (PRAGMA application_id): "vkhb".
const appID = 0x766b6862

const (
	walPages = 1000     // of 4096 bytes: when the log is checkpointed
	walBytes = 16 << 20 // what it is cut to; at half of it, every walEvery batches, it is begun anew
	walEvery = 64
	readers  = 4
)

//go:embed migrations/*.sql
var migrations embed.FS

//go:embed schema.sql
var golden string

// DB is an open store. It satisfies hub.Store.
type DB struct {
	path  string
	lock  *fsx.Lock
	write *sql.DB
	read  *sql.DB

	wmu  sync.Mutex
	conn *sql.Conn // of write, under wmu
	sync string    // its synchronous, under wmu

	rmu   sync.Mutex
	reads map[string]*sql.Stmt // of read, by text

	commits int // under wmu
	st      map[string]*sql.Stmt
}

var _ hub.Store = (*DB)(nil)

// Open opens the database at path, made 0600 when there is none, and brings
// its schema up to date. One process has it open at a time: another one gets a
// fault.Busy.
func Open(ctx context.Context, path string) (*DB, error) {
	lock, err := fsx.TryLock(path+".lock", false)
	if errors.Is(err, fsx.ErrLocked) {
		return nil, fault.Newf(fault.Busy, "another vk-hub has %s open", path)
	}
	if err != nil {
		return nil, fmt.Errorf("locking the database: %w", explain(err))
	}
	d := &DB{path: path, lock: lock, st: map[string]*sql.Stmt{}}
	if err := d.open(ctx); err != nil {
		d.Close()
		return nil, fmt.Errorf("opening %s: %w", path, explain(err))
	}
	return d, nil
}

func (d *DB) open(ctx context.Context) error {
	f, err := os.OpenFile(d.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	f.Close()
	if err != nil {
		return err
	}
	fresh := info.Size() == 0
	d.write = pool(d.path, "_txlock=immediate&_pragma=journal_mode(WAL)&_pragma=wal_autocheckpoint("+fmt.Sprint(walPages)+")&_pragma=journal_size_limit("+fmt.Sprint(walBytes)+")")
	d.write.SetMaxOpenConns(1)
	d.write.SetConnMaxLifetime(0)
	if d.conn, err = d.write.Conn(ctx); err != nil {
		return err
	}
	if err := migrate(ctx, d.conn, d.path, fresh); err != nil {
		return err
	}
	if fresh {
		if err := fsx.SyncDir(filepath.Dir(d.path)); err != nil {
			return err
		}
	}
	d.read = pool(d.path, "_pragma=query_only(1)")
	d.read.SetMaxOpenConns(readers)
	return nil
}

// pool opens no connection yet. Every connection waits 5 s for a lock, checks
// foreign keys and keeps temporary things in memory.
func pool(path, params string) *sql.DB {
	dsn := "file:" + (&url.URL{Path: path}).EscapedPath() + "?_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)&_pragma=temp_store(2)&" + params
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		panic("hubdb: the driver is not linked: " + err.Error())
	}
	return db
}

// Close ends all connections. Safe on a DB that is half open.
func (d *DB) Close() error {
	var errs []error
	d.wmu.Lock()
	for _, s := range d.st {
		s.Close()
	}
	if d.read != nil {
		errs = append(errs, d.read.Close())
	}
	if d.conn != nil {
		errs = append(errs, d.conn.Close())
	}
	if d.write != nil {
		errs = append(errs, d.write.Close())
	}
	d.wmu.Unlock()
	return errors.Join(append(errs, d.lock.Close())...)
}

// explain wraps what SQLite and the kernel say of a file that cannot be
// written with the hub's words for it.
func explain(err error) error {
	if err == nil {
		return nil
	}
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: %w", hub.ErrReadOnly, err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: %w", hub.ErrFull, err)
	}
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return err
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_FULL:
		return fmt.Errorf("%w: %w", hub.ErrFull, err)
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM:
		return fmt.Errorf("%w: %w", hub.ErrReadOnly, err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("%w: %w", hub.ErrBroken, err)
	}
	return err
}

// migration is one numbered file.
type migration struct {
	version int
	name    string
	text    string
}

// all is the migrations in order, numbered from 1 without gaps.
func all() ([]migration, error) {
	names, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var ms []migration
	for i, name := range names {
		var n int
		if _, err := fmt.Sscanf(filepath.Base(name), "%04d_", &n); err != nil || n != i+1 {
			return nil, fmt.Errorf("migration %s is not number %d", name, i+1)
		}
		text, err := migrations.ReadFile(name)
		if err != nil {
			return nil, err
		}
		ms = append(ms, migration{n, name, string(text)})
	}
	return ms, nil
}

func migrate(ctx context.Context, c *sql.Conn, path string, fresh bool) error {
	ms, err := all()
	if err != nil {
		return err
	}
	var app, version int
	if err := c.QueryRowContext(ctx, "PRAGMA application_id").Scan(&app); err != nil {
		return err
	}
	if err := c.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	switch {
	case app != appID && !(fresh || app == 0 && version == 0 && empty(ctx, c)):
		return fault.New(fault.Usage, "the file is no hub's database").Hint("name another data_dir in hub.toml, or move the file away")
	case version > len(ms):
		return fault.Newf(fault.Usage, "its schema is version %d, this vk-hub knows %d", version, len(ms)).Hint("run the newer vk-hub, or restore the backup made before the update: FILE.before-v%d", version)
	}
	if version == len(ms) {
		return verify(ctx, c)
	}
	if version > 0 {
		to, err := unused(fmt.Sprintf("%s.before-v%d", path, len(ms)))
		if err == nil {
			err = backupTo(ctx, c, to)
		}
		if err != nil {
			return fmt.Errorf("making a backup before migrating: %w", err)
		}
	}
	for _, m := range ms[version:] {
		if err := step(ctx, c, m); err != nil {
			return fmt.Errorf("migration %s: %w", m.name, err)
		}
	}
	return verify(ctx, c)
}

// unused is name, or name.2 and so on: a migration that failed has left a copy,
// and so has one of before a restore, which is not this database's.
func unused(name string) (string, error) {
	for n, to := 2, name; ; n, to = n+1, fmt.Sprintf("%s.%d", name, n) {
		if _, err := os.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			return to, nil
		} else if err != nil {
			return "", err
		}
	}
}

func empty(ctx context.Context, c *sql.Conn) bool {
	var n int
	return c.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema").Scan(&n) == nil && n == 0
}

func step(ctx context.Context, c *sql.Conn, m migration) error {
	tx, err := c.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	script := m.text + fmt.Sprintf("\nPRAGMA application_id = %d; PRAGMA user_version = %d;", appID, m.version)
	if _, err := tx.ExecContext(ctx, script); err != nil {
		return err
	}
	if m.version == 1 {
		if _, err := tx.ExecContext(ctx, "INSERT INTO meta VALUES ('hub', ?)", wire.NewID()); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// Schema is the text of a database's tables and indexes, sorted.
func schema(ctx context.Context, c *sql.Conn) (map[string]string, error) {
	rows, err := c.QueryContext(ctx, "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := map[string]string{}
	for rows.Next() {
		var name, text string
		if err := rows.Scan(&name, &text); err != nil {
			return nil, err
		}
		out[name] = squeeze(text)
	}
	return out, rows.Err()
}

// squeeze takes comments and white space out of SQL that has neither in its
// strings.
func squeeze(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "--")
		b.WriteString(line + " ")
	}
	return strings.Join(strings.Fields(b.String()), " ")
}

// verify compares the schema with the golden one.
func verify(ctx context.Context, c *sql.Conn) error {
	have, err := schema(ctx, c)
	if err != nil {
		return err
	}
	var errs []error
	for _, text := range strings.Split(golden, ";\n") {
		text = squeeze(text)
		if text == "" {
			continue
		}
		f := strings.Fields(text)
		name := f[2]
		switch {
		case have[name] == "":
			errs = append(errs, fmt.Errorf("%s is missing", name))
		case have[name] != text:
			errs = append(errs, fmt.Errorf("%s is %q, want %q", name, have[name], text))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: its schema is not the one of its version: %w", hub.ErrBroken, err)
	}
	return nil
}

// walSize is the size of the log.
func (d *DB) walSize() int64 {
	info, err := os.Stat(d.path + "-wal")
	if err != nil {
		return 0
	}
	return info.Size()
}

// within bounds a read: no transaction outlives a request.
func within(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, 30*time.Second)
}
