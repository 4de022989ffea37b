// Command runnerrec gives jobs to a real gitlab-runner and writes down what it
// asked and printed.
//
//	go run ./e2e/cmd/runnerrec -runner /usr/bin/gitlab-runner testdata/ci-more [NAME…]
//	go run ./e2e/cmd/runnerrec -runner /usr/bin/gitlab-runner -api testdata/runner-api [NAME…]
//
// The first runs the jobs of scenarios (gitlabtest.Scenario) with the runner's
// shell executor and puts trace, end and transfers into their files. The second
// keeps every request of one job that the stand-in GitLab answers as the rules
// of a recording say (gitlabtest.Recording), in that recording. Tests compare
// virtkit's own runner with both.
//
// With -vk, the runner has the custom executor, and vk for its driver: what comes
// of the jobs is printed, and nothing is written.
//
// Each scenario has a stand-in GitLab and a gitlab-runner of its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
)

func main() {
	runner := flag.String("runner", "gitlab-runner", "the gitlab-runner to run")
	api := flag.Bool("api", false, "record the requests of recordings, not the traces of scenarios")
	parallel := flag.Int("parallel", 4, "how many scenarios run at once")
	limit := flag.Duration("limit", 5*time.Minute, "how long one may take")
	common := flag.String("common", "testdata/ci-jobs/common.json", "what all jobs have")
	vk := flag.String("vk", "", "a vk that is the driver of the custom executor")
	listen := flag.String("listen", "127.0.0.1:0", "where the stand-in GitLab listens; a fixed port needs -parallel 1")
	flag.Parse()
	if flag.NArg() < 1 {
		fmt.Fprintln(os.Stderr, "runnerrec: no directory: name testdata/ci-more or testdata/runner-api")
		os.Exit(2)
	}
	r := &recorder{runner: *runner, api: *api, dir: flag.Arg(0), limit: *limit, vk: *vk, listen: *listen}
	if err := r.run(*common, flag.Args()[1:], *parallel); err != nil {
		fmt.Fprintln(os.Stderr, "runnerrec:", err)
		os.Exit(1)
	}
}

type recorder struct {
	runner, dir string
	vk, listen  string
	api         bool
	limit       time.Duration
	com         gitlabtest.Common
}

func (r *recorder) run(common string, names []string, parallel int) error {
	path, err := exec.LookPath(r.runner)
	if err != nil {
		return fmt.Errorf("needs a gitlab-runner: %w", err)
	}
	if r.runner, err = filepath.Abs(path); err != nil {
		return err
	}
	b, err := os.ReadFile(common)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, &r.com); err != nil {
		return fmt.Errorf("%s: %w", common, err)
	}
	if len(names) == 0 {
		files, _ := filepath.Glob(filepath.Join(r.dir, "*.json"))
		for _, f := range files {
			names = append(names, strings.TrimSuffix(filepath.Base(f), ".json"))
		}
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	slots := make(chan struct{}, parallel)
	for _, n := range names {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			began := time.Now()
			record := r.scenario
			if r.api {
				record = r.recording
			}
			err := record(n)
			fmt.Println(n, time.Since(began).Round(time.Second), err)
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("%s: %w", n, err))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// world is a stand-in GitLab with a gitlab-runner.
type world struct {
	dir    string
	gitlab *gitlabtest.Server
	url    string
	close  func()
	ended  <-chan error
}

const config = `concurrent = 1
check_interval = 1
shutdown_timeout = 5
[session_server]
  session_timeout = 1800
[[runners]]
  name = "peer-runner"
  url = %q
  id = 7
  token = "glrt-peertoken0123456789ab"
  token_obtained_at = 2024-01-01T00:00:00Z
  token_expires_at = 0001-01-01T00:00:00Z
  executor = %q
  builds_dir = %q
  cache_dir = %q
`

const custom = `  [runners.custom]
    config_exec = %[1]q
    config_args = ["gitlab", "config"]
    prepare_exec = %[1]q
    prepare_args = ["gitlab", "prepare"]
    run_exec = %[1]q
    run_args = ["gitlab", "run"]
    cleanup_exec = %[1]q
    cleanup_args = ["gitlab", "cleanup"]
`

func (r *recorder) start(ready func(*gitlabtest.Server)) (*world, error) {
	dir, err := os.MkdirTemp("", "runnerrec")
	if err != nil {
		return nil, err
	}
	w := &world{dir: dir, gitlab: gitlabtest.New()}
	git, err := gitsrv.New(filepath.Join(dir, "repos"))
	if err == nil {
		err = gitsrv.Recorded(filepath.Join(dir, "repos"))
	}
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	git.Allow("*")
	w.gitlab.Git = git
	if ready != nil {
		ready(w.gitlab)
	}
	l, err := net.Listen("tcp", r.listen)
	if err != nil {
		return nil, err
	}
	srv := httptest.NewUnstartedServer(w.gitlab)
	srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	w.url = srv.URL
	conf := filepath.Join(dir, "config.toml")
	text := fmt.Appendf(nil, config, w.url, "shell", filepath.Join(dir, "builds"), filepath.Join(dir, "cache"))
	if r.vk != "" {
		text = fmt.Appendf(fmt.Appendf(nil, config, w.url, "custom", "/builds", "/cache"), custom, r.vk)
	}
	err = errors.Join(os.WriteFile(conf, text, 0o600),
		os.WriteFile(filepath.Join(dir, ".runner_system_id"), []byte("s_0123456789ab"), 0o600), os.Mkdir(filepath.Join(dir, "home"), 0o700))
	log, lerr := os.Create(filepath.Join(dir, "runner.log"))
	if err = errors.Join(err, lerr); err != nil {
		return nil, err
	}
	cmd := exec.Command(r.runner, "run", "--config", conf, "--working-directory", dir)
	cmd.Env = []string{"PATH=" + filepath.Dir(r.runner) + ":" + os.Getenv("PATH"), "HOME=" + filepath.Join(dir, "home"), "LANG=C.UTF-8",
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "TMPDIR=" + dir}
	if r.vk != "" {
		for _, v := range os.Environ() {
			if strings.HasPrefix(v, "VIRTKIT_") || strings.HasPrefix(v, "VK_") {
				cmd.Env = append(cmd.Env, v)
			}
		}
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	w.ended = ended
	w.close = func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		srv.CloseClientConnections()
		srv.Close()
		log.Close()
		os.RemoveAll(dir)
	}
	return w, nil
}

// until waits for what the stand-in is to have.
func (w *world) until(ctx context.Context, what string, is func() bool) error {
	for {
		changed := w.gitlab.Changed()
		if is() {
			return nil
		}
		select {
		case <-changed:
		case err := <-w.ended:
			b, _ := os.ReadFile(filepath.Join(w.dir, "runner.log"))
			return fmt.Errorf("gitlab-runner has ended (%v) before %s:\n%s", err, what, b)
		case <-ctx.Done():
			b, _ := os.ReadFile(filepath.Join(w.dir, "runner.log"))
			return fmt.Errorf("%w before %s:\n%s", ctx.Err(), what, b)
		}
	}
}

func (r *recorder) scenario(name string) error {
	all, err := gitlabtest.Scenarios(r.dir)
	if err != nil {
		return err
	}
	s := all[name]
	if s == nil {
		return fmt.Errorf("no scenario %s in %s", name, r.dir)
	}
	ctx, cancel := context.WithTimeout(context.Background(), r.limit)
	defer cancel()
	w, err := r.start(nil)
	if err != nil {
		return err
	}
	defer w.close()
	for i, j := range s.Jobs {
		if err := r.job(ctx, w, s, i, j); err != nil {
			return fmt.Errorf("job %d: %w", i+1, err)
		}
	}
	if r.vk != "" {
		return nil
	}
	return write(filepath.Join(r.dir, name+".json"), s)
}

func (r *recorder) job(ctx context.Context, w *world, s *gitlabtest.Scenario, i int, j *gitlabtest.ScenarioJob) error {
	w.gitlab.SetRules(j.Rules...)
	b, err := s.Response(i, &r.com, w.url)
	if err != nil {
		return err
	}
	before := len(w.gitlab.Requests())
	id := s.ID(i)
	if _, err := w.gitlab.AddJob(b); err != nil {
		return err
	}
	if j.Cancel != nil {
		err := w.until(ctx, fmt.Sprintf("%q in the trace", j.Cancel.After), func() bool {
			got, _ := w.gitlab.Job(id)
			return strings.Contains(string(got.Trace), j.Cancel.After)
		})
		if err != nil {
			return err
		}
		w.gitlab.Cancel(id, j.Cancel.Graceful)
	}
	// The last update comes after every byte of the trace, whatever the end.
	err = w.until(ctx, "the job's end", func() bool {
		return slices.ContainsFunc(w.gitlab.Requests()[before:], func(q gitlabtest.Request) bool { return q.JobID == id && q.Endpoint == "put_final" })
	})
	if err != nil {
		return err
	}
	got, _ := w.gitlab.Job(id)
	if r.vk != "" {
		fmt.Printf("%s\n%s\n%d artifacts\n", got.Trace, got.Final, len(got.Artifacts))
		return nil
	}
	j.Trace = strings.Split(r.normal(w, string(got.Trace)), "\n")
	j.Final = gitlabtest.Final{}
	if len(got.Final) > 0 {
		if err := json.Unmarshal(got.Final, &j.Final); err != nil {
			return err
		}
	}
	j.Uploads = nil
	for _, a := range got.Artifacts {
		u, err := gitlabtest.Uploaded(a)
		if err != nil {
			return err
		}
		j.Uploads = append(j.Uploads, u)
	}
	j.Requests = gitlabtest.Transfers(w.gitlab.Requests()[before:], id, j.Dependencies()...)
	return nil
}

var (
	stampRE   = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z `)
	sectionRE = regexp.MustCompile(`section_(start|end):\d+:`)
	pidRE     = regexp.MustCompile(`pid\x1b\[0;m=\d+`)
	// Some builds of 19.4 have a line more than those of shared/vectors.
	uuidRE = regexp.MustCompile(`(?m)^(\S+ 00O )?\x1b\[0K  UUID: .*\n`)
)

// normal takes out of a trace what is of this machine and this moment.
func (r *recorder) normal(w *world, out string) string {
	host, _ := os.Hostname()
	out = stampRE.ReplaceAllString(out, "0000-00-00T00:00:00.000000Z ")
	out = sectionRE.ReplaceAllString(out, "section_$1:0:")
	out = pidRE.ReplaceAllString(out, "pid\x1b[0;m=X")
	out = uuidRE.ReplaceAllString(out, "")
	return strings.NewReplacer(filepath.Join(w.dir, "builds")+"/peertoken/0", "BUILDS", filepath.Join(w.dir, "builds"), "BUILDS", filepath.Join(w.dir, "cache"), "CACHE", w.dir, "DIR",
		w.url, r.com.Server, strings.TrimPrefix(w.url, "http://"), strings.TrimPrefix(r.com.Server, "http://"), "Running on "+host, "Running on vm").Replace(out)
}

// recording keeps the requests of one job.
func (r *recorder) recording(name string) error {
	all, err := gitlabtest.Recordings(r.dir)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(rec *gitlabtest.Recording) bool { return rec.Name == name })
	if i < 0 || all[i].Script == nil {
		return fmt.Errorf("no recording %s with a script in %s", name, r.dir)
	}
	rec := all[i]
	ctx, cancel := context.WithTimeout(context.Background(), r.limit)
	defer cancel()
	s := &gitlabtest.Scenario{Jobs: []*gitlabtest.ScenarioJob{{Job: map[string]any{
		"steps":    []any{map[string]any{"name": "script", "script": rec.Script, "timeout": 3600, "when": "on_success"}},
		"features": map[string]any{"failure_reasons": rec.Job.Features.FailureReasons},
	}}}}
	w, err := r.start(func(g *gitlabtest.Server) { g.Interval = rec.Interval; g.Misbehave(rec.Rules...) })
	if err != nil {
		return err
	}
	defer w.close()
	b, err := s.Response(0, &r.com, w.url)
	if err != nil {
		return err
	}
	if _, err := w.gitlab.AddJob(b); err != nil {
		return err
	}
	rec.Job.ID, rec.Job.Token = s.ID(0), s.Token(0)
	var took []gitlabtest.Request
	err = w.until(ctx, "the job's end", func() bool {
		took = w.gitlab.Requests()
		own := false
		for _, q := range took {
			own = own || q.JobID == s.ID(0)
			if own && q.Endpoint == "request" {
				return true
			}
		}
		return false
	})
	if err != nil {
		return err
	}
	rec.Requests = nil
	for _, q := range took {
		if q.Endpoint == "git" {
			continue
		}
		rec.Requests = append(rec.Requests, recorded(q, strings.TrimPrefix(w.url, "http://"), strings.TrimPrefix(r.com.Server, "http://")))
	}
	return rewrite(filepath.Join(r.dir, name+".json"), rec)
}

// rewrite writes a recording as the others are: a request on each line.
func rewrite(path string, rec *gitlabtest.Recording) error {
	var b strings.Builder
	line := func(before string, v any) {
		var one strings.Builder
		enc := json.NewEncoder(&one)
		enc.SetEscapeHTML(false)
		enc.Encode(v) // plain data
		b.WriteString(before + strings.TrimSuffix(one.String(), "\n"))
	}
	line("{\"job\": ", rec.Job)
	line(",\n\"script\": ", rec.Script)
	line(",\n\"rules\": ", rec.Rules)
	if rec.Interval > 0 {
		line(",\n\"interval\": ", rec.Interval)
	}
	b.WriteString(",\n\"requests\": [")
	for i, q := range rec.Requests {
		sep := ",\n"
		if i == 0 {
			sep = "\n"
		}
		line(sep, q)
	}
	b.WriteString("\n]}\n")
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

func recorded(q gitlabtest.Request, host, as string) gitlabtest.Recorded {
	out := gitlabtest.Recorded{Seq: q.Seq, JobID: q.JobID, Endpoint: q.Endpoint, Method: q.Method, Target: q.Target, Nth: q.Nth, Status: q.Status}
	var names []string
	for n := range q.Header {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		v := strings.ReplaceAll(q.Header.Get(n), host, as)
		if n == "X-Request-Id" {
			v = "X"
		}
		out.Headers = append(out.Headers, [2]string{n, v})
	}
	if q.Endpoint != "patch" && q.Endpoint != "upload" {
		out.Raw = string(q.Body)
	}
	return out
}

func write(path string, v any) error {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	// Others read the directory meanwhile.
	if err := os.WriteFile(path+".new", []byte(b.String()), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
