package image

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"time"

	"virtkit/core/fsx"
)

// EvictOptions say what may go.
type EvictOptions struct {
	Need  int64         // bytes that are to come free
	Grace time.Duration // an image used since then stays: somebody may have resolved it without a hold yet
	Keep  []string      // digests of images that stay
}

// Eviction is what went, and what might have.
type Eviction struct {
	Images int
	Blobs  int
	Bytes  int64 // that came free
	Could  int64 // that might have come free; below Need nothing went
}

// Evict makes room: layers that no image needs, then images that nobody holds,
// the least recently used first, until Need bytes are free. When all of that
// together is less, nothing goes. Bundles stay.
func (s *Store) Evict(ctx context.Context, o EvictOptions) (Eviction, error) {
	var e Eviction
	infos, err := s.images()
	if err != nil {
		return e, err
	}
	now := time.Now()
	infos = slices.DeleteFunc(infos, func(i Info) bool {
		return i.InUse || now.Sub(i.Used) < o.Grace || slices.Contains(o.Keep, i.Digest) || foreign(filepath.Dir(i.Path)) != nil
	})
	slices.SortStableFunc(infos, func(a, b Info) int { return a.Used.Compare(b.Used) })

	all, plan := map[string]bool{}, Report{DryRun: true}
	for _, i := range infos {
		all[i.Digest] = true
		e.Could += i.DiskSize
	}
	if err := s.gcBlobs(&plan, all, true); err != nil {
		return e, err
	}
	if e.Could += plan.Bytes; e.Could < o.Need {
		return e, nil
	}
	blobs := func() error {
		var r Report
		err := s.gcBlobs(&r, nil, false)
		e.Blobs += r.Blobs
		e.Bytes += r.Bytes
		return err
	}
	if err := blobs(); err != nil {
		return e, err
	}
	gone := map[string]bool{}
	for _, i := range infos {
		if e.Bytes >= o.Need {
			break
		}
		if err := context.Cause(ctx); err != nil {
			return e, err
		}
		switch removed, err := s.removeImage(ctx, i.Digest, false); {
		case errors.Is(err, fsx.ErrLocked): // it is used since
			continue
		case err != nil:
			return e, err
		case removed:
			gone[i.Digest] = true
			e.Images++
			e.Bytes += i.DiskSize
		}
		if err := blobs(); err != nil {
			return e, err
		}
	}
	if len(gone) > 0 {
		s.gcRefs(&Report{}, gone, false)
	}
	return e, nil
}
