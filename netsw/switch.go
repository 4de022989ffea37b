package netsw

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"virtkit/core/fault"
	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/netsw/frame"
	"virtkit/netsw/pcap"
)

// Switch joins the guests of one job. Make it with New, end it with Close.
type Switch struct {
	cfg    Config
	log    *slog.Logger
	subnet netip.Prefix
	gwIP   frame.IP
	allIP  frame.IP // the subnet's broadcast address
	gwMAC  frame.MAC
	dns    []netip.AddrPort
	search []string
	policy policy.Decider
	// What the policy is besides; nil where it is not.
	opener     policy.Opener
	witness    policy.Witness
	asker      policy.Asker
	questioner policy.Questioner
	guard      *hostGuard
	pcap       *pcap.Writer // nil = off

	pcapFile *os.File // when the capture is ours to close

	table atomic.Pointer[table] // copied on write, under mu

	mu     sync.Mutex
	gone   []*counters // of removed ports
	closed bool

	connecting atomic.Int64 // guests' TCP connections being set up

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the switch
	gw     *gateway
	pinger pinger

	sockets   *sockets
	openFlows atomic.Int64
	held      atomic.Int64 // bytes, of flows being listened to
	warned    sometimes    // of what guests' flows fail for
}

// table says who is where. It is never changed once stored.
type table struct {
	ports  []*Port
	byMAC  map[frame.MAC]*Port
	byIP   map[frame.IP]*Port
	byName map[string]*Port // canonical
}

// New makes a switch without ports. It reads the resolvers' addresses and
// fails when a configured value makes no sense (fault.Usage).
func New(cfg Config) (*Switch, error) {
	s := &Switch{cfg: cfg, log: cfg.Log, policy: cfg.Policy, gwMAC: frame.MAC{0x02, 'v', 'k', 0, 0, 1}}
	if s.log == nil {
		s.log = logx.Discard()
	}
	s.log = s.log.With(logx.Comp, "netsw")
	if s.policy == nil {
		s.policy = policy.AllowAll{}
	}
	s.opener, _ = s.policy.(policy.Opener)
	s.witness, _ = s.policy.(policy.Witness)
	s.asker, _ = s.policy.(policy.Asker)
	s.questioner, _ = s.policy.(policy.Questioner)
	s.sockets = newSockets()
	if s.cfg.DialTimeout <= 0 {
		s.cfg.DialTimeout = 2 * time.Minute
	}
	if s.cfg.UDPIdle <= 0 {
		s.cfg.UDPIdle = 2 * time.Minute
	}
	if s.cfg.MaxFlows <= 0 {
		s.cfg.MaxFlows = 8192
	}
	if s.cfg.MaxSessions <= 0 {
		s.cfg.MaxSessions = 1024
	}
	for _, p := range cfg.HostPorts {
		if p < 1 || p > 65535 {
			return nil, fault.Newf(fault.Usage, "host port %d: not a port number", p).Hint("use 1 to 65535")
		}
	}
	s.dns, s.search = cfg.Upstreams, cfg.Search
	if len(s.dns) == 0 {
		if err := s.readResolvConf(); err != nil {
			return nil, err
		}
	}
	var err error
	if s.subnet, err = pickSubnet(cfg.Subnet, s.dns); err != nil {
		return nil, err
	}
	s.gwIP = frame.IP(s.subnet.Addr().Next().As4())
	s.allIP = frame.IP(lastAddr(s.subnet).As4())
	s.guard = newHostGuard(s)
	s.table.Store(&table{})
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := s.openCapture(); err != nil {
		s.cancel()
		return nil, err
	}
	if s.gw, err = newGateway(s); err != nil {
		s.cancel()
		return nil, errors.Join(err, s.closeCapture())
	}
	s.log.Info("switch made; IPv6 is off", "subnet", s.subnet.String(), "resolvers", fmt.Sprint(s.dns))
	return s, nil
}

// Gateway is the switch's own address in the job's network.
func (s *Switch) Gateway() netip.Addr { return s.gwIP.Addr() }

// Subnet is the job's network.
func (s *Switch) Subnet() netip.Prefix { return s.subnet }

// Ports are those there are now, oldest first.
func (s *Switch) Ports() []*Port { return slices.Clone(s.table.Load().ports) }

// AddPort makes a port with an address of its own and plugs a link into it.
// Names that are taken are fault.Conflict; a full subnet is fault.Busy.
func (s *Switch) AddPort(pc PortConfig) (*Port, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	if pc.Name == "" {
		return nil, fault.New(fault.Usage, "a port of the switch needs a name")
	}
	old := s.table.Load()
	for _, q := range old.ports {
		if q.name == pc.Name {
			return nil, fault.Newf(fault.Conflict, "port %q exists already on the job's network", pc.Name)
		}
	}
	p := &Port{sw: s, name: pc.Name, flows: make(map[flow]struct{}), sessions: make(map[*session]struct{})}
	if err := p.take(old, append([]string{pc.Hostname}, pc.Aliases...)); err != nil {
		return nil, err
	}
	ip, err := s.pickAddr(pc.Addr, old)
	if err != nil {
		return nil, err
	}
	p.ip = ip
	// From the address, so that it is the same again for the same place in a job,
	// and no two ports of one switch share it.
	p.mac = frame.MAC{0x02, 'v', 'k', 1, ip[2], ip[3]}
	if _, err := p.plug(); err != nil {
		return nil, err
	}
	s.store(append(slices.Clone(old.ports), p))
	return p, nil
}

// store replaces the table by one of these ports; s.mu is held.
func (s *Switch) store(ports []*Port) {
	t := &table{ports: ports, byMAC: make(map[frame.MAC]*Port), byIP: make(map[frame.IP]*Port), byName: make(map[string]*Port)}
	for _, p := range ports {
		t.byMAC[p.mac], t.byIP[p.ip] = p, p
		for _, n := range p.names {
			t.byName[n] = p
		}
	}
	s.table.Store(t)
}

func (s *Switch) pickAddr(want netip.Addr, t *table) (frame.IP, error) {
	last := lastAddr(s.subnet)
	if want.IsValid() {
		if !want.Is4() || !s.subnet.Contains(want) || want == s.subnet.Addr() || want == s.Gateway() || want == last {
			return frame.IP{}, fault.Newf(fault.Usage, "address %s is not one for a guest in %s", want, s.subnet)
		}
		if q := t.byIP[want.As4()]; q != nil {
			return frame.IP{}, fault.Newf(fault.Conflict, "address %s is taken by %q", want, q.name)
		}
		return want.As4(), nil
	}
	for a := s.Gateway().Next(); a.Less(last); a = a.Next() {
		if t.byIP[a.As4()] == nil {
			return a.As4(), nil
		}
	}
	return frame.IP{}, fault.Newf(fault.Busy, "no address is left in %s", s.subnet)
}

// Close unplugs all ports, ends all flows and waits for every goroutine of
// the switch. Safe to call twice.
func (s *Switch) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	ports := s.table.Load().ports
	s.mu.Unlock()

	s.cancel()
	for _, p := range ports {
		p.unplug()
	}
	s.gw.close(s.wg.Wait)
	return s.closeCapture()
}

func (s *Switch) openCapture() error {
	w := s.cfg.Pcap
	if w == nil && s.cfg.PcapPath != "" {
		f, err := os.OpenFile(s.cfg.PcapPath, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
		if err != nil {
			return fmt.Errorf("opening the capture: %w", err)
		}
		w, s.pcapFile = f, f
	}
	if w == nil {
		return nil
	}
	var err error
	if s.pcap, err = pcap.New(w); err != nil {
		return errors.Join(fmt.Errorf("writing the capture's header: %w", err), s.closeCapture())
	}
	return nil
}

func (s *Switch) closeCapture() error {
	var err error
	if s.pcap != nil {
		err = s.pcap.Flush()
	}
	if s.pcapFile != nil {
		err = errors.Join(err, s.pcapFile.Close())
	}
	if err != nil {
		return fmt.Errorf("writing the capture: %w", err)
	}
	return nil
}

var errClosed = errors.New("the job's network is closed")

// run starts a goroutine that Close waits for; false when closed already.
func (s *Switch) run(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.wg.Go(f)
	return true
}

// decide asks the host guard, then the policy.
func (s *Switch) decide(f policy.Flow) policy.Verdict {
	if f.Proto != policy.DNS {
		if v := s.guard.check(f.Dst); !v.Allow {
			s.refused(f, v)
			return v
		}
	}
	return s.policy.Decide(f)
}

// refused tells the policy what was refused without asking it.
func (s *Switch) refused(f policy.Flow, v policy.Verdict) {
	if s.witness != nil {
		s.witness.Denied(f, v)
	}
}
