package image

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/lazyre"
	"virtkit/core/logx"
)

// Store is a directory of kept images. Several processes may use one at once.
type Store struct {
	dir string
	o   Options
}

// Open makes dir if needed and sweeps what crashed processes left in it.
func Open(dir string, o Options) (*Store, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("image store %s: %w", dir, err)
	}
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.LocalDir == "" {
		o.LocalDir = filepath.Join(filepath.Dir(abs), "local")
	}
	orInt(&o.Parallel, 4)
	orInt(&o.Retries, 6)
	if o.Stall <= 0 {
		o.Stall = 30 * time.Second
	}
	if o.Patience <= 0 {
		o.Patience = defaultPatience
	}
	if o.Small <= 0 {
		o.Small = smallLimit
	}
	if o.MaxBytes <= 0 {
		o.MaxBytes = 128 << 30
	}
	s := &Store{dir: abs, o: o}
	for _, d := range []string{"", "images", "refs", "blobs", "locks", "staging"} {
		if err := os.MkdirAll(filepath.Join(abs, d), 0o700); err != nil {
			return nil, fault.Newf(fault.System, "image store %s cannot be made", abs).
				Hint("set state_dir to a directory that can be written").Because(noSpace(abs, err))
		}
	}
	if o.NoSweep {
		return s, nil
	}
	if _, err := s.sweep(false); err != nil {
		s.o.Log.Warn("sweeping the staging directory", logx.Path, abs, logx.Err, err)
	}
	return s, nil
}

func orInt(p *int, otherwise int) {
	if *p <= 0 {
		*p = otherwise
	}
}

// Dir is the directory of the store.
func (s *Store) Dir() string { return s.dir }

// Parse reads a reference with the store's configuration.
func (s *Store) Parse(text string) (Ref, error) {
	return ParseRef(text, Sources{s.o.RegistryRepo, s.o.DockerRepo, s.o.Insecure})
}

// record is the content of image.json and bundle.json.
type record struct {
	Schema   int       `json:"schema"` // 1
	Ref      string    `json:"ref"`
	Digest   string    `json:"digest"`
	Kind     string    `json:"kind"` // image, bundle or default
	Platform string    `json:"platform,omitempty"`
	Created  time.Time `json:"created"`
	Size     int64     `json:"size"` // of root.ext4, holes included
	FSType   string    `json:"fstype"`
	Config   Config    `json:"config"`
	Blobs    []string  `json:"blobs,omitempty"` // digests of the layers, as received
	Recipe   string    `json:"recipe,omitempty"`
}

const (
	recordSchema = 1
	imageJSON    = "image.json"
	bundleJSON   = "bundle.json"
	rootFile     = "root.ext4"
	holdFile     = "hold"
)

// dirName is the name under which something with a digest is kept.
func dirName(digest string) string { return strings.Replace(digest, ":", "-", 1) }

var digestForm = lazyre.New(`^sha256:[0-9a-f]{64}$`)

func (s *Store) imageDir(digest string) string {
	return filepath.Join(s.dir, "images", dirName(digest))
}
func (s *Store) blobPath(digest string) string {
	return filepath.Join(s.dir, "blobs", dirName(digest))
}
func (s *Store) lockPath(name string) string { return filepath.Join(s.dir, "locks", name+".lock") }

// wait takes an exclusive lock that another process may hold for as long as a
// download takes, and says so.
func (s *Store) wait(ctx context.Context, name string, p *progress, why string) (*fsx.Lock, error) {
	told := time.Time{}
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		l, err := fsx.TryLock(s.lockPath(name), false)
		if !errors.Is(err, fsx.ErrLocked) {
			if err != nil {
				err = fmt.Errorf("taking a lock: %w", noSpace(s.dir, err))
			}
			return l, err
		}
		if time.Since(told) > 10*time.Second {
			told = time.Now()
			p.say("wait", "waiting for another vk that is "+why)
		}
		if err := sleep(ctx, pause); err != nil {
			return nil, err
		}
	}
}

// stage is a directory for work in progress; see the package documentation.
type stage struct {
	dir  string
	lock *fsx.Lock
}

var stageForm = lazyre.New(`^s-[0-9a-f]{16}$`)

func (s *Store) stage(ctx context.Context) (*stage, error) {
	// Held while the directory has no lock of its own yet: a sweeper waits.
	making, err := fsx.AcquireLock(ctx, s.lockPath("staging"), true)
	if err != nil {
		return nil, fmt.Errorf("staging: %w", noSpace(s.dir, err))
	}
	defer making.Close()
	var b [8]byte
	_, _ = rand.Read(b[:])
	st := &stage{dir: filepath.Join(s.dir, "staging", "s-"+hex.EncodeToString(b[:]))}
	if err := os.Mkdir(st.dir, 0o700); err != nil {
		return nil, fmt.Errorf("staging: %w", noSpace(st.dir, err))
	}
	if st.lock, err = fsx.TryLock(filepath.Join(st.dir, "lock"), false); err != nil {
		os.Remove(st.dir)
		return nil, fmt.Errorf("staging: %w", noSpace(st.dir, err))
	}
	return st, nil
}

func (st *stage) path(name string) string { return filepath.Join(st.dir, name) }

// Close removes the directory and then gives up its lock.
func (st *stage) Close() {
	_, _ = removeOurs(st.dir)
	st.lock.Close()
}

// ours are the names of files that this package makes in directories that it
// removes. Others, and whatever is no regular file, are never touched: then
// the directory stays.
var ours = lazyre.New(`^(lock|hold|blob|idx|spool|image\.json|bundle\.json|root\.ext4|\.(image|bundle)\.json\.tmp-[0-9]+)$`)

// removeOurs removes one of this package's directories, and an "img" in it.
// bytes is the disk space freed.
func removeOurs(dir string) (bytes int64, err error) {
	ents, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range ents {
		p := filepath.Join(dir, e.Name())
		switch {
		case e.Type().IsRegular() && ours.MatchString(e.Name()):
			n := diskSize(p)
			if err := os.Remove(p); err != nil {
				return bytes, err
			}
			bytes += n
		case e.IsDir() && e.Name() == "img":
			n, err := removeOurs(p)
			bytes += n
			if err != nil {
				return bytes, err
			}
		}
	}
	return bytes, os.Remove(dir)
}

// diskSize is what a file takes on disk, in bytes.
func diskSize(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// sweep removes staging directories whose makers are gone.
func (s *Store) sweep(dryRun bool) (r Report, err error) {
	l, err := fsx.TryLock(s.lockPath("staging"), false)
	if errors.Is(err, fsx.ErrLocked) {
		return r, nil // somebody is making one, or sweeping
	}
	if err != nil {
		return r, err
	}
	defer l.Close()
	ents, err := os.ReadDir(filepath.Join(s.dir, "staging"))
	if err != nil {
		return r, err
	}
	for _, e := range ents {
		if !e.IsDir() || !stageForm.MatchString(e.Name()) {
			continue
		}
		dir := filepath.Join(s.dir, "staging", e.Name())
		if err := fsx.NotOurs(dir); err != nil {
			r.Skipped = append(r.Skipped, err.Error())
			continue
		}
		held, err := fsx.TryLock(filepath.Join(dir, "lock"), false)
		if err != nil {
			if !errors.Is(err, fsx.ErrLocked) {
				r.Skipped = append(r.Skipped, dir+": "+err.Error())
			}
			continue
		}
		r.Staging++
		if dryRun {
			for _, f := range []string{"blob", "spool", "root.ext4", "img/root.ext4"} {
				r.Bytes += diskSize(filepath.Join(dir, f))
			}
		} else {
			n, err := removeOurs(dir)
			r.Bytes += n
			if err != nil {
				r.Skipped = append(r.Skipped, dir+": "+err.Error())
			}
		}
		held.Close()
	}
	return r, nil
}

// open returns a kept image with a shared hold on it; fs.ErrNotExist when
// there is none.
func (s *Store) open(digest, ref string) (*Image, error) {
	dir := s.imageDir(digest)
	if _, err := os.Lstat(filepath.Join(dir, imageJSON)); err != nil {
		return nil, err
	}
	hold, err := holdShared(filepath.Join(dir, holdFile))
	if err != nil {
		return nil, err
	}
	img, err := opened(dir, imageJSON, ref)
	if err != nil {
		hold.Close()
		return nil, err
	}
	img.Hold, img.LockPath = hold, filepath.Join(dir, holdFile)
	now := time.Now()
	_ = os.Chtimes(img.LockPath, now, now)
	return img, nil
}

// holdShared takes a shared hold. Others have it exclusively only for moments:
// to see whether it is in use, or to move what it is of out of sight, after
// which its file is no more (fs.ErrNotExist).
func holdShared(path string) (*fsx.Lock, error) {
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		l, err := fsx.TryLock(path, true)
		if !errors.Is(err, fsx.ErrLocked) || time.Now().After(deadline) {
			return l, err
		}
	}
}

func readRecord(path string) (record, error) {
	var r record
	b, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("%s: %w", path, err)
	}
	if r.Schema != recordSchema {
		return r, fmt.Errorf("%s: schema %d, this vk knows %d", path, r.Schema, recordSchema)
	}
	return r, nil
}

func opened(dir, recordName, ref string) (*Image, error) {
	r, err := readRecord(filepath.Join(dir, recordName))
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, rootFile)
	st, err := os.Lstat(path)
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular() || st.Size() != r.Size:
		return nil, fmt.Errorf("%s is not the file of %d bytes that %s says it is", path, r.Size, recordName)
	}
	return &Image{Ref: ref, Digest: r.Digest, Path: path, FSType: r.FSType, Config: r.Config, Size: r.Size, Platform: r.Platform}, nil
}

// keep returns the image of a digest, made by build when it is not there yet:
// by one process, however many ask. build writes root.ext4 into the directory
// it is given.
func (s *Store) keep(ctx context.Context, digest, ref string, p *progress, build func(st *stage, dir string) (record, error)) (*Image, error) {
	if img, err := s.open(digest, ref); err == nil {
		return img, nil
	}
	lock, err := s.wait(ctx, "image-"+dirName(digest), p, "unpacking "+ref)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	img, err := s.open(digest, ref)
	if err == nil {
		return img, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		s.o.Log.Warn("a kept image cannot be used and is made again", "digest", digest, logx.Err, err)
	}
	st, err := s.stage(ctx)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	if _, err := os.Lstat(s.imageDir(digest)); err == nil {
		if err := s.discard(ctx, s.imageDir(digest)); err != nil {
			return nil, fmt.Errorf("removing a damaged image: %w", err)
		}
	}
	dir := st.path("img")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, noSpace(dir, err)
	}
	rec, err := build(st, dir)
	if err != nil {
		return nil, err
	}
	return s.publish(dir, digest, ref, rec)
}

// publish gives a finished directory its name in the store. The hold is taken
// before, so that no GC can come between.
func (s *Store) publish(dir, digest, ref string, rec record) (*Image, error) {
	st, err := os.Lstat(filepath.Join(dir, rootFile))
	if err != nil {
		return nil, err
	}
	rec.Schema, rec.Ref, rec.Digest, rec.Size, rec.FSType = recordSchema, ref, digest, st.Size(), "ext4"
	rec.Created = time.Now().UTC().Truncate(time.Second)
	if err := writeJSON(filepath.Join(dir, imageJSON), rec); err != nil {
		return nil, err
	}
	hold, err := fsx.TryLock(filepath.Join(dir, holdFile), true)
	if err != nil {
		return nil, noSpace(dir, err)
	}
	final := s.imageDir(digest)
	if err := os.Rename(dir, final); err != nil {
		hold.Close()
		return nil, noSpace(final, err)
	}
	if err := fsx.SyncDir(filepath.Dir(final)); err != nil {
		hold.Close()
		return nil, noSpace(final, err)
	}
	img, err := opened(final, imageJSON, ref)
	if err != nil {
		hold.Close()
		return nil, err
	}
	img.Hold, img.LockPath = hold, filepath.Join(final, holdFile)
	return img, nil
}

func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return noSpace(path, fsx.WriteFile(path, append(b, '\n'), 0o600))
}

// discard moves a directory of the store out of sight and removes it. A crash
// in between leaves a dead staging directory.
func (s *Store) discard(ctx context.Context, dir string) error {
	st, err := s.stage(ctx)
	if err != nil {
		return err
	}
	defer st.Close()
	return os.Rename(dir, st.path("img"))
}
