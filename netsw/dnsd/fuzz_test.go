package dnsd

import (
	"context"
	"net/netip"
	"testing"

	"github.com/miekg/dns"
)

// refuser lets no question out, so that only our own code is fuzzed.
type refuser struct{}

func (refuser) Enter(netip.Addr) (Client, bool)     { return refuser{}, true }
func (refuser) Lookup(string) (netip.Addr, bool)    { return netip.Addr{}, false }
func (refuser) Reverse(a netip.Addr) (string, bool) { return "db", a.IsPrivate() }
func (refuser) Leave()                              {}
func (refuser) Allow(string, uint16) bool           { return false }
func (refuser) Unreadable() bool                    { return false }
func (refuser) Connect(netip.Addr) (func(), bool)   { return func() {}, true }
func (refuser) Forwarded(int, int)                  {}
func (refuser) WantsAnswers() bool                  { return true }
func (refuser) Answered(Answer)                     {}

func seed(name string, edns bool) []byte {
	m := new(dns.Msg).SetQuestion(name, dns.TypeA)
	if edns {
		m.SetEdns0(1232, true)
	}
	b, _ := m.Pack()
	return b
}

func FuzzQuestion(f *testing.F) {
	f.Add(seed("a.test.", false))
	f.Add(seed("1.0.0.10.in-addr.arpa.", true))
	s := New(Config{Job: refuser{}})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, stream := range []bool{false, true} {
			r := s.answer(context.Background(), netip.Addr{}, append([]byte(nil), b...), stream)
			if r == nil {
				continue
			}
			if r[0] != b[0] || r[1] != b[1] || r[2]&0x80 == 0 {
				t.Fatalf("answer % x to % x", r, b)
			}
			if err := new(dns.Msg).Unpack(r); err != nil {
				t.Fatalf("answer % x does not parse: %v", r, err)
			}
		}
		if qu, _ := parse(append([]byte(nil), b...)); qu != nil {
			q, err := qu.rebuild()
			if err != nil {
				return
			}
			m := new(dns.Msg)
			if err := m.Unpack(q); err != nil || len(m.Question) != 1 || m.Question[0] != qu.q {
				t.Fatalf("rebuilt % x from % x: %v", q, b, err)
			}
		}
	})
}

// FuzzAnswer feeds what a hostile resolver may say.
func FuzzAnswer(f *testing.F) {
	q := seed("a.test.", false)
	f.Add(append([]byte(nil), q...))
	m := new(dns.Msg).SetQuestion("a.test.", dns.TypeA)
	m.Response = true
	m.Answer = []dns.RR{&dns.CNAME{Hdr: dns.RR_Header{Name: "a.test.", Rrtype: dns.TypeCNAME, Class: 1, Ttl: 1}, Target: "a.test."}}
	b, _ := m.Pack()
	f.Add(b)
	s := New(Config{Job: refuser{}})
	f.Fuzz(func(t *testing.T, resp []byte) {
		qu, _ := parse(append([]byte(nil), q...))
		query, err := qu.rebuild()
		if err != nil {
			t.Fatal(err)
		}
		if len(resp) >= 12 {
			copy(resp, query[:2])
		}
		if !answers(resp, query) {
			return
		}
		r := s.pass(refuser{}, qu, resp, false)
		if len(r) < 12 || len(r) > minSize || r[0] != q[0] || r[1] != q[1] {
			t.Fatalf("passed on % x", r)
		}
	})
}
