package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/netsw"
)

// network is a netsw.Switch as a supervisor knows it.
type network struct {
	sw     *netsw.Switch
	record *policy.Recorder // nil = nothing is restricted and nothing recorded
}

func (n *network) Close() error { return n.sw.Close() }

// egressNetwork is a network with a policy.
type egressNetwork struct{ *network }

var _ supervise.EgressNetwork = egressNetwork{}

func (n egressNetwork) Recorder() *policy.Recorder { return n.record }

// Traffic counts payload between the guests and the outside.
func (n *network) Traffic() (sent, received uint64) {
	s := n.sw.Stats()
	return s.Sent, s.Received
}

func (n *network) Plug(_ context.Context, name string, s supervise.NetSpec) (supervise.Plugged, error) {
	names := s.Names
	if names == nil {
		names = []string{name}
	}
	p, err := n.sw.AddPort(netsw.PortConfig{Name: name, Aliases: names})
	if err != nil {
		return nil, fmt.Errorf("plugging %s: %w", name, err)
	}
	return &plugged{sw: n.sw, port: p, open: map[supervise.Publish]io.Closer{}}, nil
}

// plugged is a guest's port on the switch.
type plugged struct {
	sw   *netsw.Switch
	port *netsw.Port

	mu   sync.Mutex
	open map[supervise.Publish]io.Closer // by what Publish returned
}

// File hands a copy out and closes the switch's own: the link has to end with
// the VMM, and an end that this process held would keep it alive.
func (p *plugged) File() *os.File {
	f, err := p.take(p.port.File())
	if err != nil {
		return nil
	}
	return f
}

func (p *plugged) Replug() (*os.File, error) {
	f, err := p.port.Replug()
	if err != nil {
		return nil, err
	}
	return p.take(f)
}

func (p *plugged) take(f *os.File) (*os.File, error) {
	if f == nil {
		return nil, errors.New("the port's link was taken before")
	}
	defer p.port.CloseFile()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicating the port's link: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func (p *plugged) Guest() guestwire.Net { return p.port.Net() }

func (p *plugged) Publish(_ context.Context, pub supervise.Publish) (supervise.Publish, error) {
	pub = pub.Filled()
	port, closer, err := p.sw.Publish(pub.HostAddr, pub.HostPort, p.port, pub.GuestPort, policy.Proto(pub.Proto))
	if err != nil {
		return pub, err
	}
	pub.HostPort = port
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open[pub] = closer
	return pub, nil
}

func (p *plugged) Unpublish(pub supervise.Publish) error {
	pub = pub.Filled()
	p.mu.Lock()
	closer, ok := p.open[pub]
	delete(p.open, pub)
	p.mu.Unlock()
	if !ok {
		return notPublished(pub)
	}
	return closer.Close()
}

func (p *plugged) Unplug() { p.port.Remove() }

func (p *plugged) Stats() supervise.NetStats {
	s := p.port.Stats()
	return supervise.NetStats{SentBytes: int64(s.Sent), RecvBytes: int64(s.Received)}
}

func notPublished(pub supervise.Publish) error {
	return fault.Newf(fault.NotFound, "%s:%d is not published to port %d (%s)", pub.HostAddr, pub.HostPort, pub.GuestPort, pub.Proto)
}
