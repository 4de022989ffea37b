package wire

import (
	"virtkit/core/admit"
	"virtkit/core/logx"
	"virtkit/core/numa"
	"virtkit/core/supervise"
)

// placeByLedger chooses memory nodes by what was granted on each: guests that
// have not touched their memory yet count in full. Without a budget the ledger
// does not know what memory jobs have, and each guest's supervisor chooses by
// what is free.
func (h *Host) placeByLedger(budgetMiB int64) func(admit.Ask, []admit.Claim) *numa.Placement {
	if budgetMiB <= 0 || h.Conf.NUMA.Mode == numa.Off {
		return nil
	}
	return func(ask admit.Ask, others []admit.Claim) *numa.Placement {
		nodes, err := numa.Read(numa.Sysfs)
		if err != nil {
			h.Log.Warn("choosing a memory node", logx.Err, err)
			return nil
		}
		return chooseByLedger(h.Conf.NUMA.Mode, nodes, ask, others)
	}
}

func chooseByLedger(mode string, nodes []numa.Node, ask admit.Ask, others []admit.Claim) *numa.Placement {
	room := func(n numa.Node) int64 {
		left := n.TotalMiB
		for _, c := range others {
			left -= c.Place.Share(n.ID, c.Granted.MemMiB)
		}
		return left
	}
	return numa.Choose(mode, nodes, room, ask.Guest)
}

// place chooses a memory node for a guest by what is free beside the others of
// its job.
func (h *Host) place(s supervise.Spec, others []numa.Outstanding) (*numa.Placement, error) {
	if h.Conf.NUMA.Mode == numa.Off {
		return nil, nil
	}
	nodes, err := numa.Read(numa.Sysfs)
	if err != nil {
		return nil, err
	}
	return numa.Choose(h.Conf.NUMA.Mode, nodes, numa.Beside(others), numa.Guest{MemMiB: int64(s.MemMiB), CPUs: s.CPUs}), nil
}
