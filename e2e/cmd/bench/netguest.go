package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"virtkit/e2e/netgen"
	"virtkit/netsw"
)

// guestBytes is what a guest moves each way; without KVM it takes it half a
// second or more.
const guestBytes = 48 << 20

// transferSource is an init that sets its interface to what its environment
// (words of the kernel's command line) says, then reads BYTES from one port of
// the host, says so with a byte, and sends as many to another.
const transferSource = `
#include <arpa/inet.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <unistd.h>
static char buf[262144];
static void put(struct sockaddr *a, const char *ip) {
	struct sockaddr_in s = {AF_INET};
	inet_pton(AF_INET, ip, &s.sin_addr);
	memcpy(a, &s, sizeof s);
}
static int dial(const char *port) {
	struct sockaddr_in s = {AF_INET, htons(atoi(getenv(port)))};
	inet_pton(AF_INET, getenv("vkhost"), &s.sin_addr);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(fd, (void *)&s, sizeof s)) { perror("transfer: connect"); return -1; }
	return fd;
}
int main(void) {
	struct ifreq r = {{"eth0"}};
	int c = socket(AF_INET, SOCK_DGRAM, 0);
	put(&r.ifr_addr, getenv("vkaddr"));
	if (ioctl(c, SIOCSIFADDR, &r)) perror("transfer: address");
	put(&r.ifr_netmask, "255.255.255.0");
	ioctl(c, SIOCSIFNETMASK, &r);
	r.ifr_flags = IFF_UP | IFF_RUNNING;
	if (ioctl(c, SIOCSIFFLAGS, &r)) perror("transfer: up");
	long left = BYTES;
	int fd = dial("vkdown");
	while (fd >= 0 && left > 0) {
		ssize_t n = read(fd, buf, sizeof buf);
		if (n <= 0) { perror("transfer: read"); break; }
		left -= n;
	}
	write(fd, "!", 1);
	close(fd);
	fd = dial("vkup");
	for (left = BYTES; fd >= 0 && left > 0;) {
		ssize_t n = write(fd, buf, left < sizeof buf ? left : sizeof buf);
		if (n <= 0) { perror("transfer: write"); break; }
		left -= n;
	}
	shutdown(fd, SHUT_WR);
	read(fd, buf, 1);
	reboot(RB_POWER_OFF);
	return 0;
}
`

// netGuest: a bare guest with vk's switch and with each of the others, each as
// a guest gets it: with the largest MTU that the program has.
func (b *bench) netGuest(ctx context.Context, o *outside) error {
	g, err := b.prepareBare(ctx, "transfer", transferSource, guestBytes)
	if err != nil {
		return err
	}
	const largest = 65520
	sides := []struct {
		name string
		run  func() (d, u float64, err error)
	}{
		{"vk", func() (d, u float64, err error) { return b.transferVK(ctx, g, o) }},
		{"QEMU's user network", func() (d, u float64, err error) { return b.transferSlirp(ctx, g) }},
		{"passt", func() (d, u float64, err error) { return b.transferOn(ctx, g, b.startPasst, largest) }},
		{"gvproxy", func() (d, u float64, err error) { return b.transferOn(ctx, g, b.startGvproxy, largest) }},
	}
	down, up := make([][]float64, len(sides)), make([][]float64, len(sides))
	for range b.rounds {
		for i, s := range sides {
			d, u, err := s.run()
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			if os.Getenv("VIRTKIT_BENCH_VERBOSE") != "" {
				fmt.Fprintf(os.Stderr, "bench: net: guest, %s: to it %.4g MB/s, from it %.4g\n", s.name, d, u)
			}
			down[i], up[i] = append(down[i], d), append(up[i], u)
		}
	}
	for i, s := range sides[1:] {
		b.addRate("net", "to a real guest", "MB/s", median(slices.Clone(down[0])), s.name, median(slices.Clone(down[i+1])), 1)
		b.addRate("net", "from a real guest", "MB/s", median(slices.Clone(up[0])), s.name, median(slices.Clone(up[i+1])), 1)
	}
	return nil
}

func (b *bench) transferVK(ctx context.Context, g *bare, o *outside) (d, u float64, err error) {
	p, fd, set, err := b.startSwitch(ctx, switchConfig{DNS: o.dns})
	if err != nil {
		return 0, 0, err
	}
	defer p.stop()
	return g.transferOver(ctx, fd, netip.MustParsePrefix(set.Addr).Addr().String(), set.Gateway, set.MAC, netsw.MTU)
}

func (b *bench) transferSlirp(ctx context.Context, g *bare) (d, u float64, err error) {
	return g.transfer(ctx, "10.0.2.15", "10.0.2.2", nil, "-netdev", "user,id=n0", "-device", "virtio-net-device,netdev=n0")
}

// transferOn is a transfer over a program that listens for its guest.
func (b *bench) transferOn(ctx context.Context, g *bare, start func(context.Context, int) (*plugged, int, netgen.Config, error), mtu int) (d, u float64, err error) {
	p, fd, cfg, err := start(ctx, mtu)
	if err != nil {
		return 0, 0, err
	}
	defer p.stop()
	return g.transferOver(ctx, fd, cfg.Addr.String(), cfg.Host.String(), cfg.MAC.String(), mtu)
}

// transferOver is a transfer over a stream socket, which it closes.
func (g *bare) transferOver(ctx context.Context, fd int, addr, host, mac string, mtu int) (d, u float64, err error) {
	end := os.NewFile(uintptr(fd), "guest")
	defer end.Close()
	return g.transfer(ctx, addr, host, []*os.File{end},
		"-netdev", "stream,id=n0,server=off,addr.type=fd,addr.str=3",
		"-device", fmt.Sprintf("virtio-net-device,netdev=n0,mac=%s,host_mtu=%d", mac, mtu))
}

// transfer boots the guest and gives how fast bytes came to and from it, in
// MB/s, as the servers of the host saw it.
func (g *bare) transfer(ctx context.Context, addr, host string, files []*os.File, devices ...string) (d, u float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	down, err := once(ctx, func(c net.Conn) (float64, error) {
		start := time.Now()
		buf := make([]byte, 256<<10)
		for left := guestBytes; left > 0; {
			n, err := c.Write(buf[:min(left, len(buf))])
			if err != nil {
				return 0, fmt.Errorf("sending to the guest: %w", err)
			}
			left -= n
		}
		_, err := io.ReadFull(c, buf[:1]) // it has them all
		return guestBytes / 1e6 / time.Since(start).Seconds(), err
	})
	if err != nil {
		return 0, 0, err
	}
	up, err := once(ctx, func(c net.Conn) (float64, error) {
		var m meter
		_, err := io.CopyBuffer(struct{ io.Writer }{&m}, struct{ io.Reader }{c}, make([]byte, 256<<10))
		if err == nil && m.n != guestBytes {
			err = fmt.Errorf("%d bytes came from the guest, want %d", m.n, guestBytes)
		}
		return m.rate(), err
	})
	if err != nil {
		return 0, 0, err
	}
	cmd := g.command(ctx, fmt.Sprintf(" vkaddr=%s vkhost=%s vkdown=%d vkup=%d", addr, host, down.port, up.port), devices...)
	cmd.ExtraFiles = files
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	err = cmd.Run()
	d, derr := down.result()
	u, uerr := up.result()
	if err := errors.Join(err, derr, uerr); err != nil {
		return 0, 0, fmt.Errorf("transferring to and from a bare guest: %w: %s", err, said.String())
	}
	return d, u, nil
}

// served is the one connection of a server.
type served struct {
	port int
	ln   net.Listener
	done chan struct{}
	rate float64
	err  error
}

func once(ctx context.Context, serve func(net.Conn) (float64, error)) (*served, error) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &served{port: ln.Addr().(*net.TCPAddr).Port, ln: ln, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		c, err := ln.Accept()
		if err != nil {
			s.err = errors.New("the guest did not connect")
			return
		}
		defer c.Close()
		defer context.AfterFunc(ctx, func() { c.Close() })()
		s.rate, s.err = serve(c)
	}()
	return s, nil
}

// result is asked for once the guest has ended.
func (s *served) result() (float64, error) {
	s.ln.Close()
	<-s.done
	return s.rate, s.err
}
