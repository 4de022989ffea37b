package dnsd

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"testing"

	"github.com/miekg/dns"
)

// The usual answer is read by a way of its own, and says what it would say when
// read as any other: as one whose records write their name out.
func TestOpenedPlainly(t *testing.T) {
	m := new(dns.Msg)
	m.SetQuestion("Some.Name.test.", dns.TypeA)
	q, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	qu, _ := parse(q)
	if qu == nil {
		t.Fatal("the question cannot be read")
	}
	name := q[12 : len(q)-4]
	answer := func(owner []byte, ttls ...uint32) []byte {
		b := bytes.Clone(q)
		b[2] |= 0x80
		binary.BigEndian.PutUint16(b[6:], uint16(len(ttls)))
		for i, ttl := range ttls {
			b = append(append(b, owner...), 0, 1, 0, 1)
			b = append(binary.BigEndian.AppendUint32(b, ttl), 0, 4, 192, 0, 2, byte(i))
		}
		return b
	}
	for _, ttls := range [][]uint32{{60}, {0}, {300, 60, 61}, {1 << 31, 5}, {5, 1 << 31}, make([]uint32, 100), {}} {
		short, long := answer([]byte{0xc0, 12}, ttls...), answer(name, ttls...)
		if _, ok := openedPlainly(qu, short); ok != (len(ttls) > 0) {
			t.Errorf("%v: an answer of pointers is read plainly: %t", ttls, ok)
		}
		if _, ok := openedPlainly(qu, long); ok {
			t.Errorf("%v: names that are written out were read as pointers", ttls)
		}
		got, err := opened(qu, short)
		want, err2 := opened(qu, long)
		if err != nil || err2 != nil || !reflect.DeepEqual(got, want) || len(got.Addrs) != len(ttls) {
			t.Errorf("%v: %v, %v; written out %v, %v", ttls, got, err, want, err2)
		}
	}
	for at := range 16 { // one byte that differs makes it another answer
		odd := answer([]byte{0xc0, 12}, 60, 60)
		odd[len(odd)-32+at] ^= 1
		_, ok := openedPlainly(qu, odd)
		if number := at >= 6 && at < 10 || at >= 12; ok != number {
			t.Errorf("byte %d of a record differs: read plainly is %t", at, ok)
		}
	}
	if _, ok := openedPlainly(qu, answer([]byte{0xc0, 12}, 60, 60)[:len(q)+31]); ok {
		t.Error("an answer that ends within a record was read")
	}
}
