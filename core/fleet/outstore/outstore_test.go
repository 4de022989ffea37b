package outstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/outstore"
)

// runner is a store that runs, and the acks that it gave.
type runner struct {
	*outstore.Store
	t    *testing.T
	dir  string
	mu   sync.Mutex
	acks map[string]int64
	more chan struct{}
}

func run(t *testing.T, dir string) *runner {
	t.Helper()
	s, err := outstore.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	r := &runner{Store: s, t: t, dir: dir, acks: map[string]int64{}, more: make(chan struct{}, 1024)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.Run(ctx, func(job string, off int64, err error) {
			if err != nil {
				t.Error(err)
			}
			r.mu.Lock()
			r.acks[job] = max(r.acks[job], off)
			r.mu.Unlock()
			select {
			case r.more <- struct{}{}:
			default:
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *runner) append(job string, off int64, data string, limit int64) {
	r.t.Helper()
	if err := r.Append(job, off, []byte(data), limit); err != nil {
		r.t.Fatal(err)
	}
}

// acked waits until a job's node may be acked up to off.
func (r *runner) acked(job string, off int64) {
	r.t.Helper()
	deadline := time.After(time.Minute)
	for {
		r.mu.Lock()
		got := r.acks[job]
		r.mu.Unlock()
		if got >= off {
			if got > off {
				r.t.Fatalf("acked up to %d, want %d", got, off)
			}
			return
		}
		select {
		case <-r.more:
		case <-deadline:
			r.t.Fatalf("acked up to %d after a minute, want %d", got, off)
		}
	}
}

func (r *runner) holds(job, want string) {
	r.t.Helper()
	b, n, err := r.Read(job, 0, 1<<20)
	if err != nil || string(b) != want || n != int64(len(want)) {
		r.t.Errorf("%s holds %q of %d, %v, want %q", job, b, n, err, want)
	}
}

func TestAppend(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "jobs"))
	r.append("a", 0, "hello ", 1000)
	r.append("a", 0, "hello world", 1000)
	r.append("a", 2, "llo", 1000)
	r.acked("a", 11)
	r.holds("a", "hello world")
	if err := r.Append("a", 12, []byte("x"), 1000); !errors.Is(err, outstore.ErrGap) {
		t.Errorf("a gap: %v", err)
	}
	if b, n, err := r.Read("a", 6, 3); err != nil || string(b) != "wor" || n != 11 {
		t.Errorf("3 bytes from 6: %q of %d, %v", b, n, err)
	}
	if b, n, err := r.Read("a", 20, 3); err != nil || len(b) != 0 || n != 11 {
		t.Errorf("past the end: %q of %d, %v", b, n, err)
	}
	if b, n, err := r.Read("none", 0, 3); err != nil || len(b) != 0 || n != 0 {
		t.Errorf("of a job without output: %q of %d, %v", b, n, err)
	}
	if info, err := os.Stat(filepath.Join(r.dir, "a.out")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v", info.Mode(), err)
	}
}

func TestLimit(t *testing.T) {
	dir := t.TempDir()
	r := run(t, dir)
	r.append("a", 0, "0123456789", 12)
	r.append("a", 10, "abcdef", 12)
	r.append("a", 16, "more", 12)
	r.acked("a", 20)
	r.holds("a", "0123456789ab")
	// Another process does not know how far the node was acked; past the limit
	// it does not matter.
	r = run(t, dir)
	if acked, n, err := r.Held("a"); err != nil || acked != 12 || n != 12 {
		t.Errorf("after a restart acked %d of %d, %v", acked, n, err)
	}
	r.append("a", 20, "yet more", 12)
	r.acked("a", 28)
	r.holds("a", "0123456789ab")
}

func TestRemove(t *testing.T) {
	r := run(t, t.TempDir())
	r.append("a", 0, "text", 100)
	r.append("b", 0, "text", 100)
	r.acked("a", 4)
	r.acked("b", 4)
	r.Close("a")
	r.holds("a", "text")
	if err := r.Remove("a"); err != nil {
		t.Fatal(err)
	}
	r.append("a", 4, "late", 100)
	r.acked("a", 8)
	r.holds("a", "")
	if jobs, err := r.Jobs(); err != nil || fmt.Sprint(jobs) != "[b]" {
		t.Errorf("jobs %v, %v", jobs, err)
	}
	r.Forget("a")
	if err := r.Remove("a"); err != nil {
		t.Errorf("removed again: %v", err)
	}
}

// TestManyAtOnce: what is acked is there for another process, whatever came at
// the same time.
func TestManyAtOnce(t *testing.T) {
	dir := t.TempDir()
	r := run(t, dir)
	line := bytes.Repeat([]byte("x"), 999)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			job := fmt.Sprint("job", i)
			for k := range 50 {
				if err := r.Append(job, int64(k*1000), append(line, byte('0'+i)), 1<<20); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for i := range 20 {
		r.acked(fmt.Sprint("job", i), 50_000)
	}
	other := run(t, dir)
	for i := range 20 {
		b, n, err := other.Read(fmt.Sprint("job", i), 0, 1<<20)
		if err != nil || n != 50_000 || !bytes.Equal(b, bytes.Repeat(append(line, byte('0'+i)), 50)) {
			t.Errorf("job%d: %d bytes, %v", i, n, err)
		}
	}
}

// BenchmarkAppend is what a hub stores durably of 32 jobs that print at once, in
// chunks of 4 KiB: bytes a second until all is acked.
func BenchmarkAppend(b *testing.B) {
	s, err := outstore.Open(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	const jobs, chunk = 32, 4096
	type ack struct {
		job string
		off int64
	}
	acks := make(chan ack, 1<<16)
	go s.Run(ctx, func(job string, off int64, err error) { acks <- ack{job, off} })
	data := bytes.Repeat([]byte("a line of output\n"), chunk/17+1)[:chunk]
	b.SetBytes(jobs * chunk)
	var off int64
	for b.Loop() {
		for i := range jobs {
			if err := s.Append(fmt.Sprint("job", i), off, data, 1<<40); err != nil {
				b.Fatal(err)
			}
		}
		off += chunk
	}
	done := map[string]bool{}
	for len(done) < jobs {
		if a := <-acks; a.off == off {
			done[a.job] = true
		}
	}
}
