package image_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/image"
)

// namesOf is what List says of each image: its name, or what it was.
func namesOf(t *testing.T, s *image.Store) map[string]string {
	t.Helper()
	list, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, i := range list {
		out[i.Digest] = i.Ref
		if i.Ref == "" {
			out[i.Digest] = "was " + i.Former
		}
	}
	return out
}

// TestListMovedNames: a name is told of the one image that it means now.
func TestListMovedNames(t *testing.T) {
	reg := newRegistry(t)
	s := openStore(t, image.Options{})
	pull := func(ref, platform string) {
		t.Helper()
		if _, err := resolve(t, s, reg.host()+ref, image.ResolveOptions{Platform: platform}); err != nil {
			t.Fatal(err)
		}
	}
	name := "docker/" + reg.host() + "/r:1"
	old := reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "v", body: "1"})))
	pull("/r:1", "")
	now := reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "v", body: "2"})))
	pull("/r:1", "")
	if d := cmp.Diff(map[string]string{old: "was " + name, now: name}, namesOf(t, s)); d != "" {
		t.Errorf("after the tag moved (-want +got):\n%s", d)
	}
	if i, err := s.Inspect(name); err != nil || i.Digest != now {
		t.Errorf("Inspect(%s) = %s, %v; want %s", name, i.Digest, err, now)
	}
	if i, err := s.Inspect(old); err != nil || len(i.Refs) != 0 {
		t.Errorf("Inspect of the old digest = %+v, %v; want no references", i, err)
	}

	// By its digest the old one has a name again; another platform's image takes none.
	pull("/r@"+old, "")
	arm := reg.push(t, "r", "arm", ociManifest, map[string]any{"architecture": "arm64"}, gz(t, layer(t, f{name: "v", body: "3"})))
	idx, _ := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": ociIndex, "manifests": []any{
		map[string]any{"mediaType": ociManifest, "digest": arm, "size": 1, "platform": map[string]string{"os": "linux", "architecture": "arm64"}},
		map[string]any{"mediaType": ociManifest, "digest": now, "size": 1, "platform": map[string]string{"os": "linux", "architecture": "amd64"}},
	}})
	reg.put(t, "/v2/r/manifests/1", ociIndex, idx)
	pull("/r:1", "linux/arm64")
	pull("/r:1", "linux/amd64")
	want := map[string]string{old: "docker/" + reg.host() + "/r@" + old, now: name, arm: name}
	if d := cmp.Diff(want, namesOf(t, s)); d != "" {
		t.Errorf("with two platforms (-want +got):\n%s", d)
	}
}

func TestListOldDefault(t *testing.T) {
	tar := defaultTar(t, f{name: "v", body: "1"})
	s := openStore(t, image.Options{Getenv: func(k string) string { return map[string]string{image.EnvDefaultTar: tar}[k] }})
	digest := func() string {
		t.Helper()
		img, err := resolve(t, s, "", image.ResolveOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return img.Digest
	}
	old := digest()
	if err := os.WriteFile(tar, layer(t, f{name: "v", body: "two"}), 0o600); err != nil {
		t.Fatal(err)
	}
	now := digest()
	if d := cmp.Diff(map[string]string{old: "was local/default", now: "local/default"}, namesOf(t, s)); d != "" {
		t.Errorf("after the recipe changed (-want +got):\n%s", d)
	}
	b, err := s.Import(t.Context(), tar, "default", image.ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{old: "was local/default", now: "was local/default", b.Digest: "local/default"}
	if d := cmp.Diff(want, namesOf(t, s)); d != "" {
		t.Errorf("with a bundle of that name (-want +got):\n%s", d)
	}
	if dir := filepath.Dir(b.Path); filepath.Base(dir) != "default" {
		t.Errorf("the bundle is at %s", dir)
	}
}
