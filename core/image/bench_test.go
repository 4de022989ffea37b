package image_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"virtkit/core/image"
)

// BenchmarkBootable measures from an image in a registry on this machine to a
// file that a guest can boot, beside umoci unpack + mkfs.erofs on the same
// image as an OCI layout. VIRTKIT_BENCH_TAR names a root filesystem tar to be
// used as its base; else it is the Go tree's sources.
//
//	vk-s      seconds, nothing kept
//	shared-s  seconds, all but a 3 MB layer kept
//	peer-s    seconds of umoci + mkfs.erofs
//	ratio     vk-s / peer-s; goal 1.2
//	shared    shared-s / peer-s
func BenchmarkBootable(b *testing.B) {
	for _, p := range []string{"umoci", "mkfs.erofs"} {
		if _, err := exec.LookPath(p); err != nil {
			b.Skipf("needs %s: apt-get install umoci erofs-utils", p)
		}
	}
	base := gz(b, benchBase(b))
	noise := func(seed byte) sent {
		body := make([]byte, 3<<20)
		x := uint32(seed) + 1
		for i := range body {
			x = x*1664525 + 1013904223
			body[i] = byte(x >> 24)
		}
		return gz(b, layer(b, f{name: "opt/noise", body: string(body)}))
	}
	one, two := noise(1), noise(2)
	reg := newRegistry(b)
	reg.push(b, "bench", "one", ociManifest, nil, base, one)
	reg.push(b, "bench", "two", ociManifest, nil, base, two)
	layout := benchLayout(b, base, one)
	for b.Loop() {
		dir := b.TempDir()
		s, err := image.Open(filepath.Join(dir, "images"), image.Options{})
		if err != nil {
			b.Fatal(err)
		}
		timed := func(tag string) float64 {
			start := time.Now()
			img, err := resolve(b, s, reg.host()+"/bench:"+tag, image.ResolveOptions{})
			if err != nil {
				b.Fatal(err)
			}
			img.Close()
			return time.Since(start).Seconds()
		}
		vk, shared := timed("one"), timed("two")
		start := time.Now()
		for _, c := range [][]string{
			{"umoci", "unpack", "--rootless", "--image", layout + ":one", filepath.Join(dir, "u")},
			{"mkfs.erofs", filepath.Join(dir, "u.erofs"), filepath.Join(dir, "u", "rootfs")},
		} {
			if os.Geteuid() == 0 && c[0] == "umoci" {
				c = append(c[:2], c[3:]...)
			}
			if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
				b.Fatalf("%v: %v\n%s", c, err, out)
			}
		}
		peer := time.Since(start).Seconds()
		b.ReportMetric(vk, "vk-s")
		b.ReportMetric(shared, "shared-s")
		b.ReportMetric(peer, "peer-s")
		b.ReportMetric(vk/peer, "ratio")
		b.ReportMetric(shared/peer, "shared")
	}
}

func benchBase(b *testing.B) []byte {
	if t := os.Getenv("VIRTKIT_BENCH_TAR"); t != "" {
		body, err := os.ReadFile(t)
		if err != nil {
			b.Fatal(err)
		}
		return body
	}
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		b.Skipf("needs go for its sources as a root: %v", err)
	}
	root := filepath.Join(strings.TrimSpace(string(goroot)), "src")
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		body, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "src/" + rel, Mode: 0o644, Size: int64(len(body)), ModTime: stamp}); err != nil {
			return err
		}
		_, err = w.Write(body)
		return err
	})
	if err != nil {
		b.Skipf("needs the Go tree's sources, or VIRTKIT_BENCH_TAR: %v", err)
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	return out.Bytes()
}

// benchLayout writes the layers as an OCI layout with the tag one.
func benchLayout(b testing.TB, layers ...sent) string {
	dir := filepath.Join(b.TempDir(), "layout")
	writeLayout(b, dir, layers...)
	return dir
}

func writeLayout(t testing.TB, dir string, layers ...sent) {
	t.Helper()
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(body []byte) string {
		d := sum(body)
		if err := os.WriteFile(filepath.Join(blobs, d[len("sha256:"):]), body, 0o644); err != nil {
			t.Fatal(err)
		}
		return d
	}
	ls, ids := "", ""
	for i, l := range layers {
		if i > 0 {
			ls, ids = ls+",", ids+","
		}
		ls += fmt.Sprintf(`{"mediaType":%q,"size":%d,"digest":%q}`, l.mediaType, len(l.body), put(l.body))
		ids += fmt.Sprintf("%q", sum(l.raw))
	}
	cfg := []byte(`{"os":"linux","architecture":"amd64","config":{"Env":["L=1"]},"rootfs":{"type":"layers","diff_ids":[` + ids + `]}}`)
	man := []byte(fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":%d,"digest":%q},"layers":[%s]}`, ociManifest, len(cfg), put(cfg), ls))
	index := fmt.Sprintf(`{"schemaVersion":2,"manifests":[{"mediaType":%q,"size":%d,"digest":%q,"annotations":{"org.opencontainers.image.ref.name":"one"}}]}`, ociManifest, len(man), put(man))
	for name, body := range map[string]string{"oci-layout": `{"imageLayoutVersion":"1.0.0"}`, "index.json": index} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
