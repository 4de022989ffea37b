// Package view walks a recording (core/atop) a sample at a time: Index finds
// any sample of a log, which may still grow, and Panel is what a terminal shows
// of one. Reading keys and drawing lines is the command's.
package view

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"virtkit/core/atop"
	"virtkit/core/atop/archive"
)

// maxSamples bounds what of a log is walked: at a sample a second, a year.
const maxSamples = 32 << 20

// Index knows where each sample of a log is. A packed log is unpacked into a
// file without a name.
type Index struct {
	f    *os.File
	ends []int64 // behind each sample's SEP
	size int64   // of what has been looked at
	buf  []byte
}

// Open opens a log, plain or packed.
func Open(path string) (*Index, error) {
	in, err := archive.Open(path)
	if err != nil {
		return nil, err
	}
	x := &Index{buf: make([]byte, 1<<20)}
	if f, ok := in.(*os.File); ok {
		x.f = f
	} else {
		defer in.Close()
		if x.f, err = os.CreateTemp("", "vk-atop-*"); err != nil {
			return nil, err
		}
		os.Remove(x.f.Name())
		if _, err := io.Copy(x.f, in); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			x.f.Close()
			return nil, fmt.Errorf("unpacking %s: %w", path, err)
		}
	}
	if err := x.Refresh(); err != nil {
		x.f.Close()
		return nil, err
	}
	return x, nil
}

// Close closes the log.
func (x *Index) Close() error { return x.f.Close() }

// Len is how many samples there are.
func (x *Index) Len() int { return len(x.ends) }

// Refresh looks for samples that have come since.
func (x *Index) Refresh() error {
	// Lines may span reads: what follows the last line's end is looked at again.
	for {
		n, err := x.f.ReadAt(x.buf, x.size)
		last := bytes.LastIndexByte(x.buf[:n], '\n') + 1
		if last == 0 {
			if n == len(x.buf) { // one endless line
				x.size += int64(n)
				continue
			}
			return ended(err)
		}
		for at := 0; at < last; {
			end := at + bytes.IndexByte(x.buf[at:last], '\n') + 1
			if end-at == 4 && string(x.buf[at:end]) == "SEP\n" && len(x.ends) < maxSamples {
				x.ends = append(x.ends, x.size+int64(end))
			}
			at = end
		}
		x.size += int64(last)
		if err != nil {
			return ended(err)
		}
	}
}

func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// Read reads sample i, counted from 0. What lies between two SEPs and is no
// sample is an empty one.
func (x *Index) Read(i int, s *atop.Sample) error {
	from := int64(0)
	if i > 0 {
		from = x.ends[i-1]
	}
	r := atop.NewReader(io.NewSectionReader(x.f, from, x.ends[i]-from))
	err := r.Next(s)
	if errors.Is(err, io.EOF) {
		*s = atop.Sample{}
		return nil
	}
	return err
}
