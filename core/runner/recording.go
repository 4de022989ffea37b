package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"virtkit/core/atop/archive"
	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/supervise"
)

// Recordings keeps what jobs' guests record of themselves.
type Recordings interface {
	// Account is what a recording adds up to, for people; none when nothing
	// was recorded. dir is the supervisor's State.Recording. It returns what it
	// has when ctx ends.
	Account(ctx context.Context, dir string) ([]string, error)
	// Finish stores the recording of a guest that is gone for good. Safe to
	// call again.
	Finish(dir string) error
}

// accountTime bounds the last sample and the account, at the job's end.
const accountTime = 15 * time.Second

// recordSpec is what the supervisor is told of a job's recording; nil when it
// has none.
func (r *Runner) recordSpec(j *job) *supervise.Record {
	if r.Recordings == nil || r.Set.RecordInterval <= 0 {
		return nil
	}
	c := j.call
	project := c.Var("CI_PROJECT_PATH_SLUG")
	if project == "" {
		project = c.Var("CI_PROJECT_PATH")
	}
	return &supervise.Record{Name: archive.Name(j.id.JobID, project, c.Var("CI_JOB_NAME")), Interval: r.Set.RecordInterval}
}

// account ends a job's trace with what its guest did, in a section that GitLab
// shows folded. It comes after the last stage that the trace shows, or after
// the one in which the guest was lost.
func (r *Runner) account(ctx context.Context, g Guest, rec Record) {
	if r.Recordings == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), accountTime)
	defer cancel()
	// So that a short job has more than its guest's boot. A guest that is gone
	// has what it has.
	_ = g.Sample(ctx)
	st, err := g.State(ctx)
	if err != nil {
		last, rerr := supervise.ReadState(r.Machines.Dir(rec.ID))
		if rerr != nil {
			return
		}
		st = last
	}
	if st.Recording == "" {
		return
	}
	lines, err := r.Recordings.Account(ctx, st.Recording)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.warn("what the job's guest did is not known: " + err.Error())
	}
	if len(lines) == 0 || !r.firstAccount(rec.ID) {
		return
	}
	now := r.now().Unix()
	fmt.Fprintf(r.Trace, "\x1b[0Ksection_start:%d:vk_atop[collapsed=true]\r\x1b[0Kwhat the job's guest did (vk atop %d)\n", now, rec.JobID)
	for _, l := range lines {
		fmt.Fprintln(r.Trace, l)
	}
	fmt.Fprintf(r.Trace, "\x1b[0Ksection_end:%d:vk_atop\r\x1b[0K\n", now)
}

// accountedFile, in a job's directory, says that its trace has the account.
const accountedFile = "accounted"

// firstAccount tells whether this job's account is still to be given. The
// runner goes on with after_script when a guest was lost, and all it did would
// be told once more. A full disk costs a repetition.
func (r *Runner) firstAccount(id string) bool {
	f, err := os.OpenFile(filepath.Join(r.Machines.Dir(id), accountedFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		f.Close()
	}
	return !errors.Is(err, fs.ErrExist)
}

// endOfTrace says whether what a stage prints is the last that a trace shows:
// what cleanup says does not reach it.
func endOfTrace(stage string) bool { return stage == execdrv.StageCleanFileVars }

// finishRecording stores the recording of a job whose guest is gone.
func (r *Runner) finishRecording(st supervise.State) {
	if r.Recordings == nil || st.Recording == "" {
		return
	}
	// The guest is gone, so who holds the log is another cleanup, which packs it.
	if err := r.Recordings.Finish(st.Recording); err != nil && fault.KindOf(err) != fault.Busy {
		r.warn("the guest's recording stays as it is: " + err.Error())
	}
}
