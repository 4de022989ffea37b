package netsw

import (
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// Sizes of a link's queue. Bytes bound what a guest that does not read costs
// the host; it is more than one connection's window, so that TCP to one guest
// seldom loses a frame.
const (
	queueSlots = 512 // power of two
	queueBytes = 4 << 20
)

// item is a frame on its way to a guest: a buffer of ours, or a packet of the
// stack that still lacks its Ethernet header. Whoever takes an item releases it.
type item struct {
	buf *frameBuf
	pkt *stack.PacketBuffer
	n   int // bytes on the link, length included
}

func (it *item) release() {
	if it.buf != nil {
		it.buf.free()
	}
	if it.pkt != nil {
		it.pkt.DecRef()
	}
	*it = item{}
}

// queue is a bounded queue of many writers and one reader without a lock:
// each slot carries the turn at which it may be written or read.
type queue struct {
	slots [queueSlots]slot
	head  uint64 // reader's
	_     [56]byte
	tail  atomic.Uint64 // next to write
	bytes atomic.Int64

	asleep atomic.Bool
	wake   chan struct{}
}

type slot struct {
	turn atomic.Uint64
	it   item
}

func newQueue() *queue {
	q := &queue{wake: make(chan struct{}, 1)}
	for i := range q.slots {
		q.slots[i].turn.Store(uint64(i))
	}
	return q
}

// push adds it and wakes the reader; false when the queue is full, and the
// item is still the caller's.
func (q *queue) push(it item) bool {
	if q.bytes.Add(int64(it.n)) > queueBytes {
		q.bytes.Add(-int64(it.n))
		return false
	}
	t := q.tail.Load()
	for {
		s := &q.slots[t%queueSlots]
		turn := s.turn.Load()
		switch {
		case turn == t:
			if q.tail.CompareAndSwap(t, t+1) {
				s.it = it
				s.turn.Store(t + 1)
				if q.asleep.Load() && q.asleep.CompareAndSwap(true, false) {
					q.wake <- struct{}{} // has room: one token per sleep
				}
				return true
			}
			t = q.tail.Load()
		case turn < t: // a whole round behind: full
			q.bytes.Add(-int64(it.n))
			return false
		default:
			t = q.tail.Load()
		}
	}
}

// pop takes the oldest; for the one reader.
func (q *queue) pop() (item, bool) {
	s := &q.slots[q.head%queueSlots]
	if s.turn.Load() != q.head+1 {
		return item{}, false
	}
	it := s.it
	s.it = item{}
	s.turn.Store(q.head + queueSlots)
	q.head++
	q.bytes.Add(-int64(it.n))
	return it, true
}

// empty is for the reader, before it sleeps.
func (q *queue) empty() bool {
	return q.slots[q.head%queueSlots].turn.Load() != q.head+1
}

// wait sleeps until there is something or done closes; false then.
func (q *queue) wait(done <-chan struct{}) bool {
	q.asleep.Store(true)
	if !q.empty() {
		if !q.asleep.CompareAndSwap(true, false) {
			<-q.wake // a writer woke us meanwhile
		}
		return true
	}
	select {
	case <-q.wake:
		return true
	case <-done:
		return false
	}
}

// frameBuf holds one frame with its length before it.
type frameBuf struct {
	b    []byte
	pool *sync.Pool
}

func (b *frameBuf) free() {
	if b.pool != nil {
		b.pool.Put(b)
	}
}

// The sizes that occur: acknowledgements and requests, old MTUs, and ours.
var bufSizes = [...]int{256, 2 << 10, 16 << 10, 66 << 10}

var bufPools [len(bufSizes)]sync.Pool

// getBuffer returns a buffer with len n.
func getBuffer(n int) *frameBuf {
	for i, size := range bufSizes {
		if n > size {
			continue
		}
		if b, _ := bufPools[i].Get().(*frameBuf); b != nil {
			b.b = b.b[:n]
			return b
		}
		return &frameBuf{b: make([]byte, n, size), pool: &bufPools[i]}
	}
	return &frameBuf{b: make([]byte, n)}
}
