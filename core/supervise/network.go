package supervise

import (
	"context"
	"os"

	"virtkit/core/guestwire"
	"virtkit/core/policy"
)

// Network is the switch of one job, or the tap device of its one guest. The
// supervisor makes it before the guest boots and closes it after the guest's end; applets adapt netsw to it.
type Network interface {
	// Plug gives a guest its port, called name. The others on the switch may
	// call the guest s.Names, or name when that is nil. ctx bounds the call
	// alone.
	Plug(ctx context.Context, name string, s NetSpec) (Plugged, error)
	// Close ends the switch, its flows and its listeners.
	Close() error
}

// EgressNetwork is a Network that enforces Spec.Net.Egress and records what it
// decided. A Network of a Spec with an Egress has to be one.
type EgressNetwork interface {
	Network
	// Recorder is where the switch records.
	Recorder() *policy.Recorder
	// Traffic counts bytes of payload between all guests and the outside, seen
	// from the guests, since the switch was made; it works after Close too.
	Traffic() (sent, received uint64)
}

// Plugged is a guest's port on the switch. It outlives a reboot of the guest.
type Plugged interface {
	// File is the guest's end, as machine.NIC.File wants it. The caller owns
	// it; called once, later ends come from Replug.
	File() *os.File
	// Guest is what the guest's agent sets its interface up with.
	Guest() guestwire.Net
	// Replug replaces the guest's end, for a guest that was booted anew; the
	// old end is dead after it. The caller owns the file.
	Replug() (*os.File, error)
	// Publish opens a port of the host and returns p with the address and
	// port that it got. Published ports survive Replug.
	Publish(ctx context.Context, p Publish) (Publish, error)
	// Unpublish closes what Publish opened; p is what Publish returned.
	Unpublish(p Publish) error
	// Stats counts since Plug.
	Stats() NetStats
	// Unplug takes the port and its names off the switch.
	Unplug()
}

// NetStats counts a port's traffic, seen from the guest. On a switch it is
// payload between the guest and the outside: what guests send each other is not
// in it. On a device of the host it is all that the device carried.
type NetStats struct {
	SentBytes int64 `json:"sent_bytes"`
	RecvBytes int64 `json:"recv_bytes"`
}
