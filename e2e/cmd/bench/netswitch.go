package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// switchSubnet is fixed, so that a list can name the gateway.
var switchSubnet = netip.MustParsePrefix("10.98.0.0/24")

// profile writes what the processor does to a file, until stop is called.
func profile(path string) (stop func(), err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, fmt.Errorf("profiling: %w", err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, fmt.Errorf("profiling: %w", err)
	}
	return func() { pprof.StopCPUProfile(); f.Close() }, nil
}

// runSwitch is the process of a switch with one port. It sends the guest's end
// and what the guest's interface is to be set to over descriptor 3, and ends
// when that closes or when it is told to.
func runSwitch(ctx context.Context, arg string) error {
	if path := os.Getenv("VIRTKIT_BENCH_PROFILE"); path != "" {
		stop, err := profile(fmt.Sprintf("%s.%d", path, os.Getpid()))
		if err != nil {
			return err
		}
		defer stop()
	}
	var c switchConfig
	if err := json.Unmarshal([]byte(arg), &c); err != nil {
		return fmt.Errorf("reading what the switch is to be: %w", err)
	}
	cfg := netsw.Config{
		Subnet: switchSubnet, HostLoopback: true, Search: []string{},
		Upstreams: []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(c.DNS))},
	}
	if c.Policy {
		p, err := benchPolicy(c.Entries)
		if err != nil {
			return err
		}
		cfg.Policy = policy.NewEngine(policy.EngineConfig{Policy: p, JobPort: "build"})
	}
	sw, err := netsw.New(cfg)
	if err != nil {
		return err
	}
	defer sw.Close()
	port, err := sw.AddPort(netsw.PortConfig{Name: "build"})
	if err != nil {
		return err
	}
	set, err := json.Marshal(port.Net())
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(3, set, unix.UnixRights(int(port.File().Fd())), nil, 0); err != nil {
		return fmt.Errorf("handing the guest's end over: %w", err)
	}
	port.CloseFile()
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	<-ctx.Done()
	return nil
}

// benchPolicy has as many entries in each of a node's two lists; what the
// benchmark talks to is the last of them.
func benchPolicy(entries int) (*policy.Policy, error) {
	p := &policy.Policy{Phase: policy.Run}
	if entries == 0 {
		return p, nil
	}
	var names, ips []string
	for i := 1; i < entries; i++ {
		names = append(names, fmt.Sprintf("host%d.example.com", i))
		ips = append(ips, fmt.Sprintf("203.%d.%d.0/24:443", i/250, i%250))
	}
	names = append(names, "bench.test")
	ips = append(ips, switchSubnet.Addr().Next().String()+"/32")
	var bad []*policy.EntryError
	p.Cap, bad = policy.ParseCap(policy.Run, names, ips, "bench", "bench")
	if len(bad) > 0 {
		return nil, fmt.Errorf("the benchmark's own list: %w", bad[0])
	}
	return p, nil
}

// receiveLink is the other end of what runSwitch sends.
func receiveLink(conn int) (fd int, set guestwire.Net, err error) {
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	n, on, _, _, err := unix.Recvmsg(conn, b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, set, fmt.Errorf("taking the guest's end: %w", err)
	}
	if n == 0 {
		return 0, set, errors.New("taking the guest's end: its process ended")
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil || len(msgs) != 1 {
		return 0, set, fmt.Errorf("taking the guest's end: %d messages, %w", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return 0, set, fmt.Errorf("taking the guest's end: %d descriptors, %w", len(fds), err)
	}
	if err := json.Unmarshal(b[:n], &set); err != nil {
		return 0, set, fmt.Errorf("reading what the guest's interface is to be set to: %w", err)
	}
	return fds[0], set, nil
}

func parseMAC(s string) (frame.MAC, error) {
	m, err := net.ParseMAC(s)
	if err != nil || len(m) != 6 {
		return frame.MAC{}, fmt.Errorf("the switch gave the MAC %q", s)
	}
	return frame.MAC(m), nil
}
