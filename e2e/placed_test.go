package e2e_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/nodejobs"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/host"
	"virtkit/e2e/memreg"
	"virtkit/ledger"
)

// placedTime is how long a placed job may take on a busy machine.
const placedTime = 15 * time.Minute

// placed is a node's jobs with a hub that the test plays.
type placed struct {
	t        *testing.T
	h        *host.Host
	jobs     *nodejobs.Jobs
	journal  *jobdir.Store
	s        node.JobSession
	gitlab   *gitlabtest.Server
	url      string
	image    string
	registry string
	layer    string // of the hub's egress rules, for the jobs to be started; "" = none
}

func newPlaced(t *testing.T) *placed {
	guests(t)
	reg := memreg.Start(t).Addr
	h, err := host.New(root, filepath.Join(world.dir, "placed-"+t.Name()), config+"\n[registry]\nrepo = \""+reg+"/team\"\n")
	if err != nil {
		t.Fatal(err)
	}
	p := &placed{t: t, h: h, registry: reg, gitlab: gitlabtest.New(), image: busybox(t, h)}
	srv := httptest.NewServer(p.gitlab)
	t.Cleanup(srv.Close)
	p.url = srv.URL
	dirs, err := ledger.Open(h.State)
	if err != nil {
		t.Fatal(err)
	}
	gate, err := dirs.Admissions(ledger.AdmitOptions{Limits: admit.Limits{MemMiB: 2048}})
	if err != nil {
		t.Fatal(err)
	}
	if p.journal, err = jobdir.Open(h.State); err != nil {
		t.Fatal(err)
	}
	l := logx.ForTest(t)
	p.jobs, err = nodejobs.New(nodejobs.Config{Journal: p.journal, Ledger: gate, Log: l, Drivers: &nodejobs.Processes{
		Argv: []string{h.VK, "node", "job"}, CleanupArgv: []string{h.VK, "node", "job", "--cleanup"}, Env: h.Env(), Log: l,
	}})
	if err != nil {
		t.Fatal(err)
	}
	p.jobs.Steer(node.State{Node: wire.Ready})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); p.jobs.Run(ctx) }()
	t.Cleanup(func() { stop(); <-done })
	p.s = p.jobs.Open()
	return p
}

// spec is a job without sources.
func (p *placed) spec(id int64, script ...string) *job.CiJob {
	token := "glcbt-64_token" + strconv.FormatInt(id, 10) + "ABCDEFGHIJ"
	if _, err := p.gitlab.AddJob([]byte(`{"id":` + strconv.FormatInt(id, 10) + `,"token":"` + token + `"}`)); err != nil {
		p.t.Fatal(err)
	}
	return &job.CiJob{
		Kind: job.KindGitLabCI, ServerURL: p.url, Token: token, TimeoutSecs: int64(placedTime / time.Second),
		Job: job.Info{ID: id, Name: "build", Stage: "test", ProjectID: 12, ProjectName: "project", ProjectPath: "group/project"},
		Variables: []job.Variable{
			{Key: "MICROVM_IMAGE", Value: p.image, Public: true}, {Key: "GIT_STRATEGY", Value: "none", Public: true},
			{Key: "CI_JOB_ID", Value: strconv.FormatInt(id, 10), Public: true}, {Key: "CI_JOB_NAME", Value: "build", Public: true}, {Key: "CI_JOB_STAGE", Value: "test", Public: true},
			{Key: "CI_PROJECT_ID", Value: "12", Public: true}, {Key: "CI_PROJECT_NAME", Value: "project", Public: true}, {Key: "CI_PROJECT_PATH", Value: "group/project", Public: true},
			{Key: "CI_SERVER_URL", Value: p.url, Public: true}, {Key: "CI_PIPELINE_ID", Value: "1", Public: true},
			{Key: "SECRET", Value: "s3cr3t-of-the-job", Masked: true},
		},
		Steps: []job.Step{{Name: job.StepScript, Script: script, When: job.OnSuccess}},
	}
}

// start reserves and starts a job.
func (p *placed) start(j *job.CiJob) string {
	p.t.Helper()
	b, err := j.Encode()
	if err != nil {
		p.t.Fatal(err)
	}
	env := wire.Envelope{Memory: 512 << 20, CPUs: 1}
	res, id := wire.NewID(), wire.NewID()
	if a := p.s.Handle(p.t.Context(), &wire.Offer{Reservation: res, Envelope: env, LeaseSecs: 60}).(*wire.OfferReply).Reply; a.State != "accepted" {
		p.t.Fatalf("%+v", a)
	}
	if st := p.s.Handle(p.t.Context(), &wire.Start{Job: id, Reservation: res, Envelope: env, Spec: b, Layer: []byte(p.layer)}).(*wire.JobState).State; st.State != "accepted" {
		p.t.Fatalf("%+v", st)
	}
	return id
}

// follow stores a job's output until ends says so or its result has come.
func (p *placed) follow(id string, ends func(output string) bool) (output string, res *wire.JobResult) {
	p.t.Helper()
	limit := time.After(placedTime)
	for {
		switch m := p.s.Next().(type) {
		case *wire.Output:
			b, err := base64.StdEncoding.DecodeString(m.Data)
			if err != nil || m.Offset > int64(len(output)) {
				p.t.Fatalf("a chunk at %d with %d bytes stored, %v", m.Offset, len(output), err)
			}
			output = output[:m.Offset] + string(b)
			p.s.Handle(p.t.Context(), &wire.OutputAck{Job: id, Offset: int64(len(output))})
			if ends != nil && ends(output) {
				return output, nil
			}
		case *wire.Result:
			p.s.Handle(p.t.Context(), &wire.JobRecorded{Job: id})
			return output, &m.Result
		case nil:
			select {
			case <-p.s.Ready():
			case <-limit:
				p.t.Fatalf("no end within %v:\n%s", placedTime, output)
			}
		}
	}
}

// log is what the driver says, for a job that fails.
func (p *placed) log(id string) string {
	b, _ := os.ReadFile(filepath.Join(p.journal.Root(), id, "driver.log"))
	return string(b)
}

// over fails when anything of the jobs is left.
func (p *placed) over() {
	p.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		ids, err := p.journal.List()
		if err == nil && len(ids) == 0 {
			break
		}
		if time.Now().After(end) {
			p.t.Fatalf("the journal holds %v, %v", ids, err)
		}
	}
	nothingLeft(p.t, p.h)
}

// TestPlacedJobs: two jobs as a hub places them, with artifacts from one to the
// other and a cache, in guests of their own.
func TestPlacedJobs(t *testing.T) {
	p := newPlaced(t)
	cache := []job.Cache{{Key: "k", Policy: job.PullPush, When: job.OnSuccess, Paths: []string{"c/"}}}
	first := p.spec(101, "mkdir out c", "echo one > out/one.txt; ln -s one.txt out/link; echo kept > c/new", `echo "the secret is $SECRET"`)
	first.Caches = cache
	first.Artifacts = []job.Artifact{
		{Name: "art", Paths: []string{"out"}, Exclude: []string{"out/none"}, When: job.OnSuccess, Type: "archive", Format: job.TarZstd},
		{Name: "junit.xml", Paths: []string{"out/one.txt"}, When: job.Always, Type: "junit", Format: job.Gzip},
		{Name: "z", Paths: []string{"out"}, When: job.Always, Type: "metadata", Format: job.ZipZstd},
	}
	id := p.start(first)
	out, res := p.follow(id, nil)
	if res.Failure != "" || res.OutputLen != int64(len(out)) {
		t.Fatalf("%+v\n%s\n%s", res, out, p.log(id))
	}
	for _, want := range []string{"the secret is [MASKED]", "WARNING: Cache file does not exist", "Created cache", "out: found 3 matching", `Uploading artifacts as "archive" to coordinator... 201 Created`, "Job succeeded"} {
		if !strings.Contains(out, want) {
			t.Errorf("the trace lacks %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "s3cr3t") {
		t.Error("a secret is in the output")
	}
	want := []wire.ArtifactResult{{Name: "art", Outcome: job.Uploaded}, {Name: "junit.xml", Outcome: job.Uploaded}, {Name: "z", Outcome: job.Uploaded}}
	if !slices.Equal(res.Artifacts, want) {
		t.Errorf("artifacts: %+v", res.Artifacts)
	}
	if g, _ := p.gitlab.Job(101); len(g.Artifacts) != 3 || g.Artifacts[0].Filename != "art.tar.zst" || g.Artifacts[1].Filename != "junit.xml.gz" || g.Artifacts[2].Filename != "z.zip" {
		t.Errorf("GitLab has %+v", g.Artifacts)
	}

	second := p.spec(102, `test "$(cat out/link c/new | tr '\n' ' ')" = "one kept "`, "exit 7")
	second.Caches = cache
	second.Dependencies = []job.Dependency{{ID: 101, Token: first.Token, Name: "build", Filename: "art.tar.zst"}}
	id = p.start(second)
	out, res = p.follow(id, nil)
	if res.Failure != string(job.Script) || res.ExitCode == nil || *res.ExitCode != 7 {
		t.Errorf("%+v\n%s\n%s", res, out, p.log(id))
	}
	if !strings.Contains(out, "Successfully extracted cache") || !strings.Contains(out, "Downloading artifacts from coordinator... ok") {
		t.Errorf("the trace:\n%s", out)
	}
	p.over()
}

// TestPlacedUnderRules: a hub's rules hold a placed job, and its report says
// so; an image that is not there is told apart from the host's failures.
func TestPlacedUnderRules(t *testing.T) {
	p := newPlaced(t)
	p.layer = `{"rules":["wab"],"run":{"names":["allowed.example"],"ips":[]},"build":{}}`
	id := p.start(p.spec(110, "/bin/busybox nslookup refused.example || true"))
	out, res := p.follow(id, nil)
	if res.Failure != "" {
		t.Fatalf("%+v\n%s\n%s", res, out, p.log(id))
	}
	if !strings.Contains(out, "virtkit: egress under the hub's rules: wab") {
		t.Errorf("the trace does not name the rules:\n%s", out)
	}
	var r policy.Report
	if err := json.Unmarshal(res.Egress, &r); err != nil {
		t.Fatalf("%q: %v", res.Egress, err)
	}
	refused := false
	for _, e := range r.Blocked {
		refused = refused || e.Destination.Domain == "refused.example" && e.Layer == policy.LayerHub && e.Protocol == policy.DNS && strings.HasPrefix(e.Stage, "step_")
	}
	if !refused || len(r.Rules) != 1 || r.Run == nil || r.Run.Coverage != policy.Complete {
		t.Errorf("the report is %s\n%s", res.Egress, out)
	}
	p.layer = ""
	missing := p.spec(111, "true")
	missing.Variables[0].Value = p.registry + "/team/none:1"
	id = p.start(missing)
	if out, res = p.follow(id, nil); res.Failure != string(job.ImagePull) {
		t.Errorf("%+v\n%s\n%s", res, out, p.log(id))
	}
	p.over()
}

// TestPlacedDriverKilled: the driver of a job is killed while its guest runs.
func TestPlacedDriverKilled(t *testing.T) {
	p := newPlaced(t)
	id := p.start(p.spec(103, "echo it runs; sleep 3600"))
	out, res := p.follow(id, func(out string) bool { return strings.Contains(out, "01O it runs") })
	if res != nil {
		t.Fatalf("%+v\n%s\n%s", res, out, p.log(id))
	}
	pid := driverOf(t, filepath.Join(p.journal.Root(), id))
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, res := p.follow(id, nil); res.Failure != string(job.Interrupted) {
		t.Errorf("%+v", res)
	}
	p.over()
}

// driverOf finds the process that runs a job's directory.
func driverOf(t *testing.T, dir string) int {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		b, _ := os.ReadFile(f)
		if args := strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00"); len(args) >= 4 && args[1] == "node" && args[2] == "job" && args[len(args)-1] == dir {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			return pid
		}
	}
	t.Fatalf("no driver of %s", dir)
	return 0
}
