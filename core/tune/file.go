package tune

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
)

// DesiredFile is where the number is, below the state directory.
const DesiredFile = "schedule/desired-concurrency"

// maxConfig bounds a config.toml, in bytes.
const maxConfig = 8 << 20

// WriteDesired writes the number, and when it was decided: the file's time.
func WriteDesired(stateDir string, n int) error {
	path := filepath.Join(stateDir, DesiredFile)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return fsx.WriteFile(path, strconv.AppendInt(nil, int64(n), 10), 0o644)
}

// ReadDesired reads the number and when it was written. The file may be
// another user's: it is followed nowhere, must be small and regular, and an
// error tells nothing of what is in it.
func ReadDesired(path string) (n int, at time.Time, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, at, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, at, err
	}
	bad := fmt.Errorf("%s does not hold a number from 1 to %d", path, maxConcurrent)
	if !st.Mode().IsRegular() || st.Size() > 64 {
		return 0, at, bad
	}
	b, err := io.ReadAll(io.LimitReader(f, 65))
	if err != nil {
		return 0, at, err
	}
	n, err = strconv.Atoi(string(bytes.TrimSpace(b)))
	if err != nil || n < 1 || n > maxConcurrent {
		return 0, at, bad
	}
	return n, st.ModTime(), nil
}

// maxConcurrent is more than any runner runs.
const maxConcurrent = 100000

// config is a config.toml that is read and may be replaced.
type config struct {
	path string // of the file itself, not of a link to it
	data []byte
	st   os.FileInfo
	uid  int
	gid  int
}

func readConfig(path string) (*config, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(real, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	c := &config{path: real}
	if c.st, err = f.Stat(); err != nil {
		return nil, err
	}
	sys, ok := c.st.Sys().(*syscall.Stat_t)
	if !ok || !c.st.Mode().IsRegular() || c.st.Size() > maxConfig {
		return nil, fmt.Errorf("%s is no configuration of gitlab-runner", path)
	}
	c.uid, c.gid = int(sys.Uid), int(sys.Gid)
	if c.data, err = io.ReadAll(io.LimitReader(f, maxConfig+1)); err != nil {
		return nil, err
	}
	return c, nil
}

// OrigSuffix names the first version of a file, kept for ever.
const OrigSuffix = ".vk-orig"

// replace puts data in the file's place, with its mode and owner, after keeping
// the original once. A crash at any instruction leaves the old file or the new
// one, and an original that is whole.
func (c *config) replace(data []byte) error {
	c.sweep()
	if err := c.keepOriginal(); err != nil {
		return fmt.Errorf("keeping %s%s: %w", c.path, OrigSuffix, err)
	}
	tmp, err := c.write(data, c.st.Mode().Perm())
	if err != nil {
		return err
	}
	// Whoever has changed the file meanwhile must not lose that.
	now, err := os.Stat(c.path)
	if err == nil && (!os.SameFile(now, c.st) || !now.ModTime().Equal(c.st.ModTime()) || now.Size() != c.st.Size()) {
		err = fault.Newf(fault.Busy, "%s was changed by somebody else at this moment", c.path).Hint("the next run tries again")
	}
	if err == nil {
		err = os.Rename(tmp, c.path)
	}
	if err != nil {
		os.Remove(tmp)
		return err
	}
	return fsx.SyncDir(filepath.Dir(c.path))
}

// sweep removes what a crash has left of an earlier replacement.
func (c *config) sweep() {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(c.path), "."+filepath.Base(c.path)+".vk-*"))
	for _, p := range left {
		if st, err := os.Lstat(p); err == nil && st.Mode().IsRegular() && time.Since(st.ModTime()) > 10*time.Minute {
			os.Remove(p)
		}
	}
}

func (c *config) keepOriginal() error {
	orig := c.path + OrigSuffix
	if _, err := os.Lstat(orig); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp, err := c.write(c.data, c.st.Mode().Perm())
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	// A link, unlike a rename, leaves one that is there already.
	if err := os.Link(tmp, orig); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return fsx.SyncDir(filepath.Dir(c.path))
}

// write makes a file beside the configuration, synced, with its owner.
func (c *config) write(data []byte, mode fs.FileMode) (path string, err error) {
	f, err := os.CreateTemp(filepath.Dir(c.path), "."+filepath.Base(c.path)+".vk-*") // 0600
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if c.uid != os.Geteuid() || c.gid != os.Getegid() {
		if err = f.Chown(c.uid, c.gid); err != nil {
			return "", err
		}
	}
	if err = f.Chmod(mode); err != nil {
		return "", err
	}
	if _, err = f.Write(data); err != nil {
		return "", err
	}
	if err = f.Sync(); err != nil {
		return "", err
	}
	return f.Name(), f.Close()
}

// Set sets `concurrent` of a config.toml that this user owns. It returns what
// it was; a file of another user is refused.
func Set(path string, n int) (was int, err error) {
	c, err := readConfig(path)
	if err != nil {
		return 0, err
	}
	if c.uid != os.Geteuid() {
		return 0, fault.Newf(fault.Denied, "%s belongs to user %d, not to this one (%d): it is left alone", path, c.uid, os.Geteuid()).
			Hint("a runner's configuration that is root's is edited by vk-runnerctl: see docs/tune.md")
	}
	if was, err = Concurrent(c.data); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	if was == n {
		return was, nil
	}
	data, err := Edit(c.data, n)
	if err != nil {
		return was, fmt.Errorf("%s: %w", path, err)
	}
	return was, c.replace(data)
}
