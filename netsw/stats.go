package netsw

import (
	"sync/atomic"
)

// Drop is why a frame was not passed on.
type Drop uint8

// The reasons. Names are stable: they go to JSON.
const (
	DropSrcMAC    Drop = iota // source MAC is not the port's
	DropSrcIP                 // source IP (or ARP sender) is not the port's
	DropMalformed             // cannot be parsed, or lies about its length
	DropIPv6                  // IPv6 is off
	DropEtherType             // neither IPv4 nor ARP
	DropNoPort                // no guest has the destination MAC
	DropMartian               // destination that is nobody's: loopback, link-local, multicast outside, an unused address of the subnet
	DropProtocol              // neither TCP, UDP nor ICMP, to the outside
	DropQueueFull             // receiver too slow
	DropNoLink                // receiver not plugged
	DropDenied                // refused by the host guard or by policy
	DropLimit                 // over a cap on flows or questions
	DropFragment              // piece of a TCP segment or of an ICMP message, to the outside
	dropCount
)

var dropNames = [dropCount]string{
	"src_mac", "src_ip", "malformed", "ipv6", "ethertype", "no_port", "martian",
	"protocol", "queue_full", "no_link", "denied", "limit", "fragment",
}

// String is the reason's stable name.
func (d Drop) String() string {
	if d < dropCount {
		return dropNames[d]
	}
	return "unknown"
}

// Stats are counters since the switch (or port) was made.
type Stats struct {
	// Sent and Received are bytes of payload that guests moved out of and into
	// the switch, from the guests' side: TCP and UDP payload, echo data, forwarded
	// DNS messages. What guests send each other is in neither.
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
	// Frames and Bytes on links, both ways, headers included.
	FramesIn  uint64 `json:"frames_in"`
	FramesOut uint64 `json:"frames_out"`
	BytesIn   uint64 `json:"bytes_in"`
	BytesOut  uint64 `json:"bytes_out"`
	// Switched are frames passed between guests.
	Switched uint64 `json:"switched"`
	// Flows and Sessions are TCP and UDP ones to the outside, ever; the Open
	// ones are there now.
	Flows        uint64 `json:"flows"`
	OpenFlows    int64  `json:"open_flows"`
	Sessions     uint64 `json:"sessions"`
	OpenSessions int64  `json:"open_sessions"`
	Questions    uint64 `json:"questions"` // DNS
	// Drops counts frames, flows and questions refused, by reason; only
	// those that happened.
	Drops map[string]uint64 `json:"drops,omitempty"`
}

func (s *Stats) add(o Stats) {
	s.Sent += o.Sent
	s.Received += o.Received
	s.FramesIn += o.FramesIn
	s.FramesOut += o.FramesOut
	s.BytesIn += o.BytesIn
	s.BytesOut += o.BytesOut
	s.Switched += o.Switched
	s.Flows += o.Flows
	s.OpenFlows += o.OpenFlows
	s.Sessions += o.Sessions
	s.OpenSessions += o.OpenSessions
	s.Questions += o.Questions
	for k, v := range o.Drops {
		if s.Drops == nil {
			s.Drops = make(map[string]uint64)
		}
		s.Drops[k] += v
	}
}

// Dropped is the count for one reason.
func (s Stats) Dropped(d Drop) uint64 { return s.Drops[d.String()] }

// counters are a port's, each written by whoever sees the event.
type counters struct {
	sent, received      atomic.Uint64
	framesIn, framesOut atomic.Uint64
	bytesIn, bytesOut   atomic.Uint64
	switched            atomic.Uint64
	flows, sessions     atomic.Uint64
	openFlows, openSess atomic.Int64
	questions           atomic.Uint64
	drops               [dropCount]atomic.Uint64
}

func (c *counters) drop(d Drop) { c.drops[d].Add(1) }

func (c *counters) snapshot() Stats {
	s := Stats{
		Sent: c.sent.Load(), Received: c.received.Load(),
		FramesIn: c.framesIn.Load(), FramesOut: c.framesOut.Load(),
		BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(),
		Switched: c.switched.Load(),
		Flows:    c.flows.Load(), OpenFlows: c.openFlows.Load(),
		Sessions: c.sessions.Load(), OpenSessions: c.openSess.Load(),
		Questions: c.questions.Load(),
	}
	drops := make(map[string]uint64)
	for d := range c.drops {
		if n := c.drops[d].Load(); n > 0 {
			drops[dropNames[d]] = n
		}
	}
	if len(drops) > 0 {
		s.Drops = drops
	}
	return s
}

// Stats are the sums over all ports, those removed included.
func (s *Switch) Stats() Stats {
	var out Stats
	s.mu.Lock()
	gone, ports := s.gone, s.table.Load().ports
	s.mu.Unlock()
	for _, c := range gone {
		out.add(c.snapshot())
	}
	for _, p := range ports {
		out.add(p.Stats())
	}
	return out
}

// PortStats are the counters of each port by its name.
func (s *Switch) PortStats() map[string]Stats {
	out := make(map[string]Stats)
	for _, p := range s.table.Load().ports {
		out[p.name] = p.Stats()
	}
	return out
}
