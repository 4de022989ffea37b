package fleet_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"virtkit/core/cijob/cache"
	"virtkit/core/fault"
	"virtkit/core/fleet/job"
	"virtkit/core/zst"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
	"virtkit/e2e/ociregistry"
	"virtkit/e2e/testimage"
)

// Exit statuses of a chaos job's own checks. No mishap makes the first two.
const (
	exitHalfCache = 99
	exitWrong     = 98 // checkout or artifacts
	exitNoService = 97
)

// cacheKeys is how many caches the pipelines share.
const cacheKeys = 3

const chaosService = "local/chaos-web"

// chaosRegistry is where the caches are: Debian's docker-registry, behind a
// proxy, so that it is at one address whenever it is started.
type chaosRegistry struct {
	t    *testing.T
	dir  string
	link *proxy
	srv  *ociregistry.Server
}

func newChaosRegistry(t *testing.T, dir string) *chaosRegistry {
	c := &chaosRegistry{t: t, dir: dir}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var err error
	c.srv, err = ociregistry.Start(t.Context(), "", dir)
	if fault.KindOf(err) == fault.NotFound {
		t.Skip("needs docker-registry: make setup-fleet")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.srv.Close() })
	c.link = newProxy(t, c.srv.Addr)
	return c
}

// restart kills it and starts it again.
func (c *chaosRegistry) restart(pause time.Duration) {
	c.srv.Close()
	time.Sleep(pause)
	srv, err := ociregistry.Start(c.t.Context(), "", c.dir)
	if err != nil {
		c.t.Errorf("starting the registry again: %v", err)
		return
	}
	c.srv = srv
	c.link.lead(srv.Addr)
}

// sources makes what jobs clone, and the image of their service.
func (c *chaos) sources(ctx context.Context) {
	c.f.Git.Allow("*")
	r, err := gitsrv.InitBare(c.f.Repos, "group/project.git")
	if err != nil {
		c.t.Fatal(err)
	}
	files := []gitsrv.File{{Path: "README.md", Mode: "100644", Data: "# chaos\n"}, {Path: "tool.sh", Mode: "100755", Data: "#!/bin/sh\necho tool\n"}}
	for i := range 60 {
		files = append(files, gitsrv.File{Path: fmt.Sprintf("src/%d/file%d.txt", i%7, i), Mode: "100644", Data: strings.Repeat(fmt.Sprintf("line of file %d\n", i), 1+i*40)})
	}
	if c.sha, err = r.Commit(gitsrv.Commit{Message: "all", Date: "2026-01-01T00:00:00Z", Files: files}); err == nil {
		err = r.Ref("refs/heads/main", c.sha)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	if c.cache == nil {
		return
	}
	file := filepath.Join(c.f.Dir, "web.tar")
	err = testimage.Write(file, testimage.Spec{Files: map[string]string{"www/index.html": "hello from the service\n"},
		Config: v1.Config{Entrypoint: []string{"/bin/httpd"}, Cmd: []string{"-f", "-p", "80", "-h", "/www"}, Env: []string{"PATH=/bin"}}})
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.f.VKRun(ctx, "image", "inspect", chaosService); err == nil {
		return
	}
	if _, err := c.f.VKRun(ctx, "image", "import", file, strings.TrimPrefix(chaosService, "local/")); err != nil {
		c.t.Fatal(err)
	}
}

// more is what a job has beside its lines.
type more struct {
	git       map[string]any
	variables []any
	script    []string
	fields    map[string]any
}

// checksSums is a shell command that ends a job where a directory is not as its
// list says.
func checksSums(dir string, exit int) string {
	return fmt.Sprintf("(cd %s && sha256sum --quiet -c sums) || exit %d", dir, exit)
}

// pipeline is a job's checkout, and its part in a pipeline: a build takes the
// cache, if there is one, looks whether it is whole, makes another, and leaves
// artifacts, which its test takes.
func (c *chaos) pipeline(r *rand.Rand, j *chaosJob) more {
	v := func(key, value string) any { return map[string]any{"key": key, "value": value, "public": true} }
	base := c.f.URL // cut with all of GitLab
	if r.IntN(2) == 0 {
		base = c.f.GitURL // cut alone
	}
	m := more{fields: map[string]any{}, git: map[string]any{"repo_url": base + "/group/project.git", "repo_object_format": "sha1", "ref": "main", "sha": c.sha,
		"before_sha": strings.Repeat("0", 40), "ref_type": "branch", "refspecs": []string{"+refs/heads/main:refs/remotes/origin/main"}, "depth": r.IntN(2) * 20}}
	if !j.clones {
		m.variables = append(m.variables, v("GIT_STRATEGY", "none"))
		return m
	}
	m.variables = append(m.variables, v("GIT_STRATEGY", []string{"clone", "fetch"}[r.IntN(2)]), v("GET_SOURCES_ATTEMPTS", fmt.Sprint(1+r.IntN(3))), v("ARTIFACT_DOWNLOAD_ATTEMPTS", fmt.Sprint(1+r.IntN(3))))
	if r.IntN(3) == 0 { // a host that fetches sources leaves those to the guest
		m.variables = append(m.variables, v("GIT_SUBMODULE_STRATEGY", "normal"), v("GIT_SUBMODULE_UPDATE_FLAGS", "--remote"))
	}
	m.script = append(m.script, fmt.Sprintf("test \"$(git rev-parse HEAD)\" = %s && git fsck --no-progress >/dev/null && git diff --quiet HEAD && test \"$(find src -type f | wc -l)\" = 60 || exit %d", c.sha, exitWrong))
	if j.stage == "" {
		return m
	}
	policy := map[string]string{"build": "pull-push", "test": "pull"}[j.stage]
	m.fields["cache"] = []map[string]any{{"key": fmt.Sprintf("deps-%d", r.IntN(cacheKeys)), "paths": []string{"deps/"}, "policy": policy, "when": "on_success"}}
	m.script = append(m.script, "if [ -d deps ]; then "+checksSums("deps", exitHalfCache)+"; echo the cache is whole; fi")
	if j.stage == "build" {
		m.script = append(m.script,
			fmt.Sprintf("mkdir -p deps out; head -c %d /dev/urandom > deps/blob; date > deps/date; ln -sf blob deps/link; (cd deps && sha256sum blob date > sums)", 1+r.IntN(3<<20)),
			fmt.Sprintf("echo build-%d > out/id; head -c %d /dev/urandom > out/data; (cd out && sha256sum id data > sums)", j.id, 1+r.IntN(400<<10)))
		m.fields["artifacts"] = []map[string]any{{"paths": []string{"out/"}, "when": "on_success", "artifact_type": "archive", "artifact_format": "zip"}}
		return m
	}
	m.fields["dependencies"] = []map[string]any{{"id": j.needs.id, "name": "build", "token": j.needs.token, "artifacts_file": map[string]any{"filename": "artifacts.zip", "size": 200}}}
	m.script = append(m.script, checksSums("out", exitWrong), fmt.Sprintf("test \"$(cat out/id)\" = build-%d || exit %d", j.needs.id, exitWrong), "echo the artifacts are right")
	if j.service {
		m.fields["services"] = []map[string]any{{"name": chaosService, "alias": "web"}}
		m.script = append(m.script, fmt.Sprintf("{ exec 3<>/dev/tcp/web/80 && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q hello <&3; } || exit %d", exitNoService))
	}
	return m
}

// checkouts looks at what the node's host has of the jobs' sources: no
// credential, and in all the jobs that came to their end some that began with it.
func (c *chaos) checkouts() {
	if !c.guests {
		return
	}
	onHost, inGuest := 0, 0
	for _, j := range c.jobs {
		got, _ := c.f.GitLab.Job(j.id)
		switch trace := string(got.Trace); {
		case strings.Contains(trace, " on the host in "):
			onHost++
		case strings.Contains(trace, "virtkit: the sources are cloned in the guest"):
			inGuest++
		}
	}
	c.t.Logf("sources: %d jobs had them from the host, %d cloned in the guest", onHost, inGuest)
	if onHost == 0 && inGuest > 0 {
		c.t.Error("no job had its sources from the host")
	}
	for _, dir := range []string{"checkouts", "mirrors"} {
		err := filepath.WalkDir(filepath.Join(c.state, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			for _, j := range c.jobs {
				if bytes.Contains(b, []byte(j.token)) || bytes.Contains(b, []byte(j.secret)) {
					c.t.Errorf("%s has a secret of job %d", path, j.id)
				}
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.t.Error(err)
		}
	}
}

// transfers says whether a job moves something that a mishap can keep it from.
func (j *chaosJob) transfers() bool { return j.clones }

// uncertain notes what jobs may not survive: gitlab-runner's rules give up a
// clone and a transfer of artifacts after a few attempts. A cache is never a
// reason to fail.
func (c *chaos) uncertain(link, what string) {
	if link != "git" && link != "GitLab's clients" {
		return
	}
	c.mu.Lock()
	ids := slices.Collect(maps.Keys(c.jobs))
	c.mu.Unlock()
	for _, id := range ids {
		if j, ok := c.f.GitLab.Job(id); ok && j.Final == nil && c.jobOf(id).transfers() {
			c.hit(id, what+" "+link)
		}
	}
}

// befell notes the same of one request of a job's artifacts: an upload is its
// own, a download that of a job which needs it.
func (c *chaos) befell(id int64, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, j := range c.jobs {
		if j.id == id || j.stage == "test" && j.needs.id == id {
			j.why = append(j.why, "artifacts: "+what)
		}
	}
}

// artifacts looks at what GitLab has of a job: all that it took is whole, and a
// build that went well has some.
func (j *chaosJob) artifacts(got gitlabtest.Job) error {
	if j.stage == "build" && got.Status == "success" && len(got.Artifacts) == 0 {
		return errors.New("it went well, and GitLab has no artifacts of it")
	}
	if j.stage == "test" && got.Status == "success" && !bytes.Contains(got.Trace, []byte("the artifacts are right")) {
		return errors.New("it went well without its artifacts")
	}
	for i, a := range got.Artifacts {
		z, err := zip.NewReader(bytes.NewReader(a.Content), int64(len(a.Content)))
		if err != nil {
			return fmt.Errorf("artifact %d: %w", i, err)
		}
		files := map[string][]byte{}
		for _, e := range z.File {
			r, err := e.Open()
			if err == nil {
				files[e.Name], err = io.ReadAll(r) // checks the sum
			}
			if err != nil {
				return fmt.Errorf("artifact %d, %s: %w", i, e.Name, err)
			}
		}
		if err := wholeSums(files, "out/"); err != nil {
			return fmt.Errorf("artifact %d: %w", i, err)
		}
		if want := fmt.Sprintf("build-%d\n", j.id); string(files["out/id"]) != want {
			return fmt.Errorf("artifact %d is of %q", i, files["out/id"])
		}
	}
	return nil
}

// wholeSums compares files with the list among them.
func wholeSums(files map[string][]byte, dir string) error {
	n := 0
	for line := range strings.Lines(string(files[dir+"sums"])) {
		f := strings.Fields(line)
		if len(f) != 2 {
			return fmt.Errorf("its list has the line %q", line)
		}
		sum := sha256.Sum256(files[dir+f[1]])
		if hex.EncodeToString(sum[:]) != f[0] {
			return fmt.Errorf("%s is not what was packed", f[1])
		}
		n++
	}
	if n != 2 {
		return fmt.Errorf("its list has %d files, it holds %v", n, slices.Sorted(maps.Keys(files)))
	}
	return nil
}

// caches takes every cache out of the registry: each that is there is whole.
func (c *chaos) caches() {
	if c.cache == nil {
		return
	}
	found := 0
	for n := range cacheKeys {
		reg := &cache.Registry{Repo: c.cache.link.addr() + "/chaos"}
		ref, err := reg.Ref(&job.CiJob{ServerURL: c.f.URL, Job: job.Info{ProjectID: 42}}, fmt.Sprintf("deps-%d", n))
		if err != nil {
			c.t.Fatal(err)
		}
		files, err := pullTar(ref)
		if err != nil {
			if strings.Contains(err.Error(), "MANIFEST_UNKNOWN") || strings.Contains(err.Error(), "NAME_UNKNOWN") {
				continue
			}
			c.t.Errorf("cache %d: %v", n, err)
			continue
		}
		found++
		if err := wholeSums(files, "deps/"); err != nil {
			c.t.Errorf("cache %d: %v", n, err)
		}
	}
	c.t.Logf("%d caches are in the registry", found)
}

// pullTar reads the one layer of an artifact in a registry; its digest is
// compared on the way.
func pullTar(ref string) (map[string][]byte, error) {
	tag, err := name.NewTag(ref, name.Insecure)
	if err != nil {
		return nil, err
	}
	img, err := remote.Image(tag)
	if err != nil {
		return nil, err
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		return nil, fmt.Errorf("%d layers: %w", len(layers), err)
	}
	body, err := layers[0].Compressed()
	if err != nil {
		return nil, err
	}
	defer body.Close()
	all, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	z, err := zst.NewReader(bytes.NewReader(all))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	files := map[string][]byte{}
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if err == io.EOF {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if files[h.Name], err = io.ReadAll(t); err != nil {
			return nil, err
		}
	}
}
