// Demofleet shows a fleet at work, all of it on this machine: a stand-in
// GitLab, a registry for caches, a hub, a vk-gitlab and a node that boots a
// microVM for each job and for its service. It runs a pipeline of three stages
// and prints what a GitLab user would see of each job: its log, its artifacts,
// and how it ended. The last one fails, as it is meant to.
//
//	go run ./e2e/cmd/demofleet            the pipeline
//	go run ./e2e/cmd/demofleet -v         with the logs of the fleet's processes, on stderr
package main

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"virtkit/core/fault"
	"virtkit/e2e/fleetup"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
	"virtkit/e2e/ociregistry"
	"virtkit/e2e/testimage"
)

const (
	project   = "demo/greeter"
	projectID = 42
)

func main() {
	vk := flag.String("vk", "bin/vk", "the program to show")
	image := flag.String("image", "local/default", "the jobs' image; it needs bash and git")
	verbose := flag.Bool("v", false, "show the logs of hub, node and vk-gitlab")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demofleet: unexpected argument %q\n", flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, *vk, *image, *verbose)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "demofleet: %v\n", err)
		if h := fault.HintOf(err); h != "" {
			fmt.Fprintf(os.Stderr, "demofleet: hint: %s\n", h)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, vk, image string, verbose bool) (err error) {
	o := fleetup.Options{StateDir: os.Getenv("VIRTKIT_STATE_DIR"), Mem: "512M"}
	if o.StateDir == "" {
		o.StateDir = "/var/lib/virtkit"
	}
	if o.VK, err = filepath.Abs(vk); err != nil {
		return err
	}
	if _, err := os.Stat(o.VK); err != nil {
		return fault.New(fault.NotFound, "the program to show").Because(err).Hint("make build, or give -vk FILE")
	}
	if o.Dir, err = os.MkdirTemp("", "vkfleet-"); err != nil {
		return err
	}
	defer os.RemoveAll(o.Dir)
	bin := filepath.Join(filepath.Dir(o.VK), "tools", ociregistry.Program) // where `make setup-fleet` puts it
	if _, err := os.Stat(bin); err != nil {
		bin = ""
	}
	reg, err := ociregistry.Start(ctx, bin, o.Dir)
	if err != nil {
		return err
	}
	defer reg.Close()
	o.NodeConfig = fmt.Sprintf("[registry]\nrepo = \"%s/demo\"\n[vmm]\nboot_timeout_secs = 360\n[executor.vm]\ncpus = 1\nmem = \"512M\"\n", reg.Addr)
	if verbose {
		o.Log = os.Stderr
	}
	begin := time.Now()
	fmt.Println("bringing up a stand-in GitLab, a registry, a hub, a node and vk-gitlab…")
	f, err := fleetup.Up(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Down(); err == nil {
			err = e
		}
	}()
	sha, err := makeProject(f.Repos)
	if err != nil {
		return err
	}
	if err := f.Approve(ctx, projectID, project); err != nil {
		return err
	}
	if err := makeService(ctx, f); err != nil {
		return err
	}
	for _, list := range []string{"nodes", "relays"} {
		out, err := f.Hub(ctx, list)
		if err != nil {
			return err
		}
		fmt.Printf("\n$ vk-hub %s\n%s", list, out)
	}
	fmt.Printf("\nthe fleet is up after %.1f s; a pipeline of three stages begins\n", time.Since(begin).Seconds())
	p := &pipeline{f: f, image: image, sha: sha}
	if err := p.run(ctx); err != nil {
		return err
	}
	out, err := f.Hub(ctx, "jobs")
	if err != nil {
		return err
	}
	fmt.Printf("\n$ vk-hub jobs\n%s", out)
	return nil
}

// makeService makes the image of the pipeline's service: an HTTP server.
func makeService(ctx context.Context, f *fleetup.Fleet) error {
	file := filepath.Join(f.Dir, "web.tar")
	err := testimage.Write(file, testimage.Spec{Files: map[string]string{"www/index.html": "hello from the service\n"},
		Config: v1.Config{Entrypoint: []string{"/bin/httpd"}, Cmd: []string{"-f", "-p", "80", "-h", "/www"}, Env: []string{"PATH=/bin"}}})
	if err != nil {
		return fmt.Errorf("making the service's image: %w", err)
	}
	if _, err := f.VKRun(ctx, "image", "inspect", service); err == nil {
		return nil
	}
	_, err = f.VKRun(ctx, "image", "import", file, strings.TrimPrefix(service, "local/"))
	return err
}

// service is the image of the pipeline's service. It is kept for the next run.
const service = "local/demo-web"

func makeProject(root string) (string, error) {
	r, err := gitsrv.InitBare(root, project+".git")
	if err != nil {
		return "", err
	}
	sha, err := r.Commit(gitsrv.Commit{Message: "say hello", Date: "2026-01-01T12:00:00Z", Files: []gitsrv.File{
		{Path: "greet.sh", Mode: "100755", Data: "#!/bin/bash\necho \"hello, ${1:-world}\"\n"},
		{Path: "README.md", Mode: "100644", Data: "# greeter\n"},
	}})
	if err != nil {
		return "", err
	}
	return sha, r.Ref("refs/heads/main", sha)
}

// pipeline is one run of the project's stages.
type pipeline struct {
	f          *fleetup.Fleet
	image, sha string
}

// stage is a job, and what is expected of it.
type stage struct {
	id          int64
	name, token string
	script      []string
	more        map[string]any // further fields of GitLab's answer
	state       string
	exit        int
}

func (p *pipeline) run(ctx context.Context) error {
	build := p.stage(1, "build", "mkdir out cache; echo kept > cache/from-build", "./greet.sh fleet | tee out/greeting.txt", "echo \"the token is $CI_JOB_TOKEN\"")
	build.more["cache"] = []map[string]any{{"key": "$CI_PROJECT_PATH", "paths": []string{"cache/"}, "policy": "pull-push", "when": "on_success"}}
	build.more["artifacts"] = []map[string]any{{"paths": []string{"out/"}, "when": "on_success", "artifact_type": "archive", "artifact_format": "zip"}}
	test := p.stage(2, "test", "cat out/greeting.txt", "cat cache/from-build", "exec 3<>/dev/tcp/web/80; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3 | grep hello")
	test.more["cache"] = []map[string]any{{"key": "$CI_PROJECT_PATH", "paths": []string{"cache/"}, "policy": "pull"}}
	test.more["services"] = []map[string]any{{"name": service, "alias": "web"}}
	test.more["dependencies"] = []map[string]any{{"id": build.id, "name": build.name, "token": build.token, "artifacts_file": map[string]any{"filename": "artifacts.zip", "size": 200}}}
	deploy := p.stage(3, "deploy", "echo deploying", "exit 7")
	deploy.state, deploy.exit = "failed", 7
	for _, s := range []stage{build, test, deploy} {
		if err := p.play(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (p *pipeline) stage(n int64, name string, script ...string) stage {
	var b [12]byte
	rand.Read(b[:])
	s := stage{id: time.Now().Unix()%1e6*10 + n, name: name, token: "glcbt-64_" + hex.EncodeToString(b[:]), script: script, more: map[string]any{}, state: "success"}
	p.f.Git.Allow(s.token)
	return s
}

func (p *pipeline) play(ctx context.Context, s stage) error {
	fmt.Printf("\n── job %d: %s ─────────────────────────────────────\n", s.id, s.name)
	begin := time.Now()
	if _, err := p.f.GitLab.AddJob(p.response(s)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	j, err := p.f.Ended(ctx, s.id)
	if err != nil {
		return fmt.Errorf("job %d (%s): %w", s.id, s.name, err)
	}
	show(os.Stdout, j.Trace)
	var end struct {
		State    string
		Reason   string `json:"failure_reason"`
		ExitCode int    `json:"exit_code"`
	}
	if err := json.Unmarshal(j.Final, &end); err != nil {
		return err
	}
	fmt.Printf("→ %s", end.State)
	if end.Reason != "" {
		fmt.Printf(" (%s, exit code %d)", end.Reason, end.ExitCode)
	}
	fmt.Printf(" after %.1f s, %d bytes of log\n", time.Since(begin).Seconds(), len(j.Trace))
	for _, a := range j.Artifacts {
		if err := showArtifact(a); err != nil {
			return err
		}
	}
	if bytes.Contains(j.Trace, []byte(s.token)) {
		return fmt.Errorf("the log of %s shows the job's token", s.name)
	}
	if end.State != s.state || end.ExitCode != s.exit {
		return fmt.Errorf("%s ended as %s with exit code %d, expected %s with %d", s.name, end.State, end.ExitCode, s.state, s.exit)
	}
	return nil
}

func showArtifact(a gitlabtest.Artifact) error {
	fmt.Printf("→ artifact %s, %d bytes:", a.Filename, len(a.Content))
	z, err := zip.NewReader(bytes.NewReader(a.Content), int64(len(a.Content)))
	if err != nil {
		return fmt.Errorf("artifact %s: %w", a.Filename, err)
	}
	for _, e := range z.File {
		fmt.Printf(" %s", e.Name)
	}
	fmt.Println()
	return nil
}

var (
	stamp  = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT[\d:.]+Z \d\d[OE]([ +])`)
	marker = regexp.MustCompile(`section_(start|end):\d+:[a-z_]+(\[[^\]]*\])?\r`)
)

// show prints a trace as GitLab's page does: without timestamps, which it has in
// a column of its own, and without the marks of sections.
func show(w io.Writer, trace []byte) {
	for line := range strings.Lines(string(trace)) {
		line = marker.ReplaceAllString(stamp.ReplaceAllString(line, ""), "")
		if t := strings.TrimRight(line, "\n"); strings.ReplaceAll(t, "\x1b[0K", "") != "" {
			fmt.Fprintf(w, "  %s\n", t)
		}
	}
}

// response is the job as GitLab gives it out.
func (p *pipeline) response(s stage) []byte {
	v := func(key, value string, masked bool) map[string]any {
		return map[string]any{"key": key, "value": value, "public": !masked, "masked": masked}
	}
	r := map[string]any{
		"id": s.id, "token": s.token, "allow_git_fetch": true,
		"job_info": map[string]any{"id": s.id, "name": s.name, "stage": s.name, "pipeline_id": 500, "project_id": projectID, "project_name": "greeter", "project_full_path": project,
			"namespace_id": 9, "root_namespace_id": 9, "user_id": 1},
		"git_info": map[string]any{"repo_url": strings.Replace(p.f.URL, "://", "://gitlab-ci-token:"+s.token+"@", 1) + "/" + project + ".git", "repo_object_format": "sha1", "ref": "main",
			"sha": p.sha, "before_sha": strings.Repeat("0", 40), "ref_type": "branch", "refspecs": []string{"+refs/heads/main:refs/remotes/origin/main"}, "depth": 20},
		"runner_info": map[string]any{"timeout": 900},
		"variables": []any{v("CI", "true", false), v("GITLAB_CI", "true", false), v("CI_JOB_NAME", s.name, false), v("CI_JOB_TOKEN", s.token, true), v("CI_JOB_ID", fmt.Sprint(s.id), false),
			v("CI_SERVER_URL", p.f.URL, false), v("CI_PROJECT_PATH", project, false), v("CI_COMMIT_SHA", p.sha, false), v("CI_SERVER_VERSION", "19.4.0", false)},
		"steps":    []any{map[string]any{"name": "script", "script": s.script, "timeout": 900, "when": "on_success"}},
		"image":    map[string]any{"name": p.image},
		"features": map[string]any{"trace_sections": true, "failure_reasons": []string{"unknown_failure", "runner_system_failure", "image_pull_failure"}},
	}
	for k, x := range s.more {
		r[k] = x
	}
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // plain data
	}
	return b
}
