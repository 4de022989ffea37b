package dnsd_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"virtkit/netsw/dnsd"
)

// askedBy is a resolver that notes who asks, and answers as told.
func askedBy(t *testing.T, answer func(c *net.UDPConn, to netip.AddrPort, q []byte)) (r *dnsd.Resolver, ports func() map[uint16]int) {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	seen := map[uint16]int{}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 4096)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			mu.Lock()
			seen[from.Port()]++
			mu.Unlock()
			answer(c, from, b[:n])
		}
	})
	r = dnsd.NewResolver(c.LocalAddr().(*net.UDPAddr).AddrPort())
	t.Cleanup(func() {
		r.Close()
		c.Close()
		wg.Wait()
	})
	return r, func() map[uint16]int {
		mu.Lock()
		defer mu.Unlock()
		return seen
	}
}

func yes(c *net.UDPConn, to netip.AddrPort, q []byte) {
	a := append([]byte(nil), q...)
	a[2] |= 0x80
	_, _ = c.WriteToUDPAddrPort(a, to)
}

func queryFor(t *testing.T, name string) []byte {
	t.Helper()
	b, err := new(dns.Msg).SetQuestion(name, dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Questions share a port, and none is used for more than a few.
func TestPortsAreSharedByFew(t *testing.T) {
	r, ports := askedBy(t, yes)
	const n = 10 * dnsd.SocketQuestions
	for i := range n {
		if _, err := dnsd.AskUDP(t.Context(), r, queryFor(t, fmt.Sprintf("n%d.test.", i))); err != nil {
			t.Fatal(err)
		}
	}
	// More than ten when one became too old meanwhile.
	if got := ports(); len(got) < 10 || len(got) > n/4 {
		t.Errorf("%d questions came from %d ports, want about 10", n, len(got))
	}
	for p, k := range ports() {
		if k > dnsd.SocketQuestions {
			t.Errorf("%d questions came from port %d, want %d at most", k, p, dnsd.SocketQuestions)
		}
	}
}

// Answers in any order find their questions; those with another identifier, or
// to another question, are nobody's.
func TestAnswersFindTheirQuestions(t *testing.T) {
	var mu sync.Mutex
	type held struct {
		to netip.AddrPort
		q  []byte
	}
	var all []held
	const n = dnsd.SocketQuestions
	r, _ := askedBy(t, func(c *net.UDPConn, to netip.AddrPort, q []byte) {
		mu.Lock()
		defer mu.Unlock()
		wrong := append([]byte(nil), q...)
		wrong[0] ^= 0x55
		yes(c, to, wrong)
		other := append([]byte(nil), q...)
		other[13] ^= 0x01 // in the name
		yes(c, to, other)
		if all = append(all, held{to, append([]byte(nil), q...)}); len(all) < n {
			return
		}
		for i := len(all) - 1; i >= 0; i-- {
			yes(c, all[i].to, all[i].q)
		}
	})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			q := queryFor(t, fmt.Sprintf("n%d.test.", i))
			a, err := dnsd.AskUDP(t.Context(), r, q)
			if err != nil {
				t.Errorf("question %d: %v", i, err)
				return
			}
			m := new(dns.Msg)
			if err := m.Unpack(a); err != nil || m.Question[0].Name != fmt.Sprintf("n%d.test.", i) {
				t.Errorf("question %d was answered with %v, %v", i, m, err)
			}
		})
	}
	wg.Wait()
}

// A resolver that is not there is known at once by all who ask it; one that is
// silent is waited for as long as the caller wants.
func TestNoResolver(t *testing.T) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	to := c.LocalAddr().(*net.UDPAddr).AddrPort()
	c.Close()
	gone := dnsd.NewResolver(to)
	defer gone.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 3 {
		if _, err := dnsd.AskUDP(ctx, gone, queryFor(t, "a.test.")); err == nil || ctx.Err() != nil {
			t.Fatalf("asking where nobody listens = %v", err)
		}
	}
	silent, _ := askedBy(t, func(*net.UDPConn, netip.AddrPort, []byte) {})
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := dnsd.AskUDP(short, silent, queryFor(t, "a.test.")); err == nil || short.Err() == nil {
		t.Errorf("asking who says nothing = %v, want the caller's limit", err)
	}
}
