package cache_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/cijob/cache"
	"virtkit/core/cijob/transfer/transfertest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/relay"
	"virtkit/e2e/memreg"
)

// S07: cache keys with slashes, dots, percent signs and colons, a long one, and
// one that is made of a file in a folder. What one job pushes the next one
// pulls, different keys have entries of their own, and none leads out of the
// project's: all that the registry sees of a key is a digest. A key that nothing
// is left of is refused, aloud (TestTransferRecordings/cache-bad-keys).
func TestKeysApart(t *testing.T) {
	r := &cache.Registry{Repo: memreg.Start(t).Addr + "/team"}
	keys := []string{"feature/x", "feature", "x", "feature-x", "a%2Fb", "../../etc", "build:arm64", "build-arm64", strings.Repeat("k", 300), strings.Repeat("k", 299),
		"3b1f/sub/folder/go.sum-0123456789abcdef", "Feature/X"}
	refs := map[string]string{}
	for _, written := range keys {
		key := relay.CacheKey(written)
		tr, trace := transfertest.New(t, "https://gitlab.example.com", nil)
		transfertest.File(t, tr, "c/of", written)
		if err := r.Save(t.Context(), tr, job.Cache{Key: key, Paths: []string{"c"}}); err != nil {
			t.Fatalf("%q: %v: %q", written, err, trace.Lines())
		}
		ref, err := r.Ref(tr.Job, key)
		repo, _, _ := strings.Cut(ref[strings.LastIndexByte(ref, '/'):], ":")
		if other, twice := refs[ref]; err != nil || twice || repo != "/12" || !strings.HasPrefix(ref, r.Repo+"/ci-cache/gitlab.example.com/12:") {
			t.Errorf("%q is kept at %s, as is %q (%v)", written, ref, other, err)
		}
		refs[ref] = written
	}
	for _, written := range keys {
		tr, trace := transfertest.New(t, "https://gitlab.example.com", nil)
		if err := r.Restore(t.Context(), tr, job.Cache{Key: relay.CacheKey(written), Paths: []string{"c"}}); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(tr.Project, "c/of")); string(b) != written {
			t.Errorf("%q: pulled %q, %v: %q", written, b, err, trace.Lines())
		}
	}
	for _, nothing := range []string{"", "..", ".", "/", "%2e%2e", " "} {
		if key := relay.CacheKey(nothing); key != "" {
			t.Errorf("of key %q is left %q", nothing, key)
		}
	}
}
