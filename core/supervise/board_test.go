package supervise_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/machine"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// Why a guest ended is kept also when the disk was full at its end, which has
// made room on it.
func TestStateAfterAFullDisk(t *testing.T) {
	var dir string
	full := func() string { return filepath.Join(dir, "."+supervise.StateFile+".new") } // no file can be written there
	w := run(t, &supervisetest.Driver{}, keep, func(_ *supervise.Spec, d *supervise.Deps) {
		d.Hook = func(step string) {
			switch step {
			case "ending":
				if err := os.MkdirAll(filepath.Join(full(), "x"), 0o700); err != nil {
					t.Error(err)
				}
			case "removing":
				if st, err := supervise.ReadState(dir); err != nil || st.Exit != nil {
					t.Errorf("with a full disk: %+v, %v; the test does not show what it should", st.Exit, err)
				}
				os.RemoveAll(full())
			}
		}
	})
	dir = w.dir
	w.driver.Last().End(machine.Crashed, "no space")
	w.wait()
	if st, err := supervise.ReadState(dir); err != nil || st.Phase != supervise.Ended || st.Exit == nil || st.Exit.Reason != string(machine.Crashed) {
		t.Errorf("state = %+v, %v; want how it ended", st, err)
	}
}

// What a job directory says is read neither through a link nor without a bound.
func TestStateIsAFile(t *testing.T) {
	dir := t.TempDir()
	at := filepath.Join(dir, supervise.StateFile)
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "other"), []byte("{}"), 0o600), os.Symlink("other", at)); err != nil {
		t.Fatal(err)
	}
	if _, err := supervise.ReadState(dir); !errors.Is(err, unix.ELOOP) {
		t.Errorf("through a link: %v", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, supervise.SpecFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(f.Truncate(1<<40), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := supervise.ReadSpec(dir); err == nil || errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("of 1 TiB: %v", err)
	}
}
