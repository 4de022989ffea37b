package runner

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"virtkit/core/admit"
	"virtkit/core/checkout"
	"virtkit/core/conf"
	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
	"virtkit/core/ui"
)

// job is what prepare gathers on its way.
type job struct {
	call   *execdrv.Call
	id     Identity
	resp   execdrv.Response
	wanted execdrv.Wanted
	egress *supervise.Egress // nil under a [net] mode that has no switch
	image  Image

	tools     *supervise.Disk // nil = none
	toolNames []string        // of its programs

	services      execdrv.Services
	serviceImages []Image // of services.All

	site string     // key of its history; "" = the runner does not say which job it is
	held admit.Held // nil before admission

	sources execdrv.Sources
	tree    *checkout.Tree // nil = the guest gets its sources itself

	spec  supervise.Spec
	rec   Record
	slot  Slot
	guest Guest
	state supervise.State
	tell  *startTeller // of the guest's start
}

// Prepare makes the job's guest and returns when it runs. When it fails,
// nothing is left.
func (r *Runner) Prepare(ctx context.Context, c *execdrv.Call) error {
	start := r.now()
	j := &job{call: c}
	err, left := RunSteps(ctx, r.steps(j), r.now, func(name string, took time.Duration) { r.stepDone(j, name, took) })
	for _, e := range left {
		r.warn(e.Error())
	}
	if err != nil {
		return r.fullDisk(err)
	}
	r.say("ready after %s", seconds(r.now().Sub(start)))
	return nil
}

func (r *Runner) steps(j *job) []Step {
	return []Step{
		{Name: "job", Do: func(context.Context) error { return r.read(j) }},
		{Name: "admission", Do: func(ctx context.Context) error { return r.admit(ctx, j) },
			Undo: func(context.Context) error { return r.undoAdmit(j) }},
		{Name: "sources", Do: func(ctx context.Context) error { return r.takeSources(ctx, j) },
			Undo: func(context.Context) error { return j.closeTree() }},
		{Name: "image", Do: func(ctx context.Context) error { return r.resolveAll(ctx, j) }},
		{Name: "tools", Do: func(ctx context.Context) error { return r.readyTools(ctx, j) }},
		{Name: "shares", Do: func(context.Context) error { return r.checkShares() }},
		{Name: "directory", Do: func(ctx context.Context) error { return r.reserve(ctx, j) },
			Undo: func(ctx context.Context) error { return r.undoReserve(ctx, j) }},
		{Name: "checkout", Do: func(ctx context.Context) error { return r.packSources(ctx, j) }},
		{Name: "boot", Do: func(ctx context.Context) error { return r.launch(ctx, j) }},
		{Name: "shell", Do: func(ctx context.Context) error { return r.tryShell(ctx, j) }},
	}
}

func (r *Runner) stepDone(j *job, name string, took time.Duration) {
	switch name {
	case "image":
		r.say("image %s (%s%s) in %s", j.wanted.Image, shortDigest(j.image.Root.Digest), prefixed(", ", j.image.From), seconds(took))
	case "boot":
		how := "booted"
		if j.state.Restored {
			how = "restored from a booted template"
		}
		r.say("%s in %s: %d %s, %s memory%s%s", how, seconds(took), j.spec.CPUs, plural(j.spec.CPUs, "CPU"),
			execdrv.MiBText(j.spec.MemMiB), prefixed(", kernel ", j.state.Kernel), prefixed(", ", j.state.Accel))
		if j.state.NUMA != "" {
			r.say("%s", j.state.NUMA)
		}
		r.sayTools(j)
	}
}

// read learns what the job wants.
func (r *Runner) read(j *job) error {
	var err error
	if j.id, err = Identify(j.call); err != nil {
		return err
	}
	if j.resp, err = readResponse(j.call); err != nil {
		return err
	}
	if j.wanted, err = execdrv.ReadWanted(j.call, j.resp, r.Set.Limits); err != nil {
		return err
	}
	if err := r.checkImage(j.wanted); err != nil {
		return err
	}
	j.sources = r.readSources(j.call, j.resp)
	for _, w := range j.call.Warnings {
		r.warn(w)
	}
	for _, w := range j.wanted.Warnings {
		r.warn(w)
	}
	for _, n := range j.wanted.Notes {
		r.say("%s", n)
	}
	if r.Set.DAX != "" {
		r.warn(fmt.Sprintf("[executor.vm] dax = %q has no effect: QEMU offers no window here, and what jobs read of the host are disks, not shares", r.Set.DAX))
	}
	if j.services, err = r.readServices(j.call, j.resp); err != nil {
		return err
	}
	for _, w := range j.services.Warnings {
		r.warn(w)
	}
	for _, n := range j.services.Notes {
		r.say("%s", n)
	}
	j.egress, err = r.readEgress(j.call, j.resp, serviceLists(j.services))
	return err
}

func (r *Runner) resolve(ctx context.Context, j *job) error {
	q := ImageQuery{
		Ref: j.wanted.Image, Platform: j.resp.Image.ExecutorOpts.Docker.Platform, PullPolicies: j.resp.Image.PullPolicies,
		AuthConfig: j.call.Var("DOCKER_AUTH_CONFIG"), Credentials: j.resp.Credentials,
	}
	img, err := r.Images.Resolve(ctx, q, func(line string) { r.say("%s", line) })
	switch {
	case err == nil:
	case j.wanted.ImageFrom == "image:":
		return fmt.Errorf("%s: %w", j.wanted.Image, err) // the step has said "image:"
	default:
		return fmt.Errorf("%s %s: %w", j.wanted.ImageFrom, j.wanted.Image, err)
	}
	j.image = img
	return nil
}

// reserve takes the job's directory.
func (r *Runner) reserve(ctx context.Context, j *job) error {
	j.spec = r.specOf(j)
	var err error
	if j.spec.Services, err = r.servicesOf(j); err != nil {
		return err
	}
	slot, err := r.Machines.Reserve(ctx, j.spec)
	if err != nil {
		return err
	}
	j.slot = slot
	j.rec = r.recordOf(j)
	return WriteRecord(r.Machines.Dir(j.id.ID), j.rec)
}

func (r *Runner) undoReserve(ctx context.Context, j *job) error {
	if j.slot == nil {
		return nil
	}
	return errors.Join(j.slot.Release(), r.remove(ctx, j.id.ID))
}

// remove removes a job's directory. A record that could not be kept is no
// reason to stop.
func (r *Runner) remove(ctx context.Context, id string) error {
	st, serr := supervise.ReadState(r.Machines.Dir(id))
	err := r.Machines.Remove(ctx, id)
	if fault.KindOf(err) == fault.Partial {
		r.warn(err.Error())
		err = nil
	}
	if err == nil && serr == nil {
		r.finishRecording(st)
	}
	return err
}

func (r *Runner) launch(ctx context.Context, j *job) error {
	j.tell = r.newStartTeller(j)
	g, err := j.slot.Launch(ctx, j.held.File(), j.tell.hear)
	if err != nil {
		if bad := r.badUser(j, err); bad != nil {
			return bad
		}
		return err
	}
	j.guest = g
	if err := j.held.Close(); err != nil { // the guest's supervisor has it
		return err
	}
	if j.state, err = g.State(ctx); err != nil {
		return fmt.Errorf("asking the guest's supervisor: %w", err)
	}
	j.tell.hear(j.state)
	if e := j.state.RecordErr; e != "" {
		r.warn("the job's guest is not recorded: " + e)
	}
	r.followLogs(j.call, j.rec)()
	return nil
}

// badUser tells a user that the image does not have from a fault of ours. The
// agent names the user in the error of the directory that it could not give
// away.
func (r *Runner) badUser(j *job, err error) error {
	u := j.rec.User
	if u == "" || !strings.Contains(err.Error(), "user "+strconv.Quote(userOf(u))) && !strings.Contains(err.Error(), "user "+userOf(u)) {
		return nil
	}
	return fault.Newf(fault.JobFailed, "%s: the image has no user %q", r.userFrom(j), u).Because(err).
		Hint("name a user of the image's /etc/passwd, or a number")
}

func userOf(s string) string { u, _, _ := strings.Cut(s, ":"); return u }

func (r *Runner) userFrom(j *job) string {
	switch {
	case j.wanted.UserFrom != "":
		return j.wanted.UserFrom
	case r.Set.User != "":
		return "[executor.vm] user"
	}
	return "the image's USER"
}

// tryShell starts the job's shell once as the job's user, so that an image
// without a shell and a user without a passwd line are refused here, in
// words, and not by the first stage.
//
// A guest that falls silent until then is booted anew by its supervisor, once;
// the shell is then tried in the new one.
func (r *Runner) tryShell(ctx context.Context, j *job) error {
	for {
		err := r.tryOnce(ctx, j)
		if err != nil && fault.KindOf(err) == fault.JobFailed {
			return err
		}
		st, berr := j.guest.Begin(ctx)
		if berr == nil && st.Phase == supervise.Running && len(st.Retried) > len(j.state.Retried) {
			j.tell.hear(st)
			j.state = st
			continue
		}
		switch {
		case err != nil:
			return r.guestLost(ctx, j.guest, err)
		case berr != nil:
			return r.guestLost(ctx, j.guest, berr)
		case st.Exit != nil:
			return lostError(st, errors.New("it ended"))
		}
		return nil
	}
}

func (r *Runner) tryOnce(ctx context.Context, j *job) error {
	var out tail
	req := request(j.rec, execdrv.StagePrepare, nil)
	ev, err := j.guest.Exec(ctx, req, Stdio{In: strings.NewReader("exit 0\n"), Out: &out, Err: &out}, nil)
	if err != nil {
		return err
	}
	if ev.Err == "" && ev.Code == 0 && ev.Signal == 0 {
		return r.makeVolumes(ctx, j)
	}
	why := ev.Err
	if why == "" {
		why = fmt.Sprintf("exit status %d%s", ev.Code, prefixed(": ", strings.TrimSpace(out.String())))
	}
	return fault.Newf(fault.JobFailed, "starting a shell in image %s as user %s: %s", j.wanted.Image, orRoot(j.rec.User), why).
		Hint("the image needs bash or sh, and the user (%s) must exist in it", r.userFrom(j))
}

// makeVolumes makes the image's VOLUMEs that its layers do not have, and
// leaves those that are there as they are, owner and mode included.
func (r *Runner) makeVolumes(ctx context.Context, j *job) error {
	for _, v := range j.image.Volumes {
		req := guestwire.ExecRequest{Argv: []string{Shell}, Dir: v, MkDir: true, Stdin: true}
		ev, err := j.guest.Exec(ctx, req, Stdio{In: strings.NewReader("exit 0\n")}, nil)
		if err != nil {
			return err
		}
		if ev.Err != "" {
			return fault.Newf(fault.JobFailed, "making volume %s of image %s: %s", v, j.wanted.Image, ev.Err)
		}
	}
	return nil
}

func orRoot(u string) string {
	if u == "" {
		return "root"
	}
	return u
}

func (r *Runner) specOf(j *job) supervise.Spec {
	now := r.now()
	s := supervise.Spec{
		ID: j.id.ID, Kind: "gitlab", Created: now, Hostname: r.Set.Hostname,
		CPUs: j.wanted.CPUs, MemMiB: j.wanted.MemMiB, Nested: r.Set.Nested,
		Image: j.image.Root, Upper: r.Set.Upper, Net: r.Set.Net, Env: j.image.Env,
		Dirs:     r.dirsOf(j),
		Deadline: now.Add(r.timeoutOf(j) + GraceAfterTimeout),
		// Later stages must be able to say why the guest is gone; cleanup or
		// the reaper removes the directory.
		Keep:      true,
		Trial:     true,
		BootLimit: r.Set.BootLimit, HangLimit: r.Set.HangLimit,
		Kernel: r.Set.Kernel, Accel: r.Set.Accel,
		Record: r.recordSpec(j),
	}
	s.Place, s.NoBalloon, s.Reclaim = j.held.Place(), !r.Set.Balloon, r.reclaim(s.MemMiB)
	if j.tools != nil {
		s.Disks = append(s.Disks, *j.tools)
	}
	s.Shares = r.Set.Shares
	s.Checkout = r.checkoutOf(j)
	s.Net.Egress = j.egress
	if len(j.services.All) > 0 {
		s.Net.Names = append([]string{}, j.services.JobNames...)
	}
	s.ServiceExec = r.serviceExec(j)
	if pid, start, ok := execdrv.ReadFirstCall(j.call); ok && pid == r.Parent.PID && start == r.Parent.Start {
		// config and prepare have the same living parent: it is the runner,
		// not a shell around one call.
		s.Owner = r.Parent
	}
	return s
}

// reclaim is what the job's guest does with idle file cache. Without a balloon
// what it evicts would come back to nobody.
func (r *Runner) reclaim(memMiB int) *guestwire.Reclaim {
	if !r.Set.Balloon {
		return nil
	}
	return reclaimOf(r.Set.Reclaim, memMiB)
}

func reclaimOf(a conf.Amount, memMiB int) *guestwire.Reclaim {
	switch {
	case a.Word == "off" || a == conf.Amount{}:
		return nil
	case a.Word == "auto":
		return &guestwire.Reclaim{}
	}
	return &guestwire.Reclaim{Keep: a.Of(int64(memMiB) << 20)}
}

func (r *Runner) timeoutOf(j *job) time.Duration {
	if n, err := strconv.ParseInt(j.call.Var("CI_JOB_TIMEOUT"), 10, 32); err == nil && n > 0 {
		return time.Duration(n) * time.Second
	}
	if n := j.resp.RunnerInfo.Timeout; n > 0 && n < 1<<31 {
		return time.Duration(n) * time.Second
	}
	return defaultTimeout
}

// userOfJob is the first of: the job's own choice, the host's, the image's.
func (r *Runner) userOfJob(j *job) string {
	switch {
	case j.wanted.User != "":
		return j.wanted.User
	case r.Set.User != "":
		return r.Set.User
	}
	return j.image.User
}

// dirsOf are the directories that the runner's scripts expect to be able to
// write: the builds and cache directories and the parents of the project's.
func (r *Runner) dirsOf(j *job) []supervise.Dir {
	user := r.userOfJob(j)
	builds := j.call.Var("CI_BUILDS_DIR")
	if builds == "" {
		builds = r.Set.BuildsDir
	}
	var out []supervise.Dir
	seen := map[string]bool{}
	add := func(p string) {
		p = path.Clean(p)
		if !path.IsAbs(p) || p == "/" || seen[p] {
			return
		}
		seen[p] = true
		out = append(out, supervise.Dir{Path: p, Mode: 0o755, User: user})
	}
	add(builds)
	if project := j.call.Var("CI_PROJECT_DIR"); project != "" {
		rel, ok := strings.CutPrefix(path.Dir(path.Clean(project)), path.Clean(builds)+"/")
		if ok {
			p := path.Clean(builds)
			for part := range strings.SplitSeq(rel, "/") {
				p = path.Join(p, part)
				add(p)
			}
		} else {
			add(path.Dir(path.Clean(project)))
		}
	}
	add(r.Set.CacheDir)
	return out
}

func (r *Runner) recordOf(j *job) Record {
	return Record{
		ID: j.id.ID, JobID: j.id.JobID, Name: j.call.Var("CI_JOB_NAME"), Stage: j.call.Var("CI_JOB_STAGE"),
		Project: j.call.Var("CI_PROJECT_PATH"), Pipeline: j.call.Var("CI_PIPELINE_ID"), URL: j.call.Var("CI_JOB_URL"),
		Page: pageOf(j.call.Env(execdrv.EnvJobServer), j.resp),
		Ref:  j.call.Var("CI_COMMIT_REF_NAME"), SHA: j.call.Var("CI_COMMIT_SHA"),
		Image: j.wanted.Image, Digest: j.image.Root.Digest, CPUs: j.spec.CPUs, MemMiB: j.spec.MemMiB,
		User: r.userOfJob(j), Workdir: j.image.Workdir,
		Entrypoint: execdrv.EffectiveEntrypoint(j.resp.Image.Entrypoint, j.image.Entrypoint),
		Runner:     j.spec.Owner, Created: j.spec.Created, Deadline: j.spec.Deadline,
		Site: j.site, SiteJob: j.resp.JobInfo.Name,
		Services: serviceRecords(j.spec.Services), HostSources: j.tree != nil,
	}
}

// pageOf is a job's page on its GitLab, by the runner's account of the job.
func pageOf(server string, r execdrv.Response) string {
	if server == "" || r.JobInfo.ProjectPath == "" || r.ID < 1 {
		return ""
	}
	return fmt.Sprintf("%s/%s/-/jobs/%d", strings.TrimRight(server, "/"), r.JobInfo.ProjectPath, r.ID)
}

// request is the exec of a stage's shell.
func request(rec Record, stage string, env []string) guestwire.ExecRequest {
	var argv []string
	if execdrv.UserStage(stage) {
		argv = append(argv, rec.Entrypoint...)
	}
	return guestwire.ExecRequest{
		Argv: append(argv, Shell), Env: env, Dir: orSlash(rec.Workdir), MkDir: true, User: rec.User,
		Stdin: true, Stdout: true, Stderr: true,
	}
}

func orSlash(dir string) string {
	if dir == "" {
		return "/"
	}
	return dir
}

// guestLost makes an error of a lost guest that says why it ended, waiting a
// moment for its supervisor to find out.
func (r *Runner) guestLost(ctx context.Context, g Guest, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lostWait)
	defer cancel()
	var last supervise.State
	for {
		st, err := g.State(ctx)
		if err == nil {
			last = st
		}
		if last.Exit != nil || last.Boots > 1 && last.Phase == supervise.Running {
			return lostError(last, cause)
		}
		if errors.Is(err, supervise.ErrSupervisorGone) {
			return lostError(last, err)
		}
		select {
		case <-ctx.Done():
			return lostError(last, cause)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// lostWait is how long to wait for the reason of a guest's end.
const lostWait = 5 * time.Second

func lostError(st supervise.State, cause error) error {
	switch {
	case st.Exit == nil && errors.Is(cause, supervise.ErrSupervisorGone):
		return fault.New(fault.System, "the guest's supervisor was killed").Because(cause).
			Hint("the host's kernel log tells whether it ran out of memory")
	case st.Exit == nil && st.Boots > 1:
		return fault.New(fault.System, "the guest rebooted during the job").Because(cause)
	case st.Exit == nil:
		return fault.New(fault.System, "the way to the guest was lost").Because(cause)
	}
	text := "the guest ended: " + st.Exit.Reason + prefixed(": ", st.Exit.Detail)
	if len(st.Exit.Console) > 0 {
		text += "\nlast lines of its console:"
		for _, l := range st.Exit.Console[max(0, len(st.Exit.Console)-consoleLines):] {
			text += "\n  " + ui.CleanLine(l)
		}
	}
	return fault.New(fault.System, text)
}

// consoleLines is how many lines of a dead guest's console a trace shows.
const consoleLines = 20

func seconds(d time.Duration) string { return fmt.Sprintf("%.2fs", d.Seconds()) }

func prefixed(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}

func plural(n int, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

func shortDigest(d string) string {
	if algo, hexa, ok := strings.Cut(d, ":"); ok && len(hexa) > 12 {
		return algo + ":" + hexa[:12]
	}
	if d == "" {
		return "no digest"
	}
	return d
}

// tail keeps the first KiB of what is written, for an error's text.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p[:min(len(p), 1024-len(t.b))]...)
	return len(p), nil
}

func (t *tail) String() string { return string(t.b) }
