package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/numa"
	"virtkit/core/usage"
)

// What the directory of a job that is not known is expected to hold.
const (
	defaultDisk   = 8 << 30 // bytes
	defaultInodes = 64      // of the job's own files
	serviceInodes = 32      // of each service's
)

// noClaim is a job's on a host that admits everything.
type noClaim struct{}

func (noClaim) File() *os.File         { return nil }
func (noClaim) Place() *numa.Placement { return nil }
func (noClaim) Close() error           { return nil }
func (noClaim) Release() error         { return nil }

// admit waits until the host has room for the job. What an earlier attempt of
// the same job may have left is removed first, its claim with it: the runner
// calls one attempt at a time. So is what nobody will come back for, which may
// be what is in the way.
func (r *Runner) admit(ctx context.Context, j *job) error {
	j.held = noClaim{}
	if r.Set.BudgetErr != nil {
		return r.Set.BudgetErr
	}
	if err := r.remove(ctx, j.id.ID); err != nil {
		return fmt.Errorf("removing what an earlier attempt left: %w", err)
	}
	for _, line := range r.Machines.Reap(ctx) {
		r.say("%s", line)
	}
	if r.History != nil && j.resp.JobInfo.ProjectID > 0 && j.resp.JobInfo.Name != "" {
		j.site = SiteOf(j.call, j.resp)
	}
	if r.Gate == nil {
		return nil
	}
	ask, err := r.askFor(j)
	if err != nil {
		return err
	}
	ask.Prior = r.Prior
	held, err := r.Gate.Admit(ctx, ask, func(line string) { r.say("%s", line) })
	if err != nil {
		return err
	}
	j.held = held
	return nil
}

// declaredMiB is the memory of the job's guest and of its services'.
func (j *job) declaredMiB() int64 {
	n := int64(j.wanted.MemMiB)
	for _, s := range j.services.All {
		n += int64(s.MemMiB)
	}
	return n
}

// askFor sizes the job's claim: by what it declares, or what it has been using.
func (r *Runner) askFor(j *job) (admit.Ask, error) {
	declared, limits := j.declaredMiB(), r.Gate.Limits()
	ask := admit.Ask{ID: j.id.ID, Guest: numa.Guest{MemMiB: int64(j.wanted.MemMiB), CPUs: j.wanted.CPUs}, Amounts: admit.Amounts{MemMiB: declared, CPUs: j.wanted.CPUs}}
	for _, s := range j.services.All {
		ask.CPUs += s.CPUs
	}
	if b := limits.MemMiB; b > 0 && declared > b && len(j.services.All) > 0 && int64(j.wanted.MemMiB) <= b {
		return ask, fault.Newf(fault.JobFailed, "the job and its %d service(s) together declare %d MiB, more than the host's whole memory budget of %d MiB",
			len(j.services.All), declared, b).
			Hint("lower %s of the job (%s) or of its services", execdrv.VarMem, execdrv.MiBText(j.wanted.MemMiB))
	}
	past := r.past(j.site)
	lately := past.Lately(r.now(), declared)
	if last, ok := past.Last(); ok {
		ask.Keep = last.Images
	}
	if limits.MemMiB > 0 && r.Set.FromHistory {
		if mib, known := lately.ReserveMiB(); known {
			r.say("%s", usage.ReservingLine(mib, declared))
			ask.MemMiB = mib
		}
	}
	if limits.Disk {
		return ask, r.askForDisk(j, lately, &ask)
	}
	return ask, nil
}

func (r *Runner) askForDisk(j *job, lately usage.Lately, ask *admit.Ask) error {
	room, err := r.Gate.Room()
	if err != nil {
		return err
	}
	bytes, inodes, known := lately.Disk()
	if !known {
		if bytes = r.Set.DiskDefault; bytes == 0 {
			bytes = defaultDisk
		} else if bytes > room.Size {
			return fault.Newf(fault.System, "[executor.schedule] disk_default is %s, and the filesystem of %s holds %s: no job without a history can ever be admitted",
				usage.Size(bytes), room.Path, usage.Size(room.Size)).
				Hint("lower disk_default, or leave it out")
		}
	}
	if inodes == 0 {
		inodes = defaultInodes + serviceInodes*int64(len(j.services.All))
	}
	ask.Disk = min(bytes, room.Size)
	if ask.Inodes = inodes; room.Inodes > 0 {
		ask.Inodes = min(inodes, room.Inodes)
	}
	return nil
}

// undoAdmit gives the claim up; the guest that may have inherited it is gone.
func (r *Runner) undoAdmit(j *job) error {
	if j.held == nil {
		return nil
	}
	err := j.held.Release()
	if err == nil && r.Gate != nil {
		err = r.Gate.Release(j.id.ID)
	}
	return err
}

// fullDisk says, of a prepare that found no room, which filesystem is full and
// how much of it is used. The error may be the words of another process.
func (r *Runner) fullDisk(err error) error {
	if err == nil || r.Gate == nil || !errors.Is(err, unix.ENOSPC) && !strings.Contains(err.Error(), unix.ENOSPC.Error()) {
		return err
	}
	room, rerr := r.Gate.Room()
	if rerr != nil {
		return err
	}
	text := fmt.Sprintf("no room on the filesystem of %s, which is %d%% used now that what this attempt wrote is removed (%s free of %s", room.Path, percent(room.Size-room.Free, room.Size), usage.Size(room.Free), usage.Size(room.Size))
	if room.Inodes > 0 {
		text += fmt.Sprintf("; %d%% of its inodes", percent(room.Inodes-room.FreeInodes, room.Inodes))
	}
	return fault.New(fault.KindOf(err), text+")").Because(err).
		Hint("`vk gc` removes what is no longer used; [executor.schedule] disk_default says what unknown jobs are expected to write")
}

func percent(n, of int64) int64 {
	if of <= 0 {
		return 0
	}
	return (100*n + of/2) / of
}
