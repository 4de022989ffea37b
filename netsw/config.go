package netsw

import (
	"io"
	"log/slog"
	"net/netip"
	"time"

	"virtkit/core/policy"
)

// MTU is what a guest's interface is set to: the largest that leaves room for
// an Ethernet header in 64 KiB. It stands in for the offloads that QEMU's
// stream backend lacks.
const MTU = 65520

// Config says how a switch behaves. The zero value is a plain network:
// everything outside reachable, nothing of the host.
type Config struct {
	// Subnet is the job's network; at least a /28 and at most a /16. Zero picks a
	// private /24 that overlaps no address of the host's interfaces and none of its
	// resolvers.
	Subnet netip.Prefix

	// Upstreams are the resolvers that DNS questions are passed on to, asked
	// in order. Empty takes those of ResolvConf, a local one such as
	// 127.0.0.53 included: it is the host that asks.
	Upstreams []netip.AddrPort
	// ResolvConf is read when Upstreams is empty; "" = /etc/resolv.conf. Its
	// search list is given to guests.
	ResolvConf string
	// Search is the guests' search list; nil takes that of ResolvConf when
	// it is read.
	Search []string

	// HostLoopback makes the host reachable: the gateway's address means
	// the host's 127.0.0.1 on every port but DNS's, and the host's own
	// addresses are like any other.
	HostLoopback bool
	// HostPorts opens these ports of the host's 127.0.0.1 at the gateway's
	// address, TCP and UDP, and nothing else of the host.
	HostPorts []int

	// Policy decides over flows and questions; nil = policy.AllowAll.
	Policy policy.Decider

	// Pcap, when set, gets every frame in pcap format. It is written to from
	// many goroutines, one at a time. Close flushes but does not close it.
	Pcap io.Writer
	// PcapPath, when set and Pcap is not, is a file (made, or emptied; mode 0600)
	// that gets the same; Close closes it. Meant for $VIRTKIT_PCAP.
	PcapPath string

	// DialTimeout ends an attempt to connect to the outside; 0 = 2 minutes.
	DialTimeout time.Duration
	// UDPIdle ends a UDP session without traffic; 0 = 2 minutes (DNS's port: 10 s).
	UDPIdle time.Duration
	// MaxFlows bounds TCP connections, and UDP sessions, of one port each;
	// 0 = 8192 and 1024. The next TCP one is reset; the next UDP one ends the one
	// idle for longest.
	MaxFlows, MaxSessions int

	Log *slog.Logger // nil = none
}

// PortConfig says who sits on a port.
type PortConfig struct {
	// Name tells ports apart; it is in logs, statistics and policy.
	Name string
	// Hostname and Aliases are the DNS names that the other guests know it by,
	// compared without case, with or without a final dot.
	Hostname string
	Aliases  []string
	// Addr is its address; zero takes the next free one.
	Addr netip.Addr
}
