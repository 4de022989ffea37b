package supervise

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
	"virtkit/core/proctree"
	"virtkit/core/usage"
)

// Usage is what a guest has cost so far, with its services and the processes
// around it: the supervisor and all below it.
type Usage struct {
	usage.Figures
	// Victims are those of the guest's kernel, the first of Killed.
	Victims []usage.Victim `json:"victims,omitempty"`
	Killed  int            `json:"killed,omitempty"`
}

// highWater is the most that a guest's writable layer has held. The guest's
// pulse tells what it holds at one moment; what came and went between two of
// them has left its blocks in the layer's file, which nobody takes out again.
type highWater struct {
	mu   sync.Mutex
	top  usage.Overlay
	took int64 // blocks of the file when it was made, bytes
}

// begin takes note of the new and empty layer at path.
func (h *highWater) begin(path string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.took = blocks(path)
}

// blocks is what a file takes on its disk, in bytes; 0 for a layer that is no
// file but in the guest's memory.
func blocks(path string) int64 {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0
	}
	return st.Blocks * 512
}

// see takes in a pulse; path is the layer's file.
func (h *highWater) see(p guestwire.Pong, path string) {
	if p.UpperSize <= 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.top.Size = p.UpperSize
	// The guest counts what it has not written out yet, the file what the guest
	// has removed again: never the sum of the two.
	h.top.Used = min(max(h.top.Used, p.UpperUsed, blocks(path)-h.took), p.UpperSize)
}

// layerFile is the file of the layer that the guest's pulse tells of; "" when
// that is in the guest's memory.
func (s *supervisor) layerFile() string {
	if c := s.spec.Checkout; c != nil && c.Memory > 0 {
		return ""
	}
	return filepath.Join(s.dir, UpperFile)
}

func (h *highWater) get() *usage.Overlay {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.top.Size == 0 {
		return nil
	}
	return new(h.top)
}

// usage measures while the guest runs: one that does not answer has its figures
// of the host all the same. Of one that has ended they are gone with its
// process.
func (s *supervisor) usage() (*Usage, error) {
	g := s.current()
	if p := s.board.get().Phase; g == nil || p != Running && p != Stopping {
		return nil, fault.Newf(fault.Conflict, "guest %s does not run, and what it used is not known any more", s.spec.Name)
	}
	ctx, cancel := contextFor(s.d.Times.Usage)
	defer cancel()
	var u Usage
	if p, err := asked(ctx, g.ch.client().Ping); err == nil {
		s.upper.see(p, s.layerFile())
	}
	v, err := asked(ctx, g.ch.client().Victims)
	if err == nil && v.Err != "" {
		s.log.Warn("the guest cannot read its kernel's log", logx.Err, v.Err)
	}
	u.Killed = v.Total
	for _, k := range v.List {
		u.Victims = append(u.Victims, usage.Victim{Name: printable(k.Name), PID: k.PID, RSS: k.RSS, Uptime: time.Duration(k.UptimeMS) * time.Millisecond})
	}
	t, err := proctree.Measure(os.Getpid())
	if err != nil {
		return nil, err
	}
	u.CPU, u.Memory, u.Overlay = t.CPU, t.Memory, s.upper.get()
	if t.IO {
		u.IO = &usage.IO{Read: t.Read, Written: t.Written}
	}
	if n, ok := s.network.(interface {
		Traffic() (sent, received uint64)
	}); ok {
		sent, received := n.Traffic()
		u.Net = &usage.Net{Sent: int64(sent), Received: int64(received)}
	}
	return &u, nil
}

// asked asks a guest that may not answer.
func asked[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	got := make(chan T, 1)
	err := bounded(ctx, func(ctx context.Context) error {
		v, err := ask(ctx)
		got <- v
		return err
	})
	if err != nil {
		var none T
		return none, err
	}
	return <-got, nil
}

// Usage asks what the guest has cost so far. fault.Conflict when it does not
// run.
func (c *Client) Usage(ctx context.Context) (Usage, error) {
	var u Usage
	conn, err := c.ask(ctx, request{Op: opUsage}, func(a answer) {
		if a.Usage != nil {
			u = *a.Usage
		}
	})
	if err == nil {
		conn.Close()
	}
	return u, err
}
