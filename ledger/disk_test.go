package ledger_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/core/fsx"
	"virtkit/ledger"
)

// A real filesystem with room for three of twelve jobs, in bytes or in inodes:
// whoever is admitted has room to its end, and all of them come to one.
func TestASmallDiskIsNeverFilled(t *testing.T) {
	t.Run("bytes", func(t *testing.T) { fillDisk(t, "size=64m,nr_inodes=4000", 40) })
	t.Run("inodes", func(t *testing.T) { fillDisk(t, "size=1g,nr_inodes=150", 40) })
}

// fillDisk lets each job write files of half a MiB.
func fillDisk(t *testing.T, mount string, files int) {
	state := t.TempDir()
	if err := unix.Mount("tmpfs", state, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, mount); err != nil {
		t.Skipf("needs to mount a tmpfs: run as root (%v)", err)
	}
	t.Cleanup(func() { unix.Unmount(state, unix.MNT_DETACH) })
	j, err := ledger.Open(state)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var waited, inside, most atomic.Int64
	for i := range 12 {
		wg.Go(func() {
			a, err := j.Admissions(ledger.AdmitOptions{Limits: admit.Limits{Disk: true}, Wait: 2 * time.Minute})
			if err != nil {
				t.Error(err)
				return
			}
			id := fmt.Sprint(i, "-job")
			var once sync.Once
			h, err := a.Admit(t.Context(), room(id, int64(files)*mib/2, int64(files)+1), func(string) { once.Do(func() { waited.Add(1) }) })
			if err != nil {
				t.Error(err)
				return
			}
			for n := inside.Add(1); n > most.Load(); {
				most.Store(n)
			}
			defer inside.Add(-1)
			dir := j.Path(id)
			err = os.Mkdir(dir, 0o700)
			for n := 0; n < files && err == nil; n++ {
				err = os.WriteFile(filepath.Join(dir, fmt.Sprint(n)), make([]byte, mib/2), 0o600)
				time.Sleep(time.Millisecond)
			}
			if err != nil {
				t.Errorf("%s: %v (full: %t)", id, err, errors.Is(err, unix.ENOSPC))
			}
			// As a cleanup does: the guest, its directory, its claim.
			err = errors.Join(fsx.RemoveTree(dir), h.Release())
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d of 12 waited; at most %d at once", waited.Load(), most.Load())
	if waited.Load() == 0 || most.Load() < 2 || most.Load() > 3 {
		t.Error("not what was to be tried")
	}
}

// TestOfferMakesRoom: an offer that is short of disk has images evicted and is
// decided anew; what freed nothing is not tried again for more.
func TestOfferMakesRoom(t *testing.T) {
	j := open(t)
	var asked []int64
	said := newLines()
	opt := disk(100*mib, func(need int64, _ []string) admit.Evicted {
		asked = append(asked, need)
		if need > 40*mib {
			return admit.Evicted{Could: 40 * mib}
		}
		os.RemoveAll(j.Path("cache"))
		return admit.Evicted{Images: 1, Bytes: 40 * mib}
	})
	write(t, filepath.Join(j.Path("cache"), "blob"), 40*mib)
	g := gate(t, j, 0, opt, func(o *ledger.AdmitOptions) { o.Say = said.say })
	offer := func(id string, want int64) string {
		t.Helper()
		_, refused, err := g.Offer(t.Context(), id, admit.Amounts{Disk: want})
		if err != nil {
			t.Fatal(err)
		}
		return refused
	}
	for _, tt := range []struct {
		id      string
		want    int64
		refused string
		asked   int
	}{
		{"a", 20 * mib, "", 0},
		{"big", 90 * mib, "disk", 1},  // 50 MiB short: more than could come free
		{"big2", 90 * mib, "disk", 1}, // not asked again
		{"b", 50 * mib, "", 2},
	} {
		if refused := offer(tt.id, tt.want); refused != tt.refused || len(asked) != tt.asked {
			t.Errorf("%s: refused %q after %d tries, want %q after %d", tt.id, refused, len(asked), tt.refused, tt.asked)
		}
	}
	if !strings.HasPrefix(said.text(), "evicted 1 unused image(s)") {
		t.Errorf("said %q", said.text())
	}
}
