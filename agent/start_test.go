package agent_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// maxSize is what the agent's program may weigh, in bytes: it stays in the
// memory of every guest.
const maxSize = 8 << 20

func buildAgent(t testing.TB) string {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs go: install the toolchain that go.mod names")
	}
	bin := filepath.Join(t.TempDir(), "vk-agent")
	cmd := exec.Command("go", "build", "-tags", "netgo,osusergo", "-trimpath", "-ldflags", "-s -w", "-o", bin, "./agenttest/cmd")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the agent: %v\n%s", err, out)
	}
	return bin
}

func TestSizeUsageAndShell(t *testing.T) {
	bin := buildAgent(t)
	fi, err := os.Stat(bin)
	if err != nil || fi.Size() > maxSize {
		t.Errorf("the agent is %d bytes, over %d (%v)", fi.Size(), maxSize, err)
	}
	t.Logf("the agent is %d bytes", fi.Size())
	for _, args := range [][]string{nil, {"frobnicate"}, {"serve"}, {"serve", "--tcp"}, {"nop", "x"}} {
		out, err := exec.Command(bin, args...).CombinedOutput()
		if ee, ok := err.(*exec.ExitError); !ok || ee.ExitCode() != 2 || !bytes.Contains(out, []byte("usage:")) {
			t.Errorf("vk-agent %q: %v, %q", args, err, out)
		}
	}
	link := filepath.Join(filepath.Dir(bin), "vk-shell")
	if err := os.Symlink("vk-agent", link); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(link)
	cmd.Stdin = strings.NewReader("echo \"$0 reads its input\"; exit 4\n")
	out, err := cmd.Output()
	if ee, ok := err.(*exec.ExitError); !ok || ee.ExitCode() != 4 || !strings.Contains(string(out), "sh reads its input\n") {
		t.Errorf("vk-shell: %v, %q", err, out)
	}
	if out, err := exec.Command(link, "-c", `echo "$1"`, "x", "a  b").Output(); err != nil || string(out) != "a  b\n" {
		t.Errorf("vk-shell with arguments: %q, %v", out, err)
	}
}

func TestShellMissing(t *testing.T) {
	needRoot(t)
	bin := buildAgent(t)
	root := t.TempDir()
	b, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "vk-shell"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	os.Mkdir(filepath.Join(root, "dev"), 0o755)
	cmd := exec.Command("chroot", root, "/vk-shell")
	var e bytes.Buffer
	cmd.Stderr = &e
	err = cmd.Run()
	if ee, ok := err.(*exec.ExitError); !ok || ee.ExitCode() != 127 || !strings.Contains(e.String(), "no shell") {
		t.Errorf("vk-shell in an empty root: %v, %q", err, e.String())
	}
}

// BenchmarkAgentStart is the fork, exec and start of the agent alone.
func BenchmarkAgentStart(b *testing.B) {
	bin := buildAgent(b)
	for b.Loop() {
		if err := exec.Command(bin, "nop").Run(); err != nil {
			b.Fatal(err)
		}
	}
}
