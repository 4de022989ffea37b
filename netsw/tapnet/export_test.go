package tapnet

import "net/netip"

var (
	ClosedChains = closedChains
	ParseAlias   = parseAlias
	Alias        = alias
	OtherAddr    = otherAddr
	Resolvers    = resolvers
)

// BlockOf is blockOf as text.
func BlockOf(network netip.Prefix, slot int) (host, guest string, ok bool) {
	b, ok := blockOf(network, slot)
	return b.host.String(), b.guest.String(), ok
}
