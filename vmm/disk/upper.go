package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
)

// recipe names the options below; a change of them changes the name, so that
// old templates are never used.
const recipe = "v1"

// mkfsArgs: no journal and no reserved blocks, because the layer never
// outlives its guest; tables left to be written lazily, so that the template
// stays sparse; an inode for every 8 KiB, because a checkout or a package tree
// is many small files. Discard and the lazy writer are off in the guest by the
// same flags: the blocks of a new sparse file are zero already.
var mkfsArgs = []string{
	"-q", "-F", "-t", "ext4", "-m", "0", "-b", "4096", "-i", "8192", "-I", "256",
	"-O", "^has_journal,^resize_inode,metadata_csum,extent,flex_bg,uninit_bg,sparse_super2,dir_index",
	"-E", "lazy_itable_init=1,assume_storage_prezeroed=1,root_owner=0:0,nodiscard",
}

func upper(ctx context.Context, stateDir, dst string, size int64) error {
	mib := max((size+1<<20-1)>>20, MinUpper>>20)
	full := func(err error) error {
		return fault.Newf(fault.Busy, "no space for the guest's writable layer %s", dst).Because(err).Hint("run vk gc, or free some disk space")
	}
	tpl, err := template(ctx, stateDir, mib)
	if errors.Is(err, syscall.ENOSPC) {
		return full(err)
	}
	if err != nil {
		return err
	}
	err = fsx.SparseCopy(dst, tpl, 0o600)
	if errors.Is(err, fs.ErrNotExist) { // swept between the two steps: once more
		if tpl, err = template(ctx, stateDir, mib); err == nil {
			err = fsx.SparseCopy(dst, tpl, 0o600)
		}
	}
	if errors.Is(err, syscall.ENOSPC) {
		return full(err)
	}
	if err != nil {
		return fmt.Errorf("making the writable layer %s: %w", dst, err)
	}
	return nil
}

func template(ctx context.Context, stateDir string, mib int64) (string, error) {
	dir := filepath.Join(stateDir, "templates")
	path := filepath.Join(dir, "upper-"+recipe+"-"+strconv.FormatInt(mib, 10)+".ext4")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("making a place for disk templates: %w", err)
	}
	mkfs, err := findMkfs()
	if err != nil {
		return "", err
	}
	sweepTemplates(dir)
	f, err := os.CreateTemp(dir, ".upper-*.tmp")
	if err != nil {
		return "", fmt.Errorf("making a disk template: %w", err)
	}
	tmp := f.Name()
	defer os.Remove(tmp)
	// Held while it is being made, for sweepTemplates.
	hold, err := fsx.TryLock(tmp, true)
	if err != nil {
		f.Close()
		return "", fmt.Errorf("making a disk template: %w", err)
	}
	defer hold.Close()
	err = errors.Join(f.Truncate(mib<<20), f.Close())
	if err != nil {
		return "", fmt.Errorf("making a disk template of %d MiB: %w", mib, err)
	}
	cmd := exec.CommandContext(ctx, mkfs, append(append([]string{}, mkfsArgs...), tmp)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.CombinedOutput()
	if err != nil {
		if strings.Contains(string(out), "No space left") {
			err = syscall.ENOSPC
		}
		return "", fmt.Errorf("making a disk template of %d MiB with %s: %w: %s", mib, mkfs, err, strings.TrimSpace(string(out)))
	}
	g, err := os.Open(tmp)
	if err != nil {
		return "", err
	}
	if err := errors.Join(g.Sync(), g.Close()); err != nil {
		return "", fmt.Errorf("writing disk template %s: %w", tmp, err)
	}
	// Several makers may get here; whichever renames last wins, and all made
	// the same.
	if err := os.Rename(tmp, path); err != nil {
		return "", fmt.Errorf("keeping disk template: %w", err)
	}
	return path, fsx.SyncDir(dir)
}

// sweepTemplates removes what makers left that were killed.
func sweepTemplates(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, ".upper-*.tmp"))
	for _, p := range left {
		st, err := os.Stat(p)
		if err != nil || time.Since(st.ModTime()) < time.Minute { // its maker may be about to hold it
			continue
		}
		if l, err := fsx.TryLock(p, false); err == nil {
			os.Remove(p)
			l.Close()
		}
	}
}

func findMkfs() (string, error) {
	if p, err := exec.LookPath("mkfs.ext4"); err == nil {
		return p, nil
	}
	for _, p := range []string{"/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"} { // a plain user's PATH has no sbin
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	return "", fault.New(fault.System, "there is no mkfs.ext4 on this host, which makes the guests' writable layers").
		Hint("apt-get install e2fsprogs")
}
