package netsw_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
	"virtkit/netsw/netswtest"
)

// resolve asks the gateway for a name of the job; "" when there is none.
func resolve(t *testing.T, sw *netsw.Switch, g *netswtest.Guest, name string) string {
	t.Helper()
	r := g.Ask(t, at(sw, 53), dnsQuery(7, name, 1))
	if r[3]&15 != 0 {
		return ""
	}
	if len(r) < 16 || r[7] != 1 {
		t.Fatalf("A %s = % x, want one record", name, r)
	}
	for _, p := range sw.Ports() {
		if a := p.Addr().As4(); bytes.HasSuffix(r, a[:]) {
			return p.Name()
		}
	}
	t.Fatalf("A %s = % x, nobody's address", name, r)
	return ""
}

// Guests are known by their names in any case, an address by the first of them;
// services come and go while the job's guest runs.
func TestNamesOfServices(t *testing.T) {
	sw := open(t, netsw.Config{Upstreams: nxdomain(t)})
	_, g := join(t, sw, "job", "build", "Runner-1.")
	want := func(when string, names map[string]string) {
		t.Helper()
		for n, p := range names {
			if got := resolve(t, sw, g, n); got != p {
				t.Errorf("%s: %s is %q, want %q", when, n, got, p)
			}
		}
	}
	ptr := func(p *netsw.Port, name string) {
		t.Helper()
		a := p.Addr().As4()
		r := g.Ask(t, at(sw, 53), dnsQuery(7, reverse(a), 12))
		if !bytes.HasSuffix(r, append(append([]byte{byte(len(name))}, name...), 0)) {
			t.Errorf("PTR of %s = % x, want %s", p.Name(), r, name)
		}
	}
	want("alone", map[string]string{"BUILD": "job", "runner-1": "job", "job": "job", "db": ""})
	ptr(sw.Ports()[0], "job")

	if _, err := sw.AddPort(netsw.PortConfig{Name: "other", Aliases: []string{"new", "Build."}}); fault.KindOf(err) != fault.Conflict {
		t.Errorf("AddPort with a taken name = %v, want a conflict", err)
	}
	db, err := sw.AddPort(netsw.PortConfig{Name: "db", Hostname: "postgres", Aliases: []string{"db", "Postgres."}})
	if err != nil {
		t.Fatal(err)
	}
	want("with a service", map[string]string{"new": "", "build": "job", "db": "db", "postgres": "db"})
	ptr(db, "postgres")

	db.Remove()
	want("when it is gone", map[string]string{"build": "job", "db": "", "postgres": ""})
}

// Who has a removed guest's address is reached by nothing that was that guest's.
func TestAddressesChangeHands(t *testing.T) {
	udp := echoUDP(t)
	j := &judge{}
	sw := open(t, netsw.Config{HostLoopback: true, Policy: j})
	old, g := join(t, sw, "old")
	tcpPort, _, err := sw.Publish("", 0, old, 80, policy.TCP)
	if err != nil {
		t.Fatal(err)
	}
	me := g.Addr.String() + ":4000"
	ask := func(g *netswtest.Guest, name string) {
		t.Helper()
		if g.WaitFrame(udpFrame(gwMAC, g.MAC(), me, at(sw, udp), []byte(name)), limit, func(e frame.Eth) bool { return bytes.HasSuffix(e.Payload, []byte(name)) }) == nil {
			t.Fatalf("%s got no answer", name)
		}
	}
	ask(g, "old")
	old.Remove()
	fresh, g2 := join(t, sw, "fresh")
	if fresh.Addr() != old.Addr() || fresh.MAC() != old.MAC() {
		t.Fatalf("the new guest has %s, want the old one's %s", fresh.Addr(), old.Addr())
	}
	ln, err := g2.Listen(80)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		if _, err := ln.Accept(); err == nil {
			t.Error("a connection for the old guest came to the new one")
		}
	}()
	ask(g2, "fresh") // from the same port to the same place
	var who []string
	j.mu.Lock()
	for _, f := range j.flows {
		who = append(who, f.Port)
	}
	j.mu.Unlock()
	if !slices.Equal(who, []string{"old", "fresh"}) {
		t.Errorf("flows were decided for %q, want one for each guest", who)
	}
	// What went out is counted after it has.
	eventually(t, "the new guest's own figures", func() bool { s := fresh.Stats(); return s.Sent == 5 && s.Sessions == 1 })
	c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(tcpPort)))
	if err == nil {
		_ = c.SetDeadline(time.Now().Add(limit))
		if _, err = c.Read(make([]byte, 1)); err == nil {
			t.Error("the old guest's published port answers")
		}
		c.Close()
	}
}

// Services come and go while others talk, look names up and connect.
func TestPortsComeAndGo(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("x")) })
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "job")
	var wg sync.WaitGroup
	for k := range 2 {
		wg.Go(func() {
			for i := range 40 {
				name := fmt.Sprintf("svc%d-%d", k, i)
				p, err := sw.AddPort(netsw.PortConfig{Name: name, Hostname: name, Aliases: []string{name + ".alias"}})
				if err != nil {
					t.Error(err)
					return
				}
				s := netswtest.New(t, p.File(), p.Net())
				p.CloseFile()
				if got := resolve(t, sw, g, name+".alias"); got != name {
					t.Errorf("%s.alias is %q", name, got)
				}
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				c, err := s.Dial(ctx, at(sw, port))
				cancel()
				if err != nil {
					t.Error(err)
				} else {
					if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
						t.Error(err)
					}
					c.Close()
				}
				p.Remove()
				s.Close()
			}
		})
	}
	wg.Wait()
	if n := len(sw.Ports()); n != 1 {
		t.Errorf("%d ports are left", n)
	}
	eventually(t, "no flow is left", func() bool { return sw.Stats().OpenFlows == 0 && sw.UsedSockets() == 0 })
	if s := sw.Stats(); s.Flows != 80 || s.Received != 80 {
		t.Errorf("Stats() = %+v, want 80 flows of removed guests counted", s)
	}
}
