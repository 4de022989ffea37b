package artifact_test

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/cijob"
	"virtkit/core/cijob/artifact"
	"virtkit/core/cijob/transfer/transfertest"
	"virtkit/core/fleet/job"
	"virtkit/e2e/gitlabtest"
)

type rig struct {
	t      *testing.T
	gitlab *gitlabtest.Server
	url    string
	tr     cijob.Transfer
	trace  *transfertest.Trace
	client *artifact.Client
	waits  int
}

func newRig(t *testing.T, rules ...gitlabtest.Rule) *rig {
	r := &rig{t: t, gitlab: gitlabtest.New()}
	srv := httptest.NewServer(r.gitlab)
	t.Cleanup(srv.Close)
	r.url = srv.URL
	r.tr, r.trace = transfertest.New(t, srv.URL, map[string]string{"CI_JOB_NAME": "art", "DIR": "out"})
	if _, err := r.gitlab.AddJob([]byte(`{"id":1046,"token":"glcbt-64_jobtoken1046ABCDEFGHIJ"}`)); err != nil {
		t.Fatal(err)
	}
	r.gitlab.Misbehave(rules...)
	r.client = &artifact.Client{Agent: "vk/test", Sleep: func(context.Context, time.Duration) error { r.waits++; return nil }}
	return r
}

func (r *rig) upload(a job.Artifact) (string, error) {
	return r.client.Upload(r.t.Context(), r.tr, a)
}

// lines are the trace's with what varies taken out.
func (r *rig) lines() []string {
	vary := regexp.MustCompile(`(correlation_id(?:\x1b\[0;m)?=)[^ ]+|(duration\x1b\[0;m=)[^ ]+`)
	var out []string
	for _, l := range r.trace.Lines() {
		l = strings.ReplaceAll(l, r.url, "http://127.0.0.1:8929")
		l = strings.ReplaceAll(l, r.tr.Project, "/builds/group/project")
		out = append(out, vary.ReplaceAllString(l, "${1}${2}X"))
	}
	return out
}

func (r *rig) want(lines ...string) {
	r.t.Helper()
	if d := cmp.Diff(lines, r.lines()); d != "" {
		r.t.Error(d)
	}
}

const (
	found   = "out/one.txt: found 1 matching artifact files and directories\x1b[0;m "
	created = "Uploading artifacts as \"archive\" to coordinator... 201 Created\x1b[0;m  correlation_id\x1b[0;m=X id\x1b[0;m=1046 status\x1b[0;m=201 token\x1b[0;m=64_jobtok"
	waiting = "Waiting before making the next call               \x1b[0;m  context\x1b[0;m=ratelimit-requester-gitlab-request duration\x1b[0;m=X method\x1b[0;m=POST url\x1b[0;m=http://127.0.0.1:8929/api/v4/jobs/1046/artifacts?artifact_format=zip&artifact_type=archive"
)

var one = job.Artifact{Paths: []string{"$DIR/one.txt"}, When: job.OnSuccess, Type: "archive", Format: job.Zip}

// TestUpload: the lines of the recordings, and the requests.
func TestUpload(t *testing.T) {
	r := newRig(t)
	transfertest.File(t, r.tr, "out/one.txt", "one\n")
	a := one
	a.Name, a.ExpireIn = "art-$CI_JOB_NAME", "1 week"
	if outcome, err := r.upload(a); outcome != job.Uploaded || err != nil {
		t.Fatal(outcome, err)
	}
	r.want(found, created)
	j, _ := r.gitlab.Job(1046)
	if len(j.Artifacts) != 1 || j.Artifacts[0].Filename != "art-art.zip" || len(j.Artifacts[0].Content) == 0 {
		t.Fatalf("%+v", j.Artifacts)
	}
	req := r.gitlab.Requests()[0]
	if req.Target != "/api/v4/jobs/1046/artifacts?artifact_format=zip&artifact_type=archive&expire_in=1+week" {
		t.Error(req.Target)
	}
	if got := j.Artifacts[0].Header["Content-Type"][0]; got != "application/octet-stream" {
		t.Error(got)
	}
	// None of the three named: the target still ends in a question mark.
	a = one
	a.Type = ""
	r.upload(a)
	if req := r.gitlab.Requests()[1]; req.Target != "/api/v4/jobs/1046/artifacts?" {
		t.Error(req.Target)
	}
	if l := r.lines(); !strings.HasPrefix(l[len(l)-1], "Uploading artifacts to coordinator... 201 Created \x1b[0;m  ") {
		t.Errorf("%q", l[len(l)-1])
	}
}

func TestFormatsAreNamed(t *testing.T) {
	for format, name := range map[job.Format]string{
		job.Zip: "r.zip", job.ZipZstd: "r.zip", job.TarZstd: "r.tar.zst", job.Gzip: "r.gz", job.Raw: "r",
	} {
		r := newRig(t)
		transfertest.File(t, r.tr, "out/one.txt", "one\n")
		a := one
		a.Name, a.Format, a.Type = "r", format, "junit"
		if outcome, err := r.upload(a); outcome != job.Uploaded || err != nil {
			t.Fatal(format, outcome, err)
		}
		if j, _ := r.gitlab.Job(1046); j.Artifacts[0].Filename != name {
			t.Errorf("%s: %q", format, j.Artifacts[0].Filename)
		}
	}
}

// TestUploadFails: what is final, what is tried again, how often, and the words.
func TestUploadFails(t *testing.T) {
	fail := func(status int, word string) string {
		return fmt.Sprintf("\x1b[31;1mERROR: Uploading artifacts as \"archive\" to coordinator... POST http://127.0.0.1:8929/api/v4/jobs/1046/artifacts: %s\x1b[0;m  \x1b[31;1mcorrelation_id\x1b[0;m=X \x1b[31;1mid\x1b[0;m=1046 \x1b[31;1mstatus\x1b[0;m=%d \x1b[31;1mtoken\x1b[0;m=64_jobtok", word, status)
	}
	for _, tt := range []struct {
		rule    gitlabtest.Rule
		outcome string
		tries   int
		lines   []string
	}{
		{gitlabtest.Rule{On: "upload", Status: 413}, job.TooLarge, 1, []string{found, fail(413, "413 Request Entity Too Large (413 from rule)"), "\x1b[31;1mFATAL: too large                                  \x1b[0;m "}},
		{gitlabtest.Rule{On: "upload", Status: 403}, job.Failed, 1, []string{found, fail(403, "403 Forbidden (403 from rule)"), "\x1b[31;1mFATAL: permission denied                          \x1b[0;m "}},
		{gitlabtest.Rule{On: "upload", To: 2, Status: 503}, job.Uploaded, 3, []string{found, waiting, waiting, created}},
		{gitlabtest.Rule{On: "upload", Status: 503}, job.Failed, 30, nil},
		{gitlabtest.Rule{On: "upload", Status: 500}, job.Failed, 15, nil},
		{gitlabtest.Rule{On: "upload", Status: 400}, job.Failed, 3, nil},
	} {
		r := newRig(t, tt.rule)
		transfertest.File(t, r.tr, "out/one.txt", "one\n")
		outcome, err := r.upload(one)
		if outcome != tt.outcome || (err == nil) != (outcome == job.Uploaded) {
			t.Errorf("%d: %s, %v", tt.rule.Status, outcome, err)
		}
		if n := len(r.gitlab.Requests()); n != tt.tries {
			t.Errorf("%d: %d requests, want %d", tt.rule.Status, n, tt.tries)
		}
		if tt.lines != nil {
			r.want(tt.lines...)
		}
	}
}

func TestNothingToUpload(t *testing.T) {
	r := newRig(t)
	a := one
	a.Paths = []string{"nothing/*", "none.txt"}
	if outcome, err := r.upload(a); outcome != job.Skipped || err != nil {
		t.Error(outcome, err)
	}
	missing := func(p string) string {
		return "\x1b[0;33mWARNING: " + p + ": no matching files. Ensure that the artifact path is relative to the working directory (/builds/group/project)\x1b[0;m "
	}
	r.want(missing("nothing/*"), missing("none.txt"), "\x1b[31;1mERROR: No files to upload                         \x1b[0;m ")
	if len(r.gitlab.Requests()) != 0 {
		t.Error("something was uploaded")
	}
}

// TestDownload: what was uploaded comes back; a second try does not go direct.
func TestDownload(t *testing.T) {
	r := newRig(t, gitlabtest.Rule{On: "download", Nth: 1, Status: 502})
	transfertest.File(t, r.tr, "out/one.txt", "one\n")
	if _, err := r.upload(one); err != nil {
		t.Fatal(err)
	}
	into := t.TempDir()
	r.tr.Project = into
	dep := job.Dependency{ID: 1046, Token: "glcbt-64_jobtoken1046ABCDEFGHIJ", Name: "build", Filename: "artifacts.zip"}
	if err := r.client.Download(t.Context(), r.tr, dep, true); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(into, "out/one.txt")); string(b) != "one\n" || err != nil {
		t.Error(string(b), err)
	}
	var targets []string
	for _, q := range r.gitlab.Requests()[1:] {
		targets = append(targets, q.Target)
	}
	if d := cmp.Diff([]string{"/api/v4/jobs/1046/artifacts?direct_download=true", "/api/v4/jobs/1046/artifacts?"}, targets); d != "" {
		t.Error(d)
	}
	l := r.lines()
	if want := "Downloading artifacts from coordinator... ok      \x1b[0;m  correlation_id\x1b[0;m=X host\x1b[0;m=" + strings.TrimPrefix(r.tr.Job.ServerURL, "http://") + " id\x1b[0;m=1046 status\x1b[0;m=200 token\x1b[0;m=64_jobtok"; l[len(l)-1] != want {
		t.Errorf("%q", l[len(l)-1])
	}
}

func TestDownloadMissing(t *testing.T) {
	r := newRig(t)
	dep := job.Dependency{ID: 1046, Token: "glcbt-64_jobtoken1046ABCDEFGHIJ"}
	if err := r.client.Download(t.Context(), r.tr, dep, true); err == nil {
		t.Error("no error")
	}
	r.want("\x1b[31;1mERROR: Downloading artifacts from coordinator... not found\x1b[0;m  \x1b[31;1mcorrelation_id\x1b[0;m=X \x1b[31;1mid\x1b[0;m=1046 \x1b[31;1mstatus\x1b[0;m=404 \x1b[31;1mtoken\x1b[0;m=64_jobtok",
		"\x1b[31;1mFATAL: file does not exist                        \x1b[0;m ")
	if n := len(r.gitlab.Requests()); n != 1 {
		t.Errorf("%d requests", n)
	}
}

// TestRedirects: the token stays with GitLab's own origin, and https does not
// become http.
func TestRedirects(t *testing.T) {
	var got []string
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		got = append(got, q.Method+" "+q.URL.RequestURI()+" token="+q.Header.Get("Job-Token"))
		w.WriteHeader(http.StatusCreated)
	}))
	defer store.Close()
	redirect := func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/moved" {
			got = append(got, q.Method+" /moved token="+q.Header.Get("Job-Token"))
			w.WriteHeader(http.StatusCreated)
			return
		}
		to := store.URL + "/bucket?signature=secret"
		if strings.Contains(q.URL.RawQuery, "artifact_type=own") {
			to = "/moved"
		}
		http.Redirect(w, q, to, http.StatusTemporaryRedirect)
	}
	plain, secure := httptest.NewServer(http.HandlerFunc(redirect)), httptest.NewTLSServer(http.HandlerFunc(redirect))
	defer plain.Close()
	defer secure.Close()
	r := newRig(t)
	transfertest.File(t, r.tr, "out/one.txt", "one\n")
	r.tr.Job.ServerURL = plain.URL
	if outcome, err := r.upload(one); outcome != job.Uploaded || err != nil {
		t.Error(outcome, err)
	}
	own := one
	own.Type = "own"
	if outcome, err := r.upload(own); outcome != job.Uploaded || err != nil {
		t.Error(outcome, err)
	}
	if d := cmp.Diff([]string{"POST /bucket?signature=secret token=", "POST /moved token=" + r.tr.Job.Token}, got); d != "" {
		t.Error(d)
	}
	got = nil
	r.tr.Job.ServerURL = secure.URL
	r.tr.Job.ServerCAPEM = certOf(secure)
	if outcome, err := r.upload(one); outcome != job.Failed || err == nil || !strings.Contains(err.Error(), "refused") {
		t.Error(outcome, err)
	}
	if len(got) != 0 {
		t.Errorf("the other server was asked: %v", got)
	}
	if bytes.Contains([]byte(strings.Join(r.lines(), "\n")), []byte("secret")) {
		t.Error("a signature is in the trace")
	}
	// Without its certificate nothing is said to it.
	r.tr.Job.ServerCAPEM = ""
	if outcome, err := r.upload(one); outcome != job.Failed || err == nil {
		t.Error(outcome, err)
	}
}

func certOf(s *httptest.Server) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
}
