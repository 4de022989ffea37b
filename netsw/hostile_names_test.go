package netsw_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// labels is a question of type A about a name in the form that messages have it
// in, which may hold any byte.
func labels(l ...string) []byte {
	b := []byte{0xaa, 0xbb, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	for _, s := range l {
		b = append(append(b, byte(len(s))), s...)
	}
	return append(b, 0, 0, 1, 0, 1)
}

// Names as they should not be written, under an allowlist: each is allowed by
// whole labels or does not exist, and then nobody else hears of it.
func TestHostileNames(t *testing.T) {
	asked := make(chan string, 1)
	up := answering(t, func(n string) ([]netip.Addr, uint32) {
		asked <- n
		return []netip.Addr{netip.MustParseAddr("198.51.100.7")}, 60
	})
	eng := allowing(false, "example.com", "xn--bcher-kva.test")
	sw := open(t, netsw.Config{Upstreams: up, Policy: eng, Search: []string{"corp.test"}})
	_, g := join(t, sw, "job", "cache")
	long := strings.Repeat("l", 63)
	for what, c := range map[string]struct {
		labels []string
		rcode  byte
		shown  string // in the record; "" = as with nothing recorded
	}{
		"a listed one":                     {[]string{"a", "example", "com"}, 0, "a.example.com"},
		"in mixed letters":                 {[]string{"A", "eXaMpLe", "CoM"}, 0, "a.example.com"},
		"as long as may be":                {[]string{long, long, long, strings.Repeat("l", 49), "example", "com"}, 0, long + "." + long + "." + long + "." + strings.Repeat("l", 49) + ".example.com"},
		"IDN as it is looked up":           {[]string{"XN--BCHER-KVA", "test"}, 0, "xn--bcher-kva.test"},
		"IDN as it is read":                {[]string{"bücher", "test"}, 3, "b??cher.test"},
		"IDN in Latin-1":                   {[]string{"b\xfccher", "test"}, 3, "b?cher.test"},
		"a letter that folds to k":         {[]string{"\u212a", "test"}, 3, "???.test"},
		"a single label":                   {[]string{"build"}, 3, "build"},
		"a top-level domain":               {[]string{"com"}, 3, "com"},
		"the root":                         {nil, 3, "."},
		"localhost":                        {[]string{"localhost"}, 3, "localhost"},
		"with the search list's suffix":    {[]string{"a", "example", "com", "corp", "test"}, 3, "a.example.com.corp.test"},
		"a dot in a label":                 {[]string{"a.example", "com"}, 3, "a?example.com"},
		"a dot at the end of one":          {[]string{"a", "example", "com."}, 3, "a.example.com?"},
		"a NUL at the end of one":          {[]string{"a", "example", "com\x00"}, 3, "a.example.com?"},
		"a space and a line":               {[]string{"a b\n", "example", "com"}, 0, "a?b?.example.com"},
		"an address":                       {[]string{"192", "0", "2", "1"}, 3, "192.0.2.1"},
		"its reverse":                      {[]string{"1", "2", "0", "192", "in-addr", "arpa"}, 3, "1.2.0.192.in-addr.arpa"},
		"the reverse of an IPv6 address":   {[]string{"1", "0", "ip6", "arpa"}, 3, "1.0.ip6.arpa"},
		"the allowed one as a first label": {[]string{"example", "com", "evil", "test"}, 3, "example.com.evil.test"},
		"the job's own":                    {[]string{"CACHE"}, 0, ""},
	} {
		q := labels(c.labels...)
		before := eng.Recorder().Snapshot()
		r := g.Ask(t, at(sw, 53), q)
		if r[3]&15 != c.rcode || !bytes.Equal(r[12:len(q)], q[12:]) {
			t.Errorf("%s: code %d, want %d with the question as it came", what, r[3]&15, c.rcode)
		}
		var heard string
		select {
		case heard = <-asked:
		default:
		}
		if want := strings.Join(c.labels, "."); heard != want && c.rcode == 0 && c.shown != "" || heard != "" && (c.rcode != 0 || c.shown == "") {
			t.Errorf("%s: upstream was asked about %q", what, heard)
		}
		var shown []string
		for _, e := range eng.Recorder().Snapshot().Since(before).Entries {
			shown = append(shown, e.Dest)
		}
		if c.shown != "" != (len(shown) == 1) || c.shown != "" && shown[0] != c.shown {
			t.Errorf("%s: recorded as %q, want %q", what, shown, c.shown)
		}
	}
}

// Answers made to open what they should not, or a lot: each opens the addresses
// of the name asked for, to who asked, for as long as the TTL and the grace are.
func TestHostileAnswers(t *testing.T) {
	last := netip.MustParseAddr("198.51.100.200")
	up := dnsServer(t, func(q *dns.Msg, _ bool) *dns.Msg {
		r := new(dns.Msg).SetReply(q)
		name := q.Question[0].Name
		alias := func(from, to string) {
			r.Answer = append(r.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: from, Rrtype: dns.TypeCNAME, Class: dns.ClassINET}, Target: to})
		}
		switch strings.Split(name, ".")[0] {
		case "chain":
			for i := range 20 {
				to := fmt.Sprintf("n%d.evil.test.", i)
				alias(name, to)
				name = to
			}
			r.Answer = append(r.Answer, a(name, last, 0))
		case "hundred":
			for i := range 100 {
				r.Answer = append(r.Answer, a(name, netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), 60))
			}
		case "beside":
			r.Answer = append(r.Answer, a("other.example.", netip.MustParseAddr("192.0.2.1"), 60))
			r.Extra = append(r.Extra, a(name, netip.MustParseAddr("192.0.2.2"), 60))
		case "hints":
			r.Answer = append(r.Answer, &dns.AAAA{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeAAAA, Class: dns.ClassINET, Ttl: 60}, AAAA: netip.MustParseAddr("::ffff:192.0.2.3").AsSlice()},
				&dns.AAAA{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeAAAA, Class: dns.ClassINET, Ttl: 60}, AAAA: netip.MustParseAddr("64:ff9b::c000:204").AsSlice()})
		}
		return r
	})
	now := time.Unix(1e9, 0)
	var ahead atomic.Int64
	eng := policy.NewEngine(policy.EngineConfig{JobPort: "job", Now: func() time.Time { return now.Add(time.Duration(ahead.Load())) },
		Policy: &policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"ok.example"}}}})
	sw := open(t, netsw.Config{Upstreams: up, Policy: eng})
	p, g := join(t, sw, "job")
	join(t, sw, "db")
	decide := func(port string, dst netip.AddrPort) bool {
		return eng.Decide(policy.Flow{Port: port, Proto: policy.TCP, Dst: dst}).Allow
	}
	lookup := func(name string, qtype uint16, records int) {
		t.Helper()
		q := ask(name+".ok.example.", qtype)
		q.SetEdns0(4096, false)
		if r := exchange(t, sw, g, "udp", q); r.Rcode != 0 || len(r.Answer) != records {
			t.Fatalf("%s: %v, want %d records", name, r, records)
		}
	}
	lookup("chain", dns.TypeA, 21)
	https, domain := netip.AddrPortFrom(last, 443), netip.AddrPortFrom(last, 53)
	if !decide("job", https) || decide("db", https) || decide("job", domain) {
		t.Errorf("through 20 aliases: the asker's %v, another guest's %v, port 53 %v; want only the first", decide("job", https), decide("db", https), decide("job", domain))
	}
	// Refused where it matters, and not by the policy alone.
	for _, f := range [][]byte{
		tcpFrame(g, 1000, domain, 1, 0, flagSYN),
		udpFrame(gwMAC, g.MAC(), g.Addr.String()+":1000", domain.String(), dnsQuery(1, "x.evil.test", 16)),
	} {
		before := p.Stats().Dropped(netsw.DropDenied)
		if err := g.Send(f); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a question to a resolver of the guest's own refused", func() bool { return p.Stats().Dropped(netsw.DropDenied) == before+1 })
	}
	if ahead.Store(int64(89 * time.Second)); !decide("job", https) {
		t.Error("TTL 0: closed before 30 s and the grace of 60 s were over")
	}
	if ahead.Store(int64(90 * time.Second)); decide("job", https) {
		t.Error("TTL 0: open past 30 s and the grace of 60 s")
	}
	lookup("hundred", dns.TypeA, 100)
	for i := range 100 {
		if dst := netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), 1); !decide("job", dst) {
			t.Errorf("100 addresses: %s is closed", dst)
		}
	}
	lookup("beside", dns.TypeA, 1)
	lookup("hints", dns.TypeAAAA, 2)
	for i := range 4 {
		if dst := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), 443); decide("job", dst) {
			t.Errorf("%s is open, which is in no address record of the name", dst)
		}
	}
	// No alias is a name that the layers would have to allow, and none is one that
	// the guest may ask for.
	if r := exchange(t, sw, g, "udp", ask("n19.evil.test.", dns.TypeA)); r.Rcode != dns.RcodeNameError {
		t.Errorf("an alias asked for by itself: %s", dns.RcodeToString[r.Rcode])
	}
}

// Questions over TCP, many in one segment and one in many, allowed and not in
// turn: each is answered for itself, and over the open connection policy is asked
// each time.
func TestHostilePipelining(t *testing.T) {
	var heard atomic.Int64
	up := answering(t, func(n string) ([]netip.Addr, uint32) {
		heard.Add(1)
		if !strings.HasSuffix(n, ".ok.example") {
			t.Errorf("upstream was asked about %q", n)
		}
		return []netip.Addr{netip.MustParseAddr("198.51.100.7")}, 60
	})
	sw := open(t, netsw.Config{Upstreams: up, Policy: allowing(false, "ok.example")})
	_, g := join(t, sw, "job")
	const n = 120
	var all []byte
	for i := range n {
		q := dnsQuery(uint16(i), fmt.Sprintf("n%d.%s.example", i, []string{"ok", "bad"}[i%2]), 1)
		all = append(binary.BigEndian.AppendUint16(all, uint16(len(q))), q...)
	}
	for what, size := range map[string]int{"all at once": len(all), "in pieces": 7} {
		heard.Store(0)
		c, err := g.Dial(within(t), at(sw, 53))
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(limit))
		done := make(chan struct{})
		go func() {
			defer close(done)
			for b := range slices.Chunk(all, size) {
				_, _ = c.Write(b)
			}
		}()
		seen := map[uint16]bool{}
		for range n {
			var l [2]byte
			if _, err := io.ReadFull(c, l[:]); err != nil {
				t.Fatalf("%s: after %d answers: %v", what, len(seen), err)
			}
			b := make([]byte, binary.BigEndian.Uint16(l[:]))
			if _, err := io.ReadFull(c, b); err != nil {
				t.Fatal(err)
			}
			id := binary.BigEndian.Uint16(b)
			if want := byte(id % 2 * 3); b[3]&15 != want || seen[id] {
				t.Errorf("%s: question %d: code %d, want %d", what, id, b[3]&15, want)
			}
			seen[id] = true
		}
		<-done
		c.Close()
		if heard.Load() != n/2 {
			t.Errorf("%s: %d questions went upstream, want %d", what, heard.Load(), n/2)
		}
	}
}

// The name of a rebinding answer does not matter, nor what carries the packet:
// what no name may open stays shut for each protocol.
func TestHostileRebindingByAnyProtocol(t *testing.T) {
	targets := []netip.Addr{hostAddr(t)}
	for _, s := range []string{"127.0.0.1", "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "224.0.0.1", "239.255.255.250", "255.255.255.255", "10.200.0.9", "10.200.0.255"} {
		targets = append(targets, netip.MustParseAddr(s))
	}
	up := dnsServer(t, func(q *dns.Msg, _ bool) *dns.Msg {
		r := new(dns.Msg).SetReply(q)
		r.Answer = []dns.RR{&dns.CNAME{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: 60}, Target: "metadata.cloud.test."}}
		for _, x := range targets {
			r.Answer = append(r.Answer, a("metadata.cloud.test.", x, 60))
		}
		return r
	})
	for what, eng := range map[string]*policy.Engine{
		"by name": allowing(false, "ok.example"),
		// No list opens them either.
		"by address": policy.NewEngine(policy.EngineConfig{JobPort: "job", Policy: &policy.Policy{Phase: policy.Run,
			Cap: policy.Lists{Names: []string{"ok.example"}, IPs: []policy.IPRule{{Net: netip.MustParsePrefix("0.0.0.0/0")}}}}}),
		"unrestricted": policy.NewEngine(policy.EngineConfig{JobPort: "job", Policy: &policy.Policy{Phase: policy.Run}}),
	} {
		t.Run(what, func(t *testing.T) {
			sw := open(t, netsw.Config{Upstreams: up, Policy: eng, Subnet: netip.MustParsePrefix("10.200.0.0/24")})
			p, g := join(t, sw, "job")
			if r := exchange(t, sw, g, "udp", ask("ok.example.", dns.TypeA)); len(r.Answer) != len(targets)+1 {
				t.Fatalf("the answer is %v", r)
			}
			for i, x := range targets {
				me := netip.AddrPortFrom(g.Addr, uint16(2000+i))
				for proto, f := range map[string][]byte{
					"TCP":  tcpFrame(g, me.Port(), netip.AddrPortFrom(x, 80), 1, 0, flagSYN),
					"UDP":  udpFrame(gwMAC, g.MAC(), me.String(), netip.AddrPortFrom(x, 80).String(), []byte("x")),
					"echo": echoTo(g, x, uint16(i)),
				} {
					before := drops(p)
					if err := g.Send(f); err != nil {
						t.Fatal(err)
					}
					eventually(t, proto+" to "+x.String()+" refused or dropped", func() bool { return drops(p) == before+1 })
				}
			}
			if g.WaitFrame(echoTo(g, sw.Gateway(), 1), limit, func(e frame.Eth) bool { return isEchoReply(e) }) == nil {
				t.Error("the gateway does not answer any more")
			}
			// Only questions moved anything.
			if s := sw.Stats(); s.Flows != 0 || s.Sessions != 0 {
				t.Errorf("Stats() = %+v, want no flow", s)
			}
		})
	}
}
