package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
	"virtkit/e2e/gitlabtest"
)

// What vk-gitlab costs with 200 runners: idle, and with a running job each that
// prints a line a second. vk-hub and vk-gitlab are processes; GitLab, and the
// node that has the jobs, are in this one. The floor is a process that makes
// GitLab the same requests, and for each of them opens the connection that a
// request to the hub needs (dispatch: one connection a request), and does nothing
// else. Then one job prints a
// GiB, of which a hub keeps 64 MiB, for the peak memory of both.
// VIRTKIT_BENCH_RELAY_SECS is how long each is looked at (20).

const (
	relayRunners = 200
	relayFloor   = "relay-floor" // bench relayFloor idle|running URL HUB CERT
	relayPoll    = 3 * time.Second
	relayLine    = "a line of a job, of the length that most have, more or less\n"
)

type relayBench struct {
	*fleetBench
	gitlab *gitlabtest.Server
	url    string
	node   *hubtest.Placed
	addr   string // of the hub
	proc   *exec.Cmd
	window time.Duration
}

func (b *bench) relay(ctx context.Context) error {
	secs, err := envInt("VIRTKIT_BENCH_RELAY_SECS", 20)
	if err != nil {
		return err
	}
	f := &relayBench{fleetBench: &fleetBench{b: b, dir: filepath.Join(b.dir, "relay")}, gitlab: gitlabtest.New(), window: time.Duration(secs) * time.Second}
	if err := f.prepare(); err != nil {
		return err
	}
	hubProc, addr, err := f.startHub(ctx)
	if err != nil {
		return err
	}
	f.addr = addr
	defer func() { hubProc.Process.Kill(); hubProc.Wait() }()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	f.url = "http://" + l.Addr().String()
	web := &http.Server{Handler: f.gitlab, ReadHeaderTimeout: time.Minute}
	go web.Serve(l)
	defer web.Close()
	nctx, hangUp := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer hangUp()
	if err := f.join(nctx, &group); err != nil {
		return fmt.Errorf("the node: %w", err)
	}
	if err := f.startRelay(ctx); err != nil {
		return fmt.Errorf("vk-gitlab: %w", err)
	}
	defer func() { f.proc.Process.Kill(); f.proc.Wait() }()

	for _, part := range []struct {
		name string
		do   func(context.Context) (float64, error)
	}{{"idle", f.idleRunners}, {"running", f.runningJobs}} {
		vk, err := part.do(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		floor, err := f.floor(ctx, part.name)
		if err != nil {
			return fmt.Errorf("the floor, %s: %w", part.name, err)
		}
		row := map[string]string{"idle": "vk-gitlab, each of 200 idle runners", "running": "vk-gitlab, each of 200 running jobs"}[part.name]
		b.add("relay", row, "% of a core", vk/relayRunners, "the same requests alone", floor/relayRunners, 2)
	}
	if err := f.longTrace(ctx); err != nil {
		return fmt.Errorf("a long trace: %w", err)
	}
	b.add("relay", "peak memory of vk-gitlab, a log of 1 GiB last", "MiB", peakOf(f.proc.Process.Pid), "what is kept", 64, 2)
	b.add("relay", "peak memory of vk-hub, the same", "MiB", peakOf(hubProc.Process.Pid), "what is kept", 64, 2)
	return nil
}

// join brings a node with room for all jobs to the hub.
func (f *relayBench) join(ctx context.Context, group *sync.WaitGroup) error {
	if err := f.enroll(ctx, f.addr, 1); err != nil {
		return err
	}
	f.node = hubtest.PlacedAs(f.nodes[0], "node-0", 2*relayRunners, 1<<40)
	c, err := wsx.Dialer{TLS: f.trust}.Dial(ctx, "wss://"+f.addr+wire.SessionPath, nil)
	if err != nil {
		return err
	}
	channel, err := wire.Channel(c.TLS())
	if err != nil {
		return err
	}
	group.Go(func() { f.node.Session(ctx, c, channel) })
	_, err = f.admin.SetPools(ctx, f.nodes[0].ID, []string{"ci"})
	return err
}

func (f *relayBench) startRelay(ctx context.Context) error {
	var conf strings.Builder
	fmt.Fprintf(&conf, "check_interval = %d\nshutdown_timeout = 1\nstate_dir = %q\n[gitlab]\nurl = %q\n", int(relayPoll.Seconds()), filepath.Join(f.dir, "relay-state"), f.url)
	for i := range relayRunners {
		token := filepath.Join(f.dir, fmt.Sprintf("token-%d", i))
		if err := os.WriteFile(token, fmt.Appendf(nil, "glrt-bench-%04d-0123456789\n", i), 0o600); err != nil {
			return err
		}
		fmt.Fprintf(&conf, "[[runners]]\nname = \"r%d\"\ntoken_file = %q\npool = \"ci\"\nenvelope = { mem = \"1G\", cpus = 1 }\noutput_limit = \"64M\"\n", i, token)
	}
	file := filepath.Join(f.dir, "gitlab.toml")
	if err := os.WriteFile(file, []byte(conf.String()), 0o600); err != nil {
		return err
	}
	join, err := f.admin.TokenOf(ctx, "gitlab", 600)
	if err != nil {
		return err
	}
	vk := func(args ...string) *exec.Cmd {
		return exec.CommandContext(ctx, f.b.vk, append([]string{"gitlabd", "--config", file}, args...)...)
	}
	cmd := vk("join", "https://"+f.addr, "--ca", f.cert, "--token", "-")
	cmd.Stdin = strings.NewReader(join)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("joining: %w: %s", err, out)
	}
	log, err := os.Create(filepath.Join(f.dir, "relay.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	f.proc = vk("run")
	f.proc.Stderr = log
	if err := f.proc.Start(); err != nil {
		return err
	}
	return f.until(ctx, "the hub takes the GitLab server", func() bool {
		return f.admin.SetGitLab(ctx, hubadmin.GitLabRequest{Action: "approve", URL: f.url, Name: "gl"}) == nil &&
			f.admin.SetProjects(ctx, "approve", "gl", []hub.ProjectRef{{ID: 42, Path: "group/project"}}) == nil
	})
}

// until waits for what takes seconds on a slow machine.
func (f *relayBench) until(ctx context.Context, what string, ok func() bool) error {
	for deadline := time.Now().Add(3 * time.Minute); !ok(); {
		if time.Now().After(deadline) {
			text, _ := os.ReadFile(filepath.Join(f.dir, "relay.log"))
			return fmt.Errorf("not after 3 minutes: %s\n%s", what, text[max(0, len(text)-2000):])
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

// share is what the relay uses of a core within the window.
func (f *relayBench) share(ctx context.Context, meanwhile func()) (float64, error) {
	used, start := procTime(f.proc.Process.Pid), time.Now()
	for time.Since(start) < f.window {
		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-time.After(time.Second):
			meanwhile()
		}
	}
	return percent(procTime(f.proc.Process.Pid)-used, time.Since(start)), nil
}

func (f *relayBench) asked(endpoint string) (n int) {
	for _, r := range f.gitlab.Requests() {
		if r.Endpoint == endpoint {
			n++
		}
	}
	return n
}

func (f *relayBench) idleRunners(ctx context.Context) (float64, error) {
	if err := f.until(ctx, "every runner asks for jobs", func() bool { return f.asked("request") >= 2*relayRunners }); err != nil {
		return 0, err
	}
	return f.share(ctx, func() {})
}

// benchResponse is what GitLab gives a runner.
func benchResponse(id int) []byte {
	return fmt.Appendf(nil, `{"id":%d,"token":"glcbt-64_bench%06d","job_info":{"name":"job","stage":"test","project_id":42,"project_name":"project","project_full_path":"group/project"},`+
		`"git_info":{"repo_url":"https://gitlab-ci-token:x@gitlab.example.com/group/project.git","ref":"main","sha":"f400d9d34482185362e87552bcc47c5e5a468e2c","ref_type":"branch","refspecs":["+refs/heads/main:refs/remotes/origin/main"],"depth":20},`+
		`"runner_info":{"timeout":3600},"steps":[{"name":"script","script":["make"],"timeout":3600,"when":"on_success"}],"features":{"trace_sections":true}}`, id, id)
}

// begin has a number of jobs begun and returns their IDs of the hub's.
func (f *relayBench) begin(ctx context.Context, first, count int) ([]string, error) {
	_, before := f.node.Holds()
	for i := range count {
		if _, err := f.gitlab.AddJob(benchResponse(first + i)); err != nil {
			return nil, err
		}
	}
	var jobs []string
	err := f.until(ctx, "the node has all jobs", func() bool { _, jobs = f.node.Holds(); return len(jobs) >= len(before)+count })
	return jobs[len(before):], err
}

func (f *relayBench) runningJobs(ctx context.Context) (share float64, err error) {
	jobs, err := f.begin(ctx, 1, relayRunners)
	if err != nil {
		return 0, err
	}
	lines := 0
	share, err = f.share(ctx, func() {
		lines++
		for _, id := range jobs {
			err = errors.Join(err, f.node.Print(id, []byte(relayLine)))
		}
	})
	if err != nil {
		return 0, err
	}
	for _, id := range jobs {
		if err := f.node.End(id, &wire.JobResult{Artifacts: []wire.ArtifactResult{}}); err != nil {
			return 0, err
		}
	}
	for i := range relayRunners {
		if err := f.delivered(ctx, int64(i+1), lines); err != nil {
			return 0, err
		}
	}
	return share, nil
}

// delivered waits until a job has ended in GitLab and looks at its trace.
func (f *relayBench) delivered(ctx context.Context, id int64, lines int) error {
	var j gitlabtest.Job
	if err := f.until(ctx, fmt.Sprintf("job %d ends", id), func() bool { j, _ = f.gitlab.Job(id); return j.Final != nil }); err != nil {
		return err
	}
	if n := bytes.Count(j.Trace, []byte(relayLine)); n != lines {
		return fmt.Errorf("the trace of job %d has %d lines of %d", id, n, lines)
	}
	return nil
}

// longTrace has one job print a GiB: what is more than may be kept is acked and
// dropped.
func (f *relayBench) longTrace(ctx context.Context) error {
	jobs, err := f.begin(ctx, relayRunners+1, 1)
	if err != nil {
		return err
	}
	piece := bytes.Repeat([]byte(relayLine), (256<<10)/len(relayLine))
	pieces, began := 1<<30/len(piece), time.Now()
	for i := range pieces {
		sent := int64(i * len(piece))
		if err := f.until(ctx, "the hub acks output", func() bool { return sent-f.node.Acked(jobs[0]) < 3<<20 }); err != nil {
			return err
		}
		if err := f.node.Print(jobs[0], piece); err != nil {
			return err
		}
	}
	if err := f.node.End(jobs[0], &wire.JobResult{Artifacts: []wire.ArtifactResult{}}); err != nil {
		return err
	}
	if err := f.delivered(ctx, relayRunners+1, (64<<20)/len(relayLine)); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "bench: relay: a log of 1 GiB took %v from its first byte to the end that GitLab has\n", time.Since(began).Round(100*time.Millisecond))
	return nil
}

// floor runs the requests alone and returns what they cost.
func (f *relayBench) floor(ctx context.Context, what string) (float64, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", relayFloor, what, f.url, f.addr, f.cert)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	defer func() { cmd.Process.Signal(syscall.SIGKILL); cmd.Wait() }()
	time.Sleep(relayPoll)
	used, start := procTime(cmd.Process.Pid), time.Now()
	select {
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	case <-time.After(f.window):
	}
	return percent(procTime(cmd.Process.Pid)-used, time.Since(start)), nil
}

// runRelayFloor asks for a job for each runner, or sends a piece of a trace,
// each 3 s, until it is killed.
func runRelayFloor(ctx context.Context, what, url, hub, cert string) error {
	pem, err := os.ReadFile(cert)
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	trust := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: relayRunners}}
	method, path := http.MethodPost, "/api/v4/jobs/request"
	if what == "running" {
		method = http.MethodPatch
	}
	var group sync.WaitGroup
	for i := range relayRunners {
		if what == "running" {
			path = fmt.Sprintf("/api/v4/jobs/%d/trace?debug_trace=false", i+1)
		}
		target := url + path
		group.Go(func() {
			for ctx.Err() == nil {
				body := fmt.Sprintf(`{"token":"glrt-bench-%04d","info":{"name":"floor"}}`, i)
				if what == "running" {
					body = strings.Repeat(relayLine, 3)
				}
				if req, err := http.NewRequestWithContext(ctx, method, target, strings.NewReader(body)); err == nil {
					req.Header.Set("Content-Range", fmt.Sprintf("0-%d", len(body)-1))
					if resp, err := client.Do(req); err == nil {
						io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
				}
				// New output is asked for each second, capacity before each
				// request for a job.
				each := relayPoll
				if what == "running" {
					each = time.Second
				}
				for range relayPoll / each {
					if c, err := (&tls.Dialer{Config: trust}).DialContext(ctx, "tcp", hub); err == nil {
						c.Close()
					}
					select {
					case <-ctx.Done():
					case <-time.After(each):
					}
				}
			}
		})
	}
	group.Wait()
	return nil
}
