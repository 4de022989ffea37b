package image_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/image"
)

func TestEvict(t *testing.T) {
	reg := newRegistry(t)
	s := openStore(t, image.Options{})
	noise := func(n int) string {
		var b strings.Builder
		for x := uint32(n); b.Len() < 300<<10; x = x*1664525 + 1013904223 {
			fmt.Fprintf(&b, "%x", x)
		}
		return b.String()
	}
	shared := gz(t, layer(t, f{name: "x", body: noise(1)}))
	var digests []string
	held := map[string]*image.Image{}
	for i := range 4 {
		tag := fmt.Sprint(i)
		reg.push(t, "r", tag, ociManifest, nil, shared, gz(t, layer(t, f{name: "y", body: noise(i + 2)})))
		img, err := resolve(t, s, reg.host()+"/r:"+tag, image.ResolveOptions{})
		if err != nil {
			t.Fatal(err)
		}
		held[img.Digest] = img
		digests = append(digests, img.Digest)
		// The first one was used last; all of them longer ago than the grace, but
		// for the last one.
		at := time.Now().Add(-time.Duration(20+10*i) * time.Minute)
		if i == 3 {
			at = time.Now()
		}
		if err := os.Chtimes(img.LockPath, at, at); err != nil {
			t.Fatal(err)
		}
	}
	left := func() map[string]bool {
		out := map[string]bool{}
		all, err := s.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range all {
			out[i.Digest] = true
		}
		return out
	}
	evict := func(need int64, keep ...string) image.Eviction {
		t.Helper()
		e, err := s.Evict(t.Context(), image.EvictOptions{Need: need, Grace: 10 * time.Minute, Keep: keep})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	if e := evict(1); e.Could != 0 || e.Images != 0 {
		t.Errorf("all are held: %+v", e)
	}
	for _, img := range held {
		img.Close()
	}
	for i, d := range digests[:3] { // a hold's end is a use
		at := time.Now().Add(-time.Duration(20+10*i) * time.Minute)
		if err := os.Chtimes(held[d].LockPath, at, at); err != nil {
			t.Fatal(err)
		}
	}
	blobs, err := filepath.Glob(filepath.Join(s.Dir(), "blobs", "sha256-*"))
	if err != nil || len(blobs) == 0 {
		t.Fatal(blobs, err)
	}
	// A chunk that no image needs goes first.
	orphan := filepath.Join(s.Dir(), "blobs", "sha256-"+strings.Repeat("0", 64))
	if err := os.WriteFile(orphan, make([]byte, 64<<10), 0o600); err != nil {
		t.Fatal(err)
	}

	// All or nothing.
	e := evict(1<<40, digests[1])
	if e.Images != 0 || e.Blobs != 0 || e.Bytes != 0 || e.Could < 2*300<<10 {
		t.Errorf("%+v", e)
	}
	if _, err := os.Stat(orphan); err != nil || len(left()) != 4 {
		t.Error(err, left())
	}
	if e := evict(60 << 10); e.Images != 0 || e.Blobs != 1 || e.Bytes < 60<<10 {
		t.Errorf("the chunk alone was enough: %+v", e)
	}
	// The least recently used one, but for those that are to stay.
	if e := evict(200<<10, digests[2]); e.Images != 1 || e.Blobs != 1 || e.Bytes < 300<<10 {
		t.Errorf("%+v", e)
	}
	if d := cmp.Diff(map[string]bool{digests[0]: true, digests[2]: true, digests[3]: true}, left()); d != "" {
		t.Error(d)
	}
	// Whatever was used within the grace stays, and its layers.
	e = evict(0)
	if e.Images != 0 {
		t.Errorf("nothing was needed: %+v", e)
	}
	if e := evict(e.Could); e.Images != 2 || e.Bytes != e.Could {
		t.Errorf("%+v", e)
	}
	if d := cmp.Diff(map[string]bool{digests[3]: true}, left()); d != "" {
		t.Error(d)
	}
	img, err := resolve(t, s, reg.host()+"/r:3", image.ResolveOptions{})
	if err != nil || cat(t, img.Path, "/x") != noise(1) {
		t.Errorf("what was left is damaged: %v", err)
	}
}
