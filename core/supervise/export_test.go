package supervise

import (
	"net"

	"github.com/hashicorp/yamux"
)

// For tests of what has no outside of its own.
var (
	NewBoundedLog = newBoundedLog
	Printable     = printable
	LastLines     = lastLines
	ShortStage    = short
)

// BoundedLog is boundedLog.
type BoundedLog = boundedLog

// Splice joins a connection to a stream.
func Splice(c *net.UnixConn, s *yamux.Stream) { splice(c, &agentStream{Stream: s}) }

// ThreadsOf is threadsOf with stacks.
func ThreadsOf(pid int) string { return threadsOf(pid, true) }
