package e2e_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
)

// A detached guest lives through a reboot, whoever asks for it, and its
// command starts again; a command that the reboot ended is told so.
func TestReboot(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	name := fmt.Sprintf("reboot-%d", os.Getpid())
	run := func(args ...string) string {
		t.Helper()
		out, err := h.Run(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	run("run", "-d", "--cpus", "1", "--mem", "192M", "--name", name, img, "sh", "-c", "trap 'exit 3' TERM; while :; do sleep 1; done")
	t.Cleanup(func() {
		if _, err := h.Run(context.Background(), "stop", "--kill", name); err != nil {
			t.Logf("ending the guest: %v", err)
		}
	})
	run("exec", name, "sh", "-c", "echo kept > /mark; sync")
	run("reboot", name)
	if got := run("exec", name, "cat", "/mark"); got != "kept\n" {
		t.Errorf("after a reboot /mark holds %q", got)
	}
	_, err := h.Run(t.Context(), "exec", name, "sh", "-c", "(sleep 1; kill -TERM 1) & sleep 600")
	if err == nil || !strings.Contains(err.Error(), "rebooted") || !strings.Contains(err.Error(), "exit status 125") {
		t.Errorf("a command that a reboot ended: %v", err)
	}
	run("stop", name)
	nothingLeft(t, h)
}
