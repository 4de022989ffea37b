package netsw

import (
	"sync"
	"sync/atomic"

	"virtkit/netsw/frame"
)

// connID tells a connection of a guest from its others.
type connID struct {
	dst   frame.IP
	dport uint16
	sport uint16 // the guest's
}

// connTable holds the connections of a port. It is read without a lock: by the
// guest's port number, then along a short list that is never changed, only
// replaced.
type connTable struct {
	blocks [256]atomic.Pointer[connBlock]
	mu     sync.Mutex // writers
}

type connBlock [256]atomic.Pointer[connNode]

type connNode struct {
	c    *conn
	next *connNode
}

func (t *connTable) find(id connID) *conn {
	b := t.blocks[id.sport>>8].Load()
	if b == nil {
		return nil
	}
	for n := b[id.sport&255].Load(); n != nil; n = n.next {
		if n.c.id == id {
			return n.c
		}
	}
	return nil
}

func (t *connTable) add(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := &t.blocks[c.id.sport>>8]
	b := at.Load()
	if b == nil {
		b = new(connBlock)
		at.Store(b)
	}
	place := &b[c.id.sport&255]
	place.Store(&connNode{c, place.Load()})
}

func (t *connTable) remove(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.blocks[c.id.sport>>8].Load()
	if b == nil {
		return
	}
	place := &b[c.id.sport&255]
	var rest *connNode
	for n := place.Load(); n != nil; n = n.next {
		if n.c != c {
			rest = &connNode{n.c, rest}
		}
	}
	place.Store(rest)
}
