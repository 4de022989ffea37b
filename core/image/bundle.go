package image

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
)

// A bundle is a directory <[local] dir>/<name> with
//
//	bundle.json   as image.json in the store
//	root.ext4     the filesystem
//
// It may be on a read-only filesystem, so its hold is in the store's locks/.

func (s *Store) bundleLock(name string) string {
	h := sha256.Sum256([]byte(filepath.Join(s.o.LocalDir, name)))
	return s.lockPath("bundle-" + hex.EncodeToString(h[:]))
}

func (s *Store) bundleNames() []string {
	var out []string
	ents, _ := os.ReadDir(s.o.LocalDir)
	for _, e := range ents {
		if !localName.MatchString(e.Name()) {
			continue
		}
		if _, err := os.Stat(filepath.Join(s.o.LocalDir, e.Name(), bundleJSON)); err == nil {
			out = append(out, e.Name())
		}
	}
	return out
}

// openBundle returns fs.ErrNotExist when there is no such bundle.
func (s *Store) openBundle(ref Ref) (*Image, error) {
	dir := filepath.Join(s.o.LocalDir, ref.Name)
	if _, err := os.Stat(filepath.Join(dir, bundleJSON)); err != nil {
		if _, e := os.Stat(dir); e == nil && errors.Is(err, fs.ErrNotExist) {
			return nil, fault.Newf(fault.System, "%s is no bundle: it has no %s", dir, bundleJSON).
				Hint("vk image import --replace SRC %s makes one in its place", ref.Name)
		}
		return nil, err
	}
	lock := s.bundleLock(ref.Name)
	hold, err := holdShared(lock)
	if errors.Is(err, fsx.ErrLocked) {
		return nil, fault.Newf(fault.Busy, "bundle %s is being replaced or removed", ref.Name).Hint("try again")
	}
	if err != nil {
		return nil, noSpace(lock, err)
	}
	img, err := opened(dir, bundleJSON, ref.Text)
	if err != nil {
		hold.Close()
		return nil, fault.Newf(fault.System, "bundle %s cannot be used", dir).
			Hint("import it again: vk image import --replace SRC %s", ref.Name).Because(err)
	}
	img.Hold, img.LockPath = hold, lock
	now := time.Now()
	_ = os.Chtimes(lock, now, now)
	return img, nil
}

// removeBundle deletes a bundle's two files and its directory; fsx.ErrLocked
// when it is in use.
func (s *Store) removeBundle(name string) error {
	hold, err := fsx.TryLock(s.bundleLock(name), false)
	if err != nil {
		return err
	}
	defer hold.Close()
	dir := filepath.Join(s.o.LocalDir, name)
	if err := os.Remove(filepath.Join(dir, bundleJSON)); err != nil {
		return err
	}
	_, err = removeOurs(dir)
	return err
}

// placeBundle gives a finished directory the name of a bundle, in one step
// even when there is one of that name.
func (s *Store) placeBundle(tmp, name string, replace bool) error {
	final := filepath.Join(s.o.LocalDir, name)
	hold, err := fsx.TryLock(s.bundleLock(name), false)
	if errors.Is(err, fsx.ErrLocked) {
		return fault.Newf(fault.Busy, "bundle %s is in use", name).Hint("stop the guests that run it, or import under another name")
	}
	if err != nil {
		return noSpace(s.dir, err)
	}
	defer hold.Close()
	err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, final, unix.RENAME_NOREPLACE)
	if err == unix.EEXIST {
		if !replace {
			return fault.Newf(fault.Conflict, "bundle %s exists already", final).Hint("--replace takes its place")
		}
		if err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, final, unix.RENAME_EXCHANGE); err == nil {
			_, _ = removeOurs(tmp)
		}
	}
	if err != nil {
		return noSpace(final, &os.LinkError{Op: "rename", Old: tmp, New: final, Err: err})
	}
	return fsx.SyncDir(s.o.LocalDir)
}

// bundleStage is a directory beside the bundles, so that a rename suffices.
// A crash leaves it as ".tmp-…", which GC and the next import remove.
func (s *Store) bundleStage() (*stage, error) {
	if err := os.MkdirAll(s.o.LocalDir, 0o700); err != nil {
		return nil, fault.Newf(fault.System, "the bundles' directory %s cannot be made", s.o.LocalDir).
			Hint("set dir in the [local] section to one that can be written").Because(noSpace(s.o.LocalDir, err))
	}
	s.sweepBundles(false)
	var b [8]byte
	_, _ = rand.Read(b[:])
	name := ".tmp-" + hex.EncodeToString(b[:])
	lock, err := fsx.TryLock(s.bundleLock(name), false)
	if err != nil {
		return nil, noSpace(s.dir, err)
	}
	st := &stage{dir: filepath.Join(s.o.LocalDir, name), lock: lock}
	if err := os.Mkdir(st.dir, 0o700); err != nil {
		lock.Close()
		return nil, noSpace(st.dir, err)
	}
	return st, nil
}

// sweepBundles removes the directories of bundleStage whose makers are gone.
func (s *Store) sweepBundles(dryRun bool) (r Report) {
	ents, _ := os.ReadDir(s.o.LocalDir)
	for _, e := range ents {
		if !e.IsDir() || !tmpForm.MatchString(e.Name()) {
			continue
		}
		dir, lock := filepath.Join(s.o.LocalDir, e.Name()), s.bundleLock(e.Name())
		l, err := fsx.TryLock(lock, false)
		if err != nil {
			if !errors.Is(err, fsx.ErrLocked) {
				r.Skipped = append(r.Skipped, dir+": "+err.Error())
			}
			continue
		}
		r.Staging++
		if dryRun {
			r.Bytes += diskSize(filepath.Join(dir, rootFile))
		} else {
			n, err := removeOurs(dir)
			r.Bytes += n
			if err != nil {
				r.Skipped = append(r.Skipped, dir+": "+err.Error())
			}
		}
		os.Remove(lock)
		l.Close()
	}
	return r
}
