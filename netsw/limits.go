package netsw

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
)

// What guests may use of the host, in all. Per guest see Config.
const (
	// maxInFlight is how many connections of all guests may be being set up, and
	// maxConnecting of one: a guest that connects to where nobody answers leaves
	// room for the others.
	maxInFlight   = 2048
	maxConnecting = 512
	// leastSockets and mostSockets bound the sockets that guests' flows use.
	leastSockets = 256
	mostSockets  = 16384
)

// sockets counts the host's sockets that guests' flows use. They may have half
// of the process's descriptors, since a supervisor without any left could
// neither answer its runner nor end its guest.
type sockets struct {
	max  int64
	used atomic.Int64
}

func newSockets() *sockets {
	s := &sockets{max: leastSockets}
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) == nil {
		s.max = int64(min(max(r.Cur/2, leastSockets), mostSockets))
	}
	return s
}

// take asks for one; false when there are too many.
func (s *sockets) take() bool {
	if s.used.Add(1) > s.max {
		s.used.Add(-1)
		return false
	}
	return true
}

func (s *sockets) release() { s.used.Add(-1) }

// Shares of the memory that connections hold, by how many of them are open: the
// first are fast, and however many there are, the sum stays bounded. With
// mostSockets of them it is 288 MiB each way.
const (
	fastFlows = 32   // grow to bufMax
	goodFlows = 256  // goodBytes
	someFlows = 2048 // someBytes; those after them leastBytes

	goodBytes  = 256 << 10
	someBytes  = 32 << 10
	leastBytes = 8 << 10
)

// share is what the nth open connection may hold each way; 0 = as much as the
// stack finds useful, up to bufMax.
func share(n int64) int64 {
	switch {
	case n <= fastFlows:
		return 0
	case n <= goodFlows:
		return goodBytes
	case n <= someFlows:
		return someBytes
	}
	return leastBytes
}

// restrict holds a connection to its share.
func restrict(ep tcpip.Endpoint, bytes int64) {
	if bytes == 0 {
		return
	}
	ep.SocketOptions().SetSendBufferSize(bytes, true)
	ep.SocketOptions().SetReceiveBufferSize(bytes, true)
}

// sometimes lets one event in each interval through, so that a guest cannot
// fill the log.
type sometimes struct{ last atomic.Int64 }

const logEvery = 10 * time.Second

func (s *sometimes) now() bool {
	now := time.Now().UnixNano()
	was := s.last.Load()
	return now-was >= int64(logEvery) && s.last.CompareAndSwap(was, now)
}
