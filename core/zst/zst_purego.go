//go:build !cgo

package zst

import (
	"io"

	"github.com/klauspost/compress/zstd"
)

func newWriter(w io.Writer, level int) (io.WriteCloser, error) {
	return zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.EncoderLevelFromZstd(level)), zstd.WithEncoderConcurrency(1))
}
