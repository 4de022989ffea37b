package e2e_test

import (
	"strings"
	"testing"
)

// A guest that is kept stays after its end, with its console, through stop and
// gc, until stop --rm.
func TestKeep(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	vk := func(args ...string) string {
		t.Helper()
		out, err := h.Run(t.Context(), args...)
		if err != nil {
			t.Fatalf("vk %s: %v", strings.Join(args, " "), err)
		}
		return out
	}
	vk("run", "--keep", "--name", "kept-ended", "--mem", "256M", img, "true")
	vk("run", "--keep", "--name", "kept-running", "--mem", "256M", "--detach", img, "sleep", "1000")
	vk("stop", "kept-ended")
	vk("gc")
	if out := vk("list", "--all"); !strings.Contains(out, "kept-ended") || vk("logs", "kept-ended") == "" {
		t.Errorf("a kept guest is not there after stop and gc:\n%s", out)
	}
	for _, name := range []string{"kept-ended", "kept-running"} {
		vk("stop", "--rm", name)
		if out := vk("list", "--all"); strings.Contains(out, name) {
			t.Errorf("after stop --rm %s:\n%s", name, out)
		}
	}
	nothingLeft(t, h)
}
