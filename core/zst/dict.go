package zst

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/klauspost/compress/dict"
	"github.com/klauspost/compress/zstd"
)

// Dict compresses and expands small texts that are alike. Safe for concurrent
// use.
type Dict struct {
	enc *zstd.Encoder
	dec *zstd.Decoder
}

// Plain makes one without a dictionary.
func Plain() (*Dict, error) { return newDict(nil) }

// NewDict makes one of what Train made.
func NewDict(data []byte) (*Dict, error) {
	if len(data) == 0 {
		return nil, errors.New("zst: the dictionary is empty")
	}
	return newDict(data)
}

func newDict(data []byte) (*Dict, error) {
	eo := []zstd.EOption{zstd.WithEncoderConcurrency(2), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithWindowSize(1 << 20), zstd.WithLowerEncoderMem(true)}
	do := []zstd.DOption{zstd.WithDecoderConcurrency(2), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderMaxMemory(maxWindow)}
	if data != nil {
		eo, do = append(eo, zstd.WithEncoderDict(data)), append(do, zstd.WithDecoderDicts(data))
	}
	enc, err := zstd.NewWriter(nil, eo...)
	if err != nil {
		return nil, fmt.Errorf("zst: reading a dictionary: %w", err)
	}
	dec, err := zstd.NewReader(nil, do...)
	if err != nil {
		return nil, fmt.Errorf("zst: reading a dictionary: %w", err)
	}
	return &Dict{enc, dec}, nil
}

// Compress packs b into one frame.
func (d *Dict) Compress(b []byte) []byte { return d.enc.EncodeAll(b, nil) }

// Expand reverses Compress. More than limit bytes are an error.
func (d *Dict) Expand(b []byte, limit int) ([]byte, error) {
	var h zstd.Header
	if err := h.Decode(b); err != nil {
		return nil, fmt.Errorf("zst: %w", err)
	}
	if h.HasFCS && h.FrameContentSize > uint64(limit) {
		return nil, fmt.Errorf("zst: %d bytes expand to %d, at most %d are allowed", len(b), h.FrameContentSize, limit)
	}
	out, err := d.dec.DecodeAll(b, nil)
	if err == nil && len(out) > limit {
		err = fmt.Errorf("zst: %d bytes expand to %d, at most %d are allowed", len(b), len(out), limit)
	}
	return out, err
}

// dictSize is the history that a dictionary holds, in bytes.
const dictSize = 64 << 10

// Train makes a dictionary, with an id above 0, of samples that are alike.
func Train(id uint32, samples [][]byte) ([]byte, error) {
	data, err := dict.BuildZstdDict(samples, dict.Options{MaxDictSize: dictSize, HashBytes: 6, ZstdDictID: id, ZstdLevel: zstd.SpeedDefault})
	if err != nil {
		return nil, fmt.Errorf("zst: training a dictionary: %w", err)
	}
	if bytes.HasPrefix(data, []byte{0x37, 0xa4, 0x30, 0xec}) {
		return data, nil
	}
	return nil, errors.New("zst: training gave no dictionary")
}
