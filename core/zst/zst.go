// Package zst is the one place where zstd (RFC 8878) is compressed and
// expanded. With cgo it is the reference library (DataDog/zstd), without it
// the pure Go one (klauspost/compress); both write streams the other reads.
package zst

import "io"

// Levels that all callers choose from.
const (
	Fast    = 1 // for what is read once
	Default = 3
	Small   = 10 // for what is kept or sent
)

// NewReader expands r: any number of frames one after the other, skippable
// ones included. Close it to free what it holds; it does not close r.
func NewReader(r io.Reader) (io.ReadCloser, error) { return newReader(r) }

// NewWriter compresses to w at a level. The stream is whole after Close,
// which does not close w.
func NewWriter(w io.Writer, level int) (io.WriteCloser, error) { return newWriter(w, level) }
