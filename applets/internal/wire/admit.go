package wire

import (
	"context"
	"path/filepath"
	"time"

	"virtkit/core/admit"
	"virtkit/core/image"
	"virtkit/ledger"
)

// evictGrace is how long after its last use an image is left to a job that may
// have resolved it without a hold yet.
const evictGrace = 10 * time.Minute

// Budget is [executor.schedule] mem_budget in MiB; 0 = there is none.
func (h *Host) Budget() (int64, error) {
	return admit.Budget(h.Conf.Executor.Schedule.MemBudget, admit.MemInfo)
}

// Gate admits the host's jobs. A budget that is not known admits by disk alone:
// who prepares jobs asks Budget first.
func (h *Host) Gate() (*ledger.Admissions, error) {
	o, _ := h.admitOptions()
	return h.Jobs.Admissions(o)
}

// admitOptions are this host's rules of admission; by disk alone beside an
// error.
func (h *Host) admitOptions() (ledger.AdmitOptions, error) {
	s := h.Conf.Executor.Schedule
	budget, err := h.Budget()
	return ledger.AdmitOptions{
		Limits: admit.Limits{MemMiB: budget, Disk: s.DiskAdmission},
		Wait:   s.WaitTimeout,
		Evict:  h.evict,
		Place:  h.placeByLedger(budget),
	}, err
}

// evict makes room among the images, when they are where the job directories
// are.
func (h *Host) evict(ctx context.Context, need int64, keep []string) (admit.Evicted, error) {
	if !ledger.SameFilesystem(filepath.Join(h.StateDir, "images"), h.Jobs.Dir()) {
		return admit.Evicted{}, nil
	}
	store, err := h.Store()
	if err != nil {
		return admit.Evicted{}, err
	}
	e, err := store.Evict(ctx, image.EvictOptions{
		Need: need, Keep: keep, Grace: min(evictGrace, h.Conf.Executor.ImageCacheIdle),
	})
	return admit.Evicted{Images: e.Images, Chunks: e.Blobs, Bytes: e.Bytes, Could: e.Could}, err
}
