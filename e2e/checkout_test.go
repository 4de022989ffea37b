package e2e_test

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/e2e/customdriver"
	"virtkit/e2e/host"
)

// withHooks is a job with scripts of its own around its sources.
func withHooks(t *testing.T, response []byte, before, after string) []byte {
	t.Helper()
	var job map[string]json.RawMessage
	if err := json.Unmarshal(response, &job); err != nil {
		t.Fatal(err)
	}
	hooks := []execdrv.Hook{{Name: execdrv.HookBefore, Script: []string{before}}, {Name: execdrv.HookAfter, Script: []string{after}}}
	var err error
	if job["hooks"], err = json.Marshal(hooks); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// hostCheckout is a host that fetches sources itself.
func hostCheckout(t *testing.T, name, keys string) *host.Host {
	t.Helper()
	guests(t)
	h, err := host.New(root, filepath.Join(world.dir, name), strings.Replace(config, "[executor]\n", "[executor]\nhost_checkout = true\n"+keys, 1))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// sourcesLike compares get_sources with its recording, but for the line of
// the runner's request, which no driver is told of.
func sourcesLike(t *testing.T, j *customdriver.Job, res runnerside.Result, extra ...string) {
	t.Helper()
	want := slices.DeleteFunc(slices.Clone(j.Want[execdrv.StageSources].Stdout), func(l string) bool { return strings.Contains(l, "Gitaly correlation ID") })
	if len(extra) == 2 {
		want = slices.Concat([]string{"\x1b[32;1m$ echo " + extra[0] + "\x1b[0;m", extra[0]}, want, []string{"\x1b[32;1m$ echo " + extra[1] + "\x1b[0;m", extra[1]})
	}
	if d := cmp.Diff(want, j.Normalise(res.Stdout)); d != "" {
		t.Errorf("get_sources: stdout differs from the recording (-recorded +got):\n%s", d)
	}
}

// TestHostCheckout: a recorded job whose sources the host fetches has the files
// and the trace of the recording, as its own user, and can change all of them
// without the host's tree noticing. A second job of the slot, in an image
// without git, fetches into the same tree.
func TestHostCheckout(t *testing.T) {
	r := recording(t, "custom-simple")
	gitServer(t)
	h := hostCheckout(t, "checkout", "")
	j := &r.Jobs[0]
	prepare := func(s *runnerside.Session) string {
		t.Helper()
		t.Cleanup(func() { s.Cleanup(context.Background()) })
		if res, _, err := s.Config(t.Context()); err != nil || res.Exit != 0 {
			t.Fatalf("config: %d %v\n%s", res.Exit, err, res.Stderr)
		}
		res, err := s.Prepare(t.Context())
		if err != nil || res.Exit != 0 {
			t.Fatalf("prepare: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
		}
		return string(res.Stdout)
	}
	sources := func(s *runnerside.Session) runnerside.Result {
		t.Helper()
		for _, st := range j.Stages {
			if st.Name == execdrv.StageSources {
				res, err := s.Stage(t.Context(), st.Name, st.Script)
				if err != nil || res.Exit != 0 {
					t.Fatalf("get_sources: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
				}
				return res
			}
		}
		t.Fatal("the recording has no get_sources")
		return runnerside.Result{}
	}
	s := session(t, h.Driver(), r, j, busyboxGit(t, h))
	told := prepare(s)
	for _, want := range []string{"virtkit: sources of f400d9d3 cloned on the host in ", "virtkit: checkout packed for the guest: "} {
		if !strings.Contains(told, want) {
			t.Errorf("prepare does not say %q:\n%s", want, told)
		}
	}
	sourcesLike(t, j, sources(s))
	in := func(line string) bool { return !strings.HasPrefix(line, "builds/group/project/") }
	if d := cmp.Diff(slices.DeleteFunc(recordedTree(r), in), slices.DeleteFunc(worktree(t, s, j), in)); d != "" {
		t.Errorf("files differ from the recording (-recorded +got):\n%s", d)
	}
	res := stage(t, s, execdrv.StageBuild, `cd `+j.Vars["CI_PROJECT_DIR"]+`
id -un; stat -c '%U %G' . README.md .git/index a/b
git status --porcelain; git log -1 --format=%H; git fsck --connectivity-only 2>&1 | grep -v dangling
git fetch -q origin main && git rev-parse FETCH_HEAD
echo changed > README.md; rm -r a; mv tool.sh moved.sh; echo new > new
git status --porcelain | sort
grep -c glcbt ../project.tmp/.gitlab-runner.ext.conf; grep glcbt .git/config
mount | grep 'on '"$PWD"' ' | cut -d' ' -f5
`)
	want := "build\nbuild build\nbuild build\nbuild build\nbuild build\n" + "f400d9d34482185362e87552bcc47c5e5a468e2c\nf400d9d34482185362e87552bcc47c5e5a468e2c\n" +
		" D a/b/c.txt\n D tool.sh\n M README.md\n?? moved.sh\n?? new\n1\noverlay\n"
	if string(res.Stdout) != want {
		t.Errorf("in the guest: exit %d\n%s\nwant\n%s\n%s", res.Exit, res.Stdout, want, res.Stderr)
	}
	trees, _ := filepath.Glob(filepath.Join(h.State, "checkouts/*/[^.]*"))
	if len(trees) != 1 {
		t.Fatalf("the host has the trees %q", trees)
	}
	if b, err := os.ReadFile(filepath.Join(trees[0], "README.md")); err != nil || string(b) != "# project\nmore\n" {
		t.Errorf("the host's README.md is %q, %v", b, err)
	}
	// The layer's figure is the one that counts now.
	clean := stage(t, s, execdrv.StageCleanFileVars, "true\n")
	if !strings.Contains(string(clean.Stderr), " of 410 MiB, read ") {
		t.Errorf("no figure of the layer of 80 %% of 512 MiB:\n%s", clean.Stderr)
	}
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("cleanup: %d %v", res.Exit, err)
	}

	r.Response = withHooks(t, r.Response, "echo before", "echo after")
	s = session(t, h.Driver(), r, j, busybox(t, h))
	if told = prepare(s); !strings.Contains(told, "virtkit: sources of f400d9d3 fetched on the host in ") {
		t.Errorf("the second job does not fetch:\n%s", told)
	}
	res = sources(s)
	if out := string(res.Stdout); !strings.HasPrefix(out, "\x1b[32;1m$ echo before\x1b[0;m\nbefore\n") || !strings.HasSuffix(out, "\x1b[32;1m$ echo after\x1b[0;m\nafter\n") ||
		!strings.Contains(out, "Reinitialized existing Git repository in "+j.Vars["CI_PROJECT_DIR"]+"/.git/\n") {
		t.Errorf("get_sources of the second job:\n%s", out)
	}
	res = stage(t, s, execdrv.StageBuild, "cd "+j.Vars["CI_PROJECT_DIR"]+" && cat README.md && ls a/b\n")
	if string(res.Stdout) != "# project\nmore\nc.txt\n" {
		t.Errorf("the second job's files: %q %s", res.Stdout, res.Stderr)
	}
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("cleanup: %d %v", res.Exit, err)
	}
	nothingLeft(t, h)
	out, err := h.Run(t.Context(), "gc", "--idle-secs", "0")
	if err != nil || !strings.Contains(out, "removed checkout ") {
		t.Errorf("vk gc: %v\n%s", err, out)
	}
	if left, _ := os.ReadDir(filepath.Join(h.State, "checkouts")); len(left) != 0 {
		t.Errorf("vk gc left %v", left)
	}
}

// TestHostCheckoutSubmodules: a job whose submodules the host fetches has them
// at their commits, in repositories of their own which reach the server with
// the job's credentials.
func TestHostCheckoutSubmodules(t *testing.T) {
	r := recording(t, "custom-simple")
	gitServer(t)
	h := hostCheckout(t, "modules", "")
	j := r.Jobs[0]
	j.Vars = maps.Clone(j.Vars)
	j.Vars["GIT_SUBMODULE_STRATEGY"] = "recursive"
	s := session(t, h.Driver(), r, &j, busyboxGit(t, h))
	told := prepared(t, s)
	if !strings.Contains(string(told.Stdout), "virtkit: sources of f400d9d3 cloned on the host in ") {
		t.Fatalf("prepare does not say where the sources are from:\n%s", told.Stdout)
	}
	for _, st := range j.Stages {
		if st.Name != execdrv.StageSources {
			continue
		}
		res, err := s.Stage(t.Context(), st.Name, st.Script)
		if err != nil || res.Exit != 0 {
			t.Fatalf("get_sources: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
		}
		for _, want := range []string{"Updating/initializing submodules recursively with git depth set to 20...", "Submodule path 'sub/nested': checked out 'c6e9119ff8af77d1c4ba91570c94e14433ae9e45'", "Updated submodules"} {
			if !strings.Contains(string(res.Stdout), want) {
				t.Errorf("get_sources does not say %q:\n%s", want, res.Stdout)
			}
		}
	}
	res := stage(t, s, execdrv.StageBuild, `cd `+j.Vars["CI_PROJECT_DIR"]+`
cat sub/sub.txt sub/nested/nested.txt
git status --porcelain
git submodule status --recursive
git -C sub/nested fetch -q origin main && git -C sub/nested rev-parse FETCH_HEAD
touch sub/nested/new && git -C sub/nested status --porcelain && git status --porcelain
grep -r glcbt .git; stat -c %U .git/modules/sub/index sub/nested
`)
	want := "sub\nnested\n 700918091af52bc16095c5cf3b138ec822ff2028 sub (heads/main)\n c6e9119ff8af77d1c4ba91570c94e14433ae9e45 sub/nested (heads/main)\n" +
		"c6e9119ff8af77d1c4ba91570c94e14433ae9e45\n?? new\n M sub\nbuild\nbuild\n"
	if string(res.Stdout) != want {
		t.Errorf("in the guest: exit %d\n%s\nwant\n%s\n%s", res.Exit, res.Stdout, want, res.Stderr)
	}
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("cleanup: %d %v", res.Exit, err)
	}
	nothingLeft(t, h)
}
