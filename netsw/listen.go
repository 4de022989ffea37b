package netsw

import (
	"errors"
	"net/netip"
	"time"

	"virtkit/core/policy"
	"virtkit/netsw/asked"
)

// Bounds of holding a guest's first bytes until they say whom they ask for.
const (
	// listenWait is for how long the rest of a hello or request is waited for,
	// once it began. A guest that says nothing is not waited for at all.
	listenWait = 5 * time.Second
	// maxHeld bounds what is held of all flows, in bytes.
	maxHeld = 16 << 20
)

// listening is what a connection has until it is known whom it asks for.
type listening struct {
	held
	late *time.Timer // set when the guest began to say something
}

// listen has the guest's first bytes held until it is known whom the connection
// asks for, and whether it may: then they go out, else it is reset. The other
// direction is not held up, so a server that speaks first does. c.mu is held.
func (c *conn) listen() { c.ear = &listening{held: held{sw: c.p.sw}} }

// heardLocked takes bytes that the guest sent while it is listened to.
func (c *conn) heardLocked(b []byte) {
	e := c.ear
	n, _ := e.Write(b) // what it does not take goes after it: Parse has an answer then
	names, more := asked.Parse(e.b)
	if e.full {
		more = false
		if names == nil {
			names = unreadable
		}
	}
	switch {
	case !more:
		if c.decide(names); c.state == open && n < len(b) {
			var g gather
			g.add(b[n:])
			c.writeLocked(&g)
		}
	case e.late == nil:
		e.late = time.AfterFunc(listenWait, func() {
			defer c.p.kick()
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.ear == e && c.state == open {
				c.decide(unreadable)
			}
		})
	}
}

// deafLocked ends the listening, with what was held; nil when there is none.
func (c *conn) deafLocked() []byte {
	e := c.ear
	if e == nil {
		return nil
	}
	if c.ear = nil; e.late != nil {
		e.late.Stop()
	}
	e.release()
	return e.b
}

var unreadable = []string{policy.UnreadableName}

// decide asks the policy about the names, and passes on what was held.
func (c *conn) decide(names []string) {
	dst := netip.AddrPortFrom(c.id.dst.Addr(), c.id.dport)
	b := c.deafLocked()
	for _, n := range names {
		fl := policy.Flow{Port: c.p.name, Proto: policy.TCP, Dst: dst}
		if v := c.p.sw.asker.Asked(fl, n); !v.Allow {
			c.p.c.drop(DropDenied)
			c.p.sw.log.Debug("refused a flow for the name it asks for", "vm", c.p.name, "dst", dst.String(), "name", n, "layer", v.Layer, "reason", v.Reason)
			c.failLocked()
			return
		}
	}
	if len(b) > 0 {
		var g gather
		g.add(b)
		c.writeLocked(&g)
	}
}

// held takes a flow's first bytes, within bounds.
type held struct {
	sw   *Switch
	b    []byte
	full bool // there is more that it could not take
}

var errFull = errors.New("full")

func (h *held) Write(b []byte) (int, error) {
	n := min(len(b), asked.Max-len(h.b))
	if grow := int64(len(h.b) + n - cap(h.b)); grow > 0 {
		size := max(int64(1<<10), min(2*int64(cap(h.b)), asked.Max), int64(len(h.b)+n))
		if h.sw.held.Add(size-int64(cap(h.b))) > maxHeld {
			h.sw.held.Add(int64(cap(h.b)) - size)
			h.full = true
			return 0, errFull
		}
		h.b = append(make([]byte, 0, size), h.b...)
	}
	h.b = append(h.b, b[:n]...)
	if n < len(b) {
		return n, errFull // Parse has an answer to as much
	}
	return n, nil
}

func (h *held) release() { h.sw.held.Add(-int64(cap(h.b))) }
