package dnsd

import (
	"bytes"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// asking is a client that may ask anything.
type asking struct{ tell bool }

func (asking) Leave()                    {}
func (asking) Allow(string, uint16) bool { return true }
func (asking) Unreadable() bool          { return true }
func (asking) Forwarded(int, int)        {}
func (a asking) WantsAnswers() bool      { return a.tell }
func (asking) Answered(Answer)           {}

// BenchmarkPassedOn is what a question costs beside the sockets: it is taken
// apart, written anew, and its answer made the client's; told is with the answer's
// addresses told to a policy.
func BenchmarkPassedOn(b *testing.B) {
	m := new(dns.Msg)
	m.SetQuestion("n1.bench.test.", dns.TypeA)
	q, err := m.Pack()
	if err != nil {
		b.Fatal(err)
	}
	resp := append(bytes.Clone(q), 0xc0, 12, 0, 1, 0, 1, 0, 0, 14, 16, 0, 4, 198, 18, 0, 1)
	resp[2], resp[3], resp[7] = 0x81, 0x80, 1
	s := New(Config{})
	for name, cl := range map[string]asking{"told": {true}, "plain": {}} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			defer cpu(b)()
			for b.Loop() {
				qu, _ := parse(q)
				query, err := qu.rebuild()
				if err != nil || !answers(resp, append(resp[:2:2], query[2:]...)) {
					b.Fatal("the answer is to another question")
				}
				if s.pass(cl, qu, resp, false) == nil {
					b.Fatal("no answer")
				}
			}
		})
	}
}

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
