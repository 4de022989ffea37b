package dnsd_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func cname(m *dns.Msg, name, to string, ttl uint32) {
	m.Answer = append(m.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: ttl}, Target: to})
}

// What an answer opens is what it gives for the question, whichever way round
// its records come and whatever else is in it.
func TestWhatAnswersOpen(t *testing.T) {
	chain := func(m *dns.Msg, n int) {
		for i := range n {
			cname(m, fmt.Sprintf("n%d.test.", i), fmt.Sprintf("n%d.test.", i+1), 50)
		}
		addA(m, fmt.Sprintf("N%d.test.", n), "192.0.2.1", 60)
	}
	names := func(n int) (out []string) {
		for i := range n + 1 {
			out = append(out, fmt.Sprintf("n%d.test", i))
		}
		return out
	}
	for what, c := range map[string]struct {
		fill  func(m *dns.Msg)
		names []string
		addrs int
		ttl   time.Duration
	}{
		"20 aliases":             {func(m *dns.Msg) { chain(m, 20) }, names(20), 1, 50 * time.Second},
		"20 aliases, backwards":  {func(m *dns.Msg) { chain(m, 20); slices.Reverse(m.Answer) }, names(20), 1, 50 * time.Second},
		"more than are followed": {func(m *dns.Msg) { chain(m, 100) }, nil, 0, 0},
		"a loop": {func(m *dns.Msg) {
			cname(m, "n0.test.", "n1.test.", 9)
			cname(m, "n1.test.", "n0.test.", 9)
			addA(m, "n1.test.", "192.0.2.1", 9)
		}, []string{"n0.test", "n1.test", "n0.test"}, 1, 9 * time.Second},
		"100 addresses": {func(m *dns.Msg) {
			for i := range 100 {
				addA(m, "n0.test.", fmt.Sprintf("192.0.2.%d", i), 60)
			}
		}, names(0), 100, time.Minute},
		"TTL 0":         {func(m *dns.Msg) { addA(m, "n0.test.", "192.0.2.1", 0) }, names(0), 1, 0},
		"absurd TTL":    {func(m *dns.Msg) { addA(m, "n0.test.", "192.0.2.1", 1<<31) }, names(0), 1, 0},
		"others' names": {func(m *dns.Msg) { addA(m, "m.test.", "192.0.2.1", 9); cname(m, "m.test.", "n0.test.", 9) }, nil, 0, 0},
		"other sections": {func(m *dns.Msg) {
			addA(m, "n0.test.", "192.0.2.1", 9)
			m.Extra, m.Answer = m.Answer, nil
		}, nil, 0, 0},
		"the authority section": {func(m *dns.Msg) {
			addA(m, "n0.test.", "192.0.2.1", 9)
			m.Ns, m.Answer = m.Answer, nil
		}, nil, 0, 0},
		"addresses in hints": {func(m *dns.Msg) {
			hint := &dns.SVCBIPv4Hint{Hint: []net.IP{net.IPv4(192, 0, 2, 1)}}
			m.Answer = append(m.Answer, &dns.HTTPS{SVCB: dns.SVCB{Hdr: dns.RR_Header{Name: "n0.test.", Rrtype: dns.TypeHTTPS, Class: dns.ClassINET, Ttl: 9}, Priority: 1, Target: ".", Value: []dns.SVCBKeyValue{hint}}})
		}, nil, 0, 0},
		"addresses in IPv6's clothes": {func(m *dns.Msg) { // mapped, NAT64's, 6to4's
			for _, a := range []string{"::ffff:192.0.2.1", "64:ff9b::c000:201", "2002:c000:201::1"} {
				m.Answer = append(m.Answer, &dns.AAAA{Hdr: dns.RR_Header{Name: "n0.test.", Rrtype: dns.TypeAAAA, Class: dns.ClassINET, Ttl: 9}, AAAA: net.ParseIP(a)})
			}
		}, nil, 0, 0},
		"a tree that moved": {func(m *dns.Msg) { // RFC 6672: the alias is made of it
			m.Answer = append(m.Answer, &dns.DNAME{Hdr: dns.RR_Header{Name: "test.", Rrtype: dns.TypeDNAME, Class: dns.ClassINET, Ttl: 9}, Target: "moved."})
			cname(m, "n0.test.", "n0.moved.", 9)
			addA(m, "n0.moved.", "192.0.2.1", 9)
		}, []string{"n0.test", "n0.moved"}, 1, 9 * time.Second},
		"a tree that moved, without the alias": {func(m *dns.Msg) {
			m.Answer = append(m.Answer, &dns.DNAME{Hdr: dns.RR_Header{Name: "test.", Rrtype: dns.TypeDNAME, Class: dns.ClassINET, Ttl: 9}, Target: "moved."})
			addA(m, "n0.moved.", "192.0.2.1", 9)
		}, nil, 0, 0},
		"another class": {func(m *dns.Msg) {
			addA(m, "n0.test.", "192.0.2.1", 9)
			m.Answer[0].Header().Class = dns.ClassCHAOS
		}, nil, 0, 0},
		"an address of six bytes": {func(m *dns.Msg) {
			m.Answer = append(m.Answer, &dns.RFC3597{Hdr: dns.RR_Header{Name: "n0.test.", Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 9}, Rdata: "c00002010000"})
		}, nil, 0, 0},
		"two aliases of one name": {func(m *dns.Msg) {
			cname(m, "n0.test.", "n1.test.", 9)
			cname(m, "n0.test.", "evil.test.", 9)
			addA(m, "evil.test.", "192.0.2.2", 9)
			addA(m, "n1.test.", "192.0.2.1", 9)
		}, names(1), 1, 9 * time.Second},
		"an alias for the name in other letters": {func(m *dns.Msg) {
			cname(m, "N0.TEST.", "n1.tEst.", 9)
			addA(m, "N1.test.", "192.0.2.1", 9)
		}, names(1), 1, 9 * time.Second},
		"records that nobody knows": {func(m *dns.Msg) {
			m.Answer = append(m.Answer, &dns.RFC3597{Hdr: dns.RR_Header{Name: "n0.test.", Rrtype: 65000, Class: dns.ClassINET}, Rdata: "ff00"},
				&dns.RFC3597{Hdr: dns.RR_Header{Name: "n0.test.", Rrtype: dns.TypeHTTPS, Class: dns.ClassINET}, Rdata: "00"})
			addA(m, "n0.test.", "192.0.2.1", 9)
		}, names(0), 1, 9 * time.Second},
	} {
		t.Run(what, func(t *testing.T) {
			up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
				r := new(dns.Msg).SetReply(q)
				c.fill(r)
				_ = w.WriteMsg(r)
			})
			j := &job{wants: true}
			q := question("n0.test.", dns.TypeA)
			q.SetEdns0(65000, false)
			b, err := q.Pack()
			if err != nil {
				t.Fatal(err)
			}
			raw(t, server(t, j, up), b)
			j.mu.Lock()
			defer j.mu.Unlock()
			if c.addrs == 0 {
				if len(j.answered) != 0 {
					t.Fatalf("told of %+v", j.answered)
				}
				return
			}
			if len(j.answered) != 1 {
				t.Fatalf("told %d times", len(j.answered))
			}
			a := j.answered[0]
			for i := range a.Names {
				a.Names[i] = strings.ToLower(a.Names[i])
			}
			if d := cmp.Diff(c.names, a.Names); d != "" || len(a.Addrs) != c.addrs || a.TTL != c.ttl {
				t.Errorf("%d addresses for %s, want %d for %s; names (-want +got):\n%s", len(a.Addrs), a.TTL, c.addrs, c.ttl, d)
			}
		})
	}
}

// raw asks over UDP and returns the answer as it came.
func raw(t *testing.T, to string, q []byte) []byte {
	t.Helper()
	c, err := net.Dial("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(limit))
	if _, err := c.Write(q); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64<<10)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

// A client that nothing restricts may send what cannot be rebuilt.
func TestRelay(t *testing.T) {
	got := make(chan *dns.Msg, 4)
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, tcp bool) {
		got <- q
		r := new(dns.Msg).SetRcode(q, dns.RcodeSuccess)
		r.Opcode = q.Opcode
		addA(r, "told.test.", map[bool]string{false: "192.0.2.1", true: "192.0.2.2"}[tcp], 1)
		_ = w.WriteMsg(r)
	})
	to := server(t, &job{relays: true}, up)
	update := new(dns.Msg).SetUpdate("example.test.")
	update.Insert([]dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: "x.example.test.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{"data"}}})
	for _, net := range []string{"udp", "tcp"} {
		r := ask(t, net, to, update)
		if r.Rcode != dns.RcodeSuccess || r.Id != update.Id || len(r.Answer) != 1 {
			t.Fatalf("over %s: %v", net, r)
		}
		u := <-got
		if u.Opcode != dns.OpcodeUpdate || len(u.Ns) != 1 || u.Id == update.Id {
			t.Errorf("upstream got %v over %s, want the update under another identifier", u, net)
		}
		if ip := r.Answer[0].(*dns.A).A.String(); net == "tcp" && ip != "192.0.2.2" {
			t.Error("what came over TCP was not passed on over TCP")
		}
	}
	if r := ask(t, "tcp", to, question("example.test.", dns.TypeAXFR)); r.Rcode != dns.RcodeRefused || len(got) != 0 {
		t.Errorf("zone transfer: %s, %d upstream; its answer is a stream", dns.RcodeToString[r.Rcode], len(got))
	}
}

// A question that is too long ends its connection; one as long as may be is read.
func TestLongQuestionOverTCP(t *testing.T) {
	to := server(t, new(job), netip.MustParseAddrPort("127.0.0.1:9"))
	const most = 8 << 10
	for _, size := range []int{most, most + 1, 0xffff} {
		c, err := net.Dial("tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(limit))
		// Nothing but zeros after the header asks nothing, and is refused.
		_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(size)), make([]byte, most)...))
		if _, err := c.Read(make([]byte, 1)); (err == nil) != (size == most) {
			t.Errorf("after a question of %d bytes: %v", size, err)
		}
	}
}

// Types whose numbers differ as letters do in case are different types.
func TestAnswerToAnotherType(t *testing.T) {
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		r := new(dns.Msg).SetReply(q)
		r.Question[0].Qtype = dns.TypeHTTPS ^ 0x20
		_ = w.WriteMsg(r)
	})
	if r := ask(t, "udp", serverThatWaits(t, 100*time.Millisecond, new(job), up), question("a.test.", dns.TypeHTTPS)); r.Rcode != dns.RcodeServerFailure {
		t.Errorf("an answer about type %d was taken for one about %d", dns.TypeHTTPS^0x20, dns.TypeHTTPS)
	}
}

// Names as guests may write them reach the policy and the resolver as they are.
func TestStrangeNames(t *testing.T) {
	got := make(chan string, 1)
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		got <- q.Question[0].Name
		_ = w.WriteMsg(new(dns.Msg).SetRcode(q, dns.RcodeNameError))
	})
	j := new(job)
	to := server(t, j, up)
	for _, n := range []string{"localhost.", "com.", ".", "xn--bcher-kva.example.", "b\\195\\188cher.example.", "a\\.b.example.", "_dmarc.Example.COM.", "x\\000y.example.", strings.Repeat(strings.Repeat("l", 61)+".", 4)} {
		r := ask(t, "udp", to, question(n, dns.TypeTXT))
		if u := <-got; u != n || r.Question[0].Name != n || r.Rcode != dns.RcodeNameError {
			t.Errorf("%q went out as %q and came back as %q", n, u, r.Question[0].Name)
		}
		if asked := j.asked(); asked != strings.TrimSuffix(n, ".") {
			t.Errorf("policy was asked about %q, want %q", asked, n)
		}
	}
}
