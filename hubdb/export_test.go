package hubdb

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Made is the schema that the migrations make.
func Made(ctx context.Context) (string, error) {
	dir, err := os.MkdirTemp("", "hubdb")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	was := golden
	golden = "" // what is to be written anew must not refuse it
	defer func() { golden = was }()
	d, err := Open(ctx, filepath.Join(dir, "db"))
	if err != nil {
		return "", err
	}
	defer d.Close()
	have, err := schema(ctx, d.conn)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(have)) {
		b.WriteString(have[name] + ";\n")
	}
	return b.String(), nil
}

// WALSize is the size of the log.
func (d *DB) WALSize() int64 { return d.walSize() }

// WALBound is what the log may grow to with a reader that ends its reads.
const WALBound = walBytes

// Exec runs a statement on the writer's connection.
func (d *DB) Exec(ctx context.Context, text string) error {
	d.wmu.Lock()
	defer d.wmu.Unlock()
	_, err := d.conn.ExecContext(ctx, text)
	return err
}

// Versions is how many migrations there are.
func Versions() int {
	ms, err := all()
	if err != nil {
		panic(err)
	}
	return len(ms)
}

// MakeAt makes a database as a vk-hub of an older version did.
func MakeAt(ctx context.Context, path string, version int) error {
	db := pool(path, "_txlock=immediate&_pragma=journal_mode(WAL)")
	defer db.Close()
	c, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	ms, err := all()
	if err != nil {
		return err
	}
	for _, m := range ms[:version] {
		if err := step(ctx, c, m); err != nil {
			return err
		}
	}
	return nil
}

// MadeBy is a table that a migration makes.
func MadeBy(version int) string {
	ms, err := all()
	if err != nil {
		panic(err)
	}
	_, text, _ := strings.Cut(ms[version-1].text, "CREATE TABLE ")
	name, _, _ := strings.Cut(text, " ")
	return name
}
