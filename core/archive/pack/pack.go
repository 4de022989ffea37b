// Package pack is the host's half of core/archive: it turns the tar stream that
// a guest sends into the formats of GitLab's artifacts, and those back into one.
//
// Bytes stream. Files of up to Block are compressed whole, one on each CPU, and
// written in the order of the stream; longer ones in blocks, which in a zip end
// with a flush, so that together they are one deflate stream. Memory is bounded
// by some blocks for each CPU.
//
// A zip is as gitlab-runner's archiver writes it (vectors/artifacts-zip): Unix
// modes, owner and time in extra fields, a data descriptor behind each file, a
// file stored when deflating does not make it smaller, unless it is alone.
package pack

import (
	"archive/tar"
	"compress/flate"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	kgzip "github.com/klauspost/compress/gzip"

	"virtkit/core/fleet/job"
	"virtkit/core/zst"
)

// Level is how much work compressing is: ARTIFACT_COMPRESSION_LEVEL and
// CACHE_COMPRESSION_LEVEL.
type Level string

// The levels. Another word is Default.
const (
	Fastest Level = "fastest" // stored, in a zip
	Fast    Level = "fast"
	Default Level = "default"
	Slow    Level = "slow"
	Slowest Level = "slowest"
)

// Known tells whether l is one of the levels, "" being Default.
func (l Level) Known() bool {
	switch l {
	case Fastest, Fast, Default, Slow, Slowest, "":
		return true
	}
	return false
}

func (l Level) flate() int {
	switch l {
	case Fastest:
		return flate.NoCompression
	case Fast:
		return flate.BestSpeed
	case Slow:
		return 7
	case Slowest:
		return flate.BestCompression
	}
	return 5
}

func (l Level) zstd() int {
	switch l {
	case Fastest, Fast:
		return zst.Fast
	case Slow, Slowest:
		return zst.Small
	}
	return zst.Default
}

// ErrOneFile is of a raw artifact that is not exactly one file.
var ErrOneFile = errors.New("only one file can be sent as raw")

// ErrNotRegular is of a directory or a link among the files of a gzip.
var ErrNotRegular = errors.New("is not a regular file")

// Write reads a tar stream to its end and writes it in a format. entries is how
// many the stream had; with 0, what was written is worth nothing.
func Write(w io.Writer, r io.Reader, format job.Format, l Level) (entries int, err error) {
	switch format {
	case job.Zip, "":
		entries, err = writeZip(w, r, l, false)
	case job.ZipZstd:
		entries, err = writeZip(w, r, l, true)
	case job.TarZstd:
		entries, err = writeTar(w, r, l)
	case job.Gzip:
		entries, err = writeGzip(w, r, l)
	case job.Raw:
		entries, err = writeRaw(w, r)
	default:
		return 0, fmt.Errorf("no artifact format %q", format)
	}
	if err == nil {
		_, err = io.Copy(io.Discard, r) // so that whoever writes it ends well
	}
	return entries, err
}

// each calls fn for every entry.
func each(r io.Reader, fn func(*tar.Header, io.Reader) error) (n int, err error) {
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err == io.EOF {
			return n, nil
		}
		if err == nil {
			n++
			err = fn(h, t)
		}
		if err != nil {
			return n, err
		}
	}
}

func writeTar(w io.Writer, r io.Reader, l Level) (int, error) {
	z, err := zst.NewWriter(w, l.zstd())
	if err != nil {
		return 0, err
	}
	tee := io.TeeReader(r, z)
	n, err := each(tee, func(_ *tar.Header, r io.Reader) error { _, err := io.Copy(io.Discard, r); return err })
	if err == nil {
		_, err = io.Copy(io.Discard, tee)
	}
	return n, errors.Join(err, z.Close())
}

// writeGzip writes each file as a member of its own, named by its comment.
func writeGzip(w io.Writer, r io.Reader, l Level) (int, error) {
	level := l.flate()
	files := 0
	_, err := each(r, func(h *tar.Header, r io.Reader) error {
		if h.Typeflag != tar.TypeReg {
			return fmt.Errorf("the %q %w", strings.TrimSuffix(h.Name, "/"), ErrNotRegular)
		}
		files++
		z, err := kgzip.NewWriterLevel(w, level)
		if err != nil {
			return err
		}
		z.Name, z.Comment, z.ModTime = latin1(path.Base(h.Name)), latin1(h.Name), h.ModTime
		if _, err := io.Copy(z, r); err != nil {
			return err
		}
		return z.Close()
	})
	return files, err
}

// latin1 is a text as a gzip header can hold it.
func latin1(s string) string {
	return strings.Map(func(r rune) rune {
		if r == 0 || r > 0xff {
			return '?'
		}
		return r
	}, s)
}

func writeRaw(w io.Writer, r io.Reader) (int, error) {
	files := 0
	_, err := each(r, func(h *tar.Header, r io.Reader) error {
		if files++; files > 1 {
			return ErrOneFile
		}
		_, err := io.Copy(w, r)
		return err
	})
	return files, err
}
