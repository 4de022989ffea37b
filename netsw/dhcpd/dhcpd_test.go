package dhcpd_test

import (
	"encoding/binary"
	"testing"

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
