package relay

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// spool is a job's trace on this host, so that GitLab may ask for any part of
// it again. Its file has no name: nothing is left when the process is gone, and
// the hub, which keeps the output until the job is settled, fills the next one.
// It holds the head, then the hub's output, then the tail.
type spool struct {
	f *os.File

	mu   sync.Mutex
	size int64
	crc  uint32
	last byte
}

// newSpool makes one in dir.
func newSpool(dir string) (*spool, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return &spool{f: os.NewFile(uintptr(fd), "trace")}, nil
	}
	// A filesystem without O_TMPFILE.
	f, err := os.CreateTemp(dir, "trace-*.tmp")
	if err != nil {
		return nil, fmt.Errorf("making room for a trace: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return &spool{f: f}, nil
}

// append adds what comes next.
func (s *spool) append(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.f.WriteAt(p, s.size); err != nil {
		return fmt.Errorf("keeping a trace: %w", err)
	}
	s.size += int64(len(p))
	s.crc = crc32.Update(s.crc, crc32.IEEETable, p)
	s.last = p[len(p)-1]
	return nil
}

// midLine says whether the last line has no end.
func (s *spool) midLine() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size > 0 && s.last != '\n'
}

// ReadAt is gitlab.Log's.
func (s *spool) ReadAt(p []byte, off int64) (int, error) {
	n, err := s.f.ReadAt(p, off)
	if errors.Is(err, io.EOF) && n == len(p) {
		err = nil
	}
	return n, err
}

// Sum is gitlab.Log's.
func (s *spool) Sum() (int64, uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size, s.crc
}

func (s *spool) Close() error { return s.f.Close() }
