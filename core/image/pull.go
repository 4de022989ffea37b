package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"virtkit/core/fault"
	"virtkit/core/fsx"
)

// usingBlobs keeps GC from removing blobs that no kept image needs yet.
func (s *Store) usingBlobs(ctx context.Context) (*fsx.Lock, error) {
	l, err := fsx.AcquireLock(ctx, s.lockPath("blobs"), true)
	if err != nil {
		return nil, fmt.Errorf("taking a lock: %w", noSpace(s.dir, err))
	}
	return l, nil
}

// pullImage fetches what is missing of a container image and writes its root
// into dir.
func (s *Store) pullImage(ctx context.Context, r *remote, m *v1.Manifest, want v1.Platform, dir string, p *progress) (record, error) {
	body, _, err := r.small(ctx, "blobs", m.Config.Digest.String(), "", m.Config.Digest.String(), maxConfig)
	if err != nil {
		return record{}, err
	}
	cf, err := parseConfig(body)
	if err != nil {
		return record{}, fault.New(fault.System, "the image's configuration cannot be read").Because(err)
	}
	have := v1.Platform{OS: cf.OS, Architecture: cf.Architecture, Variant: cf.Variant}
	if cf.Architecture == "" {
		have = want // it does not tell; the guest will
	}
	if err := runsOn(have, want); err != nil {
		return record{}, err
	}
	if len(cf.RootFS.DiffIDs) != len(m.Layers) {
		return record{}, fault.Newf(fault.System, "its manifest has %d layers, its configuration %d", len(m.Layers), len(cf.RootFS.DiffIDs))
	}
	rec := record{Kind: "image", Platform: platformString(have), Config: configOf(cf)}
	for _, l := range m.Layers {
		if !digestForm.MatchString(l.Digest.String()) {
			return record{}, fault.Newf(fault.System, "layer digest %s: only sha256 is known", l.Digest)
		}
		rec.Blobs = append(rec.Blobs, l.Digest.String())
	}
	for try := 1; ; try++ {
		layers, err := s.ensureBlobs(ctx, r, m.Layers, cf.RootFS.DiffIDs, p)
		if err != nil {
			return record{}, err
		}
		err = s.convert(layers, filepath.Join(dir, rootFile), p)
		var bad *corruptError
		if errors.As(err, &bad) && try == 1 {
			// A kept blob went bad on disk. Fetch it again, once.
			s.o.Log.Warn("a kept layer is damaged and is fetched again", "layer", bad.layer, "err", err)
			s.dropBlob(ctx, bad.layer)
			continue
		}
		return rec, err
	}
}

// runsOn refuses an image for another machine, which would otherwise fail in
// the guest with nothing but "exec format error".
func runsOn(have, want v1.Platform) error {
	if have.OS == want.OS && have.Architecture == want.Architecture {
		return nil
	}
	return fault.Newf(fault.NotFound, "it is made for %s, not for %s", platformString(have), platformString(want)).
		Hint("choose an image made for %s", platformString(want))
}

// convert writes the root that layers make, with progress.
func (s *Store) convert(layers []layerSource, path string, p *progress) error {
	start := time.Now()
	pl, err := merge(layers)
	if err != nil {
		return err
	}
	p.begin(pl.size)
	p.say("unpack", fmt.Sprintf("writing %d files of %d layers, %s", pl.inodes, len(layers), units.BytesSize(float64(pl.size))))
	count := p.counter("unpack", "", pl.size)
	var last int64
	if err := pl.writeExt4(path, layers, s.o.MaxBytes, func(done int64) { count(done - last); last = done }); err != nil {
		return err
	}
	s.o.Log.Debug("image unpacked", "path", path, "files", pl.inodes, "bytes", pl.size, "took", time.Since(start))
	return nil
}

// ensureBlobs fetches those layers that are not kept yet, several at once, and
// returns all of them, bottom first.
func (s *Store) ensureBlobs(ctx context.Context, r *remote, layers []v1.Descriptor, diffIDs []v1.Hash, p *progress) ([]layerSource, error) {
	var total int64
	kept := 0
	indexes := map[string]*index{}
	for i, l := range layers {
		d := l.Digest.String()
		if _, seen := indexes[d]; seen {
			continue
		}
		indexes[d] = s.keptIndex(d, diffIDs[i].String())
		if indexes[d] == nil {
			total += l.Size
		} else {
			kept++
		}
	}
	missing := len(indexes) - kept
	p.begin(total)
	if missing > 0 {
		p.say("pull", fmt.Sprintf("pulling %d layers, %s (%d kept already)", missing, units.BytesSize(float64(total)), kept))
	}
	out := make([]layerSource, len(layers))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(s.o.Parallel)
	started := map[string]bool{}
	fetched := make([]*index, len(layers))
	for i, l := range layers {
		d := l.Digest.String()
		if indexes[d] != nil || started[d] {
			continue
		}
		started[d] = true
		g.Go(func() error {
			idx, err := s.fetchBlob(gctx, r, d, diffIDs[i].String(), l.Size, p)
			fetched[i] = idx
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for i, l := range layers {
		d := l.Digest.String()
		if fetched[i] != nil {
			indexes[d] = fetched[i]
		}
		if got := indexes[d].DiffID; got != diffIDs[i].String() {
			return nil, diffMismatch(d, diffIDs[i].String(), got)
		}
		path := s.blobPath(d)
		out[i] = layerSource{name: d, idx: indexes[d], open: func() (io.ReadCloser, error) { return os.Open(path) }}
	}
	return out, nil
}

func diffMismatch(layer, want, got string) error {
	return fault.Newf(fault.System, "layer %s unpacks to %s, but the image's configuration says %s", layer, got, want).
		Hint("the image was put together wrongly; build and push it again")
}

// keptIndex returns the index of a kept blob, nil when the blob or its index
// is missing or unusable.
func (s *Store) keptIndex(digest, diffID string) *index {
	path := s.blobPath(digest)
	if st, err := os.Lstat(path); err != nil || !st.Mode().IsRegular() {
		return nil
	}
	b, err := os.ReadFile(path + ".idx")
	if err != nil {
		return nil
	}
	idx, err := decodeIndex(b)
	if err != nil || idx.DiffID != diffID {
		return nil
	}
	now := time.Now()
	_ = os.Chtimes(path, now, now)
	return idx
}

// fetchBlob downloads one layer, reading its headers on the way, and keeps it
// when both its digests are right.
func (s *Store) fetchBlob(ctx context.Context, r *remote, digest, diffID string, size int64, p *progress) (*index, error) {
	lock, err := s.wait(ctx, "blob-"+dirName(digest), p, "pulling layer "+short(digest))
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	count := p.counter("pull", digest, size)
	if idx := s.keptIndex(digest, diffID); idx != nil {
		count(size)
		return idx, nil
	}
	for try := 1; ; try++ {
		var got int64
		idx, err := s.fetchOnce(ctx, r, digest, diffID, size, p, func(n int64) { got += n; count(n) })
		if err == nil {
			return idx, nil
		}
		// Damage on the way may not repeat; anything else was retried below.
		var wrong *damagedError
		if !errors.As(err, &wrong) || try == 2 || ctx.Err() != nil {
			return nil, err
		}
		count(-got)
		p.say("pull", "layer "+short(digest)+" arrived damaged; fetching it once more")
	}
}

// damagedError marks bytes that are not those that were asked for.
type damagedError struct{ err error }

func (e *damagedError) Error() string { return e.err.Error() }
func (e *damagedError) Unwrap() error { return e.err }

func (s *Store) fetchOnce(ctx context.Context, r *remote, digest, diffID string, size int64, p *progress, count func(int64)) (*index, error) {
	st, err := s.stage(ctx)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	f, err := os.OpenFile(st.path("blob"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, noSpace(st.dir, err)
	}
	defer f.Close()

	pr, pw := io.Pipe()
	type scanned struct {
		idx *index
		err error
	}
	result := make(chan scanned, 1)
	go func() {
		idx, err := scan(pr, s.o.MaxBytes)
		// What the scanner no longer wants still counts for the digest.
		_, _ = io.Copy(io.Discard, pr)
		result <- scanned{idx, err}
	}()
	err = r.blob(ctx, digest, size, io.MultiWriter(f, pw), p.note("pull"), count)
	pw.CloseWithError(err)
	got := <-result
	switch {
	case err != nil:
		var local *localWrite
		if errors.As(err, &local) {
			return nil, noSpace(st.dir, fmt.Errorf("writing layer %s: %w", short(digest), local.err))
		}
		if strings.Contains(err.Error(), "sent other bytes") {
			return nil, &damagedError{err}
		}
		return nil, err
	case got.err != nil:
		return nil, fault.Newf(fault.System, "layer %s cannot be unpacked", digest).
			Hint("the registry holds it like this; build and push the image again").Because(got.err)
	case got.idx.DiffID != diffID:
		return nil, diffMismatch(digest, diffID, got.idx.DiffID)
	}
	b, err := encodeIndex(got.idx)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(st.path("idx"), b, 0o600); err != nil {
		return nil, noSpace(st.dir, err)
	}
	if err := f.Close(); err != nil {
		return nil, noSpace(st.dir, err)
	}
	path := s.blobPath(digest)
	if err := os.Rename(st.path("idx"), path+".idx"); err != nil {
		return nil, noSpace(path, err)
	}
	if err := os.Rename(st.path("blob"), path); err != nil {
		return nil, noSpace(path, err)
	}
	return got.idx, nil
}

// dropBlob removes a kept blob that turned out damaged.
func (s *Store) dropBlob(ctx context.Context, digest string) {
	lock, err := fsx.AcquireLock(ctx, s.lockPath("blob-"+dirName(digest)), false)
	if err != nil {
		return
	}
	defer lock.Close()
	os.Remove(s.blobPath(digest))
	os.Remove(s.blobPath(digest) + ".idx")
}

func parseConfig(b []byte) (*v1.ConfigFile, error) {
	var cf v1.ConfigFile
	if err := json.Unmarshal(b, &cf); err != nil {
		return nil, err
	}
	return &cf, nil
}

func configOf(cf *v1.ConfigFile) Config {
	c := Config{
		Env: cf.Config.Env, User: cf.Config.User, WorkingDir: cf.Config.WorkingDir,
		Entrypoint: cf.Config.Entrypoint, Cmd: cf.Config.Cmd,
		Labels: cf.Config.Labels, StopSignal: cf.Config.StopSignal,
	}
	for v := range cf.Config.Volumes {
		c.Volumes = append(c.Volumes, v)
	}
	for p := range cf.Config.ExposedPorts {
		c.ExposedPorts = append(c.ExposedPorts, p)
	}
	slices.Sort(c.Volumes)
	slices.Sort(c.ExposedPorts)
	return c
}
