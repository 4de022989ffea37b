package conf

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Whether there is a state directory is asked without making one.
func TestStateDirThere(t *testing.T) {
	none := func(string) string { return "" }
	home := t.TempDir()
	user := filepath.Join(home, ".local/state/virtkit")
	system := filepath.Join(t.TempDir(), "virtkit")
	check := func(name string, c Config, system string, wantDir string, want bool) {
		t.Helper()
		if dir, there := stateDirThere(&c, none, home, system); dir != wantDir || there != want {
			t.Errorf("%s: %s, %v; want %s, %v", name, dir, there, wantDir, want)
		}
	}
	asked := filepath.Join(t.TempDir(), "asked")
	check("asked for", Config{StateDir: asked}, system, asked, false)
	check("the host's", Config{}, system, system, false)
	for _, d := range []string{asked, system, user} {
		if _, err := os.Stat(d); err == nil {
			t.Fatalf("%s was made", d)
		}
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	check("asked for, there", Config{StateDir: asked}, system, asked, true)
	check("the host's, there", Config{}, system, system, true)
	// Where this user may not write the host's, it is the user's own.
	const closed = "/proc/1/virtkit"
	if unix.Faccessat(unix.AT_FDCWD, "/proc/1", unix.W_OK|unix.X_OK, unix.AT_EACCESS) != nil {
		check("the user's, there", Config{}, closed, user, true)
		os.RemoveAll(user)
		check("the user's", Config{}, closed, user, false)
	}
	closedDir := filepath.Join("/sys/kernel", "virtkit") // nobody makes anything there
	os.RemoveAll(user)
	if unix.Faccessat(unix.AT_FDCWD, "/sys/kernel", unix.W_OK|unix.X_OK, unix.AT_EACCESS) != nil {
		check("the user's", Config{}, closedDir, user, false)
	}
}
