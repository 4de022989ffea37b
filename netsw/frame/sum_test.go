package frame

import (
	"math/rand/v2"
	"strconv"
	"testing"
)

// sums runs f with the vector instructions that there are, and with none.
func sums(t *testing.T, f func(t *testing.T)) {
	was := wideSum
	defer func() { wideSum = was }()
	if was {
		t.Run("wide", f)
	}
	wideSum = false
	t.Run("narrow", f)
}

// Each length around the steps that the sum is made in, at each place in memory
// that a payload may be at, of bytes that carry most and of any.
func TestChecksumOfLongData(t *testing.T) {
	any := make([]byte, 66<<10)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(any)
	ones := make([]byte, len(any))
	for i := range ones {
		ones[i] = 0xff
	}
	slow := func(b []byte, sum uint32) uint16 {
		s := uint64(sum)
		for i, c := range b {
			s += uint64(c) << (8 * (1 - i%2))
		}
		return ^fold(s)
	}
	sums(t, func(t *testing.T) {
		for _, all := range [][]byte{any, ones} {
			for _, base := range []int{0, wideStep, wideLeast, wideLeast + wideStep, 1448, 9000, 65480} {
				for n := max(base-2, 0); n < base+3; n++ {
					for at := range 40 {
						b := all[at : at+n]
						if got, want := Checksum(b, uint32(at)), slow(b, uint32(at)); got != want {
							t.Fatalf("Checksum(%d bytes from %d on) = %#x, want %#x", n, at, got, want)
						}
					}
				}
			}
		}
	})
}

// A single bit anywhere changes the sum: nothing is passed over or read from
// beyond the end.
func TestChecksumTakesEveryByteOnce(t *testing.T) {
	sums(t, func(t *testing.T) {
		whole := make([]byte, 3*wideLeast)
		b := whole[64 : len(whole)-64-1]
		for i := range whole {
			whole[i] = 1
			inside := i >= 64 && i-64 < len(b)
			want := uint16(0xffff)
			if inside {
				want = ^uint16(1 << (8 * (1 - (i-64)%2)))
			}
			if got := Checksum(b, 0); got != want {
				t.Fatalf("with byte %d set the sum is %#x, want %#x", i-64, got, want)
			}
			whole[i] = 0
		}
	})
}

// BenchmarkChecksum: of payloads of both MTUs, with vector instructions and
// without.
func BenchmarkChecksum(b *testing.B) {
	was := wideSum
	defer func() { wideSum = was }()
	for _, n := range []int{64, 512, 1480, 65500} {
		data := make([]byte, n)
		for _, wide := range []bool{false, was} {
			b.Run(strconv.Itoa(n)+map[bool]string{true: "/wide", false: "/narrow"}[wide], func(b *testing.B) {
				wideSum = wide
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					Checksum(data, 0)
				}
			})
		}
	}
}
