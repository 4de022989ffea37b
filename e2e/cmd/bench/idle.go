package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"virtkit/core/execdrv/runnerside"
	"virtkit/core/supervise"
	"virtkit/e2e/host"
)

// idleWindow is how long an idle guest is looked at.
const idleWindow = 120 * time.Second

// idleScript prints, in ns, what all threads of the guest's agent have used once
// its start has cooled down, and again after the window. It starts nothing but
// two sleeps: the agent's work for a job is not what is measured.
const idleScript = `used() { s=0; for f in /proc/1/task/*/schedstat; do read -r n _ < "$f"; s=$((s+n)); done; }
sleep 30; used; a=$s; sleep %d; used; echo "used $((s-a))"
`

// idle: what an idle job costs while it is recorded as by default: its
// supervisor on the host, and its recorder in the guest, which is what the agent
// takes more than that of a guest beside it that is not recorded. Both run at
// once, as a guest's clock counts what other work on the host takes from it; and
// under emulation a guest's processor is many times slower than the host's.
func (b *bench) idle(ctx context.Context) error {
	kinds := []struct{ name, toml string }{{"recorded", ""}, {"bare", "atop = false\n"}}
	used := make([]time.Duration, len(kinds))
	vmms := make([]time.Duration, len(kinds))
	var share float64
	g, gctx := errgroup.WithContext(ctx)
	for i, k := range kinds {
		g.Go(func() error {
			j, err := b.startIdle(gctx, k.name, "[executor]\n"+k.toml+idleConf, 4712+i, "")
			if err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			defer j.end(context.WithoutCancel(ctx))
			v0 := procTime(j.state.VMMPID)
			if used[i], err = j.agent(gctx); err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			vmms[i] = procTime(j.state.VMMPID) - v0
			if i > 0 {
				return nil
			}
			s0, start := procTime(j.state.PID), time.Now()
			select {
			case <-gctx.Done():
				return context.Cause(gctx)
			case <-time.After(idleWindow / 2):
			}
			share = percent(procTime(j.state.PID)-s0, time.Since(start))
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if os.Getenv("VIRTKIT_BENCH_VERBOSE") != "" {
		for i, k := range kinds {
			fmt.Fprintf(os.Stderr, "bench: %s guest: its agent used %v in %v, its VMM on the host %v in all\n", k.name, used[i], idleWindow, vmms[i])
		}
	}
	b.add("host", "idle job's supervisor", "% of a core", share, "limit of the issue", 0.2, 1)
	b.add("host", "recorder in the guest", "% of a core", percent(used[0]-used[1], idleWindow), "limit of the issue", 0.5, 1)
	b.add("host", "agent of an idle guest, all in all", "% of a core", percent(used[0], idleWindow), "limit of the issue for the recorder", 0.5, 2)
	return nil
}

// percent is the share of a core, at least 0.001: a ratio needs a number.
func percent(cpu, of time.Duration) float64 { return max(0.001, 100*cpu.Seconds()/of.Seconds()) }

// idleJob is a job whose guest has been prepared.
type idleJob struct {
	s     *runnerside.Session
	state supervise.State
}

// idleConf is the rest of the configuration of a job that does little.
const idleConf = "[executor.vm]\ncpus = 1\nmem = \"512M\"\n[executor.schedule]\ndisk_default = \"64M\"\n"

// startIdle prepares a job on a host of its own. more goes into its answer of
// GitLab, after a comma.
func (b *bench) startIdle(ctx context.Context, name, conf string, id int, more string) (*idleJob, error) {
	h, err := host.New(".", filepath.Join(b.dir, name), conf)
	if err != nil {
		return nil, err
	}
	d := h.Driver()
	d.TmpRoot = b.dir
	s, err := d.Open(map[string]string{
		"CI_JOB_ID": strconv.Itoa(id), "CI_JOB_NAME": name, "CI_PROJECT_PATH": "bench/idle", "CI_BUILDS_DIR": "/builds",
		"CI_PROJECT_DIR": "/builds/bench/idle", "CI_JOB_TIMEOUT": "1200", "CI_CONCURRENT_ID": "0", "MICROVM_IMAGE": "local/default",
	}, fmt.Appendf(nil, `{"id":%d,"token":"x","job_info":{"name":%q}%s}`, id, name, more))
	if err != nil {
		return nil, err
	}
	j := &idleJob{s: s}
	if err := j.start(ctx, h); err != nil {
		j.end(context.WithoutCancel(ctx))
		return nil, err
	}
	return j, nil
}

func (j *idleJob) start(ctx context.Context, h *host.Host) error {
	if _, _, err := j.s.Config(ctx); err != nil {
		return err
	}
	if res, err := j.s.Prepare(ctx); err != nil || res.Exit != 0 {
		return fmt.Errorf("prepare: %d, %w: %s%s", res.Exit, err, res.Stdout, res.Stderr)
	}
	dirs := h.JobDirs()
	if len(dirs) != 1 {
		return fmt.Errorf("job directories %q, want one", dirs)
	}
	var err error
	j.state, err = supervise.ReadState(filepath.Join(h.State, "jobs", dirs[0]))
	return err
}

// agent is what the guest's agent uses in the window.
func (j *idleJob) agent(ctx context.Context) (time.Duration, error) {
	res, err := j.s.Stage(ctx, "build_script", fmt.Appendf(nil, idleScript, int(idleWindow.Seconds())))
	if err != nil || res.Exit != 0 {
		return 0, fmt.Errorf("%d, %w: %s", res.Exit, err, res.Stderr)
	}
	_, rest, ok := strings.Cut(string(res.Stdout), "used ")
	n, err := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
	if !ok || err != nil {
		return 0, fmt.Errorf("the guest did not say what its agent used: %q", res.Stdout)
	}
	return time.Duration(n), nil
}

func (j *idleJob) end(ctx context.Context) {
	j.s.Cleanup(ctx)
	j.s.Close()
}
