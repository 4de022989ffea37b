package nodehost

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"virtkit/core/supervise"
)

// Observation is what a drain can observe of the host. It is over when the
// runner has exited (a managed one), the ledger is empty and no job is left;
// placed jobs without a result are the caller's to add.
type Observation struct {
	LedgerEmpty bool // it holds and awaits nothing, reservations included
	Supervisors int  // of CI jobs, that live
	Jobs        int  // CI jobs by either sign: a supervisor or a claim
}

// Observe looks at the ledger and the job directories. A directory alone proves
// nothing, since a cleanup that failed leaves one: its supervisor's lock or
// process, told from a later one by its start, says whether its guest may still
// be up. An error means that the drain cannot be judged; it wraps the kernel's
// refusal when that is the reason.
func (h *Host) Observe(ctx context.Context) (Observation, error) {
	var problems []error
	bad := func(err error) { problems = append(problems, err) }
	claims, guests, err := h.jobs(ctx, bad)
	// An entry that cannot be read may be a job.
	if err := errors.Join(append(problems, err)...); err != nil {
		return Observation{}, fmt.Errorf("looking at the host's jobs: %w", err)
	}
	o := Observation{LedgerEmpty: len(claims) == 0}
	ids := map[string]bool{}
	for _, g := range guests {
		if g.Kind != GitLab {
			continue // nobody's job: a person's `vk run`
		}
		if g.Live || (supervise.Owner{PID: g.PID, Start: g.Start}).Alive() {
			o.Supervisors++
			ids[g.ID] = true
		}
	}
	for _, c := range claims {
		if !strings.HasPrefix(c.ID, reservation) {
			ids[c.ID] = true
		}
	}
	o.Jobs = len(ids)
	return o, nil
}

// Idle says whether nothing is left for a drain to wait for.
func (o Observation) Idle() bool { return o.LedgerEmpty && o.Supervisors == 0 }
