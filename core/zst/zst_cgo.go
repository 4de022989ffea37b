//go:build cgo

package zst

import (
	"io"

	"github.com/DataDog/zstd"
)

func newWriter(w io.Writer, level int) (io.WriteCloser, error) {
	return zstd.NewWriterLevel(w, level), nil
}
