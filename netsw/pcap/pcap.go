// Package pcap writes captured frames in the classic pcap format, which every
// network analyser reads.
package pcap

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"sync"
	"time"
)

// snapLen is how much of a frame is kept: all of it.
const snapLen = 1 << 17

// Writer writes one capture. Its methods may be called from many goroutines.
type Writer struct {
	mu  sync.Mutex
	w   *bufio.Writer
	err error
	now func() time.Time
}

// New writes the header of a capture of Ethernet frames with nanoseconds.
func New(w io.Writer) (*Writer, error) {
	p := &Writer{w: bufio.NewWriterSize(w, 64<<10), now: time.Now}
	var h [24]byte
	binary.LittleEndian.PutUint32(h[0:], 0xa1b23c4d)
	binary.LittleEndian.PutUint16(h[4:], 2)
	binary.LittleEndian.PutUint16(h[6:], 4)
	binary.LittleEndian.PutUint32(h[16:], snapLen)
	binary.LittleEndian.PutUint32(h[20:], 1) // Ethernet
	if _, err := p.w.Write(h[:]); err != nil {
		return nil, fmt.Errorf("writing pcap header: %w", err)
	}
	return p, p.Flush()
}

// Frame adds a frame. The first error stays and is Flush's.
func (p *Writer) Frame(f []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return
	}
	t := p.now()
	var h [16]byte
	binary.LittleEndian.PutUint32(h[0:], uint32(t.Unix()))
	binary.LittleEndian.PutUint32(h[4:], uint32(t.Nanosecond()))
	n := min(len(f), snapLen)
	binary.LittleEndian.PutUint32(h[8:], uint32(n))
	binary.LittleEndian.PutUint32(h[12:], uint32(len(f)))
	if _, p.err = p.w.Write(h[:]); p.err == nil {
		_, p.err = p.w.Write(f[:n])
	}
}

// Flush writes out what is buffered.
func (p *Writer) Flush() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = p.w.Flush()
	}
	return p.err
}
