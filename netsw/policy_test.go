package netsw_test

import (
	"bytes"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"

	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// judge is a Decider that is all that a switch may ask of it, and remembers.
type judge struct {
	decide func(policy.Flow) policy.Verdict // nil allows
	asked  func(policy.Flow, string) policy.Verdict
	quiet  bool // Listens says no
	relays bool // Unreadable allows

	mu     sync.Mutex
	flows  []policy.Flow
	denied []policy.Flow
	names  []string // asked for
	opened []string // name=addr
	odd    int      // unreadable questions
}

func (j *judge) Decide(f policy.Flow) policy.Verdict {
	j.mu.Lock()
	j.flows = append(j.flows, f)
	j.mu.Unlock()
	if j.decide == nil {
		return policy.Verdict{Allow: true}
	}
	return j.decide(f)
}

func (j *judge) Denied(f policy.Flow, v policy.Verdict) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if v.Allow || v.Layer != policy.LayerHost || v.Reason == "" {
		panic("a refusal of the switch's own that is none")
	}
	j.denied = append(j.denied, f)
}

func (j *judge) Opened(_ string, names []string, addrs []netip.Addr, _ time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, a := range addrs {
		j.opened = append(j.opened, names[0]+"="+a.String())
	}
}

func (j *judge) Listens(policy.Flow) bool { return !j.quiet }

func (j *judge) Asked(f policy.Flow, name string) policy.Verdict {
	j.mu.Lock()
	j.names = append(j.names, name)
	j.mu.Unlock()
	if j.asked == nil {
		return policy.Verdict{Allow: true}
	}
	return j.asked(f, name)
}

func (j *judge) Unreadable(string) policy.Verdict {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.odd++
	return policy.Verdict{Allow: j.relays}
}

// What the switch refuses on its own is told too, once for each flow, and the
// policy is not asked.
func TestRefusalsOfTheHostAreTold(t *testing.T) {
	j := &judge{}
	sw := open(t, netsw.Config{Policy: j})
	p, g := join(t, sw, "db")
	host := hostAddr(t).String()
	if _, err := g.Dial(within(t), net.JoinHostPort(host, "22")); err == nil {
		t.Fatal("the host is reachable")
	}
	me := g.Addr.String() + ":4000"
	if g.WaitFrame(udpFrame(gwMAC, g.MAC(), me, "169.254.169.254:80", []byte("x")), limit, unreachable(frame.CodeProhibited)) == nil {
		t.Error("metadata over UDP: no \"prohibited\"")
	}
	if g.WaitFrame(echoTo(g, hostAddr(t), 1), limit, unreachable(frame.CodeProhibited)) == nil {
		t.Error("ping: no \"prohibited\"")
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	want := []policy.Flow{
		{Port: "db", Proto: policy.TCP, Dst: netip.MustParseAddrPort(host + ":22")},
		{Port: "db", Proto: policy.UDP, Dst: netip.MustParseAddrPort("169.254.169.254:80")},
		{Port: "db", Proto: policy.ICMP, Dst: netip.MustParseAddrPort(host + ":0")},
	}
	if len(j.denied) != len(want) || len(j.flows) != 0 {
		t.Fatalf("told of %+v, asked about %+v", j.denied, j.flows)
	}
	for i, f := range want {
		if j.denied[i] != f {
			t.Errorf("told of %+v, want %+v", j.denied[i], f)
		}
	}
	if n := p.Stats().Dropped(netsw.DropDenied); n != 3 {
		t.Errorf("%d denied, want 3", n)
	}
}

// Each way of being refused looks to the guest as policy.Decider promises, and
// nothing of it reaches anyone.
func TestRefusalsAsPromised(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) { t.Error("a connection came out") })
	asked := make(chan []byte, 8)
	j := &judge{decide: func(policy.Flow) policy.Verdict { return policy.Verdict{Layer: "job", Reason: "not listed"} }}
	sw := open(t, netsw.Config{Policy: j, HostPorts: []int{port}, Upstreams: nxdomain(t, asked)})
	p, g := join(t, sw, "a")
	me := g.Addr.String() + ":4000"
	syn := append(frame.AppendIPv4(frame.AppendEth(nil, gwMAC, g.MAC(), frame.TypeIPv4), p.Addr().As4(), sw.Gateway().As4(), frame.ProtoTCP, 20),
		0x10, 0, byte(port>>8), byte(port), 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0)
	if g.WaitFrame(syn, limit, func(e frame.Eth) bool {
		ip, _ := frame.ParseIPv4(e.Payload)
		return ip.Proto == frame.ProtoTCP && len(ip.Payload) >= 20 && ip.Payload[13]&4 != 0
	}) == nil {
		t.Error("TCP: no reset")
	}
	if g.WaitFrame(udpFrame(gwMAC, g.MAC(), me, at(sw, port), []byte("x")), limit, unreachable(frame.CodeProhibited)) == nil {
		t.Error("UDP: no \"prohibited\"")
	}
	if g.WaitFrame(echoTo(g, netip.MustParseAddr("192.0.2.1"), 1), limit, unreachable(frame.CodeProhibited)) == nil {
		t.Error("echo: no \"prohibited\"")
	}
	for _, q := range [][]byte{dnsQuery(7, "Secret.example", 16), dnsQuery(8, "1.2.0.192.in-addr.arpa", 12)} {
		if r := g.Ask(t, at(sw, 53), q); r[3]&15 != 3 || !bytes.Equal(r[12:len(q)], q[12:]) {
			t.Errorf("DNS: % x, want NXDOMAIN with the question", r)
		}
	}
	if len(asked) != 0 {
		t.Errorf("a refused question went upstream: % x", <-asked)
	}
	if s := p.Stats(); s.Dropped(netsw.DropDenied) != 5 || s.Sent+s.Received+s.Flows+s.Sessions != 0 {
		t.Errorf("Stats() = %+v", s)
	}
}

// Two guests have one switch and each its own policy; what one may is of no use
// to the other, whatever it writes into its frames.
func TestEachPortHasItsOwnPolicy(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("in")) })
	eng := policy.NewEngine(policy.EngineConfig{JobPort: "job", Policy: &policy.Policy{Phase: policy.Run,
		Services: []policy.Service{{VM: "db", Lists: policy.Lists{Names: []string{}, IPs: []policy.IPRule{}}}}}})
	sw := open(t, netsw.Config{Policy: eng, HostPorts: []int{port}})
	_, job := join(t, sw, "job")
	_, db := join(t, sw, "db")
	if _, err := db.Dial(within(t), at(sw, port)); err == nil {
		t.Error("db may reach nothing, and did")
	}
	c, err := job.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatalf("the job's guest: %v", err)
	}
	c.Close()
	// db speaks as the job's guest.
	spoof := udpFrame(gwMAC, job.MAC(), job.Addr.String()+":9", net.JoinHostPort(sw.Gateway().String(), strconv.Itoa(port)), []byte("x"))
	for _, f := range [][]byte{spoof, udpFrame(gwMAC, db.MAC(), job.Addr.String()+":9", at(sw, port), []byte("x"))} {
		if err := db.Send(f); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both frames dropped", func() bool {
		s := sw.PortStats()["db"]
		return s.Dropped(netsw.DropSrcMAC) == 1 && s.Dropped(netsw.DropSrcIP) == 1
	})
	if s := sw.Stats(); s.Sessions != 0 {
		t.Errorf("a spoofed datagram left: %+v", s)
	}
}
