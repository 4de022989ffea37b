package policy

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
)

// Layers of an egress policy, in the order in which they are asked. They are
// the report's words too.
const (
	LayerNodeCap = "node_cap" // [egress] or [egress.build]
	LayerHub     = "hub_rule" // the hub's rules for the job
	LayerJob     = "job"      // the job's variables, or the flags of vk run
	LayerService = "service"  // a service's own variables
	LayerUnknown = "unknown"  // the report's word for any other
)

// Phase is a part of a job with a policy of its own.
type Phase string

// The phases.
const (
	Run   Phase = "run"   // the job's guest and its services
	Build Phase = "build" // the RUN steps that build an image
)

// CapKey is the configuration's name of the node cap's list.
func (p Phase) CapKey(d Dimension) string {
	if p == Build {
		return "[egress.build] " + string(d)
	}
	return "[egress] " + string(d)
}

// Variable is the job's or a service's variable for a list.
func (p Phase) Variable(d Dimension) string {
	return p.prefix() + strings.ToUpper(string(d))
}

// AuditVariable is the job's variable that asks for the phase's audit.
func (p Phase) AuditVariable() string { return p.prefix() + "AUDIT" }

func (p Phase) prefix() string {
	if p == Build {
		return "MICROVM_BUILD_EGRESS_"
	}
	return "MICROVM_EGRESS_"
}

// Layer is one layer's lists in one phase, made ready for matching. It is
// immutable; make it with NodeCap, HubRules, JobLists, ServiceLists or
// FlagLists. A nil *Layer restricts nothing.
type Layer struct {
	Kind  string   // LayerNodeCap …
	VM    string   // the service, for LayerService
	Rules []string // names of the hub's rules, for LayerHub
	Lists Lists

	keys  [2]string // what people know the allow_name and the allow_ip list by
	names map[string]struct{}
	nets  []netsOfLength
}

// netsOfLength holds the networks of one prefix length.
type netsOfLength struct {
	mask  uint32
	ports map[uint32][]uint16 // sorted, by network; none is every port
}

func newLayer(kind string, l Lists) *Layer {
	y := &Layer{Kind: kind, Lists: l, names: make(map[string]struct{}, len(l.Names))}
	for _, n := range l.Names {
		y.names[n] = struct{}{}
	}
	at := map[int]int{}
	for _, r := range l.IPs {
		bits := r.Net.Bits()
		i, ok := at[bits]
		if !ok {
			i = len(y.nets)
			at[bits] = i
			y.nets = append(y.nets, netsOfLength{mask: ^uint32(0) << (32 - bits), ports: map[uint32][]uint16{}})
		}
		key := number(r.Net.Addr())
		ports, had := y.nets[i].ports[key]
		switch {
		case r.Port == 0:
			ports = []uint16{}
		case !had || len(ports) > 0:
			ports = append(ports, r.Port)
		}
		y.nets[i].ports[key] = ports
	}
	for _, n := range y.nets {
		for _, ports := range n.ports {
			slices.Sort(ports)
		}
	}
	return y
}

// NodeCap is the node's cap of a phase.
func NodeCap(p Phase, l Lists) *Layer {
	y := newLayer(LayerNodeCap, l)
	y.keys = [2]string{"the node's " + p.CapKey(DimName), "the node's " + p.CapKey(DimIP)}
	return y
}

// HubRules is what the hub's rules allow a job in a phase, added up by the
// hub; rules are their names.
func HubRules(rules []string, l Lists) *Layer {
	y := newLayer(LayerHub, l)
	y.Rules = slices.Clone(rules)
	k := "the hub's egress rules (" + orNone(cleanList(rules)) + ")"
	y.keys = [2]string{k, k}
	return y
}

// JobLists are the job's own lists of a phase.
func JobLists(p Phase, l Lists) *Layer {
	y := newLayer(LayerJob, l)
	y.keys = [2]string{"the job's " + p.Variable(DimName), "the job's " + p.Variable(DimIP)}
	return y
}

// ServiceLists are a service's own lists, for its VM.
func ServiceLists(vm string, l Lists) *Layer {
	y := newLayer(LayerService, l)
	y.VM = vm
	of := "service " + CleanText(vm, maxVM) + "'s "
	y.keys = [2]string{of + Run.Variable(DimName), of + Run.Variable(DimIP)}
	return y
}

// FlagLists are the lists of vk run's flags. --egress-restrict alone is a pair
// of empty lists.
func FlagLists(l Lists) *Layer {
	y := newLayer(LayerJob, l)
	y.keys = [2]string{"--allow-name", "--allow-ip"}
	return y
}

// Restricted says whether the layer restricts anything.
func (y *Layer) Restricted() bool { return y != nil && y.Lists.Restricted() }

// Key is what people know the list of a dimension by: "the node's [egress]
// allow_name", "the hub's egress rules (wab)", "the job's
// MICROVM_EGRESS_ALLOW_IP".
func (y *Layer) Key(d Dimension) string {
	if d == DimIP {
		return y.keys[1]
	}
	return y.keys[0]
}

func (y *Layer) outside(d Dimension) string { return "outside " + y.Key(d) }

// AllowsName says whether the layer allows a name, which is canonical: lower
// case, no final dot. Labels are compared whole. A dot inside a label, which
// DNS allows and its text form escapes (a\.b), does not divide labels.
func (y *Layer) AllowsName(name string) bool {
	if !y.Restricted() {
		return true
	}
	if len(y.names) == 0 {
		return false
	}
	for {
		if _, ok := y.names[name]; ok {
			return true
		}
		i := dot(name)
		if i < 0 {
			return false
		}
		name = name[i+1:]
	}
}

// dot finds the first dot that divides labels.
func dot(s string) int {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '.':
			return i
		case '\\':
			i++
		}
	}
	return -1
}

// AllowsIP says whether the layer's allow_ip list has a destination; a port of
// 0 (ICMP echo) is matched only by entries for every port. Only IPv4 matches.
func (y *Layer) AllowsIP(dst netip.AddrPort) bool {
	if !y.Restricted() {
		return true
	}
	a := dst.Addr().Unmap()
	if !a.Is4() {
		return false
	}
	n := number(a)
	for i := range y.nets {
		ports, ok := y.nets[i].ports[n&y.nets[i].mask]
		if !ok {
			continue
		}
		if len(ports) == 0 {
			return true
		}
		if _, listed := slices.BinarySearch(ports, dst.Port()); listed {
			return true
		}
	}
	return false
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// CanonicalName is a name as rules compare it: lower case, without the final
// dot. The name is otherwise left as the guest sent it.
func CanonicalName(name string) string {
	if n := len(name); n > 0 && name[n-1] == '.' {
		esc := 0
		for i := n - 2; i >= 0 && name[i] == '\\'; i-- {
			esc++
		}
		if esc%2 == 0 {
			name = name[:n-1]
		}
	}
	for i := range len(name) {
		if c := name[i]; c >= 'A' && c <= 'Z' {
			return lowerASCII(name)
		}
	}
	return name
}

// lowerASCII folds as DNS does: the letters of ASCII and nothing else, so that
// no other character becomes one of them.
func lowerASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}
