package hubdb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fsx"
)

// Backup copies the database to a new file while it is in use, and opens the
// copy to see that it is whole. The copy is of one moment. A file that exists
// is not replaced.
func (d *DB) Backup(ctx context.Context, to string) error {
	// A connection of its own: it may take long, and query_only forbids VACUUM.
	p := pool(d.path, "mode=ro")
	defer p.Close()
	c, err := p.Conn(ctx)
	if err != nil {
		return explain(err)
	}
	defer c.Close()
	return backupTo(ctx, c, to)
}

// backupTo writes a copy of c's database beside to, checks it, and renames it.
func backupTo(ctx context.Context, c *sql.Conn, to string) error {
	if _, err := os.Lstat(to); err == nil {
		return fault.Newf(fault.Conflict, "%s exists already", to).Hint("name another file, or remove it")
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(to), ".backup-*") // 0700: nobody reads a copy half made
	if err != nil {
		return explain(err)
	}
	defer os.RemoveAll(dir)
	tmp := filepath.Join(dir, "copy")
	if _, err := c.ExecContext(ctx, "VACUUM INTO ?", tmp); err != nil {
		return explain(err)
	}
	if err := os.Chmod(tmp, 0o600); err != nil {
		return err
	}
	if err := Check(ctx, tmp); err != nil {
		return fmt.Errorf("the copy is not whole: %w", err)
	}
	f, err := os.Open(tmp)
	if err != nil {
		return err
	}
	err = errors.Join(f.Sync(), f.Close())
	if err != nil {
		return explain(err)
	}
	// Link refuses what came meanwhile, where rename would replace it.
	if err := os.Link(tmp, to); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(to))
}

// Check looks at a database without changing it: SQLite's own checks of its
// pages and indexes, that the schema is of a known version, that every
// document can be read, and that audit lines number without gaps. Everything
// found is joined. It may be in use. The schema and documents of an older
// version, which Open brings up to date, are not looked at.
func Check(ctx context.Context, path string) error {
	if _, err := os.Stat(path); err != nil {
		return err
	}
	p := pool(path, "mode=ro&_pragma=query_only(1)")
	defer p.Close()
	p.SetMaxOpenConns(1)
	c, err := p.Conn(ctx)
	if err != nil {
		return explain(err)
	}
	defer c.Close()
	var app int
	if err := c.QueryRowContext(ctx, "PRAGMA application_id").Scan(&app); err != nil {
		return explain(err)
	}
	if app != appID {
		return fault.Newf(fault.Usage, "%s is no hub's database", path)
	}
	rows, err := c.QueryContext(ctx, "PRAGMA integrity_check(20)")
	if err != nil {
		return explain(err)
	}
	var found []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			break
		}
		if s != "ok" {
			found = append(found, s)
		}
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return explain(err)
	}
	if len(found) > 0 {
		return fmt.Errorf("%w: %s", hub.ErrBroken, strings.Join(found, "; "))
	}
	current, err := known(ctx, c)
	if err != nil {
		return err
	}
	var lines, first, last int64
	if err := c.QueryRowContext(ctx, "SELECT count(*), coalesce(min(seq),0), coalesce(max(seq),0) FROM audit").Scan(&lines, &first, &last); err != nil {
		return explain(err)
	}
	if lines > 0 && last-first+1 != lines {
		err = fmt.Errorf("%w: audit lines %d to %d are %d", hub.ErrBroken, first, last, lines)
	}
	if !current {
		return err // what this program reads may not be there yet
	}
	ro := &DB{path: path, read: p}
	c.Close() // the pool has one
	_, lerr := ro.Load(ctx)
	return errors.Join(err, lerr)
}

// known says whether the schema is of this program's version, or of an older one;
// one of neither is an error.
func known(ctx context.Context, c *sql.Conn) (current bool, err error) {
	ms, err := all()
	if err != nil {
		return false, err
	}
	var version int
	if err := c.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return false, explain(err)
	}
	switch {
	case version == len(ms):
		return true, verify(ctx, c)
	case version > len(ms):
		return false, fault.Newf(fault.Usage, "its schema is version %d, this vk-hub knows %d", version, len(ms))
	}
	return false, nil
}
