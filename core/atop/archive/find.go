package archive

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/atop"
	"virtkit/core/fault"
	"virtkit/core/zst"
)

// Run is one recording.
type Run struct {
	Day  string // 2026-08-11
	Name string // 42137-acme-web-test_unit
	Path string // of the log, plain or packed
	Time time.Time
}

// Find is the newest recording that want names: a job's id, or any part of a
// recording's name. A number is an id alone, and only the one that a name
// begins with.
func (a *Archive) Find(want string) (Run, error) {
	if want == "" {
		return Run{}, fault.New(fault.Usage, "no recording was named").Hint("give a job's id, or a part of its name")
	}
	days := a.days()
	slices.Reverse(days)
	for _, day := range days {
		var best *Run
		for _, name := range subdirs(filepath.Join(a.Root, day)) {
			if !matches(name, want) {
				continue
			}
			r, ok := runAt(filepath.Join(a.Root, day, name))
			if ok && (best == nil || r.Time.After(best.Time) || r.Time.Equal(best.Time) && r.Name > best.Name) {
				best = &r
			}
		}
		if best != nil {
			return *best, nil
		}
	}
	return Run{}, fault.Newf(fault.NotFound, "no recording matches %q", want).
		Hint("recordings are in %s, by UTC day; they are kept for [executor] atop_retention_days", a.Root)
}

// List are all recordings, oldest day first.
func (a *Archive) List() []Run {
	var out []Run
	for _, day := range a.days() {
		for _, name := range subdirs(filepath.Join(a.Root, day)) {
			if r, ok := runAt(filepath.Join(a.Root, day, name)); ok {
				out = append(out, r)
			}
		}
	}
	return out
}

func matches(name, want string) bool {
	if strings.Trim(want, "0123456789") == "" {
		rest, ok := strings.CutPrefix(name, want)
		return ok && (rest == "" || rest[0] == '-')
	}
	return strings.Contains(name, want)
}

// runAt is the recording of a directory. A plain log is the whole one.
func runAt(dir string) (Run, bool) {
	for _, f := range []string{atop.LogFile, atop.PackedFile} {
		path := filepath.Join(dir, f)
		if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() {
			return Run{filepath.Base(filepath.Dir(dir)), filepath.Base(dir), path, st.ModTime()}, true
		}
	}
	return Run{}, false
}

// At is the recording of one directory; fs.ErrNotExist when it has none.
func At(dir string) (Run, error) {
	if r, ok := runAt(dir); ok {
		return r, nil
	}
	return Run{}, fmt.Errorf("%s has no recording: %w", dir, fs.ErrNotExist)
}

var magic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// Open opens a log, plain or packed, whatever its name.
func Open(path string) (io.ReadCloser, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is no file", path)
	}
	head := make([]byte, len(magic))
	if err == nil {
		_, err = f.ReadAt(head, 0)
	}
	switch {
	case errors.Is(err, io.EOF), err == nil && !bytes.Equal(head, magic):
		return f, nil
	case err != nil:
		f.Close()
		return nil, err
	}
	z, err := zst.NewReader(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("unpacking %s: %w", path, err)
	}
	return &packed{z, f}, nil
}

type packed struct {
	io.ReadCloser
	f *os.File
}

// Close implements io.Closer.
func (p *packed) Close() error { return errors.Join(p.ReadCloser.Close(), p.f.Close()) }

// Samples calls f with each sample of a log, until it returns false. What
// cannot be read of it is in the stats and in the error: samples that came
// before are good. brief reads what an account needs alone.
func Samples(path string, brief bool, f func(*atop.Sample) bool) (atop.ReadStats, error) {
	in, err := Open(path)
	if err != nil {
		return atop.ReadStats{}, err
	}
	defer in.Close()
	ahead := readAhead(in)
	defer ahead.Close()
	r := atop.NewReader(ahead)
	r.Brief = brief
	var s atop.Sample
	for {
		switch err := r.Next(&s); {
		case err == nil:
			if !f(&s) {
				return r.Stats(), nil
			}
		case errors.Is(err, io.EOF):
			return r.Stats(), nil
		default:
			return r.Stats(), fmt.Errorf("reading %s: %w", path, err)
		}
	}
}

// readAhead unpacks beside whoever reads.
func readAhead(in io.Reader) *ahead {
	a := &ahead{full: make(chan block, 2), free: make(chan []byte, 3), stop: make(chan struct{}), done: make(chan struct{})}
	for range cap(a.free) {
		a.free <- make([]byte, 1<<20)
	}
	go a.run(in)
	return a
}

type block struct {
	b   []byte
	err error
}

type ahead struct {
	full chan block
	free chan []byte
	stop chan struct{}
	done chan struct{}
	now  block
	buf  []byte // of now, to give back
}

func (a *ahead) run(in io.Reader) {
	defer close(a.done)
	for {
		var buf []byte
		select {
		case buf = <-a.free:
		case <-a.stop:
			return
		}
		n, err := 0, error(nil)
		for n < len(buf) && err == nil { // not io.ReadFull: it would hide a cut stream's error
			var m int
			m, err = in.Read(buf[n:])
			n += m
		}
		select {
		case a.full <- block{buf[:n], err}:
		case <-a.stop:
			return
		}
		if err != nil {
			return
		}
	}
}

// Read implements io.Reader.
func (a *ahead) Read(p []byte) (int, error) {
	for len(a.now.b) == 0 {
		if a.now.err != nil {
			return 0, a.now.err
		}
		if a.buf != nil {
			a.free <- a.buf[:cap(a.buf)]
			a.buf = nil
		}
		a.now = <-a.full
		a.buf = a.now.b
	}
	n := copy(p, a.now.b)
	a.now.b = a.now.b[n:]
	return n, nil
}

// Close ends the reading.
func (a *ahead) Close() error {
	close(a.stop)
	<-a.done
	return nil
}
