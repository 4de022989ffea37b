package hubdb_test

import (
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"virtkit/core/fleet/hub"
	"virtkit/hubdb"
)

// TestCannotWrite has the disk full, and the file read-only: the batch is
// refused in the hub's words, what was acknowledged stays, and the store goes
// on once it can.
func TestCannotWrite(t *testing.T) {
	for name, tc := range map[string]struct {
		sick, well string
		want       error
	}{
		"full":      {"PRAGMA max_page_count = 1", "PRAGMA max_page_count = 1073741823", hub.ErrFull},
		"read-only": {"PRAGMA query_only = 1", "PRAGMA query_only = 0", hub.ErrReadOnly},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "db")
			d := open(t, path)
			n := 0
			add := func() error {
				b := line(n + 1)
				b.Durable = true
				err := d.Apply(t.Context(), &b)
				if err == nil {
					n++
				}
				return err
			}
			if err := add(); err != nil {
				t.Fatal(err)
			}
			if err := d.Exec(t.Context(), tc.sick); err != nil {
				t.Fatal(err)
			}
			var err error
			for range 100 { // there may be room in the pages that there are
				if err = add(); err != nil {
					break
				}
			}
			if !errors.Is(err, tc.want) {
				t.Fatalf("Apply: %v, want %v", err, tc.want)
			}
			acked := n
			l, err := d.Load(t.Context())
			if err != nil || l.LastAudit != uint64(acked) {
				t.Errorf("it has %d lines, %v; %d were acknowledged", l.LastAudit, err, acked)
			}
			if err := d.Exec(t.Context(), tc.well); err != nil {
				t.Fatal(err)
			}
			if err := add(); err != nil {
				t.Errorf("once it can write again: %v", err)
			}
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			if err := hubdb.Check(t.Context(), path); err != nil {
				t.Error(err)
			}
			if l, err := open(t, path).Load(t.Context()); err != nil || l.LastAudit != uint64(acked+1) {
				t.Errorf("opened again it has %d lines, %v; want %d", l.LastAudit, err, acked+1)
			}
		})
	}
}

// TestLogIsBounded (S42) writes while readers overlap, so that there is one at any
// time.
func TestLogIsBounded(t *testing.T) {
	d := open(t, filepath.Join(t.TempDir(), "db"))
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if _, err := d.Audit(t.Context(), hub.AuditQuery{Limit: 200}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	most := int64(0)
	for n := 1; n <= 2000; n++ {
		b := line(n)
		b.Durable = false
		if err := d.Apply(t.Context(), &b); err != nil {
			t.Error(err)
			break
		}
		most = max(most, d.WALSize())
	}
	close(done)
	wg.Wait()
	if most > hubdb.WALBound {
		t.Errorf("the log grew to %d bytes, at most %d are wanted", most, hubdb.WALBound)
	}
	t.Logf("the log had %d bytes at most", most)
}
