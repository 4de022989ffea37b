package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"virtkit/e2e/gitsrv"
)

// TestManyFilesInAGuest: a repository of many files, some of whose names are no
// text and some of which are symlinks out of it, reaches a guest whole: git sees
// no difference in it, the odd names are there with their content, and a link
// leads nowhere on the host. It has 2,000 files, or VIRTKIT_TEST_FILES.
func TestManyFilesInAGuest(t *testing.T) {
	h := hostCheckout(t, "many", "")
	n := 2_000
	if v := os.Getenv("VIRTKIT_TEST_FILES"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil || n < 1000 {
			t.Fatalf("VIRTKIT_TEST_FILES is %q, expected 1000 or more", v)
		}
	}
	dir := t.TempDir()
	secret := filepath.Join(dir, "outside")
	if err := os.WriteFile(secret, []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	bare := filepath.Join(dir, "srv", "group", "e2e.git")
	git := func(in []byte, args ...string) string {
		t.Helper()
		cmd := exec.Command("git", args...)
		cmd.Stdin = bytes.NewReader(in)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("git %q: %v", args, err)
		}
		return strings.TrimSpace(string(out))
	}
	git(nil, "init", "-q", "--bare", "-b", "main", bare)
	var in bytes.Buffer
	fmt.Fprintf(&in, "blob\nmark :1\ndata 3\none\nblob\nmark :2\ndata %d\n%s\ncommit refs/heads/main\ncommitter P <p@example.com> 1700000000 +0000\ndata 3\none\n", len(secret), secret)
	for i := range n {
		name, mode := fmt.Sprintf("d%03d/f%06d", i/1000, i), "100644 :1"
		switch i % 1000 {
		case 7:
			name = fmt.Sprintf(`"d%03d/new\012line"`, i/1000)
		case 8:
			name = fmt.Sprintf(`"d%03d/\377\376\200"`, i/1000)
		case 9:
			name, mode = fmt.Sprintf("d%03d/out", i/1000), "120000 :2"
		}
		fmt.Fprintf(&in, "M %s %s\n", mode, name)
	}
	git(in.Bytes(), "--git-dir="+bare, "fast-import", "--quiet")
	sha := git(nil, "--git-dir="+bare, "rev-parse", "main")

	srv, err := gitsrv.New(filepath.Join(dir, "srv"))
	if err != nil {
		t.Fatal(err)
	}
	srv.Allow("glcbt-e2e")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, l) }()
	t.Cleanup(func() { cancel(); <-served })

	t.Cleanup(func() { nothingLeft(t, h) })
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busyboxGit(t, h), "MICROVM_MEM": "1G", "CI_JOB_TIMEOUT": "3600"}, map[string]any{"git_info": map[string]any{
		"repo_url": fmt.Sprintf("http://%s/group/e2e.git", l.Addr()), "ref": "main", "sha": sha, "ref_type": "branch",
		"refspecs": []string{"+refs/heads/main:refs/remotes/origin/main"}, "depth": 0,
	}})
	told := string(prepared(t, s).Stdout)
	if !strings.Contains(told, "virtkit: checkout packed for the guest: ") {
		t.Errorf("prepare:\n%s", told)
	}
	t.Log(told)
	res := stage(t, s, "build_script", `cd /builds/group/e2e || exit 1
now() { cut -d' ' -f1 /proc/uptime; }
echo "first git status from $(now)" >&2
git status --porcelain | head -3
echo "to $(now)" >&2
git ls-files -z | tr -dc '\0' | wc -c
find . -name .git -prune -o ! -type d -print0 | tr -dc '\0' | wc -c
cat "d001/new
line" "d001/$(printf '\377\376\200')"; echo
readlink d001/out; cat d001/out 2>&1
echo changed > d001/f001000; git status --porcelain; rm d000/out; git status --porcelain | wc -l
`)
	want := fmt.Sprintf("%d\n%d\noneone\n%s\ncat: can't open 'd001/out': No such file or directory\n M d001/f001000\n2\n", n, n, secret)
	if res.Exit != 0 || string(res.Stdout) != want {
		t.Errorf("exit %d\n%s\nwant\n%s\n%s", res.Exit, res.Stdout, want, res.Stderr)
	}
	t.Log(string(res.Stderr))
	if b, err := os.ReadFile(secret); err != nil || string(b) != "of the host" {
		t.Errorf("the host's file is %q, %v", b, err)
	}
}
