package image_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/image"
)

func file(t testing.TB, name string, body []byte) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(p, body, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// dockerArchive is what docker save writes of one image.
func dockerArchive(t testing.TB, layers ...sent) []byte {
	t.Helper()
	var names, ids []string
	var entries []f
	for i, l := range layers {
		n := fmt.Sprintf("%d/layer.tar", i)
		names, ids = append(names, n), append(ids, sum(l.raw))
		entries = append(entries, f{name: n, body: string(l.body)})
	}
	cfg, _ := json.Marshal(map[string]any{"os": "linux", "architecture": "amd64", "config": map[string]any{"User": "7"}, "rootfs": map[string]any{"type": "layers", "diff_ids": ids}})
	man, _ := json.Marshal([]any{map[string]any{"Config": "cfg.json", "RepoTags": []string{"x:1"}, "Layers": names}})
	return layer(t, append(entries, f{name: "cfg.json", body: string(cfg)}, f{name: "manifest.json", body: string(man)})...)
}

func TestImport(t *testing.T) {
	raw := layer(t, f{name: "hello", body: "world"}, f{name: "bin/sh", mode: 0o755})
	l := sent{raw, raw, ""}
	layout := filepath.Join(t.TempDir(), "layout")
	writeLayout(t, layout, gz(t, raw))
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.AddFS(os.DirFS(layout)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hello"), []byte("world"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(dir, "hello"), filepath.Join(dir, "hard")); err != nil {
		t.Fatal(err)
	}
	srcs := map[string]string{
		"tar": file(t, "a.tar", raw), "tar.gz": file(t, "a.tar.gz", gz(t, raw).body), "tar.zst": file(t, "a.tar.zst", zs(t, raw).body),
		"dir": dir, "layout": layout, "oci-archive": file(t, "o.tar", archive.Bytes()),
		"docker": file(t, "d.tar", dockerArchive(t, l)), "docker.gz": file(t, "d.tar.gz", gz(t, dockerArchive(t, gz(t, raw))).body),
	}
	if xz, err := exec.LookPath("xz"); err == nil {
		cmd := exec.Command(xz)
		cmd.Stdin = bytes.NewReader(raw)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		srcs["tar.xz"] = file(t, "a.tar.xz", out)
	}
	for kind, src := range srcs {
		t.Run(kind, func(t *testing.T) {
			s := openStore(t, image.Options{})
			i, err := s.Import(t.Context(), src, "mine", image.ImportOptions{Platform: "linux/amd64"})
			if err != nil {
				t.Fatal(err)
			}
			img, err := resolve(t, s, "local/mine", image.ResolveOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got := cat(t, img.Path, "/hello"); got != "world" {
				t.Errorf("/hello = %q", got)
			}
			if img.Digest != i.Digest || img.Ref != "local/mine" {
				t.Errorf("image = %+v; imported %+v", img, i)
			}
			if strings.HasPrefix(kind, "docker") && img.Config.User != "7" {
				t.Errorf("configuration = %+v", img.Config)
			}
			if left := leftovers(t, s); len(left) > 0 {
				t.Errorf("left in the store: %q", left)
			}
			list, err := s.List()
			if err != nil || len(list) != 1 || list[0].Ref != "local/mine" || !list[0].InUse {
				t.Errorf("List = %+v, %v", list, err)
			}
		})
	}
}

// One image of a layout that holds two is named by its tag.
func TestImportOneOfALayout(t *testing.T) {
	dir := t.TempDir()
	layout := filepath.Join(dir, "layout")
	var all []json.RawMessage
	for _, tag := range []string{"two", "one"} { // writeLayout says "one"
		raw := layer(t, f{name: "tag", body: tag})
		writeLayout(t, layout, gz(t, raw))
		b, err := os.ReadFile(filepath.Join(layout, "index.json"))
		if err != nil {
			t.Fatal(err)
		}
		var idx struct{ Manifests []json.RawMessage }
		if err := json.Unmarshal(bytes.ReplaceAll(b, []byte(`"one"`), []byte(`"`+tag+`"`)), &idx); err != nil {
			t.Fatal(err)
		}
		all = append(all, idx.Manifests...)
	}
	b, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": all})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(layout, "index.json"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.AddFS(os.DirFS(layout)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	for _, src := range []string{layout, file(t, "o.tar", archive.Bytes())} {
		s := openStore(t, image.Options{})
		for _, tag := range []string{"one", "two"} {
			i, err := s.Import(t.Context(), src+":"+tag, tag, image.ImportOptions{Platform: "linux/amd64"})
			if err != nil {
				t.Fatal(err)
			}
			if got := cat(t, i.Path, "/tag"); got != tag {
				t.Errorf("%s:%s has /tag %q", src, tag, got)
			}
		}
		for tag, want := range map[string]struct {
			kind fault.Kind
			text string
			hint string
		}{
			"":       {fault.Usage, "the layout holds 2 images: two, one", "<path>:<tag>"},
			":three": {fault.NotFound, `no image "three"`, "it has: two, one"},
		} {
			_, err := s.Import(t.Context(), src+tag, "mine", image.ImportOptions{Platform: "linux/amd64"})
			if fault.KindOf(err) != want.kind || !strings.Contains(err.Error(), want.text) || !strings.Contains(fault.HintOf(err), want.hint) {
				t.Errorf("%q: (%s) %v, hint %q", tag, fault.KindOf(err), err, fault.HintOf(err))
			}
		}
	}
}

func TestImportErrors(t *testing.T) {
	raw := layer(t, f{name: "x"})
	bad := dockerArchive(t, sent{body: raw, raw: []byte("other")})
	for _, c := range []struct {
		name, src string
		kind      fault.Kind
		text      string
	}{
		{"missing", filepath.Join(t.TempDir(), "no.tar"), fault.NotFound, "no.tar"},
		{"no tar", file(t, "x", bytes.Repeat([]byte("x"), 5000)), fault.Usage, "not a tar"},
		{"empty file", file(t, "empty.tar", nil), fault.Usage, "not one file"},
		{"empty directory", t.TempDir(), fault.Usage, "not one file"},
		{"wrong diff id", file(t, "d.tar", bad), fault.System, "unpacks to"},
		{"tag of a directory", t.TempDir() + ":x", fault.Usage, "no OCI layout"},
		{"tag of a tar", file(t, "t.tar", raw) + ":x", fault.Usage, "no OCI layout"},
		{"device", "/dev/null", fault.Usage, "neither a file nor a directory"},
	} {
		s := openStore(t, image.Options{})
		_, err := s.Import(t.Context(), c.src, "mine", image.ImportOptions{})
		if fault.KindOf(err) != c.kind || err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: (%s) %v; want (%s) with %q", c.name, fault.KindOf(err), err, c.kind, c.text)
		}
		if ents, _ := os.ReadDir(filepath.Join(filepath.Dir(s.Dir()), "local")); len(ents)+len(leftovers(t, s)) > 0 {
			t.Errorf("%s: something is left: %v", c.name, ents)
		}
	}
}

func TestBundleLife(t *testing.T) {
	s := openStore(t, image.Options{})
	src := file(t, "a.tar", layer(t, f{name: "v", body: "1"}))
	if _, err := resolve(t, s, "local/b", image.ResolveOptions{}); fault.KindOf(err) != fault.NotFound || !strings.Contains(fault.HintOf(err), "vk image import") {
		t.Errorf("no such bundle: %v, hint %q", err, fault.HintOf(err))
	}
	if _, err := s.Import(t.Context(), src, "b", image.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Import(t.Context(), src, "b", image.ImportOptions{}); fault.KindOf(err) != fault.Conflict {
		t.Errorf("a second time: %v; want %s", err, fault.Conflict)
	}
	img, err := resolve(t, s, "local/b", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	src2 := file(t, "b.tar", layer(t, f{name: "v", body: "2"}))
	if _, err := s.Import(t.Context(), src2, "b", image.ImportOptions{Replace: true}); fault.KindOf(err) != fault.Busy {
		t.Errorf("replacing a held one: %v; want %s", err, fault.Busy)
	}
	if err := s.Remove(t.Context(), "local/b"); fault.KindOf(err) != fault.Busy {
		t.Errorf("removing a held one: %v; want %s", err, fault.Busy)
	}
	img.Close()
	if _, err := s.Import(t.Context(), src2, "local/b", image.ImportOptions{Replace: true}); err != nil {
		t.Fatal(err)
	}
	if img, err = resolve(t, s, "local/b", image.ResolveOptions{}); err != nil || cat(t, img.Path, "/v") != "2" {
		t.Errorf("after replacing: %v, %v", img, err)
	}
	img.Close()
	if r, err := s.GC(t.Context(), 0, false); err != nil || len(r.Images) != 0 {
		t.Errorf("gc touches bundles: %+v, %v", r, err)
	}
	if err := s.Remove(t.Context(), "local/b"); err != nil {
		t.Fatal(err)
	}
	if ents, _ := os.ReadDir(filepath.Join(filepath.Dir(s.Dir()), "local")); len(ents) > 0 {
		t.Errorf("left: %v", ents)
	}
}

func TestPushAndPullBundle(t *testing.T) {
	reg := newRegistry(t)
	o := image.Options{RegistryRepo: reg.host() + "/vk"}
	s := openStore(t, o)
	src := file(t, "a.tar", layer(t, f{name: "v", body: strings.Repeat("\x00", 1<<22) + "end"}))
	if _, err := s.Import(t.Context(), src, "b", image.ImportOptions{Platform: "linux/amd64", Config: &image.Config{User: "9"}}); err != nil {
		t.Fatal(err)
	}
	to, err := s.Parse("virtkit/team/b:1")
	if err != nil {
		t.Fatal(err)
	}
	digest, err := s.Push(t.Context(), "b", to, image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	local, err := resolve(t, s, "local/b", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	other := openStore(t, o)
	for _, ref := range []string{"virtkit/team/b:1", "virtkit/team/b@" + digest} {
		img, err := resolve(t, other, ref, image.ResolveOptions{})
		if err != nil {
			t.Fatal(err)
		}
		a, _ := os.ReadFile(local.Path)
		b, err := os.ReadFile(img.Path)
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s: the root is another one (%v)", ref, err)
		}
		if img.Digest != digest || img.Config.User != "9" {
			t.Errorf("%s: image = %+v", ref, img)
		}
	}
	list, err := other.List()
	if err != nil || len(list) != 1 || list[0].Kind != "bundle" || list[0].DiskSize >= list[0].Size {
		t.Errorf("List = %+v, %v; want one sparse bundle", list, err)
	}
	// A damaged bundle leaves nothing.
	third := openStore(t, o)
	reg.misbehave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") || strings.Contains(r.URL.Path, "uploads") {
			return false
		}
		_, _ = w.Write([]byte("garbage"))
		return true
	})
	if _, err := resolve(t, third, "virtkit/team/b:1", image.ResolveOptions{}); err == nil {
		t.Error("a damaged bundle was taken")
	}
	if left := leftovers(t, third); len(left) > 0 {
		t.Errorf("left in the store: %q", left)
	}
}

func TestContainerImageAsBundle(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "vk/x", "1", ociManifest, nil, gz(t, layer(t, f{name: "x"})))
	s := openStore(t, image.Options{RegistryRepo: reg.host() + "/vk"})
	_, err := resolve(t, s, "virtkit/x:1", image.ResolveOptions{})
	if fault.KindOf(err) != fault.Usage || !strings.Contains(err.Error(), "not a virtkit bundle") {
		t.Errorf("error = %v", err)
	}
}

// TestKilledImport: what an import left that was killed goes with the next gc.
func TestKilledImport(t *testing.T) {
	s := openStore(t, image.Options{})
	local := filepath.Join(filepath.Dir(s.Dir()), "local")
	left := filepath.Join(local, ".tmp-0123456789abcdef")
	if err := os.MkdirAll(left, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(left, "root.ext4"), bytes.Repeat([]byte("x"), 1<<16), 0o400); err != nil {
		t.Fatal(err)
	}
	if r, err := s.GC(t.Context(), 0, true); err != nil || r.Staging != 1 || r.Bytes < 1<<16 {
		t.Errorf("dry run: %+v, %v", r, err)
	}
	if _, err := os.Stat(left); err != nil {
		t.Fatalf("a dry run removed something: %v", err)
	}
	if r, err := s.GC(t.Context(), 0, false); err != nil || r.Staging != 1 || r.Bytes < 1<<16 {
		t.Errorf("gc: %+v, %v", r, err)
	}
	if ents, _ := os.ReadDir(local); len(ents) > 0 {
		t.Errorf("left: %v", ents)
	}
	if m, _ := filepath.Glob(filepath.Join(s.Dir(), "locks", "bundle-*")); len(m) > 0 {
		t.Errorf("locks left: %v", m)
	}
}
