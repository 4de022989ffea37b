package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/lazyre"
	"virtkit/core/logx"
)

var (
	keptForm = lazyre.New(`^sha256-[0-9a-f]{64}$`)
	blobForm = lazyre.New(`^sha256-[0-9a-f]{64}(\.idx)?$`)
	refForm  = lazyre.New(`^[0-9a-f]{64}\.json$`)
	lockForm = lazyre.New(`^(image|blob)-sha256-[0-9a-f]{64}\.lock$`)
	tmpForm  = lazyre.New(`^\.tmp-[0-9a-f]{16}$`)
)

// GC removes images unused for idle and not held, blobs that no kept image
// needs, and the leavings of crashed processes. Bundles stay. A process that
// is pulling keeps all blobs. With dryRun nothing is removed.
func (s *Store) GC(ctx context.Context, idle time.Duration, dryRun bool) (Report, error) {
	r := Report{DryRun: dryRun}
	gone := map[string]bool{}
	infos, err := s.images()
	if err != nil {
		return r, err
	}
	for _, i := range infos {
		if err := ctx.Err(); err != nil {
			return r, context.Cause(ctx)
		}
		if time.Since(i.Used) < idle {
			if i.InUse {
				r.Held++
			}
			continue
		}
		removed, err := s.removeImage(ctx, i.Digest, dryRun)
		switch {
		case errors.Is(err, fsx.ErrLocked):
			r.Held++
		case err != nil:
			r.Skipped = append(r.Skipped, i.Path+": "+err.Error())
		case removed:
			gone[i.Digest] = true
			r.Images = append(r.Images, i)
			r.Bytes += i.DiskSize
		}
	}
	r.Held += s.bundlesInUse()
	if err := s.gcBlobs(&r, gone, dryRun); err != nil {
		return r, err
	}
	s.gcRefs(&r, gone, dryRun)
	sw, err := s.sweep(dryRun)
	if err != nil {
		return r, err
	}
	for _, sw := range []Report{sw, s.sweepBundles(dryRun)} {
		r.Staging += sw.Staging
		r.Bytes += sw.Bytes
		r.Skipped = append(r.Skipped, sw.Skipped...)
	}
	if !dryRun {
		s.gcLocks(&r)
	}
	return r, nil
}

// bundlesInUse counts the bundles that somebody holds.
func (s *Store) bundlesInUse() int {
	n := 0
	for _, b := range s.bundleNames() {
		l, err := fsx.TryLock(s.bundleLock(b), false)
		if errors.Is(err, fsx.ErrLocked) {
			n++
		}
		l.Close()
	}
	return n
}

// foreign says what in one of our directories is not ours, so that the whole of
// it stays: a name that this package does not give, or anything that
// fsx.NotOurs says.
func foreign(dir string) error {
	if err := fsx.NotOurs(dir); err != nil {
		return err
	}
	ents, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range ents {
		p := filepath.Join(dir, e.Name())
		if !e.Type().IsRegular() || !ours.MatchString(e.Name()) {
			return fmt.Errorf("%s is none of the store's files", p)
		}
		if err := fsx.NotOurs(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// removeImage takes an image out of the store unless somebody holds it
// (fsx.ErrLocked).
func (s *Store) removeImage(ctx context.Context, digest string, dryRun bool) (bool, error) {
	dir := s.imageDir(digest)
	hold, err := fsx.TryLock(filepath.Join(dir, holdFile), false)
	if err != nil {
		return false, err
	}
	defer hold.Close()
	if err := foreign(dir); err != nil {
		return false, err
	}
	if dryRun {
		return true, nil
	}
	// With the hold taken exclusively nobody uses it, and from the rename on
	// nobody finds it.
	return true, s.discard(ctx, dir)
}

func (s *Store) gcBlobs(r *Report, gone map[string]bool, dryRun bool) error {
	lock, err := fsx.TryLock(s.lockPath("blobs"), false)
	if errors.Is(err, fsx.ErrLocked) {
		r.Skipped = append(r.Skipped, "layers: a pull is under way, so all stay")
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	needed := map[string]bool{}
	ents, err := os.ReadDir(filepath.Join(s.dir, "images"))
	if err != nil {
		return err
	}
	for _, e := range ents {
		if !e.IsDir() || !keptForm.MatchString(e.Name()) {
			continue
		}
		rec, err := readRecord(filepath.Join(s.dir, "images", e.Name(), imageJSON))
		if err != nil {
			r.Skipped = append(r.Skipped, err.Error())
			continue
		}
		if !gone[rec.Digest] {
			for _, b := range rec.Blobs {
				needed[dirName(b)] = true
			}
		}
	}
	ents, err = os.ReadDir(filepath.Join(s.dir, "blobs"))
	if err != nil {
		return err
	}
	for _, e := range ents {
		base := strings.TrimSuffix(e.Name(), ".idx")
		if !e.Type().IsRegular() || !blobForm.MatchString(e.Name()) || needed[base] {
			continue
		}
		path := filepath.Join(s.dir, "blobs", e.Name())
		if err := fsx.NotOurs(path); err != nil {
			r.Skipped = append(r.Skipped, err.Error())
			continue
		}
		n := diskSize(path)
		if !dryRun {
			if err := os.Remove(path); err != nil {
				r.Skipped = append(r.Skipped, err.Error())
				continue
			}
		}
		r.Bytes += n
		if base == e.Name() {
			r.Blobs++
		}
	}
	return nil
}

func (s *Store) gcRefs(r *Report, gone map[string]bool, dryRun bool) {
	dir := filepath.Join(s.dir, "refs")
	ents, _ := os.ReadDir(dir)
	for _, e := range ents {
		if !e.Type().IsRegular() || !refForm.MatchString(e.Name()) {
			continue
		}
		k, ok := s.readKnown(filepath.Join(dir, e.Name()))
		if ok && !gone[k.Digest] {
			if _, err := os.Lstat(s.imageDir(k.Digest)); err == nil {
				continue
			}
		}
		if fsx.NotOurs(filepath.Join(dir, e.Name())) != nil {
			continue
		}
		r.Refs++
		if !dryRun {
			os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

// gcLocks removes locks that nobody holds. Whoever waits for one notices, by
// fsx.TryLock, that its file is no longer the one by that name.
func (s *Store) gcLocks(r *Report) {
	ents, _ := os.ReadDir(filepath.Join(s.dir, "locks"))
	for _, e := range ents {
		if !e.Type().IsRegular() || !lockForm.MatchString(e.Name()) {
			continue
		}
		path := filepath.Join(s.dir, "locks", e.Name())
		if fsx.NotOurs(path) != nil {
			continue
		}
		if l, err := fsx.TryLock(path, false); err == nil {
			if os.Remove(path) == nil {
				r.Locks++
			}
			l.Close()
		}
	}
}

// images describes what is in images/. What cannot be read is logged and left
// out.
func (s *Store) images() ([]Info, error) {
	ents, err := os.ReadDir(filepath.Join(s.dir, "images"))
	if err != nil {
		return nil, fmt.Errorf("listing images: %w", err)
	}
	named, err := s.names()
	if err != nil {
		return nil, err
	}
	var out []Info
	for _, e := range ents {
		if !e.IsDir() || !keptForm.MatchString(e.Name()) {
			continue
		}
		dir := filepath.Join(s.dir, "images", e.Name())
		rec, err := readRecord(filepath.Join(dir, imageJSON))
		if errors.Is(err, fs.ErrNotExist) && isGone(dir) {
			continue // removed meanwhile
		}
		if err != nil || dirName(rec.Digest) != e.Name() {
			s.o.Log.Warn("an image's record cannot be used", logx.Path, dir, logx.Err, err)
			continue
		}
		i := info(rec, dir, filepath.Join(dir, holdFile))
		named.to(&i)
		out = append(out, i)
	}
	return out, nil
}

// names tells which references mean which image now.
type names struct {
	of     map[string][]string // digest → references
	moved  map[string]string   // remote and os/arch → digest
	remote func(ref string) string
	local  string // digest that local/default means; "" = none of images/
}

func (s *Store) names() (*names, error) {
	n := &names{of: map[string][]string{}, moved: map[string]string{}, remote: func(ref string) string {
		r, _ := s.Parse(ref)
		return r.Remote
	}}
	ents, err := os.ReadDir(filepath.Join(s.dir, "refs"))
	if err != nil {
		return nil, fmt.Errorf("listing images: %w", err)
	}
	for _, e := range ents {
		if k, ok := s.readKnown(filepath.Join(s.dir, "refs", e.Name())); ok {
			n.of[k.Digest] = append(n.of[k.Digest], k.Ref)
			n.moved[k.Remote+" "+osArch(k.Platform)] = k.Digest
		}
	}
	if _, err := os.Lstat(filepath.Join(s.o.LocalDir, "default", bundleJSON)); err != nil {
		if r, err := s.defaultRecipe(); err == nil { // the error is Resolve's to tell
			n.local, _, _ = r.digest()
		}
	}
	return n, nil
}

// osArch is a platform without its variant.
func osArch(p string) string {
	f := strings.SplitN(p, "/", 3)
	return strings.Join(f[:min(len(f), 2)], "/")
}

// to fills in the references of an image. The one that it was made for is its
// name until that means another: a tag that moved, a recipe that changed.
func (n *names) to(i *Info) {
	made := i.Ref
	i.Refs = append([]string{}, n.of[i.Digest]...)
	now, known := n.moved[n.remote(made)+" "+osArch(i.Platform)]
	if i.Kind == "default" {
		now, known = n.local, true
	}
	if (!known || now == i.Digest) && !slices.Contains(i.Refs, made) {
		i.Refs = append(i.Refs, made)
	}
	slices.Sort(i.Refs)
	if slices.Contains(i.Refs, made) {
		return
	}
	i.Ref, i.Former = "", made
	if len(i.Refs) > 0 {
		i.Ref = i.Refs[0]
	}
}

func isGone(path string) bool { _, err := os.Lstat(path); return errors.Is(err, fs.ErrNotExist) }

func info(rec record, dir, hold string) Info {
	i := Info{
		Ref: rec.Ref, Digest: rec.Digest, Kind: rec.Kind, Platform: rec.Platform, Size: rec.Size,
		DiskSize: diskSize(filepath.Join(dir, rootFile)), Created: rec.Created, Used: rec.Created,
		Path: filepath.Join(dir, rootFile), Config: rec.Config,
	}
	if st, err := os.Lstat(hold); err == nil {
		i.Used = st.ModTime().UTC().Truncate(time.Second)
		l, err := fsx.TryLock(hold, false)
		i.InUse = errors.Is(err, fsx.ErrLocked)
		l.Close()
	}
	return i
}

// List describes all kept images and bundles, newest use first.
func (s *Store) List() ([]Info, error) {
	out, err := s.images()
	if err != nil {
		return nil, err
	}
	for _, n := range s.bundleNames() {
		dir := filepath.Join(s.o.LocalDir, n)
		rec, err := readRecord(filepath.Join(dir, bundleJSON))
		if err != nil {
			s.o.Log.Warn("a bundle's record cannot be used", logx.Path, dir, logx.Err, err)
			continue
		}
		i := info(rec, dir, s.bundleLock(n))
		i.Ref, i.Refs = "local/"+n, []string{"local/" + n}
		out = append(out, i)
	}
	slices.SortStableFunc(out, func(a, b Info) int { return b.Used.Compare(a.Used) })
	return out, nil
}

// Inspect finds one kept image by reference, digest or unique start of a
// digest. Errors: fault.NotFound, and fault.Usage when several begin like it.
func (s *Store) Inspect(which string) (Info, error) {
	all, err := s.List()
	if err != nil {
		return Info{}, err
	}
	ref, refErr := s.Parse(which)
	var found []Info
	for _, i := range all {
		hex := strings.TrimPrefix(i.Digest, "sha256:")
		if refErr == nil && slices.Contains(i.Refs, ref.Text) || which == i.Digest {
			return i, nil
		}
		if p := strings.TrimPrefix(which, "sha256:"); len(p) >= 4 && strings.HasPrefix(hex, p) {
			found = append(found, i)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return Info{}, fault.Newf(fault.NotFound, "no image %q is kept here", which).Hint("vk images lists what is kept; vk pull fetches more")
	}
	return Info{}, fault.Newf(fault.Usage, "%d images' digests begin with %q", len(found), which).Hint("give more of it")
}

// Remove deletes one kept image or bundle; fault.Busy when it is in use. The
// layers of an image go with the next GC.
func (s *Store) Remove(ctx context.Context, which string) error {
	i, err := s.Inspect(which)
	if err != nil {
		return err
	}
	if dir := filepath.Dir(i.Path); filepath.Dir(dir) == filepath.Join(s.dir, "images") {
		_, err = s.removeImage(ctx, i.Digest, false)
	} else {
		err = s.removeBundle(filepath.Base(dir))
	}
	if errors.Is(err, fsx.ErrLocked) {
		return fault.Newf(fault.Busy, "image %s is in use", cmp.Or(i.Ref, i.Digest)).Hint("vk list shows the guests that run; stop those of it first")
	}
	if err != nil {
		return fmt.Errorf("removing image %s: %w", cmp.Or(i.Ref, i.Digest), err)
	}
	return nil
}
