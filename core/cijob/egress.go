package cijob

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"virtkit/core/policy"
)

// egress is what a job's driver tells of the job's egress: a report that grows,
// in the job's directory, where the node finds it, and the last of it in the
// result.
type egress struct {
	refused []policy.Refusal // entries that failed the job before it had a guest

	mu   sync.Mutex
	last *policy.Report
	rev  uint64
	over bool // the result has it
}

func (d *driver) layerPath() string { return filepath.Join(d.o.Dir.WorkPath(), "egress-layer.json") }

// layer writes what the hub's rules make for this job to where prepare reads
// it.
func (d *driver) layer() error {
	if len(d.st.Layer) == 0 {
		return nil
	}
	if err := os.MkdirAll(d.o.Dir.WorkPath(), 0o700); err != nil {
		return fmt.Errorf("writing the hub's egress rules: %w", err)
	}
	if err := os.WriteFile(d.layerPath(), d.st.Layer, 0o600); err != nil {
		return fmt.Errorf("writing the hub's egress rules: %w", err)
	}
	return nil
}

// followEgress tells every few seconds until the job is over.
func (d *driver) followEgress() {
	t := time.NewTicker(d.o.Tell)
	defer t.Stop()
	for {
		select {
		case <-d.hard.Done():
			return
		case <-t.C:
			d.tellEgress(false)
		}
	}
}

// egressTime bounds one reading of it.
const egressTime = 15 * time.Second

// tellEgress writes the report down when it has changed.
func (d *driver) tellEgress(now bool) {
	d.egress.mu.Lock()
	defer d.egress.mu.Unlock()
	if d.egress.over {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.hard), egressTime)
	defer cancel()
	r, same := d.o.Host.Egress(ctx, now)
	if r == nil || same || d.egress.last != nil && r.Same(*d.egress.last) {
		return
	}
	b, err := d.numberLocked(r)
	if err == nil {
		err = d.o.Dir.WriteEgress(b)
	}
	if err != nil {
		d.o.Log.Warn("telling of the job's egress", "err", err)
	}
}

// numberLocked makes a report the next one.
func (d *driver) numberLocked(r *policy.Report) ([]byte, error) {
	d.egress.rev++
	r.Revision, d.egress.last = d.egress.rev, r
	return json.Marshal(r)
}

// lastEgress is the report that goes with the result, the highest. Of a job
// that had no guest it has what failed it.
func (d *driver) lastEgress(ctx context.Context) []byte {
	d.egress.mu.Lock()
	defer d.egress.mu.Unlock()
	d.egress.over = true
	r, _ := d.o.Host.Egress(ctx, true)
	if r == nil {
		r = d.egress.last
	}
	if r == nil && len(d.egress.refused) == 0 && len(d.st.Layer) == 0 {
		return nil
	}
	if r == nil {
		in := policy.ReportInput{Refusals: d.egress.refused}
		var hub policy.HubEgress
		if json.Unmarshal(d.st.Layer, &hub) == nil {
			in.Hub = &hub
		}
		made := policy.BuildReport(in)
		r = &made
	}
	b, err := d.numberLocked(r)
	if err != nil {
		d.o.Log.Warn("telling of the job's egress", "err", err)
		return nil
	}
	return b
}
