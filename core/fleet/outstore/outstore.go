// Package outstore keeps the output of placed jobs on the hub: a file a job,
// <dir>/<job>.out, written at the offsets that nodes send.
//
// What is appended is synced by a few workers, each sync taking with it all
// that came for that job meanwhile, and the directory for a file's first
// bytes; then Synced is told how far the node may be acked. Nobody reads what
// is not synced: a reader never has bytes that a loss of power takes back.
//
// Measured beside rows in the hub's SQLite file, which would share its one
// writer and its one log: see the benchmark.
//
// Spec: fleet-reference, "Output is kept in <data_dir>/jobs/<id>.out".
package outstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"virtkit/core/fsx"
)

const suffix = ".out"

// workers sync at the same time: a file system commits them together.
const workers = 8

// ErrGap is what a chunk past the end of what was sent before gets.
var ErrGap = errors.New("outstore: a piece of output is missing")

// Store keeps outputs. Make one with Open, then Run it.
type Store struct {
	dir string

	mu    sync.Mutex
	files map[string]*file
	queue []*file
	wake  chan struct{}
}

// file is one job's output.
type file struct {
	job string

	mu      sync.Mutex
	f       *os.File
	size    int64 // written
	seen    int64 // end of what was sent; past size once the output is at its limit
	durable int64 // synced
	acked   int64 // seen at that time
	fresh   bool  // its name is not synced
	queued  bool
	gone    bool
}

// Open makes the directory, 0700.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of outputs: %w", err)
	}
	if err := fsx.SyncDir(filepath.Dir(dir)); err != nil {
		return nil, err
	}
	return &Store{dir: dir, files: map[string]*file{}, wake: make(chan struct{}, workers)}, nil
}

func (s *Store) path(job string) string { return filepath.Join(s.dir, job+suffix) }

// Run syncs until ctx ends, and tells synced of each: the offset that the
// job's node may be acked, or why it cannot be.
func (s *Store) Run(ctx context.Context, synced func(job string, offset int64, err error)) error {
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-s.wake:
				}
				for f := s.next(); f != nil; f = s.next() {
					off, err := s.sync(f)
					synced(f.job, off, err)
				}
			}
		})
	}
	wg.Wait()
	return nil
}

func (s *Store) next() *file {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		return nil
	}
	f := s.queue[0]
	s.queue = s.queue[1:]
	return f
}

func (s *Store) sync(f *file) (int64, error) {
	f.mu.Lock()
	f.queued = false
	h, size, seen, fresh, gone := f.f, f.size, f.seen, f.fresh, f.gone
	f.mu.Unlock()
	if gone {
		return seen, nil
	}
	if h != nil {
		err := h.Sync()
		if err == nil && fresh {
			err = fsx.SyncDir(s.dir)
		}
		if err != nil {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.gone {
				return seen, nil
			}
			return 0, fmt.Errorf("syncing a job's output: %w", err)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.durable, f.acked = max(f.durable, size), max(f.acked, seen)
	f.fresh = f.fresh && !fresh
	return f.acked, nil
}

// get finds a job's file, whether it is there or not.
func (s *Store) get(job string) (*file, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.files[job]; f != nil {
		return f, nil
	}
	f := &file{job: job}
	info, err := os.Stat(s.path(job))
	switch {
	case err == nil:
		f.size = info.Size()
		f.seen, f.durable, f.acked = f.size, f.size, f.size
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("looking at a job's output: %w", err)
	}
	s.files[job] = f
	return f, nil
}

// Append takes a chunk: what is held of it already is trimmed, and what is past
// limit dropped but acked. One past the end of what was sent is ErrGap. The
// ack comes by Run.
func (s *Store) Append(job string, offset int64, data []byte, limit int64) error {
	f, err := s.get(job)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if offset > f.seen && f.size < limit { // past the limit nothing is missed
		return fmt.Errorf("%w: offset %d, %d bytes are held", ErrGap, offset, f.seen)
	}
	end := offset + int64(len(data))
	if keep := min(end, limit); keep > f.size && offset <= f.size && !f.gone {
		if f.f == nil {
			if f.f, err = os.OpenFile(s.path(job), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
				return fmt.Errorf("opening a job's output: %w", err)
			}
			f.fresh = f.size == 0
		}
		n, err := f.f.WriteAt(data[f.size-offset:keep-offset], f.size)
		f.size += int64(n)
		if err != nil {
			f.seen = max(f.seen, f.size)
			return fmt.Errorf("writing a job's output: %w", err)
		}
	}
	f.seen = max(f.seen, end)
	if f.queued {
		return nil
	}
	f.queued = true
	s.mu.Lock()
	s.queue = append(s.queue, f)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default: // every worker has been woken already, and looks at the queue
	}
	return nil
}

// Held is how far a job's node has been acked, and how many bytes can be read.
func (s *Store) Held(job string) (acked, length int64, err error) {
	f, err := s.get(job)
	if err != nil {
		return 0, 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.acked, f.durable, nil
}

// Read returns up to n bytes from offset, none past the end, and the length.
func (s *Store) Read(job string, offset int64, n int) (data []byte, length int64, err error) {
	_, length, err = s.Held(job)
	if err != nil || offset >= length {
		return nil, length, err
	}
	h, err := os.Open(s.path(job))
	if err != nil {
		return nil, length, fmt.Errorf("reading a job's output: %w", err)
	}
	defer h.Close()
	data = make([]byte, min(int64(n), length-offset))
	if _, err := io.ReadFull(io.NewSectionReader(h, offset, int64(len(data))), data); err != nil {
		return nil, length, fmt.Errorf("reading a job's output: %w", err)
	}
	return data, length, nil
}

// Close gives back what a job that has ended holds; its output stays.
func (s *Store) Close(job string) {
	s.mu.Lock()
	f := s.files[job]
	s.mu.Unlock()
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.f != nil && f.durable == f.size && !f.queued {
		f.f.Close()
		f.f = nil
	}
}

// Remove deletes a job's output. What still comes for it is acked and dropped
// while this process lives.
func (s *Store) Remove(job string) error {
	f, err := s.get(job)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone, f.size, f.durable = true, 0, 0
	if f.f != nil {
		f.f.Close()
		f.f = nil
	}
	if err := os.Remove(s.path(job)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing a job's output: %w", err)
	}
	return nil
}

// Forget drops what is known in memory of a job whose output was removed, or
// that needs no more of it.
func (s *Store) Forget(job string) {
	s.Close(job)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.files, job)
}

// Jobs lists the jobs that have output.
func (s *Store) Jobs() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("listing outputs: %w", err)
	}
	var out []string
	for _, e := range entries {
		if job, ok := strings.CutSuffix(e.Name(), suffix); ok && e.Type().IsRegular() {
			out = append(out, job)
		}
	}
	return out, nil
}
