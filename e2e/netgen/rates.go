package netgen

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/netsw/frame"
)

// what a connection of Connect is in.
const (
	idle = iota
	opening
	opened // the last word of the handshake is out
	asked  // the request is out
)

// Connect opens n connections to ports of the host's loopback, parallel at a
// time; on each it sends one byte, takes the answer and the end that the server
// says, and says its own. It gives the time for all of them.
func (l *Link) Connect(ports []int, n, parallel int) (Result, error) {
	type conn struct {
		tcb
		state int
	}
	open := make(map[uint16]*conn, parallel)
	var fresh []*conn // in state opened
	var r Result
	begun := 0
	begin := func() {
		c := &conn{tcb: tcb{local: l.nextPort(), remote: uint16(ports[begun%len(ports)]), start: time.Now(), nxt: uint32(begun) << 8}, state: opening}
		open[c.local] = c
		l.segment(&c.tcb, syn, nil)
		begun++
	}
	first := time.Now()
	for range min(parallel, n) {
		begin()
	}
	for r.Count < int64(n) {
		if len(l.out) > 0 && !l.more() {
			if err := l.flush(); err != nil {
				return r, err
			}
			// A guest's kernel ends the handshake; its program asks later, in a
			// segment of its own.
			for _, c := range fresh {
				l.segment(&c.tcb, ack|psh, []byte{'?'})
				c.nxt++
				c.state = asked
			}
			if fresh = fresh[:0]; len(l.out) > 0 {
				if err := l.flush(); err != nil {
					return r, err
				}
			}
		}
		f, err := l.next()
		if errors.Is(err, errTick) {
			for _, c := range open {
				r.Again++
				if c.state == opening {
					l.segment(&c.tcb, syn, nil)
					continue
				}
				c.nxt--
				l.segment(&c.tcb, ack|psh, []byte{'?'})
				c.nxt++
			}
			continue
		}
		if err != nil {
			return r, fmt.Errorf("connecting: %d of %d done: %w", r.Count, n, err)
		}
		s, ok := l.parseTCP(f)
		if !ok {
			continue
		}
		c := open[s.local]
		if c == nil {
			continue // the last acknowledgement of one that is done
		}
		switch {
		case s.flags&rst != 0:
			return r, fmt.Errorf("connecting: reset after %d of %d", r.Count, n)
		case c.state == opening && s.flags&(syn|ack) == syn|ack:
			c.greet(s, l.cfg.MTU)
			c.state = opened
			l.segment(&c.tcb, ack, nil)
			fresh = append(fresh, c)
		case c.state == asked && s.seq == c.rcv && (len(s.data) > 0 || s.flags&fin != 0):
			c.stamp(s)
			c.rcv += uint32(len(s.data))
			if s.flags&fin == 0 {
				l.segment(&c.tcb, ack, nil)
				continue
			}
			c.rcv++
			l.segment(&c.tcb, ack|fin, nil)
			delete(open, s.local)
			r.Count++
			if begun < n {
				begin()
			}
		}
	}
	r.Took = time.Since(first)
	return r, l.flush()
}

// names is how many names are asked for, in turn.
const names = 1000

// Ask puts n questions for the address of a name to a DNS server, parallel at a
// time. What is not answered is asked again.
func (l *Link) Ask(server netip.AddrPort, n, parallel int) (Result, error) {
	var r Result
	waiting := make(map[uint16]int, parallel)
	begun := 0
	ask := func(i int) {
		id := uint16(i)
		waiting[id] = i
		at := len(l.out)
		l.begin(l.gwMAC, frame.TypeIPv4)
		l.out = frame.AppendUDP(l.out, netip.AddrPortFrom(l.cfg.Addr, 20000+id%20000), server, Question(id, i%names))
		l.finish(at)
	}
	first := time.Now()
	for ; begun < min(parallel, n); begun++ {
		ask(begun)
	}
	for r.Count < int64(n) {
		if len(l.out) > 0 && !l.more() {
			if err := l.flush(); err != nil {
				return r, err
			}
		}
		f, err := l.next()
		if errors.Is(err, errTick) {
			for _, i := range waiting {
				r.Again++
				ask(i)
			}
			continue
		}
		if err != nil {
			return r, fmt.Errorf("asking: %d of %d answered: %w", r.Count, n, err)
		}
		id, ok := l.answer(f)
		if _, is := waiting[id]; !ok || !is {
			continue
		}
		delete(waiting, id)
		r.Count++
		if begun < n {
			ask(begun)
			begun++
		}
	}
	r.Took = time.Since(first)
	return r, nil
}

// AskUDP is Ask over a socket of the host that is connected to a server.
func AskUDP(fd, n, parallel int) (Result, error) {
	t := unix.NsecToTimeval(tick.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t); err != nil {
		return Result{}, fmt.Errorf("asking: %w", err)
	}
	var r Result
	waiting := make(map[uint16]int, parallel)
	ask := func(i int) error {
		waiting[uint16(i)] = i
		_, err := unix.Write(fd, Question(uint16(i), i%names))
		return err
	}
	first := time.Now()
	begun := 0
	for ; begun < min(parallel, n); begun++ {
		if err := ask(begun); err != nil {
			return r, fmt.Errorf("asking: %w", err)
		}
	}
	b := make([]byte, 4096)
	var silent time.Duration
	for r.Count < int64(n) {
		k, err := unix.Read(fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN) && silent < patience:
			silent += tick
			for _, i := range waiting {
				r.Again++
				if err := ask(i); err != nil {
					return r, fmt.Errorf("asking: %w", err)
				}
			}
			continue
		case err != nil:
			return r, fmt.Errorf("asking: %d of %d answered: %w", r.Count, n, err)
		}
		silent = 0
		id := binary.BigEndian.Uint16(b)
		if _, is := waiting[id]; !is || !Answered(b[:k]) {
			continue
		}
		delete(waiting, id)
		r.Count++
		if begun < n {
			if err := ask(begun); err != nil {
				return r, fmt.Errorf("asking: %w", err)
			}
			begun++
		}
	}
	r.Took = time.Since(first)
	return r, nil
}

// answer is the identifier of a good DNS answer to this guest.
func (l *Link) answer(f []byte) (uint16, bool) {
	e, ok := frame.ParseEth(f)
	if !ok || e.Type != frame.TypeIPv4 {
		return 0, false
	}
	ip, ok := frame.ParseIPv4(e.Payload)
	if !ok || ip.Proto != frame.ProtoUDP || ip.Dst != l.src {
		return 0, false
	}
	u, ok := frame.ParseUDP(ip.Payload)
	if !ok || !Answered(u.Payload) {
		return 0, false
	}
	return binary.BigEndian.Uint16(u.Payload), true
}

// Question is a question for the address of a name that i makes unlike others.
func Question(id uint16, i int) []byte {
	b := binary.BigEndian.AppendUint16(make([]byte, 0, 48), id)
	b = append(b, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0) // recursion desired, one question
	label := fmt.Appendf(nil, "n%d", i)
	b = append(append(b, byte(len(label))), label...)
	b = append(b, 5, 'b', 'e', 'n', 'c', 'h', 4, 't', 'e', 's', 't', 0)
	return append(b, 0, 1, 0, 1)
}

// Answered tells whether b is an answer that has one.
func Answered(b []byte) bool {
	return len(b) > 12 && b[2]&0x80 != 0 && b[3]&15 == 0 && binary.BigEndian.Uint16(b[6:]) > 0
}
