package dhcpd_test

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/netsw/dhcpd"
	"virtkit/netsw/frame"
)

var lease = dhcpd.Lease{
	MAC: frame.MAC{2, 1, 1, 1, 1, 1}, Addr: frame.IP{10, 0, 0, 2}, Server: frame.IP{10, 0, 0, 1}, Bits: 24,
	DNS: frame.IP{10, 0, 0, 1}, MTU: 65520, Hostname: "build", Search: []string{"a.test", "b.test."},
}

var everyone = frame.IP{255, 255, 255, 255}

func message(kind byte, change func([]byte), opts ...byte) []byte {
	b := make([]byte, 236)
	b[0], b[1], b[2] = 1, 1, 6
	copy(b[28:], lease.MAC[:])
	if change != nil {
		change(b)
	}
	b = append(b, 0x63, 0x82, 0x53, 0x63, 53, 1, kind)
	return append(append(b, opts...), 255)
}

func TestReply(t *testing.T) {
	ci := func(b []byte) { copy(b[12:], lease.Addr[:]) }
	bcast := func(b []byte) { binary.BigEndian.PutUint16(b[10:], 0x8000) }
	for _, c := range []struct {
		what string
		req  []byte
		kind byte // 0 = no answer
		dst  frame.IP
	}{
		{"discover", message(1, nil), 2, lease.Addr},
		{"discover by broadcast", message(1, bcast), 2, everyone},
		{"request", message(3, nil, 50, 4, 10, 0, 0, 2), 5, lease.Addr},
		{"request of our offer", message(3, nil, 50, 4, 10, 0, 0, 2, 54, 4, 10, 0, 0, 1), 5, lease.Addr},
		{"request of another's offer", message(3, nil, 50, 4, 10, 0, 0, 2, 54, 4, 10, 0, 0, 9), 0, everyone},
		{"request of another address", message(3, nil, 50, 4, 10, 0, 0, 3), 6, everyone},
		{"renewal", message(3, ci), 5, lease.Addr},
		{"inform", message(8, ci), 5, lease.Addr},
		{"release", message(7, ci), 0, everyone},
		{"decline", message(4, nil), 0, everyone},
	} {
		r, dst, ok := dhcpd.Reply(c.req, lease)
		if !ok {
			t.Errorf("%s: not taken for a request", c.what)
			continue
		}
		if c.kind == 0 {
			if r != nil {
				t.Errorf("%s: answered, want silence", c.what)
			}
			continue
		}
		if r[242] != c.kind || dst != c.dst || len(r) < 300 {
			t.Errorf("%s: type %d to %v in %d bytes, want type %d to %v", c.what, r[242], dst, len(r), c.kind, c.dst)
		}
	}
}

// options reads an answer's options, none of which may come twice (RFC 2132, 2).
func options(t *testing.T, r []byte) map[byte][]byte {
	t.Helper()
	got := map[byte][]byte{}
	o := r[240:]
	for len(o) > 0 && o[0] != 255 {
		if len(o) < 2 || len(o) < 2+int(o[1]) {
			t.Fatalf("an option is cut off: % x", o)
		}
		if _, twice := got[o[0]]; twice {
			t.Errorf("option %d comes twice", o[0])
		}
		got[o[0]], o = o[2:2+int(o[1])], o[2+int(o[1]):]
	}
	if len(o) == 0 || strings.Trim(string(o[1:]), "\x00") != "" {
		t.Errorf("after the options: % x, want an end and zeros", o)
	}
	return got
}

// Each byte of an answer, against RFC 2131, table 3, and RFC 2132.
func TestReplyWhole(t *testing.T) {
	given := map[byte]string{
		54: "\x0a\x00\x00\x01", 51: "\x00\x09\x3a\x80", 1: "\xff\xff\xff\x00", 3: "\x0a\x00\x00\x01",
		6: "\x0a\x00\x00\x35", 26: "\xff\xf0", 12: "build", 119: "\x01a\x04test\x00\x01b\x04test\x00",
	}
	l := lease
	l.DNS = frame.IP{10, 0, 0, 53}
	for kind, c := range map[byte]struct {
		req    []byte
		yours  frame.IP
		server frame.IP // siaddr
		ours   frame.IP // ciaddr
		flags  uint16
		with   []byte // options
	}{
		2: {message(1, func(b []byte) { copy(b[4:], "xid!"); b[10] = 0x80 }), l.Addr, l.Server, frame.IP{}, 0x8000, []byte{54, 51, 1, 3, 6, 26, 12, 119}},
		5: {message(3, func(b []byte) { copy(b[4:], "xid!"); copy(b[12:], l.Addr[:]) }), l.Addr, l.Server, l.Addr, 0, []byte{54, 51, 1, 3, 6, 26, 12, 119}},
		6: {message(3, func(b []byte) { copy(b[4:], "xid!") }, 50, 4, 10, 0, 0, 3), frame.IP{}, frame.IP{}, frame.IP{}, 0, []byte{54}},
		// An answer to INFORM gives no address and no time (RFC 2131, 4.3.5).
		8: {message(8, func(b []byte) { copy(b[4:], "xid!"); copy(b[12:], l.Addr[:]) }), frame.IP{}, l.Server, l.Addr, 0, []byte{54, 1, 3, 6, 26, 12, 119}},
	} {
		r, _, ok := dhcpd.Reply(c.req, l)
		if !ok || len(r) < 300 {
			t.Fatalf("to %d: %d bytes, %v", kind, len(r), ok)
		}
		want := make([]byte, 240)
		copy(want, "\x02\x01\x06\x00xid!")
		binary.BigEndian.PutUint16(want[10:], c.flags)
		copy(want[12:], c.ours[:])
		copy(want[16:], c.yours[:])
		copy(want[20:], c.server[:])
		copy(want[28:], l.MAC[:])
		copy(want[236:], "\x63\x82\x53\x63")
		if d := cmp.Diff(want, r[:240]); d != "" {
			t.Errorf("to %d (-want +got)\n%s", kind, d)
		}
		got := options(t, r)
		if kind == 8 {
			kind = 5
		}
		if string(got[53]) != string([]byte{kind}) || len(got) != len(c.with)+1 {
			t.Errorf("to %d: options %v, want %v and 53", kind, got, c.with)
		}
		for _, o := range c.with {
			if string(got[o]) != given[o] {
				t.Errorf("to %d: option %d is % x, want % x", kind, o, got[o], given[o])
			}
		}
	}
}

// Names that no option can hold are left out, and the others are not.
func TestNamesOfAnswers(t *testing.T) {
	long := strings.Repeat("a", 63)
	for _, c := range []struct {
		host       string
		search     []string
		want, list string
	}{
		{"", nil, "", ""},
		{long, []string{long + ".test"}, long, "\x3f" + long + "\x04test\x00"},
		{long + "a", []string{long + "a.test", "a..b", ".", "ok.test"}, "", "\x02ok\x04test\x00"},
		{"b", []string{"x." + strings.Repeat(long+".", 3) + strings.Repeat("a", 61), strings.Repeat(long+".", 3) + "z", "ok"}, "b",
			"\x3f" + long + "\x3f" + long + "\x3f" + long + "\x01z\x00\x02ok\x00"},
	} {
		l := lease
		l.Hostname, l.Search = c.host, c.search
		r, _, _ := dhcpd.Reply(message(1, nil), l)
		got := options(t, r)
		if _, has := got[12]; string(got[12]) != c.want || has != (c.want != "") {
			t.Errorf("host name %q of %d bytes, want %q", got[12], len(c.host), c.want)
		}
		if _, has := got[119]; string(got[119]) != c.list || has != (c.list != "") {
			t.Errorf("search list of %q is %q, want %q", c.search, got[119], c.list)
		}
	}
}

// What comes before and between options is passed over (RFC 2132, 3.1).
func TestOptionsWithPads(t *testing.T) {
	req := append(message(3, nil)[:240], 0, 0, 53, 1, 3, 0, 12, 2, 'x', 'y', 50, 4, 10, 0, 0, 2)
	for _, end := range []string{"\xff", "\xff\x35\x01\x07", ""} {
		r, _, ok := dhcpd.Reply(append(bytes.Clone(req), end...), lease)
		if !ok || string(options(t, r)[53]) != "\x05" {
			t.Errorf("ended by %q: %v, % x", end, ok, r)
		}
	}
	if _, _, ok := dhcpd.Reply(append(message(3, nil)[:240], 255, 53, 1, 3), lease); ok {
		t.Error("what comes after the end was read")
	}
}

func TestNoRequest(t *testing.T) {
	for what, b := range map[string][]byte{
		"empty": nil, "a reply": message(1, func(b []byte) { b[0] = 2 }), "no magic": make([]byte, 300),
		"another's MAC": message(1, func(b []byte) { b[28]++ }), "relayed": message(1, func(b []byte) { b[24] = 10 }),
		"unknown type": message(99, nil), "option past the end": append(message(1, nil)[:243], 50, 200, 1),
	} {
		if r, _, ok := dhcpd.Reply(b, lease); ok {
			t.Errorf("%s: answered with %d bytes, want refused", what, len(r))
		}
	}
}

func FuzzReply(f *testing.F) {
	f.Add(message(1, nil))
	f.Add(message(3, nil, 50, 4, 10, 0, 0, 2, 55, 3, 1, 3, 6))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, dst, ok := dhcpd.Reply(b, lease)
		if !ok || r == nil {
			return
		}
		if dst != everyone && dst != lease.Addr {
			t.Errorf("answer goes to %v", dst)
		}
		if y := frame.IP(r[16:20]); y != lease.Addr && y != (frame.IP{}) {
			t.Errorf("answer gives %v away", y)
		}
	})
}
