package netsw_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/netswtest"
)

// Public reports of other projects, as inputs to this one. Each test's name has
// the number of its report in the collection.

// listenBoth listens on one port for UDP and TCP.
func listenBoth(t *testing.T) (net.PacketConn, net.Listener) {
	t.Helper()
	for tries := 0; ; tries++ {
		pc, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ln, err := net.Listen("tcp", pc.LocalAddr().String())
		if err == nil {
			return pc, ln
		}
		pc.Close() // free for UDP is not free for TCP
		if tries == 50 {
			t.Fatal(err)
		}
	}
}

// dnsServer is a resolver of the host that answers by handle, over UDP and TCP.
func dnsServer(t *testing.T, handle func(q *dns.Msg, tcp bool) *dns.Msg) []netip.AddrPort {
	t.Helper()
	pc, ln := listenBoth(t)
	for _, s := range []*dns.Server{{PacketConn: pc}, {Listener: ln}} {
		tcp, up := s.Listener != nil, make(chan struct{})
		s.NotifyStartedFunc = func() { close(up) }
		s.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { _ = w.WriteMsg(handle(q, tcp)) })
		go func() { _ = s.ActivateAndServe() }()
		<-up
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return []netip.AddrPort{pc.LocalAddr().(*net.UDPAddr).AddrPort()}
}

// exchange asks the gateway as a guest's resolver does.
func exchange(t *testing.T, sw *netsw.Switch, g *netswtest.Guest, network string, q *dns.Msg) *dns.Msg {
	t.Helper()
	var r dns.Msg
	b, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	if network == "udp" {
		b = g.Ask(t, at(sw, 53), b)
		if size := max(512, edns(q)); len(b) > size {
			t.Errorf("an answer of %d bytes to one who takes %d", len(b), size)
		}
	} else {
		c, err := g.Dial(within(t), at(sw, 53))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(limit))
		co := &dns.Conn{Conn: c}
		if err := co.WriteMsg(q); err != nil {
			t.Fatal(err)
		}
		if b, err = co.ReadMsgHeader(nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Unpack(b); err != nil || r.Id != q.Id {
		t.Fatalf("answer %v, %v", &r, err)
	}
	return &r
}

func edns(q *dns.Msg) int {
	if o := q.IsEdns0(); o != nil {
		return int(o.UDPSize())
	}
	return 0
}

func ask(name string, qtype uint16) *dns.Msg { return new(dns.Msg).SetQuestion(name, qtype) }

func a(name string, ip netip.Addr, ttl uint32) *dns.A {
	return &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}, A: ip.AsSlice()}
}

// allowing is an engine whose node allows these names and nothing else.
func allowing(strict bool, names ...string) *policy.Engine {
	return policy.NewEngine(policy.EngineConfig{JobPort: "job", Strict: strict, Policy: &policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: append([]string{}, names...)}}})
}

// allowed is what the engine says of a flow now.
func allowed(e *policy.Engine, a netip.Addr) bool {
	return e.Decide(policy.Flow{Port: "job", Proto: policy.TCP, Dst: netip.AddrPortFrom(a, 443)}).Allow
}

// S29: truncated answers and TCP.
func TestReportS29TruncatedAnswers(t *testing.T) {
	up := dnsServer(t, func(q *dns.Msg, tcp bool) *dns.Msg {
		r := new(dns.Msg).SetReply(q)
		switch {
		case !tcp:
			r.Truncated = true
		case q.Question[0].Qtype == dns.TypeAAAA:
			r.Rcode = dns.RcodeRefused
		default:
			for i := range 60 {
				r.Answer = append(r.Answer, a(q.Question[0].Name, netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 60))
			}
		}
		return r
	})
	for _, size := range []uint16{0, 512, 1232, 4096} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			eng := allowing(false, "many.example")
			sw := open(t, netsw.Config{Upstreams: up, Policy: eng})
			_, g := join(t, sw, "job")
			q, q6 := ask("many.example.", dns.TypeA), ask("many.example.", dns.TypeAAAA)
			if size > 0 {
				q.SetEdns0(size, false)
				q6.SetEdns0(size, false)
			}
			if r := exchange(t, sw, g, "udp", q6); !r.Truncated {
				t.Errorf("AAAA over UDP: %v, want it cut", r)
			}
			if r := exchange(t, sw, g, "udp", q); !r.Truncated || len(r.Answer) != 0 {
				t.Errorf("A over UDP: TC %v, %d records, want TC and none", r.Truncated, len(r.Answer))
			}
			first, last := netip.MustParseAddr("198.51.100.0"), netip.MustParseAddr("198.51.100.59")
			if allowed(eng, first) {
				t.Error("an address is open before any answer gave it")
			}
			if r := exchange(t, sw, g, "tcp", q6); r.Rcode != dns.RcodeRefused {
				t.Errorf("AAAA over TCP: %s, want REFUSED as upstream said", dns.RcodeToString[r.Rcode])
			}
			if r := exchange(t, sw, g, "tcp", q); r.Truncated || len(r.Answer) != 60 {
				t.Errorf("A over TCP: TC %v, %d records, want all", r.Truncated, len(r.Answer))
			}
			if !allowed(eng, first) || !allowed(eng, last) {
				t.Error("what the answer over TCP gave is not open")
			}
		})
	}
}

// S30: answers for types the gateway does not know.
func TestReportS30EveryType(t *testing.T) {
	soa := &dns.SOA{Hdr: dns.RR_Header{Name: "example.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 5}, Ns: "ns.example.", Mbox: "m.example.", Serial: 1}
	var asked atomic.Int64
	up := dnsServer(t, func(q *dns.Msg, _ bool) *dns.Msg {
		asked.Add(1)
		r := new(dns.Msg).SetReply(q)
		if q.Question[0].Qtype == dns.TypeA && strings.HasPrefix(q.Question[0].Name, "there") {
			r.Answer = []dns.RR{a(q.Question[0].Name, netip.MustParseAddr("198.51.100.1"), 5)}
			return r
		}
		if strings.HasPrefix(q.Question[0].Name, "missing") {
			r.Rcode = dns.RcodeNameError
		}
		r.Ns = []dns.RR{soa}
		return r
	})
	for _, pol := range []policy.Decider{nil, allowing(false, "example")} {
		sw := open(t, netsw.Config{Upstreams: up, Policy: pol})
		_, g := join(t, sw, "job")
		asked.Store(0)
		types := []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSOA, dns.TypePTR, dns.TypeCAA, dns.TypeSRV, dns.TypeTXT, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeMX, dns.TypeANY, 65280}
		for _, typ := range types {
			for name, rcode := range map[string]int{"there.example.": dns.RcodeSuccess, "missing.example.": dns.RcodeNameError} {
				r := exchange(t, sw, g, "udp", ask(name, typ))
				if r.Rcode != rcode || r.Question[0].Qtype != typ {
					t.Errorf("%s type %d: %s, want %s", name, typ, dns.RcodeToString[r.Rcode], dns.RcodeToString[rcode])
				}
				if found := len(r.Answer) == 1; found != (typ == dns.TypeA && rcode == 0) || !found && (len(r.Ns) != 1 || r.Ns[0].String() != soa.String()) {
					t.Errorf("%s type %d: %v, want the SOA where there is no record", name, typ, r)
				}
			}
		}
		if n := asked.Load(); n != int64(2*len(types)) {
			t.Errorf("%d of %d questions went upstream", n, 2*len(types))
		}
	}
}

// S31: allowed and refused names on one address. Refused by name at DNS, by SNI
// and Host at connect time under strict_names; recorded without it.
func TestReportS31NamesOnOneAddress(t *testing.T) {
	shared := netip.MustParseAddr("10.200.0.1") // the gateway, and so a server of the test's
	up := answering(t, func(string) ([]netip.Addr, uint32) { return []netip.Addr{shared}, 60 })
	for _, strict := range []bool{false, true} {
		t.Run(fmt.Sprintf("strict %v", strict), func(t *testing.T) {
			port, got := outside(t, "")
			eng := allowing(strict, "ok.example")
			sw := open(t, netsw.Config{Upstreams: up, Policy: eng, HostPorts: []int{port}, Subnet: netip.MustParsePrefix("10.200.0.0/24")})
			_, g := join(t, sw, "job")
			if r := exchange(t, sw, g, "udp", ask("ok.example.", dns.TypeA)); len(r.Answer) != 1 {
				t.Fatalf("ok.example: %v", r)
			}
			if r := exchange(t, sw, g, "udp", ask("bad.example.", dns.TypeA)); r.Rcode != dns.RcodeNameError {
				t.Errorf("bad.example: %s, want NXDOMAIN", dns.RcodeToString[r.Rcode])
			}
			for what, c := range map[string]struct {
				says []byte
				bad  bool
			}{
				"ok by TLS":   {tlsHello(t, "ok.example"), false},
				"bad by TLS":  {tlsHello(t, "bad.example"), true},
				"ok by HTTP":  {[]byte("GET / HTTP/1.1\r\nHost: OK.example.:80\r\n\r\n"), false},
				"bad by HTTP": {[]byte("GET / HTTP/1.1\r\nHost: bad.example\r\n\r\n"), true},
				"no name":     {[]byte("hello\n"), false},

				"ok by TLS, loud and with a dot": {bytes.Replace(tlsHello(t, "ok.examplex"), []byte("ok.examplex"), []byte("OK.EXAMPLE."), 1), false},
				"two hosts":                      {[]byte("GET / HTTP/1.1\r\nHost: ok.example\r\nHost: bad.example\r\n\r\n"), true},
				"a whole URL":                    {[]byte("GET http://bad.example/ HTTP/1.1\r\nHost: ok.example\r\n\r\n"), true},
			} {
				c0, err := g.Dial(within(t), at(sw, port))
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				_, _ = c0.Write(c.says)
				_ = c0.CloseWrite()
				want := string(c.says)
				if c.bad && strict {
					want = "<reset>"
				}
				if b := <-got; b != want {
					t.Errorf("%s: outside got %.40q, want %.40q", what, b, want)
				}
				c0.Close()
			}
			var askedFor []string
			for _, e := range eng.Recorder().Snapshot().Entries {
				if e.Asked != "" {
					askedFor = append(askedFor, fmt.Sprintf("%s asked for %s, opened by %s: %d", e.Outcome, e.Asked, e.Opened, e.Count))
				}
			}
			want := []string{"observed asked for bad.example, opened by ok.example: 4"}
			if strict {
				want = []string{"blocked asked for bad.example, opened by ok.example: 4"}
			}
			if !slices.Equal(askedFor, want) {
				t.Errorf("the record says %q, want %q", askedFor, want)
			}
		})
	}
}

// S32: trailing dot and letter case.
func TestReportS32CaseAndDots(t *testing.T) {
	asked := make(chan string, 8)
	up := answering(t, func(n string) ([]netip.Addr, uint32) {
		asked <- n
		return []netip.Addr{netip.MustParseAddr("198.51.100.7")}, 60
	})
	name, err := policy.ParseName("Example.COM")
	if err != nil {
		t.Fatal(err)
	}
	eng := allowing(false, name)
	sw := open(t, netsw.Config{Upstreams: up, Policy: eng, Search: []string{"corp.test"}})
	_, g := join(t, sw, "job")
	names := []string{"example.com.", "EXAMPLE.com.", "eXaMpLe.CoM.", "wWw.ExAmPlE.cOm."}
	for _, n := range names {
		r := exchange(t, sw, g, "udp", ask(n, dns.TypeA))
		if r.Rcode != 0 || r.Question[0].Name != n || len(r.Answer) != 1 || r.Answer[0].Header().Name != n {
			t.Errorf("%s: %v, want the question's case kept", n, r)
		}
	}
	if r := exchange(t, sw, g, "udp", ask("example.com.corp.test.", dns.TypeA)); r.Rcode != dns.RcodeNameError {
		t.Errorf("with the search list's suffix: %s, want NXDOMAIN", dns.RcodeToString[r.Rcode])
	}
	for _, want := range names {
		if n := <-asked; n+"." != want {
			t.Errorf("upstream was asked about %q, want %q: 0x20 lives of the case", n, want)
		}
	}
	if len(asked) != 0 {
		t.Errorf("upstream was asked about %q too", <-asked)
	}
	if l := eng.Recorder().Snapshot().ContactedNames(); !slices.Equal(l, []string{"example.com", "www.example.com"}) {
		t.Errorf("the record has %q", l)
	}
}

// S33: suffix rules that match too much.
func TestReportS33Suffixes(t *testing.T) {
	up := answering(t, func(string) ([]netip.Addr, uint32) { return []netip.Addr{netip.MustParseAddr("198.51.100.7")}, 60 })
	sw := open(t, netsw.Config{Upstreams: up, Policy: allowing(false, "example.com")})
	_, g := join(t, sw, "job")
	for n, ok := range map[string]bool{
		"example.com.": true, "a.example.com.": true, "a.b.example.com.": true, "evilexample.com.": false, "example.com.evil.test.": false,
		"com.": false, ".": false, "example\\.com.": false, "evil\\.example.com.": false, "x.evil\\.example.com.": false, "example.com\\..": false,
	} {
		if r := exchange(t, sw, g, "udp", ask(n, dns.TypeA)); (r.Rcode == 0) != ok {
			t.Errorf("%s: %s, allowed should be %v", n, dns.RcodeToString[r.Rcode], ok)
		}
	}
	for _, rule := range []string{"*.example.com", "*", "*foo.com", "a.*.com", "**.com", ".com"} {
		if n, err := policy.ParseName(rule); err == nil {
			t.Errorf("rule %q is taken as %q", rule, n)
		}
	}
}

// S34: a network that cannot be made is an error, not another network; and of
// one that forbids everything nothing gets out. (That mode "none" has no device
// is the VMM's to show.)
func TestReportS34NothingLeaves(t *testing.T) {
	if sw, err := netsw.New(netsw.Config{Subnet: netip.MustParsePrefix("10.0.0.0/31")}); err == nil || sw != nil {
		t.Fatal("a switch without room for guests was made")
	}
	asked := make(chan []byte, 8)
	port := serve(t, func(*net.TCPConn) { t.Error("a connection came out") })
	sw := open(t, netsw.Config{Upstreams: nxdomain(t, asked), HostPorts: []int{port}, Policy: allowing(false)})
	p, g := join(t, sw, "job")
	for _, to := range []string{at(sw, port), "192.0.2.1:443", "169.254.169.254:80", "8.8.8.8:53"} {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		if _, err := g.Dial(ctx, to); err == nil || ctx.Err() != nil {
			t.Errorf("TCP to %s: %v, want it refused at once", to, err)
		}
		cancel()
	}
	me := g.Addr.String() + ":9"
	for _, f := range [][]byte{
		udpFrame(gwMAC, g.MAC(), me, "8.8.8.8:53", dnsQuery(1, "x.example", 1)),
		echoTo(g, netip.MustParseAddr("192.0.2.1"), 1),
		append(bytes.Clone(gwMAC[:]), append(bytes.Clone(macOf(g)), append([]byte{0x86, 0xdd, 0x60}, make([]byte, 60)...)...)...),
	} {
		before := drops(p)
		_ = g.Send(f)
		eventually(t, "refused", func() bool { return drops(p) == before+1 })
	}
	if r := exchange(t, sw, g, "udp", ask("x.example.", dns.TypeA)); r.Rcode != dns.RcodeNameError || len(asked) != 0 {
		t.Errorf("DNS: %s, %d questions upstream", dns.RcodeToString[r.Rcode], len(asked))
	}
	if s := p.Stats(); s.Sent+s.Received+s.Flows+s.Sessions != 0 {
		t.Errorf("Stats() = %+v, want nothing out", s)
	}
}

func macOf(g *netswtest.Guest) []byte { m := g.MAC(); return m[:] }

// S35: a small outer MTU, and an inner network at 1500, are TestSmallOuterMTU
// and TestInnerNetworkWithSmallerMTU.
