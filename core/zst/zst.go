// Package zst is the one place where zstd (RFC 8878) is compressed and
// expanded. It is compressed by the reference library where there is cgo
// (DataDog/zstd) and by the pure Go one (klauspost/compress) elsewhere. It is
// always expanded by the latter: the stream reader of DataDog/zstd 1.5.7
// takes a stream that was cut short for whole, and stops at skippable frames.
package zst

import (
	"io"

	"github.com/klauspost/compress/zstd"
)

// Levels that all callers choose from.
const (
	Fast    = 1 // for what is read once
	Default = 3
	Small   = 10 // for what is kept or sent
)

// maxWindow is the memory that a stream may ask for, in bytes: what the zstd
// program itself grants by default.
const maxWindow = 128 << 20

// NewReader expands r: any number of frames one after the other, skippable
// ones included. A stream cut short is an error. Close it to free what it
// holds; it does not close r.
func NewReader(r io.Reader) (io.ReadCloser, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, err
	}
	return d.IOReadCloser(), nil
}

// NewWriter compresses to w at a level. The stream is whole after Close,
// which does not close w.
func NewWriter(w io.Writer, level int) (io.WriteCloser, error) { return newWriter(w, level) }
