// Package netsw is the network of one job: a user-space switch that joins the
// job's guests to each other and, by network address translation in
// user space, to the outside. It runs in the supervisor's
// process, needs no rights, and holds no device of the host.
//
// # Vocabulary
//
// A port is a guest's place on the switch: a name, a MAC and an IPv4 address
// that the switch assigns. A link is the socket pair that a port is plugged
// with; a guest that restarts gets a new link on the same port (Replug). The
// gateway is the switch's own address: it answers ARP, echo, DNS and DHCP,
// and everything beyond the job's subnet goes through it.
//
// # Invariants
//
//   - Whose traffic it is, is decided by the link it arrives on. A frame whose
//     source MAC or IP address is not its port's is dropped and counted; so
//     the source address of a packet inside the stack names a port for sure.
//   - A switch never waits for a guest: a full queue drops and counts.
//   - Forwarding takes no lock and allocates nothing per packet. The table is
//     copied on write; queues are lock-free; buffers are pooled, and an idle
//     port holds none. A TCP connection to the outside has a lock of its own,
//     which only that connection's other direction ever waits for.
//   - ARP is answered from the table, never by a guest: no guest can claim
//     another's address, and none sees another's requests.
//   - The host is not reachable: see hostGuard.
//   - Each new flow and question is decided by policy for its port, before
//     anything of it leaves. What the switch refuses on its own is told (Witness).
//   - No guest acts for another: what goes from guest to guest is addressed to that
//     guest, and is nothing that a DHCP server would say.
//   - What guests can hold is bounded, for each and for all: see limits.go and
//     docs/network.md.
//
// # Decisions
//
// 2026-11-29: IPv6 is off. A guest gets no IPv6 address, AAAA questions about
// the job's own names get an empty answer, and IPv6 frames are dropped and
// counted (Drops.IPv6). New logs it.
//
// 2026-11-29: the host's own addresses on any interface, not just loopback,
// are refused: a service bound to 0.0.0.0 for the host's own use would else be
// reachable from every job. Config.HostLoopback opens them all, and makes the
// gateway's address mean the host's 127.0.0.1; Config.HostPorts does the
// latter for the named ports alone.
//
// 2026-11-29: a guest's TCP connection is accepted only when the connection
// to the outside stands, so "connection refused" outside is that inside, and
// an unreachable network is an ICMP error and not a silence.
//
// 2026-11-29: a guest that reads slowly loses frames (counted) and TCP slows
// down for it; blocking the stack for one guest would stall the others.
//
// 2026-11-30: a guest's TCP connections to the outside are ended by the switch
// itself (conn), not by the stack, which took three to ten times the CPU time
// for the same bytes. The stack has what is rare: UDP, published ports, DNS
// over TCP, errors, and segments of no connection, which it resets.
//
// 2026-11-30: whom a connection asks for is looked for only where the policy
// wants to know (Asker.Listens), and only the two protocols that say so first are
// waited for. A name that begins and cannot be read is told as such rather than
// passed over: else cutting a hello in two would be the way round strict_names.
//
// 2026-11-30: queries that cannot be rebuilt are the policy's to decide
// (Questioner), since a job that nothing restricts may well send updates; without
// one they are refused.
//
// 2026-11-30: datagrams to a guest may be cut on their way. Behind it may be a
// network with a smaller MTU, which has no way to say that they were too long.
//
// 2026-11-30: a link is read by a thread that blocks in the kernel, and written
// by whoever has something to send. Both save a wake-up for each frame.
package netsw
