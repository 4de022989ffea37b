package pcap_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"virtkit/netsw/pcap"
)

func TestFormat(t *testing.T) {
	var b bytes.Buffer
	w, err := pcap.New(&b)
	if err != nil {
		t.Fatal(err)
	}
	w.Frame([]byte("first"))
	w.Frame([]byte("second one"))
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	out := b.Bytes()
	if len(out) != 24+16+5+16+10 || binary.LittleEndian.Uint32(out) != 0xa1b23c4d || binary.LittleEndian.Uint32(out[20:]) != 1 {
		t.Fatalf("capture of %d bytes: % x", len(out), out)
	}
	if n := binary.LittleEndian.Uint32(out[24+8:]); n != 5 || string(out[40:45]) != "first" {
		t.Errorf("first record has length %d, data %q", n, out[40:45])
	}
	if string(out[61:]) != "second one" {
		t.Errorf("second record is %q", out[61:])
	}
}

type full struct{ n int }

var errFull = errors.New("disk full")

func (f *full) Write(b []byte) (int, error) {
	if f.n -= len(b); f.n < 0 {
		return 0, errFull
	}
	return len(b), nil
}

func TestFirstErrorStays(t *testing.T) {
	w, err := pcap.New(&full{n: 24})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.Frame(make([]byte, 60000))
	}
	if err := w.Flush(); !errors.Is(err, errFull) {
		t.Errorf("Flush() = %v, want %v", err, errFull)
	}
}
