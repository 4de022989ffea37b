package policy_test

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"virtkit/core/policy"
)

// cpu reports the processor time of an operation, which other programs of the
// machine change less than the time on the clock.
func cpu(b *testing.B) (report func()) {
	used := func() time.Duration {
		var r syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	before := used()
	return func() { b.ReportMetric(float64(used()-before)/float64(b.N), "cpu-ns/op") }
}

// BenchmarkRecorded is what the policy adds to a question with its answer, and to
// a flow: allowed by the last of a thousand entries, and recorded.
func BenchmarkRecorded(b *testing.B) {
	var l policy.Lists
	for i := range 1000 {
		l.Names = append(l.Names, fmt.Sprintf("host%d.example.com", i))
		l.IPs = append(l.IPs, policy.IPRule{Net: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)})
	}
	e := policy.NewEngine(policy.EngineConfig{Policy: &policy.Policy{Phase: policy.Run, Cap: l}, JobPort: "build"})
	var names []string
	var addrs [][]netip.Addr
	for i := range 2000 {
		names = append(names, fmt.Sprintf("n%d.host999.example.com", i))
		addrs = append(addrs, []netip.Addr{addr(i)})
	}
	b.Run("question", func(b *testing.B) {
		b.ReportAllocs()
		defer cpu(b)()
		for i := 0; b.Loop(); i++ {
			n := names[i%len(names)]
			if !e.Decide(policy.Flow{Port: "build", Proto: policy.DNS, Name: n, QType: 1}).Allow {
				b.Fatal("refused")
			}
			e.Opened("build", []string{n}, addrs[i%len(names)], time.Minute)
		}
	})
	b.Run("flow", func(b *testing.B) {
		b.ReportAllocs()
		defer cpu(b)()
		for i := 0; b.Loop(); i++ {
			f := policy.Flow{Port: "build", Proto: policy.TCP, Dst: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 3, byte(i % 200), 9}), 443)}
			if !e.Decide(f).Allow {
				b.Fatal("refused")
			}
			e.Listens(f)
		}
	})
}
