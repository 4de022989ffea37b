package supervise_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/supervise"
)

// The environment of a detached command may hold secrets: it reaches the
// program and no file.
func TestCommandEnvStaysInMemory(t *testing.T) {
	const secret = "hunter2-in-memory"
	base := t.TempDir()
	dir := filepath.Join(base, "run-1")
	s := testSpec(base)
	s.Keep = true
	s.Command = &supervise.Command{Argv: []string{"sh", "-c", `test "${#TOKEN}" = 17 && exit 9`}, Env: []string{"TOKEN=" + secret}}
	c, err := supervise.Launch(ctxFor(t), launchOptions(dir, s))
	if err != nil {
		t.Fatal(err)
	}
	// It may have ended already: then its last state is on disk.
	_, _ = c.Wait(ctxFor(t), supervise.Ended, nil)
	eventually(t, "the supervisor's end", func() bool { return !supervise.Locked(dir) })
	st, err := supervise.ReadState(dir)
	if err != nil || st.Exit == nil || st.Exit.Code == nil || *st.Exit.Code != 9 {
		t.Fatalf("state = %+v, %v; want code 9", st.Exit, err)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if strings.Contains(string(b), secret) {
			t.Errorf("%s holds the secret", filepath.Base(path))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
