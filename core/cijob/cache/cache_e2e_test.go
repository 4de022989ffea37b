package cache_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/cijob/cache"
	"virtkit/core/cijob/transfer/transfertest"
	"virtkit/core/fleet/job"
	"virtkit/e2e/memreg"
	"virtkit/e2e/ociregistry"
)

// reference is Debian's docker-registry.
func reference(t *testing.T) string {
	if _, err := exec.LookPath(ociregistry.Program); err != nil {
		t.Skip("needs docker-registry: apt-get install docker-registry")
	}
	r, err := ociregistry.Start(t.Context(), "", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r.Addr
}

func TestRoundTrip(t *testing.T) {
	for name, start := range map[string]func(*testing.T) string{
		"in memory":       func(t *testing.T) string { return memreg.Start(t).Addr },
		"docker-registry": reference,
	} {
		t.Run(name, func(t *testing.T) {
			r := &cache.Registry{Repo: start(t) + "/team"}
			tr, trace := transfertest.New(t, "https://gitlab.example.com", nil)
			c := job.Cache{Key: "main/slash key", Paths: []string{"vendor/", "missing/"}, Policy: job.PullPush}
			transfertest.File(t, tr, "vendor/lib", strings.Repeat("a library\n", 10000))
			if err := r.Restore(t.Context(), tr, c); err != nil {
				t.Fatal(err)
			}
			if err := r.Save(t.Context(), tr, c); err != nil {
				t.Fatal(err)
			}
			ref, err := r.Ref(tr.Job, c.Key)
			if err != nil {
				t.Fatal(err)
			}
			var lines []string
			for _, l := range trace.Lines() {
				l, _, _ = strings.Cut(strings.ReplaceAll(strings.ReplaceAll(l, tr.Project, "/builds"), ref, "REF"), "  size")
				lines = append(lines, l)
			}
			want := []string{
				"\x1b[32;1mChecking cache for main/slash key...\x1b[0;m",
				"\x1b[0;33mWARNING: Cache file does not exist                \x1b[0;m ",
				"\x1b[0;33mFailed to extract cache\x1b[0;m",
				"\x1b[32;1mCreating cache main/slash key...\x1b[0;m",
				"vendor/: found 2 matching artifact files and directories\x1b[0;m ",
				"\x1b[0;33mWARNING: missing/: no matching files. Ensure that the artifact path is relative to the working directory (/builds)\x1b[0;m ",
				"Uploading cache to REF\x1b[0;m",
				"\x1b[32;1mCreated cache\x1b[0;m",
			}
			if d := cmp.Diff(want, lines); d != "" {
				t.Error(d)
			}
			// The next job, by a fallback key.
			tr2, trace2 := transfertest.New(t, "https://gitlab.example.com", nil)
			if err := r.Restore(t.Context(), tr2, job.Cache{Key: "newkey", FallbackKeys: []string{"nope", c.Key}, Paths: c.Paths}); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(filepath.Join(tr2.Project, "vendor/lib")); len(b) != 100000 || err != nil {
				t.Error(len(b), err)
			}
			if l := trace2.Lines(); len(l) == 0 || l[len(l)-1] != "\x1b[32;1mSuccessfully extracted cache\x1b[0;m" {
				t.Errorf("%q", l)
			}
		})
	}
}

// TestApart: protection, projects and servers have caches of their own.
func TestApart(t *testing.T) {
	r := &cache.Registry{Repo: memreg.Start(t).Addr}
	c := job.Cache{Key: "k", Paths: []string{"c"}}
	tr, _ := transfertest.New(t, "https://gitlab.example.com", nil)
	transfertest.File(t, tr, "c/x", "x")
	if err := r.Save(t.Context(), tr, c); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*job.CiJob){
		"the same":        func(*job.CiJob) {},
		"protected":       func(j *job.CiJob) { j.Sources.Protected = true },
		"another project": func(j *job.CiJob) { j.Job.ProjectID = 13 },
		"another server":  func(j *job.CiJob) { j.ServerURL = "https://gitlab.example.org" },
		"another path":    func(j *job.CiJob) { j.ServerURL = "https://gitlab.example.com/gitlab" },
	} {
		tr, _ := transfertest.New(t, "https://gitlab.example.com", nil)
		change(tr.Job)
		if err := r.Restore(t.Context(), tr, c); err != nil {
			t.Fatal(err)
		}
		_, err := os.Stat(filepath.Join(tr.Project, "c/x"))
		if (err == nil) != (name == "the same") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRef(t *testing.T) {
	r := &cache.Registry{Repo: "registry.example.com/team/"}
	for server, repo := range map[string]string{
		"https://gitlab.example.com":              "registry.example.com/team/ci-cache/gitlab.example.com/12:",
		"https://GitLab.example.com:8443/Git_Lab": "registry.example.com/team/ci-cache/gitlab.example.com-8443/git-lab/12:",
		"http://[::1]:8929/a..b/-.-/":             "registry.example.com/team/ci-cache/1--8929/a.b/x/12:",
	} {
		ref, err := r.Ref(&job.CiJob{ServerURL: server, Job: job.Info{ProjectID: 12}}, "k")
		tag, ok := strings.CutPrefix(ref, repo)
		if err != nil || !ok || len(tag) != 64 {
			t.Errorf("%s: %s, %v", server, ref, err)
		}
	}
}

// TestUnchanged: the same files are not uploaded again.
func TestUnchanged(t *testing.T) {
	reg := memreg.Start(t)
	r := &cache.Registry{Repo: reg.Addr}
	tr, _ := transfertest.New(t, "https://gitlab.example.com", nil)
	transfertest.File(t, tr, "c/x", "x")
	c := job.Cache{Key: "k", Paths: []string{"c"}}
	uploads := func() (n int) {
		for _, a := range reg.Asked() {
			if strings.HasPrefix(a, "POST ") {
				n++
			}
		}
		return n
	}
	if err := r.Save(t.Context(), tr, c); err != nil {
		t.Fatal(err)
	}
	first := uploads()
	if err := r.Save(t.Context(), tr, c); err != nil {
		t.Fatal(err)
	}
	if n := uploads(); first == 0 || n != first {
		t.Errorf("%d uploads, then %d", first, n)
	}
}

// TestTrouble: what goes wrong is a warning; a registry that cannot be reached
// is worth another attempt, a cache that is damaged is not.
func TestTrouble(t *testing.T) {
	tr, trace := transfertest.New(t, "https://gitlab.example.com", nil)
	transfertest.File(t, tr, "c/x", "x")
	c := job.Cache{Key: "k", Paths: []string{"c"}}
	none := &cache.Registry{}
	if err := none.Restore(t.Context(), tr, c); err != nil {
		t.Errorf("without a registry: %v", err)
	}
	if l := strings.Join(trace.Lines(), "\n"); !strings.Contains(l, "no [registry] repo") {
		t.Error(l)
	}
	r := &cache.Registry{Repo: memreg.Start(t).Addr}
	if err := r.Save(t.Context(), tr, job.Cache{Key: "k", Paths: []string{"nothing"}}); err != nil {
		t.Error(err)
	}
	if err := r.Save(t.Context(), tr, c); err != nil {
		t.Fatal(err)
	}
	// A file in the place of a directory that is not empty.
	tr2, trace2 := transfertest.New(t, "https://gitlab.example.com", nil)
	transfertest.File(t, tr2, "c/x/y", "in the way")
	if err := r.Restore(t.Context(), tr2, c); err != nil {
		t.Errorf("what cannot be extracted: %v", err)
	}
	if l := trace2.Lines(); l[len(l)-1] != "\x1b[0;33mFailed to extract cache\x1b[0;m" {
		t.Errorf("%q", l)
	}
}
