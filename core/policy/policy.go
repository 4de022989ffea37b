// Package policy is where egress rules decide, and where what they decided is
// told. It is pure: no files, no network, and the clock is the caller's.
//
//   - The contract with the switch: Decider and what it may be besides (Opener,
//     Witness, Asker, Questioner), Flow, Verdict.
//   - Lists are read by ParseCap, ParseVariables and ParseFlags, and make a
//     Layer; a Policy is all layers of a phase, a Stack those of one VM,
//     evaluated one by one and never merged, so that a Verdict can name the
//     layer that decided. OpenedTable knows what lookups opened. Engine puts
//     them behind the switch's contract.
//   - A Recorder adds up what happened. Of its Record are made the trace
//     (DenialLines, AuditLines, Standing), the hub's Report and a Suggestion.
//
// docs/egress.md is the user's side of it.
//
// Vocabulary: a flow is one TCP connection, one UDP session or one series of
// echo requests; a question is one DNS query; a port is a guest's socket on
// the switch, and the only thing that says whose flow it is.
//
// The switch itself refuses the host's own addresses before it asks a Decider
// (layer LayerHost), because no list of names may reopen them by accident: an
// allowed name that resolves to 127.0.0.1 is still the host.
package policy

import (
	"net/netip"
	"time"
)

// Proto is what a flow speaks.
type Proto string

// The protocols the switch carries to the outside. DNS is a question put to
// the gateway's own resolver, whatever it came over.
const (
	TCP  Proto = "tcp"
	UDP  Proto = "udp"
	ICMP Proto = "icmp" // echo only
	DNS  Proto = "dns"
)

// Layers that decide. More come with their rules.
const (
	LayerNone = ""     // nothing restricts
	LayerHost = "host" // the switch: addresses of the host itself, and those that are nobody's
)

// Flow is what a guest wants to do.
type Flow struct {
	Port  string         // name of the guest's port on the switch
	Proto Proto          //
	Dst   netip.AddrPort // where to; for ICMP the port is 0, for DNS both are zero
	Name  string         // for DNS the name asked for, as written, without the final dot
	QType uint16         // for DNS the type asked for
}

// Verdict is a decision and where it came from.
type Verdict struct {
	Allow  bool
	Layer  string // the layer that decided; LayerNone when nothing restricts
	Reason string // for the trace: lower case, no final period
}

// Decider decides over flows and questions. Decide is called for each new
// flow and each question, from many goroutines at once; it must not block and
// must not call back into the switch. A denied TCP flow is reset, a denied UDP
// flow or echo gets an ICMP "administratively prohibited", a denied question
// NXDOMAIN.
type Decider interface {
	Decide(Flow) Verdict
}

// Opener is a Decider that opens addresses by name: the switch tells it of
// each answer it is about to pass on, before the guest has it, so that the
// flow that follows is decided with the answer known. Names are those of the
// question and of the CNAMEs after it, in order; ttl is the answer's lowest.
// Called as Decide is.
type Opener interface {
	Decider
	Opened(port string, names []string, addrs []netip.Addr, ttl time.Duration)
}

// Witness is a Decider that is also told what the switch refused on its own,
// before it asked: the host's addresses, and those that are nobody's. Called as
// Decide is.
type Witness interface {
	Decider
	Denied(Flow, Verdict)
}

// Asker is a Decider that also decides over the name that an allowed TCP flow
// asks for: the server name of its TLS hello, or the host of its HTTP request.
type Asker interface {
	Decider
	// Listens says whether it wants to know that name of a flow which Decide has
	// just allowed. Called once for each TCP flow.
	Listens(Flow) bool
	// Asked decides before any byte of the guest's is passed on. The name is as
	// written, or UnreadableName. It is not called for a flow that names nobody: an
	// address where a name could be, no name, another protocol. Denied means a
	// reset, as Decide's.
	Asked(f Flow, name string) Verdict
}

// UnreadableName stands for the name of a flow or question that has one which
// cannot be read: one that no host can have, cut off, or past the bounds.
const UnreadableName = "?"

// Questioner is a Decider that also decides over DNS queries which cannot be
// read or rebuilt. Denied means REFUSED (NOTIMP for an update or notify);
// allowed, that the query is passed on as it is. Without a Questioner the
// switch refuses them.
type Questioner interface {
	Decider
	Unreadable(port string) Verdict
}

// AllowAll restricts nothing.
type AllowAll struct{}

// Decide allows.
func (AllowAll) Decide(Flow) Verdict { return Verdict{Allow: true} }

// Func is a function as a Decider.
type Func func(Flow) Verdict

// Decide calls f.
func (f Func) Decide(fl Flow) Verdict { return f(fl) }
