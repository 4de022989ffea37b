package cijob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path"
	"strings"
	"sync"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/failpoint"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/wire"
)

// Options of Run. Dir, Executor, Host and Log are needed.
type Options struct {
	Dir       *jobdir.Dir
	Executor  Executor
	Host      Host
	Artifacts Artifacts // nil = this build moves none: a job with some fails
	Caches    Caches    // nil = a job runs without, and its trace says so
	Log       *slog.Logger
	Version   string // of this program, where the job does not say the runner's

	Clock func() time.Time                                 // nil = time.Now
	Wait  func(ctx context.Context, d time.Duration) error // between attempts; nil = by the clock
	Poll  time.Duration                                    // how often to look for a cancel; 0 = 250 ms
	Tell  time.Duration                                    // how often to tell of the job's egress; 0 = 5 s
	// Limit is context.WithTimeoutCause but in tests, nil = it.
	Limit func(parent context.Context, d time.Duration, cause error) (context.Context, context.CancelFunc)
}

// cleanupTime bounds the executor's cleanup, wherever it runs.
const cleanupTime = 5 * time.Minute

// Prepare's attempts, and the wait after each.
const (
	prepareAttempts = 3
	prepareWait     = 3 * time.Second
)

// driver runs one job.
type driver struct {
	o    Options
	st   jobdir.Start
	j    *job.CiJob
	host string // that the executor names itself as
	p    place
	out  *output
	mask *strings.Replacer // of what goes elsewhere than into the trace

	// hard ends at once: the node's end, an immediate cancel. timed is hard under
	// the job's time. soft is timed until a graceful cancel.
	hard, timed, soft context.Context
	began             time.Time
	result            job.Result
	egress            egress
}

// Run runs the job of a directory to its result, which it writes last. ctx is
// the node's: its end, with Stop as the cause, ends the job interrupted. An
// error means that the result could not be written.
func Run(ctx context.Context, o Options) error {
	if o.Clock == nil {
		o.Clock = time.Now
	}
	if o.Poll == 0 {
		o.Poll = 250 * time.Millisecond
	}
	if o.Tell == 0 {
		o.Tell = 5 * time.Second
	}
	if o.Wait == nil {
		o.Wait = sleep
	}
	if o.Limit == nil {
		o.Limit = context.WithTimeoutCause
	}
	d, err := open(o)
	if err != nil {
		return o.Dir.Finish(job.Result{Failure: string(job.Configuration), Message: "the job cannot be read: " + err.Error()})
	}
	f, err := o.Dir.AppendOutput()
	if err != nil {
		return err
	}
	defer f.Close()
	d.out = newOutput(f, d.j, d.vars("running"), o.Clock)
	v := d.run(ctx)
	if err := d.out.close(); err != nil {
		// The trace has lost something: that is not to look like a good job.
		d.o.Log.Error("writing the output", "err", err)
		if v == nil {
			v = &verdict{failure: job.System, text: "writing the job's output: " + err.Error()}
		}
	}
	failpoint.At(failpoint.BeforeResult)
	d.o.Dir.RemoveWork()
	return d.finish(v)
}

// open reads the job of a directory.
func open(o Options) (*driver, error) {
	d := &driver{o: o}
	if o.Clock != nil {
		d.began = o.Clock()
	}
	var err error
	if d.st, err = o.Dir.Start(); err != nil {
		return nil, err
	}
	if d.j, err = d.st.CiJob(); err != nil {
		return nil, err
	}
	d.setPlace(execdrv.ConfigAnswer{})
	d.mask = masker(d.vars("running").masked(d.j))
	return d, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

func (d *driver) finish(v *verdict) error {
	r := d.result
	if v != nil {
		r.Failure, r.ExitCode, r.Message = string(v.failure), v.code, d.mask.Replace(v.text)
	}
	if r.Usage == nil {
		r.Usage = &wire.JobUsage{}
	}
	r.Usage.WallMS = d.o.Clock().Sub(d.began).Milliseconds()
	return d.o.Dir.Finish(r)
}

// setPlace takes the executor's directories over.
func (d *driver) setPlace(a execdrv.ConfigAnswer) {
	builds := a.BuildsDir
	if builds == "" {
		builds = "/builds"
	}
	d.host = a.Hostname
	d.p = place{builds: builds, project: path.Join(builds, d.j.Job.ProjectPath),
		concurrent: d.st.ConcurrentID, concurrentInProject: d.st.ConcurrentProjectID}
	v := d.vars("running")
	if a.BuildsDirIsShared {
		d.p.project = path.Join(builds, v.value("CI_RUNNER_SHORT_TOKEN"), fmt.Sprint(d.st.ConcurrentProjectID), d.j.Job.ProjectPath)
	}
	if v.value("GIT_STRATEGY") == execdrv.StrategyEmpty {
		d.p.project += "-empty" // what an earlier job left in the other one stays
	}
}

func (d *driver) vars(status string) variables { return newVariables(d.j, d.p, status) }

// run is the job up to the executor's cleanup.
func (d *driver) run(ctx context.Context) *verdict {
	stop := d.contexts(ctx)
	defer stop()
	d.header()
	failpoint.At(failpoint.DriverBegun)
	if err := d.layer(); err != nil {
		v := &verdict{failure: job.System, text: err.Error()}
		d.out.last(v.line())
		return v
	}
	v := d.prepare()
	failpoint.At(failpoint.Prepared)
	if v == nil {
		v = d.stages()
	}
	d.measure()
	d.out.last(v.line())
	d.cleanupLogged()
	return v
}

// contexts makes the job's three, and watches for a cancel.
func (d *driver) contexts(ctx context.Context) (stop func()) {
	hard, end := context.WithCancelCause(ctx)
	limit := time.Duration(d.j.TimeoutSecs) * time.Second
	timed, endTimed := d.o.Limit(hard, limit, endTime(limit))
	soft, endSoft := context.WithCancelCause(timed)
	d.hard, d.timed, d.soft = hard, timed, soft
	var aside sync.WaitGroup
	aside.Go(func() { d.watch(end, endSoft) })
	aside.Go(d.followEgress)
	return func() { end(context.Canceled); endTimed(); aside.Wait() }
}

// watch looks for a cancel until the job is over.
func (d *driver) watch(hard, soft context.CancelCauseFunc) {
	t := time.NewTicker(d.o.Poll)
	defer t.Stop()
	for {
		mode, err := d.o.Dir.Cancelled()
		switch {
		case err != nil:
			d.o.Log.Warn("looking for a cancel", "err", err)
		case mode == wire.CancelGraceful:
			soft(endCanceled)
		case mode != "":
			hard(endAborted)
			return
		}
		select {
		case <-d.hard.Done():
			return
		case <-t.C:
		}
	}
}

// header is the trace's first lines.
func (d *driver) header() {
	v := d.vars("running")
	version, revision := v.value("CI_RUNNER_VERSION"), v.value("CI_RUNNER_REVISION")
	if version == "" {
		version = d.o.Version
	}
	if revision != "" {
		version += " (" + revision + ")"
	}
	d.out.plain("Running with vk-gitlab %s", version)
	d.out.plain("  on %s %s, system ID: %s", d.j.Job.RunnerName, v.value("CI_RUNNER_SHORT_TOKEN"), d.j.Job.SystemID)
	if f := changedFlags(d.j.Variables); f != "" {
		d.out.plain("  feature flags: %s", f)
	}
	if bad := v.settingErrors(d.j); len(bad) > 0 {
		d.out.warning(strings.Join(bad, "\n"))
	}
}

func (d *driver) at(stage string) {
	d.tellEgress(false)
	if err := d.o.Dir.WriteStage(jobdir.Stage{Stage: stage, Guest: d.o.Host.Size()}); err != nil {
		d.o.Log.Warn("telling the stage", "stage", stage, "err", err)
	}
}

// prepare boots the job's guest.
func (d *driver) prepare() *verdict {
	const stage = "prepare_executor"
	d.at(stage)
	d.out.begin(stage, `Preparing the "vk" executor`)
	defer d.out.end(stage)
	for n := 1; ; n++ {
		v := d.tryPrepare()
		if d.timed.Err() != nil {
			return &endingOf(d.timed).verdict
		}
		if d.soft.Err() != nil {
			return &endingOf(d.soft).verdict
		}
		// What the job asks for, and what others fail at, another attempt does not
		// mend.
		if v == nil || v.failure != job.System {
			return v
		}
		d.out.error("Preparation failed: " + v.text)
		d.cleanupLogged()
		d.out.info("Will be retried in 3s ...")
		if err := d.o.Wait(d.soft, prepareWait); err != nil {
			return &endingOf(d.soft).verdict
		}
		if n == prepareAttempts {
			return v
		}
	}
}

func (d *driver) tryPrepare() *verdict {
	out, errs, done := d.out.streams(0)
	defer done()
	var answer answerWriter
	v := d.vars("running")
	e := d.o.Executor.Call(d.soft, d.callOf(v, Call{Kind: CallConfig, Out: &answer, Err: errs}))
	d.egress.refused = e.Outcome.Refused
	if bad := judgePrepare(e); bad != nil {
		return bad
	}
	a, err := answer.decode()
	if err != nil {
		return &verdict{failure: job.System, text: err.Error()}
	}
	d.setPlace(a)
	name := "vk"
	if a.Driver != nil {
		name = a.Driver.Name + " " + a.Driver.Version
	}
	d.out.plain("Using vk executor with driver %s...", name)
	v = d.vars("running")
	e = d.o.Executor.Call(d.soft, d.callOf(v, Call{Kind: CallPrepare, Out: out, Err: errs}))
	d.egress.refused = e.Outcome.Refused
	return judgePrepare(e)
}

// callOf adds what every call is given.
func (d *driver) callOf(v variables, c Call) Call {
	c.Env, c.Now = v.environ(d.j), d.hard.Done()
	c.Env = append(c.Env, execdrv.EnvJobServer+"="+d.j.ServerURL)
	if len(d.st.Layer) > 0 {
		c.Env = append(c.Env, execdrv.EnvEgressLayer+"="+d.layerPath())
	}
	var err error
	if c.Response, err = response(d.j, d.vars("running")); err != nil {
		d.o.Log.Error("writing the job's response", "err", err) // plain data: cannot be
	}
	return c
}

// cleanup is the executor's; what it prints is for the node's people.
func (d *driver) cleanup() error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(d.hard), cleanupTime, endStopped)
	defer cancel()
	w := &logWriter{log: d.o.Log, mask: d.mask}
	defer w.flush()
	e := d.o.Executor.Call(ctx, d.callOf(d.vars("running"), Call{Kind: CallCleanup, Out: w, Err: w}))
	if e.Err == nil && e.Exit != 0 {
		e.Err = fmt.Errorf("exit status %d", e.Exit)
	}
	if e.Err != nil {
		return fmt.Errorf("cleaning up after the job: %w", e.Err)
	}
	return nil
}

// cleanupLogged is cleanup whose failure is for the node's people: the job has
// ended.
func (d *driver) cleanupLogged() {
	if err := d.cleanup(); err != nil {
		d.o.Log.Warn(err.Error())
	}
}

// measure reads what the job has used and where it has been, before its guest
// is gone.
func (d *driver) measure() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.hard), time.Minute)
	defer cancel()
	d.result.Usage, d.result.Events = d.o.Host.Usage(ctx)
	for i := range d.result.Events {
		d.result.Events[i].First = d.mask.Replace(d.result.Events[i].First)
	}
	d.result.Egress = d.lastEgress(ctx)
}

// stage runs one stage under ctx, in its section of the trace.
func (d *driver) stage(ctx context.Context, name, heading string, do func(ctx context.Context, out, errs io.Writer) *verdict) *verdict {
	if ctx.Err() != nil {
		return &endingOf(ctx).verdict
	}
	d.at(name)
	d.out.begin(name, heading)
	out, errs, done := d.out.streams(1)
	v := do(ctx, out, errs)
	done()
	d.out.end(name)
	if ctx.Err() == nil {
		return v
	}
	e := endingOf(ctx)
	switch {
	case e.verdict.failure == job.Timeout:
		d.out.warning(name + " could not run to completion because the timeout was exceeded. For more control over job and script timeouts see: " +
			"https://docs.gitlab.com/ci/runners/configure_runners/#set-script-and-after_script-timeouts")
	case e == endCanceled && strings.HasPrefix(name, execdrv.StepPrefix):
		d.out.warning("script canceled externally (UI, API)")
	}
	if e == endAfter {
		return v // what it ended with, as with any other failure of after_script
	}
	return &e.verdict
}

// exec runs a stage that is a script in the guest.
func (d *driver) exec(ctx context.Context, name, heading, status string, f job.Failure, write func(s *script)) *verdict {
	v := d.vars(status)
	s := &script{v: v, p: d.p}
	write(s)
	return d.stage(ctx, name, heading, func(ctx context.Context, out, errs io.Writer) *verdict {
		return judge(d.o.Executor.Call(ctx, d.callOf(v, Call{Kind: CallRun, Stage: name, Script: s.bytes(), Out: out, Err: errs})), f)
	})
}

// errNoTransfers is for a build that was not given what a job needs.
var errNoTransfers = errors.New("this build of vk moves no artifacts")
