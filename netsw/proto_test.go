package netsw_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
	"virtkit/netsw/netswtest"
)

func echoTo(g *netswtest.Guest, to netip.Addr, seq uint16) []byte {
	return frame.AppendICMP(frame.AppendEth(nil, gwMAC, g.MAC(), frame.TypeIPv4), g.Addr.As4(), to.As4(),
		frame.ICMP{Type: frame.ICMPEcho, Rest: 0x1234<<16 | uint32(seq), Payload: []byte("netswtest ping")})
}

func icmpOf(e frame.Eth) (frame.IPv4, frame.ICMP, bool) {
	ip, ok := frame.ParseIPv4(e.Payload)
	if e.Type != frame.TypeIPv4 || !ok || ip.Proto != frame.ProtoICMP {
		return ip, frame.ICMP{}, false
	}
	m, ok := frame.ParseICMP(ip.Payload)
	return ip, m, ok
}

func isEchoReply(e frame.Eth) bool {
	_, m, ok := icmpOf(e)
	return ok && m.Type == frame.ICMPEchoReply
}

func unreachable(code uint8) func(frame.Eth) bool {
	return func(e frame.Eth) bool {
		_, m, ok := icmpOf(e)
		return ok && m.Type == frame.ICMPUnreachable && m.Code == code
	}
}

func TestPingGateway(t *testing.T) {
	sw := open(t, netsw.Config{})
	_, g := join(t, sw, "a")
	f := g.WaitFrame(echoTo(g, sw.Gateway(), 3), limit, isEchoReply)
	if f == nil {
		t.Fatal("the gateway does not answer echo")
	}
	e, _ := frame.ParseEth(f)
	ip, m, _ := icmpOf(e)
	if ip.Src.Addr() != sw.Gateway() || m.Rest != 0x1234<<16|3 || string(m.Payload) != "netswtest ping" {
		t.Errorf("answer = from %s, %x, %q", ip.Src.Addr(), m.Rest, m.Payload)
	}
	if s := sw.Stats(); s.Sent+s.Received != 0 {
		t.Errorf("Stats() = %+v: the gateway's answer never left the switch", s)
	}
}

// Nobody answers for addresses outside but they themselves.
func TestPingHostIsProhibited(t *testing.T) {
	sw := open(t, netsw.Config{})
	_, g := join(t, sw, "a")
	for _, to := range []netip.Addr{hostAddr(t), netip.MustParseAddr("169.254.169.254")} {
		if g.WaitFrame(echoTo(g, to, 1), limit, unreachable(frame.CodeProhibited)) == nil {
			t.Errorf("ping %s: no \"prohibited\"", to)
		}
	}
}

func TestPingOutside(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "a")
	if errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) {
		if g.WaitFrame(echoTo(g, hostAddr(t), 1), limit, unreachable(frame.CodeProhibited)) == nil {
			t.Error("no ping sockets here, and the guest is not told")
		}
		t.Skip("needs ping sockets for the answer itself: sysctl -w net.ipv4.ping_group_range=\"0 2147483647\"")
	}
	unix.Close(fd)
	for seq := range uint16(3) {
		f := g.WaitFrame(echoTo(g, hostAddr(t), seq), limit, isEchoReply)
		if f == nil {
			t.Fatalf("ping %d: no answer", seq)
		}
		e, _ := frame.ParseEth(f)
		if _, m, _ := icmpOf(e); m.Rest != 0x1234<<16|uint32(seq) || string(m.Payload) != "netswtest ping" {
			t.Errorf("answer %d = %x %q", seq, m.Rest, m.Payload)
		}
	}
	eventually(t, "42 bytes counted each way", func() bool { s := p.Stats(); return s.Sent == 42 && s.Received == 42 })
}

func TestUDP(t *testing.T) {
	port := echoUDP(t)
	sw := open(t, netsw.Config{HostLoopback: true, UDPIdle: 300 * time.Millisecond})
	p, g := join(t, sw, "a")
	c, err := g.DialUDP(at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, 64<<10)
	total := 0
	for _, n := range []int{1, 100, 1472, 9000, 60000, 65507} { // the last one goes in fragments
		want := pattern(n)
		_ = c.SetReadDeadline(time.Now().Add(limit))
		if _, err := c.Write(want); err != nil {
			t.Fatalf("sending %d bytes: %v", n, err)
		}
		k, err := c.Read(buf)
		if err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		same(t, "datagram", buf[:k], want)
		total += n
	}
	eventually(t, "bytes counted both ways", func() bool {
		s := p.Stats()
		return s.Sent == uint64(total) && s.Received == uint64(total)
	})
	if s := p.Stats(); s.Sessions != 1 {
		t.Errorf("Sessions = %d, want 1", s.Sessions)
	}
	eventually(t, "idle session ends", func() bool { return p.Stats().OpenSessions == 0 })
	_ = c.SetReadDeadline(time.Now().Add(limit))
	_, _ = c.Write([]byte("again"))
	if n, err := c.Read(buf); err != nil || string(buf[:n]) != "again" {
		t.Errorf("after the idle end: %q, %v", buf[:n], err)
	}
}

func TestUDPRefused(t *testing.T) {
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	port := pc.LocalAddr().(*net.UDPAddr).Port
	pc.Close()
	sw := open(t, netsw.Config{HostPorts: []int{port}})
	_, g := join(t, sw, "a")
	me := g.Addr.String() + ":4000"
	if g.WaitFrame(udpFrame(gwMAC, g.MAC(), me, at(sw, port), []byte("x")), limit, unreachable(frame.CodePort)) == nil {
		t.Error("closed port: no \"port unreachable\"")
	}
	other := port%60000 + 1
	if g.WaitFrame(udpFrame(gwMAC, g.MAC(), me, at(sw, other), []byte("x")), limit, unreachable(frame.CodeProhibited)) == nil {
		t.Error("the host's loopback: no \"prohibited\"")
	}
}

func TestUDPSessionsAreCapped(t *testing.T) {
	port := echoUDP(t)
	sw := open(t, netsw.Config{HostLoopback: true, MaxSessions: 8})
	p, g := join(t, sw, "a")
	for i := range 50 {
		c, err := g.DialUDP(at(sw, port))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(limit))
		_, _ = c.Write([]byte("flood"))
		if _, err := c.Read(make([]byte, 9)); err != nil {
			t.Fatalf("session %d got no answer: %v", i, err)
		}
	}
	eventually(t, "old sessions end", func() bool { return p.Stats().OpenSessions <= 8 })
	if s := p.Stats(); s.Sessions != 50 || s.Dropped(netsw.DropLimit) != 42 {
		t.Errorf("Stats() = %+v, want 50 sessions, 42 of them ended for others", s)
	}
}

func TestDHCP(t *testing.T) {
	sw := open(t, netsw.Config{Search: []string{"corp.test"}, Subnet: netip.MustParsePrefix("10.9.8.0/24")})
	p, g := join(t, sw, "build")
	ask := func(kind byte, opts ...byte) []byte {
		b := make([]byte, 236)
		b[0], b[1], b[2] = 1, 1, 6
		copy(b[4:], "xid!")
		mac := g.MAC()
		copy(b[28:], mac[:])
		b = append(b, 0x63, 0x82, 0x53, 0x63, 53, 1, kind)
		b = append(append(b, opts...), 255)
		f := g.WaitFrame(udpFrame(frame.Broadcast, g.MAC(), "0.0.0.0:68", "255.255.255.255:67", b), limit, func(e frame.Eth) bool {
			ip, _ := frame.ParseIPv4(e.Payload)
			u, ok := frame.ParseUDP(ip.Payload)
			return ok && u.Src == 67
		})
		if f == nil {
			t.Fatalf("no answer to DHCP message %d", kind)
		}
		e, _ := frame.ParseEth(f)
		ip, _ := frame.ParseIPv4(e.Payload)
		u, _ := frame.ParseUDP(ip.Payload)
		return u.Payload
	}
	if r := ask(1); r[242] != 2 || net.IP(r[16:20]).String() != "10.9.8.2" || string(r[4:8]) != "xid!" {
		t.Errorf("answer to discover: type %d, address %s", r[242], net.IP(r[16:20]))
	}
	r := ask(3, 50, 4, 10, 9, 8, 2)
	if r[242] != 5 || net.IP(r[16:20]).String() != p.Addr().String() {
		t.Errorf("answer to request: type %d, address %s", r[242], net.IP(r[16:20]))
	}
	for what, opt := range map[string][]byte{
		"mask": {1, 4, 255, 255, 255, 0}, "router": {3, 4, 10, 9, 8, 1}, "DNS": {6, 4, 10, 9, 8, 1},
		"MTU": {26, 2, 0xff, 0xf0}, "hostname": append([]byte{12, 5}, "build"...),
		"search": append([]byte{119, 11, 4}, "corp\x04test\x00"...),
	} {
		if !bytes.Contains(r[240:], opt) {
			t.Errorf("answer lacks the %s option % x", what, opt)
		}
	}
	if r := ask(3, 50, 4, 10, 9, 8, 99); r[242] != 6 {
		t.Errorf("request for another's address: type %d, want 6 (no)", r[242])
	}
}

func TestPublishTCP(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, g := join(t, sw, "web")
	ln, err := g.Listen(8080)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				b, _ := io.ReadAll(c)
				fmt.Fprintf(c, "%d from %s", len(b), c.RemoteAddr().(*net.TCPAddr).IP)
				c.Close()
			}()
		}
	}()
	port, closer, err := sw.Publish("", 0, p, 8080, policy.TCP)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		_, _ = c.Write(pattern(5 << 20))
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	b, err := io.ReadAll(c)
	if want := fmt.Sprintf("%d from %s", 5<<20, sw.Gateway()); err != nil || string(b) != want {
		t.Errorf("guest said %q, %v, want %q", b, err, want)
	}

	_, _, err = sw.Publish("127.0.0.1", port, p, 80, policy.TCP)
	if fault.KindOf(err) != fault.Conflict || !strings.Contains(err.Error(), "127.0.0.1:"+strconv.Itoa(port)) ||
		!strings.Contains(fault.HintOf(err), "publishes it already") {
		t.Errorf("Publish on a taken port = %v (hint %q)", err, fault.HintOf(err))
	}
	if err := closer.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
	if _, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(port)); err == nil {
		t.Error("the port is open after Close")
	}
}

func TestPublishToNobodyResets(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, _ := join(t, sw, "web")
	port, _, err := sw.Publish("127.0.0.1", 0, p, 81, policy.TCP)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err == nil { // else the reset was faster than Dial
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(limit))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Read from a guest that does not listen = %v, want reset", err)
	}
}

func TestPublishUDP(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, g := join(t, sw, "dns")
	u, err := g.ListenUDP(5353)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(append([]byte("re:"), b[:n]...), from)
		}
	}()
	port, _, err := sw.Publish("", 0, p, 5353, policy.UDP)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 { // three clients, each with its own answer
		c, err := net.Dial("udp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(limit))
		fmt.Fprintf(c, "client %d", i)
		b := make([]byte, 100)
		if n, err := c.Read(b); err != nil || string(b[:n]) != fmt.Sprintf("re:client %d", i) {
			t.Errorf("client %d got %q, %v", i, b[:n], err)
		}
	}
}

func TestPublishWrongly(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, _ := join(t, sw, "web")
	for _, c := range []struct {
		addr        string
		host, guest int
		proto       policy.Proto
	}{
		{"nonsense", 0, 80, policy.TCP}, {"", -1, 80, policy.TCP}, {"", 0, 0, policy.TCP}, {"", 0, 70000, policy.UDP},
		{"", 0, 80, "sctp"}, {"192.0.2.77", 0, 80, policy.TCP},
	} {
		if _, _, err := sw.Publish(c.addr, c.host, p, c.guest, c.proto); fault.KindOf(err) != fault.Usage {
			t.Errorf("Publish(%+v) = %v, want a usage error", c, err)
		}
	}
	if os.Getuid() != 0 {
		if _, _, err := sw.Publish("", 1, p, 80, policy.TCP); fault.KindOf(err) != fault.Denied {
			t.Errorf("Publish(port 1) = %v, want denied", err)
		}
	}
}

// dnsPair is a question and how to read its answer.
func dnsQuery(id uint16, name string, qtype uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, id)
	b = append(b, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	for _, l := range strings.Split(name, ".") {
		b = append(append(b, byte(len(l))), l...)
	}
	b = append(b, 0)
	b = binary.BigEndian.AppendUint16(b, qtype)
	return append(b, 0, 1)
}

// reverse is the name that an address is looked up under.
func reverse(a [4]byte) string {
	return fmt.Sprintf("%d.%d.%d.%d.in-addr.arpa", a[3], a[2], a[1], a[0])
}

// nxdomain is a resolver of the host that knows no name; asked, if any, gets
// the questions.
func nxdomain(t testing.TB, asked ...chan []byte) []netip.AddrPort {
	t.Helper()
	up, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { up.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := up.ReadFromUDP(b)
			if err != nil {
				return
			}
			for _, c := range asked {
				c <- bytes.Clone(b[:n])
			}
			b[2] |= 0x80
			b[3] = 0x83
			_, _ = up.WriteToUDP(b[:n], from)
		}
	}()
	return []netip.AddrPort{up.LocalAddr().(*net.UDPAddr).AddrPort()}
}

func TestDNSOfTheJobItself(t *testing.T) {
	asked := make(chan []byte, 8)
	sw := open(t, netsw.Config{Upstreams: nxdomain(t, asked)})
	p, g := join(t, sw, "build")
	db, _ := join(t, sw, "db", "postgres", "db-1.test")
	c, err := g.DialUDP(at(sw, 53))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask := func(q []byte) []byte {
		t.Helper()
		_ = c.SetDeadline(time.Now().Add(limit))
		if _, err := c.Write(q); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 4096)
		n, err := c.Read(b)
		if err != nil {
			t.Fatalf("no answer: %v", err)
		}
		return b[:n]
	}
	want := db.Addr().As4()
	for i, name := range []string{"db", "POSTGRES", "Db-1.Test"} {
		r := ask(dnsQuery(uint16(i), name, 1))
		if r[3]&15 != 0 || !bytes.HasSuffix(r, want[:]) || !bytes.Contains(r, dnsQuery(0, name, 1)[12:]) {
			t.Errorf("A %s = % x, want %s with the case kept", name, r, db.Addr())
		}
	}
	if r := ask(dnsQuery(9, "db", 28)); r[3]&15 != 0 || r[7] != 0 {
		t.Errorf("AAAA db: rcode %d, %d answers, want an empty answer", r[3]&15, r[7])
	}
	if r := ask(dnsQuery(9, "3.0.200.10.in-addr.arpa", 12)); !bytes.HasSuffix(r, []byte("\x02db\x00")) {
		t.Errorf("PTR of db = % x", r)
	}
	if r := ask(dnsQuery(9, "77.0.200.10.in-addr.arpa", 12)); r[3]&15 != 3 {
		t.Errorf("PTR of nobody: rcode %d, want NXDOMAIN", r[3]&15)
	}
	if len(asked) != 0 {
		t.Errorf("the job's own names went to the host's resolver: % x", <-asked)
	}
	if s := p.Stats(); s.Sent != 0 || s.Questions != 6 {
		t.Errorf("Stats() = sent %d, questions %d, want 0 and 6", s.Sent, s.Questions)
	}
	if r := ask(dnsQuery(9, "Elsewhere.test", 1)); r[3]&15 != 3 || len(asked) != 1 {
		t.Errorf("A elsewhere.test: rcode %d, %d questions upstream, want NXDOMAIN from there", r[3]&15, len(asked))
	}
	// The same over TCP.
	tc, err := g.Dial(within(t), at(sw, 53))
	if err != nil {
		t.Fatal(err)
	}
	defer tc.Close()
	q := dnsQuery(5, "db", 1)
	_, _ = tc.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(q))), q...))
	var l [2]byte
	if _, err := io.ReadFull(tc, l[:]); err != nil {
		t.Fatal(err)
	}
	r := make([]byte, binary.BigEndian.Uint16(l[:]))
	if _, err := io.ReadFull(tc, r); err != nil || !bytes.HasSuffix(r, want[:]) {
		t.Errorf("A db over TCP = % x, %v", r, err)
	}
}
