package zst_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
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

func TestDict(t *testing.T) {
	var samples [][]byte
	for i := range 600 {
		samples = append(samples, fmt.Appendf(nil, `{"kind":"gitlab_ci","job":{"id":%d,"name":"test %d"},"variables":[{"key":"CI","value":"true"},{"key":"CI_PIPELINE_ID","value":"%d"}]}`, i, i%7, i*31))
	}
	data, err := zst.Train(7, samples)
	if err != nil {
		t.Fatal(err)
	}
	d, err := zst.NewDict(data)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := zst.Plain()
	if err != nil {
		t.Fatal(err)
	}
	one := samples[123]
	small, large := d.Compress(one), plain.Compress(one)
	if len(small) >= len(large)/2 {
		t.Errorf("%d bytes with a dictionary, %d without", len(small), len(large))
	}
	for _, c := range []struct {
		d *zst.Dict
		b []byte
	}{{d, small}, {plain, large}, {d, large}} {
		if got, err := c.d.Expand(c.b, 1<<20); err != nil || !bytes.Equal(got, one) {
			t.Errorf("expanded to %q, %v", got, err)
		}
	}
	if _, err := plain.Expand(small, 1<<20); err == nil {
		t.Error("what needs a dictionary expands without it")
	}
	if _, err := plain.Expand(plain.Compress(make([]byte, 1<<20)), 1000); err == nil {
		t.Error("more than the limit expands")
	}
	if _, err := zst.NewDict([]byte("no dictionary at all")); err == nil {
		t.Error("garbage is a dictionary")
	}
	if _, err := zst.Train(1, nil); err == nil {
		t.Error("a dictionary of nothing")
	}
}
