package nodehost

import (
	"context"
	"errors"
	"strings"

	"virtkit/core/fleet/wire"
	"virtkit/core/supervise"
)

// admission sums the claims up.
func admission(claims []Claim, budgetMiB int64) wire.Admission {
	a := wire.Admission{Budget: budgetMiB << 20}
	for _, c := range claims {
		a.Committed += c.Granted.MemMiB << 20
		a.DiskClaimed += c.Granted.Disk
		switch {
		case strings.HasPrefix(c.ID, reservation): // no job stands behind it yet
		case c.Waiting:
			a.Waiting++
		default:
			a.Running++
		}
	}
	return a
}

// reservation begins the id of a claim for a job that is not there yet
// (ledger.ReservationPrefix).
const reservation = "reservation-"

// stages tells where jobs are. A job that is admitted and has no guest yet is
// being prepared: its image is pulled, say.
func stages(claims []Claim, guests []Guest) wire.Stages {
	var s wire.Stages
	at := map[string]bool{}
	for _, g := range guests {
		if g.Kind != GitLab || !g.Live {
			continue
		}
		at[g.ID] = true
		switch g.Phase {
		case supervise.Running:
			s.Running++
		case supervise.Stopping, supervise.Ended:
			s.Cleaning++
		default:
			s.Preparing++
		}
	}
	for _, c := range claims {
		switch {
		case at[c.ID] || strings.HasPrefix(c.ID, reservation):
			// A waiting claim of a guest that runs is one that grows: it runs.
		case c.Waiting:
			s.Waiting++
		default:
			s.Preparing++
		}
	}
	return s
}

// Heartbeat takes the readings. What could not be read is left out, and said by
// the problems.
func (h *Host) Heartbeat(ctx context.Context) (b wire.Heartbeat, problems []error) {
	bad := func(err error) { problems = append(problems, err) }
	claims, guests, err := h.jobs(ctx, bad)
	if err != nil {
		bad(err)
	}
	budget, err := h.o.Ledger.Budget()
	if err != nil {
		bad(err)
	}
	b.Admission = admission(claims, budget)
	s := stages(claims, guests)
	b.Stages = &s
	b.Concurrency = h.desired(bad)
	if _, available, err := h.o.Root.Memory(); err != nil {
		bad(err)
	} else {
		b.MemAvailable = available
	}
	if l, err := h.o.Root.Load1(); err != nil {
		bad(err)
	} else {
		b.Load1 = &l
	}
	if p, err := h.o.Root.Pressure(); err == nil {
		b.Pressure = p // a kernel without it is common: no problem
	}
	b.Filesystems, b.Disks = h.rooms(bad)
	list, _ := h.workloads(claims, guests)
	b.VMs = h.meter.Read(ctx, list)
	b.Clock = h.o.Now().Unix()
	return b, problems
}

// jobs reads the ledger. What of it could not be read is told to bad.
func (h *Host) jobs(ctx context.Context, bad func(error)) ([]Claim, []Guest, error) {
	claims, problems, err := h.o.Ledger.Claims(ctx)
	for _, p := range problems {
		bad(p)
	}
	guests, problems, gerr := h.o.Ledger.Guests(ctx)
	for _, p := range problems {
		bad(p)
	}
	return claims, guests, errors.Join(err, gerr)
}

// rooms looks at the filesystems and at their disks.
func (h *Host) rooms(bad func(error)) (rooms []wire.FSReading, disks []wire.DiskReading) {
	stats, _ := h.o.Root.diskstats() // without them there is no latency
	ms, _ := h.o.Root.mounts()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.filesystems() {
		u, err := h.o.StatFS(f.path)
		if err != nil {
			bad(err)
			continue
		}
		rooms = append(rooms, wire.FSReading{Role: f.role, Free: u.Free, FreeInodes: u.FreeInodes})
		io, ok := stats[u.Dev]
		if !ok {
			continue // tmpfs, a network's, several devices as one
		}
		now := diskSeen{u.Dev, io, h.o.Now()}
		if before, ok := h.disks[f.role]; ok && before.dev == u.Dev {
			if r, w, busy, ok := io.since(before.io, now.at.Sub(before.at)); ok {
				device, _ := mountOf(ms, f.path, u.Dev)
				disks = append(disks, wire.DiskReading{Role: f.role, Device: device, ReadMS: r, WriteMS: w, Busy: busy})
			}
		}
		h.disks[f.role] = now
	}
	return rooms, disks
}
