package wire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"virtkit/core/admit"
	"virtkit/core/tune"
)

// TuneInput is what the concurrency of this host's runner is decided by, for vk
// tune and for a node, which adds its hub's ceiling. warn is told of what is not
// known and can be done without.
func (h *Host) TuneInput(ctx context.Context, meminfo string, warn func(format string, a ...any)) (in tune.Input, err error) {
	if in.Budget, err = h.Budget(); err != nil {
		return in, err
	}
	in.Ceilings = []int{h.Conf.Executor.Schedule.MaxConcurrency}
	total, terr := admit.HostMemory(meminfo, "MemTotal")
	available, aerr := admit.HostMemory(meminfo, "MemAvailable")
	if terr == nil && aerr == nil {
		in.Total, in.Available = total>>20, available>>20
	}
	gate, err := h.Gate()
	if err != nil {
		return in, err
	}
	claims, problems, err := gate.Claims(ctx)
	if err != nil {
		return in, err
	}
	for _, p := range problems {
		warn("%v", p)
	}
	var held []int64
	for _, c := range claims {
		in.Committed += c.Granted.MemMiB
		if !c.Waiting {
			in.Running++
			held = append(held, c.Granted.MemMiB)
		}
	}
	in.Typical = cmp.Or(tune.Typical(h.reserved(warn)), tune.Typical(held), int64(h.Conf.Executor.VM.Mem>>20))
	if n, _, err := tune.ReadDesired(filepath.Join(h.StateDir, tune.DesiredFile)); err == nil {
		in.Last = n
	} else if !errors.Is(err, fs.ErrNotExist) {
		warn("%v", fmt.Errorf("the number that was written last is not known: %w", err))
	}
	return in, nil
}

// reserved is what the next run of each job that this host remembers would
// reserve, in MiB. A history that cannot be read is none.
func (h *Host) reserved(warn func(format string, a ...any)) (out []int64) {
	names, err := h.History.Projects("")
	if err != nil {
		warn("%v", err)
	}
	for _, n := range names {
		p, _, err := h.History.Project(n)
		if err != nil {
			continue
		}
		for _, j := range p.Report(time.Now(), h.Conf.Executor.Schedule.FromHistory, 0).Jobs {
			if j.ReservesMiB > 0 {
				out = append(out, j.ReservesMiB)
			}
		}
	}
	return out
}
