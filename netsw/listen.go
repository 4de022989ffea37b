package netsw

import (
	"errors"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"

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

// listen reads from the guest until it is known whom the flow asks for, and
// whether it may: then what was read goes out, else an error comes back. The
// other direction is not held up, so a server that speaks first does.
func (f *tcpFlow) listen(ch <-chan struct{}) error {
	h := held{sw: f.p.sw}
	defer h.release()
	var late <-chan time.Time
	for {
		_, terr := f.ep.Read(&h, tcpip.ReadOptions{})
		names, more := asked.Parse(h.b)
		if h.full {
			more = false
			if names == nil {
				names = unreadable
			}
		}
		if !more {
			return f.answer(names, &h)
		}
		switch terr.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			if late == nil && len(h.b) > 0 {
				t := time.NewTimer(listenWait)
				defer t.Stop()
				late = t.C
			}
			select {
			case <-ch:
			case <-late:
				return f.answer(unreadable, &h)
			}
		case *tcpip.ErrClosedForReceive:
			if len(h.b) == 0 {
				return nil
			}
			return f.answer(unreadable, &h)
		default:
			return errReset
		}
	}
}

var unreadable = []string{policy.UnreadableName}

// answer asks the policy about the names, and passes on what was held.
func (f *tcpFlow) answer(names []string, h *held) error {
	for _, n := range names {
		fl := policy.Flow{Port: f.p.name, Proto: policy.TCP, Dst: f.dst}
		if v := f.p.sw.asker.Asked(fl, n); !v.Allow {
			f.p.c.drop(DropDenied)
			f.p.sw.log.Debug("refused a flow for the name it asks for", "vm", f.p.name, "dst", f.dst.String(), "name", n, "layer", v.Layer, "reason", v.Reason)
			return errReset
		}
	}
	n, err := f.conn.Write(h.b)
	f.p.c.sent.Add(uint64(n))
	return err
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
