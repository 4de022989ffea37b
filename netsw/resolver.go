package netsw

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"virtkit/core/policy"
	"virtkit/netsw/dnsd"
	"virtkit/netsw/frame"
)

// resolver joins the DNS server to the switch: port 53 of the gateway, the
// job's own names, policy and counters.
type resolver struct {
	sw  *Switch
	srv *dnsd.Server
	ctx context.Context // of questions
	pc  *gonet.UDPConn
	ln  *gonet.TCPListener
	end context.CancelFunc
}

// maxQuestions is how many questions of one guest may be open, and maxAskers how
// many TCP connections it may have to ask over.
const (
	maxQuestions = 128
	maxAskers    = 16
)

func newResolver(g *gateway) (*resolver, error) {
	r := &resolver{sw: g.sw}
	addr := full(netip.AddrPortFrom(g.sw.Gateway(), 53))
	var wq waiter.Queue
	ep, terr := g.st.NewEndpoint(udp.ProtocolNumber, ipv4.ProtocolNumber, &wq)
	if terr == nil {
		terr = ep.Bind(addr)
	}
	if terr != nil {
		return nil, fmt.Errorf("listening for DNS questions on UDP: %s", terr)
	}
	cuttable(ep)
	r.pc = gonet.NewUDPConn(&wq, ep)
	var err error
	if r.ln, err = gonet.ListenTCP(g.st, addr, ipv4.ProtocolNumber); err != nil {
		r.pc.Close()
		return nil, fmt.Errorf("listening for DNS questions on TCP: %w", err)
	}
	r.srv = dnsd.New(dnsd.Config{
		Upstreams: g.sw.dns,
		Job:       r,
		Log:       g.sw.log,
	})
	r.ctx, r.end = context.WithCancel(g.sw.ctx)
	g.sw.run(func() { r.srv.ServePacket(r.ctx, r.pc) })
	g.sw.run(func() { r.srv.ServeStream(r.ctx, r.ln) })
	return r, nil
}

// inputDNS takes a question over UDP past the stack, which has only those that
// come in fragments; false when it is something else. It is called by a link's
// reader.
func (p *Port) inputDNS(ip *frame.IPv4) bool {
	if ip.Dst != p.sw.gwIP || ip.Fragment() {
		return false
	}
	u, ok := frame.ParseUDP(ip.Payload)
	if !ok || u.Dst != 53 {
		return false
	}
	r := p.sw.gw.resolver
	to := netip.AddrPortFrom(p.Addr(), u.Src)
	if work := r.srv.Packet(p.Addr(), u.Payload, func(b []byte) { r.answer(p, to, b) }); work != nil {
		p.sw.wg.Go(func() { work(r.ctx) }) // the group is not waited out while this reads
	}
	return true
}

// answer sends an answer over UDP; the stack cuts what is too long for a frame.
func (r *resolver) answer(p *Port, to netip.AddrPort, b []byte) {
	if frame.IPv4Size+frame.UDPSize+len(b) > MTU {
		_, _ = r.pc.WriteTo(b, net.UDPAddrFromAddrPort(to))
		return
	}
	p.sendIP(frame.IPv4Size+frame.UDPSize+len(b), func(f []byte) []byte {
		at := len(f)
		f = frame.AppendUDP(f, netip.AddrPortFrom(r.sw.Gateway(), 53), to, b)
		frame.LetCut(f[at:], binary.BigEndian.Uint16(b)) // see cuttable
		return f
	})
}

func (r *resolver) close() {
	r.end()
	r.srv.Close()
	r.pc.Close()
	r.ln.Close()
}

// Enter begins a question of a guest.
func (r *resolver) Enter(client netip.Addr) (dnsd.Client, bool) {
	p := r.sw.table.Load().byIP[client.As4()]
	if p == nil {
		return nil, false
	}
	p.c.questions.Add(1)
	if p.asking.Add(1) > maxQuestions {
		p.asking.Add(-1)
		p.c.drop(DropLimit)
		return nil, false
	}
	return asker{p}, true
}

// Connect begins a connection that a guest asks over.
func (r *resolver) Connect(client netip.Addr) (leave func(), ok bool) {
	p := r.sw.table.Load().byIP[client.As4()]
	if p == nil {
		return nil, false
	}
	if p.askers.Add(1) > maxAskers {
		p.askers.Add(-1)
		p.c.drop(DropLimit)
		return nil, false
	}
	return func() { p.askers.Add(-1) }, true
}

// Lookup finds a guest of the job by name.
func (r *resolver) Lookup(name string) (netip.Addr, bool) {
	if p := r.sw.table.Load().byName[policy.CanonicalName(name)]; p != nil {
		return p.Addr(), true
	}
	return netip.Addr{}, false
}

// Reverse names an address of the job's network; ok says whether it is one.
func (r *resolver) Reverse(a netip.Addr) (name string, ok bool) {
	if !r.sw.subnet.Contains(a) {
		return "", false
	}
	if p := r.sw.table.Load().byIP[a.As4()]; p != nil {
		return p.hostname(), true
	}
	return "", true
}

// asker is a port as the DNS server sees it.
type asker struct{ p *Port }

func (a asker) Leave() { a.p.asking.Add(-1) }

func (a asker) Allow(name string, qtype uint16) bool {
	v := a.p.sw.decide(policy.Flow{Port: a.p.name, Proto: policy.DNS, Name: name, QType: qtype})
	if !v.Allow {
		a.p.c.drop(DropDenied)
		a.p.sw.log.Debug("refused a question", "vm", a.p.name, "name", name, "layer", v.Layer, "reason", v.Reason)
	}
	return v.Allow
}

// Unreadable decides over a question that cannot be rebuilt.
func (a asker) Unreadable() bool {
	q := a.p.sw.questioner
	if q == nil || !q.Unreadable(a.p.name).Allow {
		a.p.c.drop(DropDenied)
		return false
	}
	return true
}

func (a asker) Forwarded(sent, received int) {
	a.p.c.sent.Add(uint64(sent))
	a.p.c.received.Add(uint64(received))
}

func (a asker) Answered(ans dnsd.Answer) {
	if o := a.p.sw.opener; o != nil {
		o.Opened(a.p.name, ans.Names, ans.Addrs, ans.TTL)
	}
}

func (a asker) WantsAnswers() bool { return a.p.sw.opener != nil }

// readResolvConf takes the host's resolvers and, unless configured, its search
// list. As the C library does, it takes 127.0.0.1 when there are none.
func (s *Switch) readResolvConf() error {
	path := s.cfg.ResolvConf
	if path == "" {
		path = "/etc/resolv.conf"
	}
	f, err := os.Open(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reading the host's resolvers: %w", err)
	}
	var search []string
	if err == nil {
		defer f.Close()
		for sc := bufio.NewScanner(f); sc.Scan(); {
			w := strings.Fields(sc.Text())
			if len(w) < 2 {
				continue
			}
			switch w[0] {
			case "nameserver":
				if a, err := netip.ParseAddr(w[1]); err == nil {
					s.dns = append(s.dns, netip.AddrPortFrom(a, 53))
				} else {
					s.log.Warn("a resolver of the host is not an address", "path", path, "nameserver", w[1])
				}
			case "search", "domain": // the last one counts
				search = w[1:]
			}
		}
	}
	if len(s.dns) == 0 {
		s.dns = []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 53)}
		s.log.Warn("the host names no resolver; asking 127.0.0.1 as its C library would", "path", path)
	}
	if s.search == nil && len(search) > 0 && search[0] != "." {
		s.search = search
	}
	return nil
}
