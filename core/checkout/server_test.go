package checkout_test

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"virtkit/core/checkout"
)

const token = "glcbt-64_SecretOfThisTest"

// server is a repository behind http, as GitLab serves it to a job.
type server struct {
	t    *testing.T
	bare string // of the repository
	URL  string
	sent atomic.Int64 // bytes answered
	down atomic.Bool
	shut atomic.Pointer[string] // the path of a repository that the token may not read
}

func newServer(t *testing.T) *server {
	t.Helper()
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("needs git: apt-get install git")
	}
	root := t.TempDir()
	s := &server{t: t, bare: filepath.Join(root, "group", "project.git")}
	s.git("", "init", "-q", "--bare", "-b", "main", s.bare)
	h := &cgi.Handler{Path: git, Args: []string{"http-backend"}, Dir: root,
		Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_GLOBAL=/dev/null"}, InheritEnv: []string{"PATH"}}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, pass, _ := r.BasicAuth()
		switch {
		case s.down.Load():
			http.Error(w, "no", http.StatusServiceUnavailable)
		case s.shut.Load() != nil && strings.HasPrefix(r.URL.Path, *s.shut.Load()):
			http.Error(w, "not this one", http.StatusForbidden)
		case user != "gitlab-ci-token" || pass != token:
			w.Header().Set("WWW-Authenticate", `Basic realm="GitLab"`)
			http.Error(w, "HTTP Basic: Access denied", http.StatusUnauthorized)
		default:
			if p := r.Header.Get("Git-Protocol"); p != "" {
				g := *h
				g.Env = append(g.Env[:len(g.Env):len(g.Env)], "GIT_PROTOCOL="+p)
				g.ServeHTTP(&counted{w, &s.sent}, r)
				return
			}
			h.ServeHTTP(&counted{w, &s.sent}, r)
		}
	}))
	t.Cleanup(srv.Close)
	s.URL = srv.URL + "/group/project.git"
	return s
}

type counted struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (c *counted) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return c.ResponseWriter.Write(p)
}

// git runs git for the test, in dir.
func (s *server) git(dir string, args ...string) string {
	s.t.Helper()
	return runGit(s.t, dir, nil, args...)
}

func runGit(t *testing.T, dir string, stdin []byte, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=P", "GIT_AUTHOR_EMAIL=p@example.com", "GIT_COMMITTER_NAME=P", "GIT_COMMITTER_EMAIL=p@example.com"}
	cmd.Stdin = bytes.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// commit adds a commit with these files changed to main and returns it. A file
// whose content begins with "->" is a symlink.
func (s *server) commit(files map[string]string) string {
	s.t.Helper()
	var in bytes.Buffer
	fmt.Fprintf(&in, "commit refs/heads/main\ncommitter P <p@example.com> 1700000000 +0000\ndata 3\none\n")
	if out, err := exec.Command("git", "--git-dir="+s.bare, "rev-parse", "-q", "--verify", "refs/heads/main").Output(); err == nil {
		fmt.Fprintf(&in, "from %s\n", strings.TrimSpace(string(out)))
	}
	for name, data := range files {
		if data == "-" {
			fmt.Fprintf(&in, "D %s\n", cQuote(name))
		}
	}
	for name, data := range files {
		mode := "100644"
		if data == "-" {
			continue
		}
		if sha, ok := strings.CutPrefix(data, "@"); ok {
			fmt.Fprintf(&in, "M 160000 %s %s\n", sha, cQuote(name))
			continue
		}
		if to, ok := strings.CutPrefix(data, "->"); ok {
			mode, data = "120000", to
		} else if strings.HasPrefix(data, "#!") {
			mode = "100755"
		}
		fmt.Fprintf(&in, "M %s inline %s\ndata %d\n%s\n", mode, cQuote(name), len(data), data)
	}
	runGit(s.t, "", in.Bytes(), "--git-dir="+s.bare, "fast-import", "--quiet", "--force")
	sha := s.git("", "--git-dir="+s.bare, "rev-parse", "refs/heads/main")
	s.git("", "--git-dir="+s.bare, "update-ref", "refs/pipelines/500", sha)
	return sha
}

// cQuote quotes a path as fast-import reads it, whatever its bytes.
func cQuote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for i := range len(s) {
		fmt.Fprintf(&b, `\%03o`, s[i])
	}
	return b.String() + `"`
}

// job is what GitLab would ask for.
func (s *server) job(sha string) checkout.Job {
	return checkout.Job{
		Slot: "tok-0", Project: "7-project", URL: strings.Replace(s.URL, "://", "://gitlab-ci-token:"+token+"@", 1),
		SHA: sha, Ref: "main", Refspecs: []string{"+refs/pipelines/500:refs/pipelines/500", "+refs/heads/main:refs/remotes/origin/main"},
		Depth: 20, CleanFlags: checkout.DefaultCleanFlags, FetchFlags: checkout.DefaultFetchFlags, Dir: "/builds/group/project",
	}
}
