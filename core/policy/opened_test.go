package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"virtkit/core/policy"
)

var t0 = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

func addr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{203, byte(i >> 16), byte(i >> 8), byte(i)})
}

func TestOpenedForItsTime(t *testing.T) {
	tab := policy.NewOpenedTable()
	a := addr(1)
	open := func(at time.Time) []string { return tab.Openers("build", a, at, nil) }
	tab.Open("build", "A.Example.", []netip.Addr{a}, 0, t0)
	if got := open(t0.Add(90*time.Second - 1)); !slices.Equal(got, []string{"a.example"}) {
		t.Errorf("TTL 0 opens for 30 s + 60 s: %v", got)
	}
	if got := open(t0.Add(90 * time.Second)); got != nil {
		t.Errorf("still open at its end: %v", got)
	}
	tab.Open("build", "a.example", []netip.Addr{a}, 300*time.Second, t0)
	tab.Open("build", "a.example", []netip.Addr{a}, time.Second, t0.Add(time.Second))
	if open(t0.Add(360*time.Second-1)) == nil || open(t0.Add(360*time.Second)) != nil {
		t.Error("a later, shorter answer changes how long the address stays open")
	}
	if tab.Openers("db", a, t0, nil) != nil {
		t.Error("open to another VM")
	}
	if tab.Openers("build", netip.MustParseAddr("::ffff:203.0.0.1"), t0, nil) == nil {
		t.Error("the mapped form of the address is another one")
	}
	tab.Open("build", "b.example", nil, 0, t0.Add(time.Hour))
	if n := tab.Len(); n != 0 {
		t.Errorf("%d entries left after their time", n)
	}
}

func TestNobodysAddressesStayClosed(t *testing.T) {
	tab := policy.NewOpenedTable()
	for _, s := range []string{"127.0.0.1", "0.0.0.0", "0.1.2.3", "169.254.169.254", "224.0.0.1", "255.255.255.255", "2001:db8::1", "::ffff:127.0.0.1"} {
		a := netip.MustParseAddr(s)
		tab.Open("build", "rebind.example", []netip.Addr{a}, time.Hour, t0)
		if got := tab.Openers("build", a, t0, nil); got != nil {
			t.Errorf("%s is opened by %v", s, got)
		}
	}
	tab.Open("build", "corp.example", []netip.Addr{netip.MustParseAddr("10.0.0.1")}, 0, t0)
	if tab.Len() != 1 {
		t.Error("a private address is not opened")
	}
}

func TestOpenedBounds(t *testing.T) {
	tab := policy.NewOpenedTable()
	for i := range 65 { // the first is the soonest to expire
		tab.Open("build", fmt.Sprintf("n%d.example", i), []netip.Addr{addr(0)}, time.Duration(100+i)*time.Second, t0)
	}
	got := tab.Openers("build", addr(0), t0, nil)
	if len(got) != 64 || slices.Contains(got, "n0.example") || !slices.Contains(got, "n64.example") {
		t.Errorf("%d names on the address, n0 among them: %v", len(got), slices.Contains(got, "n0.example"))
	}
	if tab.Open("build", "short.example", []netip.Addr{addr(0)}, 0, t0); slices.Contains(tab.Openers("build", addr(0), t0, nil), "short.example") {
		t.Error("a name that expires before all others pushed one out")
	}

	tab = policy.NewOpenedTable()
	for i := range 20000 {
		tab.Open("build", "a.example", []netip.Addr{addr(i)}, time.Duration(100+i)*time.Second, t0)
	}
	if tab.Len() != 16384 {
		t.Errorf("%d entries", tab.Len())
	}
	if tab.Openers("build", addr(20000-16384-1), t0, nil) != nil || tab.Openers("build", addr(20000-16384), t0, nil) == nil {
		t.Error("not the soonest to expire was closed")
	}
}

// FuzzOpened runs a program of lookups over the table and over a plain list.
func FuzzOpened(f *testing.F) {
	f.Add([]byte("\x01\x02\x03\x04\x05\x06\x07\x08"))
	f.Fuzz(func(t *testing.T, prog []byte) {
		type entry struct {
			vm, name string
			a        netip.Addr
		}
		plain := map[entry]time.Time{}
		tab, now := policy.NewOpenedTable(), t0
		for ; len(prog) >= 4; prog = prog[4:] {
			now = now.Add(time.Duration(prog[0]) * time.Second)
			e := entry{fmt.Sprint("vm", prog[1]%3), fmt.Sprintf("n%d", prog[2]%40), addr(int(prog[1]) % 5)}
			ttl := time.Duration(prog[3]) * time.Second
			tab.Open(e.vm, e.name, []netip.Addr{e.a}, ttl, now)
			if until := now.Add(max(ttl, 30*time.Second) + 60*time.Second); until.After(plain[e]) {
				plain[e] = until
			}
			var want []string
			for k, until := range plain {
				if k.vm == e.vm && k.a == e.a && now.Before(until) {
					want = append(want, k.name)
				}
			}
			got := tab.Openers(e.vm, e.a, now, nil)
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Fatalf("%v: open by %v, want %v", e, got, want)
			}
		}
	})
}

func BenchmarkOpeners(b *testing.B) {
	tab := policy.NewOpenedTable()
	for i := range 16000 {
		tab.Open("build", fmt.Sprintf("n%d.example", i), []netip.Addr{addr(i)}, time.Hour, t0)
	}
	var room [64]string
	b.ReportAllocs()
	for b.Loop() {
		tab.Openers("build", addr(77), t0, room[:0])
	}
}

// What is opened again counts from then on: it neither closes when it would have,
// nor goes before those that are due sooner, in whatever order they came.
func TestOpenedAgain(t *testing.T) {
	tab := policy.NewOpenedTable()
	const full = 16384
	for i := range full {
		tab.Open("build", fmt.Sprintf("n%d.example", i), []netip.Addr{addr(i)}, time.Duration(100+i)*time.Second, t0)
	}
	is := func(i int, now time.Time) bool { return len(tab.Openers("build", addr(i), now, nil)) == 1 }
	for i := range 10 {
		tab.Open("build", fmt.Sprintf("N%d.example.", i), []netip.Addr{addr(i)}, 10*time.Hour, t0.Add(time.Duration(i)))
	}
	tab.Open("build", "one.more.example", []netip.Addr{addr(full)}, 9*time.Hour, t0)
	if tab.Len() != full || is(10, t0) || !is(0, t0) || !is(9, t0) || !is(11, t0) || !is(full, t0) {
		t.Errorf("%d entries; the first ten are %t, %t; the eleventh, soonest, is %t; want it alone closed", tab.Len(), is(0, t0), is(9, t0), is(10, t0))
	}
	late := t0.Add(9*time.Hour + 30*time.Minute)
	tab.Open("build", "late.example", []netip.Addr{addr(full + 1)}, time.Minute, late)
	if n := tab.Len(); n != 11 || !is(0, late) || !is(9, late) {
		t.Errorf("%d entries are left after nine hours and a half, want the ten that were opened again and one more", n)
	}
	tab.Open("build", "later.example", []netip.Addr{addr(full + 2)}, time.Minute, t0.Add(11*time.Hour))
	if n := tab.Len(); n != 1 {
		t.Errorf("%d entries are left in the end, want 1", n)
	}
}
