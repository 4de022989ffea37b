package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"sync"

	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
	"virtkit/core/supervise"
	"virtkit/netsw/tapnet"
)

// tapConfig is the configuration of tap devices; job "" is of none.
func (h *Host) tapConfig(job string) (tapnet.Config, error) {
	c := tapnet.Config{Job: job, PoolSize: h.Conf.Net.PoolSize, Log: h.Log.With(logx.Comp, "tapnet")}
	var err error
	if c.Home, err = tapnet.HomeOf(h.Jobs.Dir()); err != nil {
		return c, err
	}
	if c.Resolvers, err = resolvers(h.Conf); err != nil {
		return c, err
	}
	if t := h.Conf.Net.Subnet; t != "" {
		if c.Subnet, err = netip.ParsePrefix(t); err != nil {
			return c, fmt.Errorf("reading [net] subnet: %w", err)
		}
	}
	for _, w := range h.Conf.Net.Pool {
		d, err := conf.ParseTapDevice(w)
		if err != nil {
			return c, fmt.Errorf("[net] pool: %q: %w", w, err)
		}
		c.Devices = append(c.Devices, tapnet.Device(d))
	}
	return c, nil
}

// newTap gives a guest its device.
func (h *Host) newTap(ctx context.Context, s supervise.Spec) (supervise.Network, error) {
	c, err := h.tapConfig(s.ID)
	if err != nil {
		return nil, err
	}
	get := tapnet.Make
	if s.Net.Mode == "pool" {
		get = tapnet.Lease
	}
	p, err := get(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("giving the guest a device: %w", err)
	}
	h.Log.Info("device", "device", p.Name(), "guest", p.Guest().Addr)
	return &tap{port: p, open: map[supervise.Publish]io.Closer{}}, nil
}

// CheckNet refuses what a guest's network cannot be or do, before anything is
// started.
func (h *Host) CheckNet(n supervise.NetSpec) error {
	if !n.Tap() {
		return nil
	}
	where := first(h.Conf.File, "config.toml")
	needs := func(what string) error {
		return fault.Newf(fault.Usage, `%s cannot be had under [net] mode %q`, what, n.Mode).
			Hint(`set mode = "switch" under [net] in %s, or do without`, where)
	}
	e := h.Conf.Egress
	switch {
	case e.AllowIP != nil || e.AllowName != nil:
		return needs("the allowlist of [egress]")
	case e.Audit || e.DryRun:
		return needs("the audit or dry run of [egress]")
	case n.HostLoopback || len(n.Loopback) > 0 || len(h.Conf.Net.HostLoopback) > 0:
		return needs("the host's loopback")
	}
	for _, p := range n.Publish {
		if p.Proto == "udp" {
			return needs("publishing a UDP port")
		}
	}
	c, err := h.tapConfig("")
	if err != nil {
		return err
	}
	return tapnet.Possible(c, n.Mode == "pool")
}

func first(words ...string) string {
	for _, w := range words {
		if w != "" {
			return w
		}
	}
	return ""
}

// SweepNet removes devices whose job is gone and rules that none needs; see
// tapnet.Sweep.
func (h *Host) SweepNet(ctx context.Context, dryRun bool) ([]string, error) {
	home, err := tapnet.HomeOf(h.Jobs.Dir())
	if err != nil {
		return nil, err
	}
	return tapnet.Sweep(ctx, tapnet.SweepOptions{
		Home:     home,
		Alive:    func(job string) bool { return supervise.Locked(filepath.Join(h.Jobs.Dir(), filepath.Base(job))) },
		KeepPool: h.Conf.Net.Mode == "pool" && len(h.Conf.Net.Pool) == 0,
		DryRun:   dryRun,
	})
}

// NetReady tells whether the configured mode works on this host: how, or what
// is missing.
func (h *Host) NetReady(ctx context.Context) (text string, warn []string, err error) {
	mode := h.Conf.Net.Mode
	n := supervise.NetSpec{Mode: mode}
	if !n.Tap() {
		return mode, nil, nil
	}
	if err := h.CheckNet(n); err != nil {
		return "", nil, err
	}
	c, err := h.tapConfig("")
	if err != nil {
		return "", nil, err
	}
	if mode == "pool" && len(c.Devices) > 0 {
		free, used, errs := tapnet.PoolReady(c)
		if free+used == 0 {
			return "", nil, errors.Join(errs...)
		}
		for _, e := range errs {
			warn = append(warn, e.Error()+"; "+fault.HintOf(e))
		}
		return fmt.Sprintf("pool: %d devices free, %d in use", free, used), warn, nil
	}
	text, err = tapnet.Ready(ctx, c)
	if err != nil {
		return "", nil, err
	}
	closed, err := tapnet.Closed(ctx)
	for _, ch := range closed {
		warn = append(warn, "chain "+ch+" of this host's firewall drops what is routed; it has to accept interfaces named vktap*")
	}
	return mode + ": " + text, warn, err
}

// tap is a guest's device as a supervisor knows it: the network and its one
// port.
type tap struct {
	port *tapnet.Port

	mu      sync.Mutex
	plugged bool
	open    map[supervise.Publish]io.Closer
}

func (t *tap) Close() error { return t.port.Close() }

func (t *tap) Plug(_ context.Context, name string, n supervise.NetSpec) (supervise.Plugged, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.plugged {
		return nil, fault.Newf(fault.Usage, "%s cannot be a second guest under [net] mode %q", name, n.Mode).
			Hint(`guests of one job need [net] mode "switch"`)
	}
	t.plugged = true
	return t, nil
}

func (t *tap) File() *os.File {
	f, err := t.port.File()
	if err != nil {
		return nil
	}
	return f
}

func (t *tap) Replug() (*os.File, error) { return t.port.File() }

func (t *tap) Guest() guestwire.Net { return t.port.Guest() }

func (t *tap) Publish(_ context.Context, pub supervise.Publish) (supervise.Publish, error) {
	pub = pub.Filled()
	if pub.Proto != "tcp" {
		return pub, fault.Newf(fault.Usage, "port %d: publishing over %s needs [net] mode \"switch\"", pub.GuestPort, pub.Proto)
	}
	port, closer, err := t.port.Forward(pub.HostAddr, pub.HostPort, pub.GuestPort)
	if err != nil {
		return pub, err
	}
	pub.HostPort = port
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open[pub] = closer
	return pub, nil
}

func (t *tap) Unpublish(pub supervise.Publish) error {
	pub = pub.Filled()
	t.mu.Lock()
	closer, ok := t.open[pub]
	delete(t.open, pub)
	t.mu.Unlock()
	if !ok {
		return notPublished(pub)
	}
	return closer.Close()
}

// Unplug leaves the device as it is: Close gives it up.
func (t *tap) Unplug() {}

func (t *tap) Stats() supervise.NetStats {
	s := t.port.Stats()
	return supervise.NetStats{SentBytes: int64(s.SentBytes), RecvBytes: int64(s.RecvBytes)}
}
