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
	queueLow   = 512 << 10
)

// item is a frame on its way to a guest: a buffer of ours, or a packet of the
// stack that still lacks its Ethernet header. Whoever takes an item releases it.
type item struct {
	buf *frameBuf
	pkt *stack.PacketBuffer
	n   int // bytes on the link, lengths included

	frames int // in buf
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
	head  atomic.Uint64 // changed by the reader alone
	_     [56]byte
	tail  atomic.Uint64 // next to write
	bytes atomic.Int64

	// Writers that can wait do, until little is queued (low): what comes from the
	// outside stays there, and nothing is dropped.
	waiters atomic.Int32
	mu      sync.Mutex
	room    sync.Cond
	closed  bool
}

type slot struct {
	turn atomic.Uint64
	it   item
}

func newQueue() *queue {
	q := &queue{}
	q.room.L = &q.mu
	for i := range q.slots {
		q.slots[i].turn.Store(uint64(i))
	}
	return q
}

// push adds it; false when the queue is full, and the
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

// pop takes the oldest; for one reader at a time.
func (q *queue) pop() (item, bool) {
	h := q.head.Load()
	s := &q.slots[h%queueSlots]
	if s.turn.Load() != h+1 {
		return item{}, false
	}
	it := s.it
	s.it = item{}
	s.turn.Store(h + queueSlots)
	q.head.Store(h + 1)
	q.bytes.Add(-int64(it.n))
	if q.waiters.Load() > 0 && q.low() {
		q.mu.Lock()
		q.room.Broadcast()
		q.mu.Unlock()
	}
	return it, true
}

// low says whether there is room for some more, in bytes and, of small frames,
// in slots.
func (q *queue) low() bool {
	h := q.head.Load() // first: it is never ahead of a later tail
	return q.bytes.Load() < queueLow && q.tail.Load()-h < queueSlots/2
}

// waitRoom returns when there is room for some more, or the queue is closed.
func (q *queue) waitRoom() {
	if q.low() {
		return
	}
	q.waiters.Add(1)
	defer q.waiters.Add(-1)
	q.mu.Lock()
	defer q.mu.Unlock()
	for !q.low() && !q.closed {
		q.room.Wait()
	}
}

// close lets all go who wait for room.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.room.Broadcast()
}

// empty says whether there is nothing to pop, to anyone: what was pushed before
// and is not popped makes it false.
func (q *queue) empty() bool {
	h := q.head.Load()
	return q.slots[h%queueSlots].turn.Load() <= h
}

// frameBuf holds one frame with its length before it, or some in a row.
type frameBuf struct {
	b    []byte
	pool *sync.Pool
	more atomic.Int32 // who have it, beyond one
}

// hold is for another who will free it.
func (b *frameBuf) hold() { b.more.Add(1) }

func (b *frameBuf) free() {
	if b.more.Add(-1) >= 0 {
		return
	}
	b.more.Store(0)
	if b.pool != nil {
		b.pool.Put(b)
	}
}

// The sizes: what holds a frame or four or sixteen of our MTU, and halves of it,
// so that what is kept lies in no more than twice its size.
var bufSizes = [...]int{256, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 33 << 10, 66 << 10, 132 << 10, 264 << 10, 528 << 10, 1056 << 10}

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
