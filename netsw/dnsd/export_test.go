package dnsd

import (
	"context"
	"net/netip"
)

// AskUDP asks one resolver over UDP as a Server does, on the sockets that r
// (made by NewResolver) keeps.
func AskUDP(ctx context.Context, r *Resolver, query []byte) ([]byte, error) {
	return (*resolver)(r).ask(ctx, query, answers)
}

// Resolver is one that is asked over UDP.
type Resolver resolver

// NewResolver makes one.
func NewResolver(to netip.AddrPort) *Resolver { return (*Resolver)(&resolver{to: to}) }

// Close closes what is kept.
func (r *Resolver) Close() { (*resolver)(r).close() }

// SocketQuestions is how many questions a socket takes.
const SocketQuestions = socketQuestions

// MaxPiped is how many questions of one connection are answered at once.
const MaxPiped = maxPiped
