package zst_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"virtkit/core/zst"
)

func pack(t *testing.T, level int, s string) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := zst.NewWriter(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, s); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func unpack(b []byte) (string, error) {
	r, err := zst.NewReader(bytes.NewReader(b))
	if err != nil {
		return "", err
	}
	defer r.Close()
	out, err := io.ReadAll(r)
	return string(out), err
}

func TestRoundTrip(t *testing.T) {
	for _, s := range []string{"", "x", strings.Repeat("hello ", 1<<20)} {
		for _, level := range []int{zst.Fast, zst.Default, zst.Small} {
			got, err := unpack(pack(t, level, s))
			if err != nil || got != s {
				t.Errorf("level %d, %d bytes: %d bytes, %v", level, len(s), len(got), err)
			}
		}
	}
}

// TestFrames: frames one after the other, skippable ones between, and those of
// the other library.
func TestFrames(t *testing.T) {
	skip := binary.LittleEndian.AppendUint32([]byte{0x53, 0x2a, 0x4d, 0x18}, 5)
	skip = append(skip, "later"...)
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	other := enc.EncodeAll([]byte("three"), nil)
	b := bytes.Join([][]byte{skip, pack(t, 1, "one "), skip, pack(t, 3, "two "), other, skip}, nil)
	if got, err := unpack(b); err != nil || got != "one two three" {
		t.Errorf("frames = %q, %v; want one two three", got, err)
	}
}

func TestDamage(t *testing.T) {
	b := pack(t, 3, strings.Repeat("abcdefgh", 10000)+"end")
	if _, err := unpack(b[:len(b)-4]); err == nil {
		t.Error("a stream cut short unpacks without an error")
	}
	if _, err := unpack([]byte("\x28\xb5\x2f\xfdgarbage")); err == nil {
		t.Error("garbage unpacks without an error")
	}
}
