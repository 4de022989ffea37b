package image_test

import (
	"io"
	stdlog "log"
	"os/exec"
	"testing"
)

// cat reads a file of an ext4 image.
func cat(t testing.TB, img, path string) string {
	t.Helper()
	return debugfs(t, img, "cat "+path)
}

// debugfs runs one of its requests on an ext4 image.
func debugfs(t testing.TB, img, request string) string {
	t.Helper()
	bin, err := exec.LookPath("debugfs")
	if err != nil {
		t.Skip("needs debugfs: apt-get install e2fsprogs")
	}
	out, err := exec.Command(bin, "-R", request, img).Output()
	if err != nil {
		t.Fatalf("debugfs: %v", err)
	}
	return string(out)
}

func nil2log() *stdlog.Logger { return stdlog.New(io.Discard, "", 0) }
