// Demo runs one CI job through virtkit's custom executor as gitlab-runner
// would: it serves a small C project over Git, boots a guest, clones, builds
// and tests the project in it, and prints the trace as GitLab would show it,
// with the seconds of each part.
//
//	go run ./e2e/cmd/demo         a job that passes
//	go run ./e2e/cmd/demo -fail   the same with a bug in the project
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"virtkit/core/execdrv/runnerside"
	"virtkit/core/fault"
	"virtkit/e2e/gitsrv"
)

func main() {
	fail := flag.Bool("fail", false, "put a bug into the project, so that its test fails")
	vk := flag.String("vk", "bin/vk", "the program to show")
	image := flag.String("image", "local/default", "the job's image; it needs bash, git, curl and dpkg-deb")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: unexpected argument %q\n", flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *vk, *image, *fail); err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		if h := fault.HintOf(err); h != "" {
			fmt.Fprintf(os.Stderr, "demo: hint: %s\n", h)
		}
		stop()
		os.Exit(1)
	}
}

// job is what the demo's parts share.
type job struct {
	vk, image  string
	dir        string // temporary
	url        string // of the server, the same on the host and in the guest
	token      string
	sha, title string
	port       int
}

func run(ctx context.Context, vk, image string, fail bool) error {
	j := &job{image: image, title: "count the words"}
	var err error
	if j.vk, err = filepath.Abs(vk); err != nil {
		return err
	}
	if _, err := os.Stat(j.vk); err != nil {
		return fault.New(fault.NotFound, "the program to show").Because(err).Hint("make build, or give -vk FILE")
	}
	if j.dir, err = os.MkdirTemp("", "vk-demo-"); err != nil {
		return err
	}
	defer os.RemoveAll(j.dir)
	var b [12]byte
	rand.Read(b[:])
	j.token = "glcbt-" + hex.EncodeToString(b[:])
	if err := j.serve(ctx, fail); err != nil {
		return err
	}
	return j.play(ctx, fail)
}

// serve starts what a GitLab would be: the project's repository, and beside it
// the compiler that the job installs.
func (j *job) serve(ctx context.Context, fail bool) error {
	repos := filepath.Join(j.dir, "repos")
	srv, err := gitsrv.New(repos)
	if err != nil {
		return err
	}
	if j.sha, err = makeProject(repos, fail); err != nil {
		return err
	}
	srv.Allow(j.token)
	tools := filepath.Join(j.dir, "toolchain")
	fmt.Println("fetching a small C compiler for the job from the host's Debian archive…")
	if err := fetchToolchain(ctx, tools); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	j.port = l.Addr().(*net.TCPAddr).Port
	j.url = "http://127.0.0.1:" + strconv.Itoa(j.port)
	mux := http.NewServeMux()
	mux.Handle("/toolchain/", http.StripPrefix("/toolchain/", http.FileServer(http.Dir(tools))))
	mux.Handle("/", srv)
	hs := &http.Server{Handler: mux, ReadHeaderTimeout: 30 * time.Second}
	go func() {
		if err := hs.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			fmt.Fprintf(os.Stderr, "demo: server: %v\n", err)
		}
	}()
	context.AfterFunc(ctx, func() { hs.Close() })
	return nil
}

// toolchain are Debian's packages that make a C compiler: tcc is one of 200 kB.
var toolchain = []string{"tcc", "libc6-dev", "linux-libc-dev", "make"}

func fetchToolchain(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	args := append([]string{"-q", "-o", "APT::Sandbox::User=", "download"}, toolchain...)
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fault.Newf(fault.Unavailable, "apt-get download %s: %s", strings.Join(toolchain, " "), strings.TrimSpace(string(out))).Because(err).
			Hint("run apt-get update as root, then make demo again")
	}
	return packToolchain(ctx, dir)
}

// notNeeded is what of those packages a small C program does without.
var notNeeded = []string{"usr/share", "usr/include/drm", "usr/include/rdma", "usr/include/sound", "usr/include/xen", "usr/include/video",
	"usr/include/mtd", "usr/include/misc", "usr/include/scsi", "usr/include/linux/netfilter*", "libc.a", "libm*.a", "libmvec.a", "libnsl.a", "libresolv.a"}

// packToolchain makes one archive of the packages, because unpacking xz takes
// an emulated guest longer than all the rest of the job.
func packToolchain(ctx context.Context, dir string) error {
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(debs) != len(toolchain) {
		return fmt.Errorf("apt-get download left %d packages, expected %d", len(debs), len(toolchain))
	}
	tree := filepath.Join(dir, "tree")
	for _, d := range debs {
		if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", d, tree).CombinedOutput(); err != nil {
			return fmt.Errorf("dpkg-deb -x %s: %w: %s", filepath.Base(d), err, out)
		}
	}
	args := []string{"-C", tree, "--owner=0", "--group=0", "-cf", filepath.Join(dir, archive)}
	for _, p := range notNeeded {
		args = append(args, "--exclude="+p)
	}
	if out, err := exec.CommandContext(ctx, "tar", append(args, "usr")...).CombinedOutput(); err != nil {
		return fmt.Errorf("packing the compiler: %w: %s", err, out)
	}
	return nil
}

// archive is the compiler as the job fetches it.
const archive = "tcc.tar"

// play runs the job and shows it.
func (j *job) play(ctx context.Context, fail bool) error {
	conf := filepath.Join(j.dir, "config.toml")
	toml := fmt.Sprintf("[net]\nhost_loopback = [%d]\n\n[executor.vm]\ncpus = 2\nmem = \"1G\"\n", j.port)
	if err := os.WriteFile(conf, []byte(toml), 0o600); err != nil {
		return err
	}
	argv := func(word string) []string { return []string{j.vk, "gitlab", word} }
	d := runnerside.Driver{Config: argv("config"), Prepare: argv("prepare"), Run: argv("run"), Cleanup: argv("cleanup"),
		Env: append(os.Environ(), "VIRTKIT_CONFIG="+conf), TmpRoot: j.dir}
	id := time.Now().UnixNano() % 1e9
	vars := j.variables(id)
	response, err := json.Marshal(map[string]any{"id": id, "token": j.token, "job_info": map[string]any{"name": "build and test", "project_full_path": project},
		"image": map[string]any{"name": j.image}, "runner_info": map[string]any{"timeout": 3600}})
	if err != nil {
		return err
	}
	s, err := d.Open(vars, response)
	if err != nil {
		return err
	}
	defer s.Close()
	t := newTrace(os.Stdout, j.token)
	s.On = t.output
	t.heading("Running with virtkit's own driver of the custom executor contract")
	res, err := s.RunJob(ctx, j.stages(vars), nil)
	if err != nil {
		return err
	}
	t.end(res)
	want := "success"
	if fail {
		want = "failed"
	}
	if res.Verdict.State != want {
		return fmt.Errorf("the job ended as %s (%s), expected %s", res.Verdict.State, res.Verdict.Text, want)
	}
	return nil
}

func (j *job) variables(id int64) map[string]string {
	v := map[string]string{
		"CI": "true", "GITLAB_CI": "true", "CI_SERVER": "yes", "CI_SERVER_URL": j.url,
		"CI_JOB_ID": strconv.FormatInt(id, 10), "CI_JOB_NAME": "build and test", "CI_JOB_STAGE": "test", "CI_JOB_TIMEOUT": "3600",
		"CI_PROJECT_PATH": project, "CI_PROJECT_NAME": "wordcount", "CI_COMMIT_SHA": j.sha, "CI_COMMIT_SHORT_SHA": j.sha[:8],
		"CI_COMMIT_REF_NAME": "main", "CI_COMMIT_TITLE": j.title, "CI_JOB_TOKEN": j.token, "CI_JOB_IMAGE": j.image,
		"CI_BUILDS_DIR": "/builds", "CI_PROJECT_DIR": "/builds/" + project, "CI_CONCURRENT_ID": "0",
	}
	return v
}
