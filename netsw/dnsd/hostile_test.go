package dnsd_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"virtkit/netsw/dnsd"
)

// wiretap is a resolver that shows each message as it came, and answers that
// the name does not exist.
func wiretap(t *testing.T) (netip.AddrPort, chan []byte) {
	t.Helper()
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	got, done := make(chan []byte, 16), make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 64<<10)
		for {
			n, from, err := pc.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			got <- bytes.Clone(b[:n])
			b[2], b[3] = 0x80|b[2]&0x79, dns.RcodeNameError
			_, _ = pc.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	t.Cleanup(func() {
		pc.Close()
		<-done
	})
	return pc.LocalAddr().(*net.UDPAddr).AddrPort(), got
}

// Wherever in a message a guest can write something, what goes upstream is made
// of the question, three flags and a bare EDNS record, byte for byte.
func TestNothingElseGoesUpstream(t *testing.T) {
	up, got := wiretap(t)
	to := server(t, new(job), up)
	plain := question("WwW.example.test.", dns.TypeA)
	plain.RecursionDesired = false
	b, err := plain.Pack()
	if err != nil {
		t.Fatal(err)
	}
	name := b[12:]
	opt := func(owner string, size, ext, flags uint16, options ...byte) []byte {
		r := append([]byte(owner), 0, byte(dns.TypeOPT))
		for _, n := range []uint16{size, ext, flags, uint16(len(options))} {
			r = binary.BigEndian.AppendUint16(r, n)
		}
		return append(r, options...)
	}
	padding := append([]byte{0, 12, 0, 100}, bytes.Repeat([]byte("data"), 25)...) // RFC 7830
	subnet := []byte{0, 8, 0, 7, 0, 1, 24, 0, 10, 11, 12}                         // RFC 7871
	const rd, ad, cd = 0x0100, 0x0020, 0x0010
	for what, c := range map[string]struct {
		flags     uint16
		extra     []byte // the additional section, of one record
		trail     string // after the message
		want      uint16
		wantExtra []byte
	}{
		"nothing":                {0, nil, "", 0, nil},
		"the flags that are":     {rd | ad | cd, nil, "", rd | ad | cd, nil},
		"all flags":              {0x07ff, nil, "", rd | ad | cd, nil},
		"bytes after the end":    {rd, nil, "and more data", rd, nil},
		"EDNS":                   {rd, opt("\x00", 1400, 0, 0x8000), "", rd, opt("\x00", 1400, 0, 0x8000)},
		"options":                {rd, opt("\x00", 1400, 0, 0, append(subnet, padding...)...), "", rd, opt("\x00", 1400, 0, 0)},
		"flags and code of EDNS": {rd, opt("\x00", 1400, 0xab00, 0x7fff), "", rd, opt("\x00", 1400, 0, 0)},
		"a size below all":       {rd, opt("\x00", 7, 0, 0), "", rd, opt("\x00", 512, 0, 0)},
		"an owner of the record": {rd, opt("\x06secret\x00", 1400, 0, 0), "", rd, opt("\x00", 1400, 0, 0)},
	} {
		q := []byte{0xaa, 0xbb, byte(c.flags >> 8), byte(c.flags), 0, 1, 0, 0, 0, 0, 0, 0}
		if c.extra != nil {
			q[11] = 1
		}
		q = append(append(append(q, name...), c.extra...), c.trail...)
		want := []byte{byte(c.want >> 8), byte(c.want), 0, 1, 0, 0, 0, 0, 0, 0}
		if c.wantExtra != nil {
			want[9] = 1
		}
		want = append(append(want, name...), c.wantExtra...)
		r := raw(t, to, q)
		if !bytes.Equal(r[:2], q[:2]) || r[3]&15 != dns.RcodeNameError {
			t.Errorf("%s: answered % x", what, r)
			continue
		}
		if u := <-got; !bytes.Equal(u[2:], want) {
			t.Errorf("%s: upstream got\n% x\nwant\n% x", what, u[2:], want)
		}
	}
}

// Questions that are not as they should be are refused or not answered, and
// never passed on.
func TestMalformedQuestions(t *testing.T) {
	up, got := wiretap(t)
	to := server(t, new(job), up)
	head := func(n byte) []byte { return []byte{0xaa, 0xbb, 1, 0, 0, n, 0, 0, 0, 0, 0, 0} }
	for what, q := range map[string][]byte{
		"a name that points at itself":  append(head(1), 0xc0, 12, 0, 1, 0, 1),
		"a name that points at its end": append(head(1), 1, 'a', 0xc0, 18, 0, 1, 0, 1, 4, 't', 'e', 's', 't', 0),
		"a label of 64":                 append(append(append(head(1), 64), bytes.Repeat([]byte("a"), 64)...), 0, 0, 1, 0, 1),
		"a name of 300":                 append(append(head(1), bytes.Repeat([]byte("\x09aaaaaaaaa"), 30)...), 0, 0, 1, 0, 1),
		"a name without end":            append(head(1), 9, 'a', 'b'),
		"no type":                       append(head(1), 1, 'a', 0),
		"no question":                   head(0),
		"more than there are":           append(head(2), 1, 'a', 0, 0, 1, 0, 1),
		"an answer that is not there":   append([]byte{0xaa, 0xbb, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0}, 1, 'a', 0, 0, 1, 0, 1),
		"a record that is not there":    append([]byte{0xaa, 0xbb, 1, 0, 0, 1, 0, 0, 0, 0, 0, 9}, 1, 'a', 0, 0, 1, 0, 1),
	} {
		if r := raw(t, to, q); !bytes.Equal(r[:2], q[:2]) || r[3]&15 != dns.RcodeRefused {
			t.Errorf("%s: answered % x, want REFUSED", what, r)
		}
	}
	select {
	case u := <-got:
		t.Errorf("upstream got % x", u)
	default:
	}
}

// One who sends questions over TCP in odd pieces is answered; one who never reads
// the answers holds up nobody else and is not read on.
func TestStreamsOfTheHostile(t *testing.T) {
	up, got := wiretap(t)
	stop := make(chan struct{})
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for {
			select {
			case <-got:
			case <-stop:
				return
			}
		}
	}()
	defer func() {
		close(stop)
		<-drained
	}()
	j := new(job)
	to := server(t, j, up)
	dial := func() net.Conn {
		c, err := net.Dial("tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(limit))
		return c
	}
	framed := func(i int) []byte {
		q := question(fmt.Sprintf("n%d.test.", i), dns.TypeA)
		q.Id = uint16(i)
		b, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
	}
	answered := func(c net.Conn, what string, id uint16) {
		t.Helper()
		var l [2]byte
		if _, err := io.ReadFull(c, l[:]); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		b := make([]byte, binary.BigEndian.Uint16(l[:]))
		if _, err := io.ReadFull(c, b); err != nil || len(b) < 12 || binary.BigEndian.Uint16(b) != id || b[3]&15 != dns.RcodeNameError {
			t.Fatalf("%s: answer % x, %v", what, b, err)
		}
	}
	slow := dial()
	defer slow.Close()
	_ = slow.(*net.TCPConn).SetNoDelay(true)
	for _, x := range framed(1) {
		if _, err := slow.Write([]byte{x}); err != nil {
			t.Fatal(err)
		}
	}
	answered(slow, "byte by byte", 1)
	// Messages of nothing, and what is no question, do not end the connection.
	_, _ = slow.Write(append([]byte{0, 0, 0, 1, 'x'}, framed(2)...))
	answered(slow, "after empty messages", 2)

	deaf := dial()
	_ = deaf.(*net.TCPConn).SetReadBuffer(4096)
	written := make(chan struct{})
	go func() {
		defer close(written)
		for i := range 20000 {
			if _, err := deaf.Write(framed(i)); err != nil {
				return
			}
		}
	}()
	for i := range 20 {
		c := dial()
		_, _ = c.Write(framed(i))
		answered(c, "beside one who does not read", uint16(i))
		c.Close()
	}
	deaf.Close()
	<-written
	j.mu.Lock()
	defer j.mu.Unlock()
	if most := 2*dnsd.MaxPiped + 1; j.most > most {
		t.Errorf("%d questions were being answered at once, want at most %d", j.most, most)
	}
}
