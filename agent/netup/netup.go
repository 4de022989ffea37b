// Package netup gives a guest its network: the loopback, the one interface by
// its hardware address, and the ports of 127.0.0.1 that lead to the gateway.
package netup

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"virtkit/core/guestwire"
)

// Loopback brings lo up.
func Loopback() error {
	c, err := dial()
	if err != nil {
		return err
	}
	defer c.close()
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if err := c.linkSet(lo.Index, true, 0, nil); err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	return nil
}

// Apply gives the interface its address, MTU and route, in the place of what
// it had. When no interface has n's hardware address and there is only one,
// that one gets it (a guest restored from memory has its template's).
func Apply(n *guestwire.Net, wait time.Duration) error {
	mac, err := net.ParseMAC(n.MAC)
	if err != nil {
		return fmt.Errorf("net: %w", err)
	}
	pfx, err := netip.ParsePrefix(n.Addr)
	if err != nil {
		return fmt.Errorf("net: address %q: %w", n.Addr, err)
	}
	ifi, own, err := find(mac, wait)
	if err != nil {
		return err
	}
	c, err := dial()
	if err != nil {
		return err
	}
	defer c.close()
	if !own {
		if err := c.linkSet(ifi.Index, false, 0, nil); err != nil {
			return fmt.Errorf("taking %s down: %w", ifi.Name, err)
		}
		if err := c.linkSet(ifi.Index, false, 0, mac); err != nil {
			return fmt.Errorf("giving %s the address %s: %w", ifi.Name, mac, err)
		}
	}
	if err := c.addrFlush(ifi.Index); err != nil {
		return fmt.Errorf("removing the addresses of %s: %w", ifi.Name, err)
	}
	if err := c.linkSet(ifi.Index, true, n.MTU, nil); err != nil {
		return fmt.Errorf("bringing %s up with MTU %d: %w", ifi.Name, n.MTU, err)
	}
	ip := pfx.Addr().Unmap()
	if err := c.addrAdd(ifi.Index, ip.AsSlice(), pfx.Bits()); err != nil {
		return fmt.Errorf("giving %s to %s: %w", n.Addr, ifi.Name, err)
	}
	if n.Gateway == "" {
		return nil
	}
	gw, err := netip.ParseAddr(n.Gateway)
	if err != nil {
		return fmt.Errorf("net: gateway %q: %w", n.Gateway, err)
	}
	if err := c.routeDefault(ifi.Index, gw.Unmap().AsSlice()); err != nil {
		return fmt.Errorf("routing by %s: %w", n.Gateway, err)
	}
	return nil
}

// find waits for the interface with this hardware address; own tells whether
// it has it already.
func find(mac net.HardwareAddr, wait time.Duration) (ifi *net.Interface, own bool, err error) {
	deadline := time.Now().Add(wait)
	for {
		all, err := net.Interfaces()
		if err != nil {
			return nil, false, fmt.Errorf("listing interfaces: %w", err)
		}
		var others []net.Interface
		for _, i := range all {
			if bytes.Equal(i.HardwareAddr, mac) {
				return &i, true, nil
			}
			// Devices that a job made (bridges, veths) have no "device".
			if _, err := os.Stat("/sys/class/net/" + i.Name + "/device"); err == nil {
				others = append(others, i)
			}
		}
		if time.Now().After(deadline) {
			if len(others) == 1 {
				return &others[0], false, nil
			}
			return nil, false, fmt.Errorf("no interface has the hardware address %s, and %d others are there", mac, len(others))
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// Forward listens on each port of the guest's 127.0.0.1 and hands what
// connects to the same port of the gateway. guard runs a goroutine.
func Forward(ports []int, gateway string, guard func(string, func())) error {
	for _, p := range ports {
		port := strconv.Itoa(p)
		ln, err := net.Listen("tcp4", "127.0.0.1:"+port)
		if err != nil {
			return fmt.Errorf("loopback port %d: %w", p, err)
		}
		to := net.JoinHostPort(gateway, port)
		guard("loopback port", func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					time.Sleep(100 * time.Millisecond) // out of descriptors
					continue
				}
				guard("loopback connection", func() { forward(c, to) })
			}
		})
	}
	return nil
}

func forward(c net.Conn, to string) {
	defer c.Close()
	d, err := net.DialTimeout("tcp", to, 30*time.Second)
	if err != nil {
		// The nearest thing to a refused connection.
		if t, ok := c.(*net.TCPConn); ok {
			t.SetLinger(0)
		}
		return
	}
	defer d.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		copyHalf(d, c)
	}()
	copyHalf(c, d)
	<-done
}

// copyHalf copies until the end of from, and passes that on.
func copyHalf(to, from net.Conn) {
	t, ok := to.(*net.TCPConn)
	if !ok {
		return
	}
	t.ReadFrom(from) // in the kernel
	t.CloseWrite()
}
