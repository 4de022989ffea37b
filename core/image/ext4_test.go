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
	debugfs, err := exec.LookPath("debugfs")
	if err != nil {
		t.Skip("needs debugfs: apt-get install e2fsprogs")
	}
	out, err := exec.Command(debugfs, "-R", "cat "+path, img).Output()
	if err != nil {
		t.Fatalf("debugfs: %v", err)
	}
	return string(out)
}

func nil2log() *stdlog.Logger { return stdlog.New(io.Discard, "", 0) }
