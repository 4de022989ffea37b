package supervisetest

import (
	"context"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/policy"
	"virtkit/core/supervise"
)

// Network is a switch that carries nothing and counts what it was asked.
type Network struct {
	mu     sync.Mutex
	next   int
	ends   []*os.File
	plugs  int
	open   []supervise.Publish
	closed bool
	record *policy.Recorder
}

var _ supervise.EgressNetwork = (*Network)(nil)

// Recorder is what a test records with in the switch's place.
func (n *Network) Recorder() *policy.Recorder {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.record == nil {
		n.record = policy.NewRecorder(policy.Run)
	}
	return n.record
}

// Traffic is always the same.
func (n *Network) Traffic() (sent, received uint64) { return 7, 11 }

// Plug gives a port.
func (n *Network) Plug(context.Context, string, supervise.NetSpec) (supervise.Plugged, error) {
	return &port{n}, nil
}

// Close ends the switch.
func (n *Network) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	for _, f := range n.ends {
		f.Close()
	}
	return nil
}

// Closed reports whether Close was called.
func (n *Network) Closed() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.closed }

// Plugs is how many guest's ends were handed out.
func (n *Network) Plugs() int { n.mu.Lock(); defer n.mu.Unlock(); return n.plugs }

type port struct{ n *Network }

func (p *port) end() (*os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	p.n.plugs++
	p.n.ends = append(p.n.ends, os.NewFile(uintptr(fds[0]), "switch"))
	return os.NewFile(uintptr(fds[1]), "guest"), nil
}

func (p *port) File() *os.File { f, _ := p.end(); return f }

func (p *port) Guest() guestwire.Net {
	return guestwire.Net{MAC: "52:54:00:00:00:02", Addr: "10.200.0.2/24", Gateway: "10.200.0.1", DNS: []string{"10.200.0.1"}, MTU: 65520}
}

func (p *port) Replug() (*os.File, error) { return p.end() }

func (p *port) Publish(_ context.Context, pub supervise.Publish) (supervise.Publish, error) {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	if pub.HostPort == 0 {
		p.n.next++
		pub.HostPort = 40000 + p.n.next
	}
	for _, o := range p.n.open {
		if o.HostPort == pub.HostPort {
			return pub, fault.New(fault.Conflict, "the port is taken").Hint("take another one")
		}
	}
	p.n.open = append(p.n.open, pub)
	return pub, nil
}

func (p *port) Unpublish(pub supervise.Publish) error {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	for i, o := range p.n.open {
		if o == pub {
			p.n.open = append(p.n.open[:i:i], p.n.open[i+1:]...)
			return nil
		}
	}
	return errors.New("no such port")
}

func (p *port) Stats() supervise.NetStats { return supervise.NetStats{} }

func (p *port) Unplug() {}
