package gitsrv_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/e2e/gitsrv"
)

func TestCloneRecorded(t *testing.T) {
	root := t.TempDir()
	s, err := gitsrv.New(root)
	if err != nil {
		t.Skip(err)
	}
	if err := gitsrv.Recorded(root); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(t.Context(), l)
	clone := func(token string) (string, error) {
		dst := filepath.Join(t.TempDir(), "w")
		cmd := exec.CommandContext(context.Background(), "git", "clone", "-q", "--recursive", "http://gitlab-ci-token:"+token+"@"+l.Addr().String()+"/group/project.git", dst)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_TERMINAL_PROMPT=0")
		out, err := cmd.CombinedOutput()
		if err != nil {
			return string(out), err
		}
		return dst, nil
	}
	if out, err := clone("wrong"); err == nil {
		t.Errorf("a wrong token clones: %s", out)
	}
	s.Allow("glcbt-x")
	dst, err := clone("glcbt-x")
	if err != nil {
		t.Fatalf("clone: %v %s", err, dst)
	}
	for f, want := range map[string]string{"README.md": "# project\nmore\n", "sub/nested/nested.txt": "nested\n"} {
		if b, err := os.ReadFile(filepath.Join(dst, f)); err != nil || string(b) != want {
			t.Errorf("%s = %q, %v", f, b, err)
		}
	}
	denied := false
	for _, r := range s.Requests() {
		denied = denied || r.Status == 401
		if !strings.HasPrefix(r.UserAgent, "git/") {
			t.Errorf("user agent %q", r.UserAgent)
		}
	}
	if !denied {
		t.Error("no request was denied")
	}
}
