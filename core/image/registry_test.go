package image_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"virtkit/core/fault"
	"virtkit/core/image"
	"virtkit/core/logx"
	"virtkit/core/zst"
)

// fakeRegistry is go-containerregistry's in-memory registry behind a handler
// that can misbehave.
type fakeRegistry struct {
	*httptest.Server
	mu   sync.Mutex
	hook func(w http.ResponseWriter, r *http.Request, next http.Handler) bool // true = answered
	seen []string
}

func newRegistry(t testing.TB) *fakeRegistry {
	t.Helper()
	reg := &fakeRegistry{}
	next := registry.New(registry.Logger(nil2log()))
	reg.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reg.mu.Lock()
		hook := reg.hook
		reg.seen = append(reg.seen, r.Method+" "+r.URL.Path)
		reg.mu.Unlock()
		if hook != nil && r.Method == http.MethodGet && hook(w, r, next) {
			return
		}
		next.ServeHTTP(w, r)
	}))
	t.Cleanup(reg.Close)
	return reg
}

func (r *fakeRegistry) host() string { return strings.TrimPrefix(r.URL, "http://") }

func (r *fakeRegistry) misbehave(hook func(w http.ResponseWriter, r *http.Request, next http.Handler) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook, r.seen = hook, nil
}

func (r *fakeRegistry) count(part string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, s := range r.seen {
		if strings.Contains(s, part) {
			n++
		}
	}
	return n
}

func (r *fakeRegistry) put(t testing.TB, path, mediaType string, body []byte) string {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, r.URL+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", mediaType)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("PUT %s: %s: %s", path, resp.Status, b)
	}
	return sum(body)
}

func (r *fakeRegistry) blob(t testing.TB, repo string, body []byte) string {
	t.Helper()
	resp, err := http.Post(r.URL+"/v2/"+repo+"/blobs/uploads/?digest="+sum(body), "application/octet-stream", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		t.Fatalf("uploading a blob: %s", resp.Status)
	}
	return sum(body)
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(s[:])
}

type sent struct {
	body      []byte // as sent
	raw       []byte // unpacked
	mediaType string
}

func gz(t testing.TB, raw []byte) sent {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(raw); err != nil {
		t.Fatal(err)
	}
	w.Close()
	return sent{b.Bytes(), raw, "application/vnd.oci.image.layer.v1.tar+gzip"}
}

func zs(t testing.TB, raw []byte) sent {
	t.Helper()
	var b bytes.Buffer
	w, err := zst.NewWriter(&b, zst.Default)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return sent{b.Bytes(), raw, "application/vnd.docker.image.rootfs.diff.tar.zstd"}
}

const (
	ociManifest    = "application/vnd.oci.image.manifest.v1+json"
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	ociIndex       = "application/vnd.oci.image.index.v1+json"
)

// push uploads an image and returns its manifest's digest.
func (r *fakeRegistry) push(t testing.TB, repo, tag, kind string, cfg map[string]any, layers ...sent) string {
	t.Helper()
	var ls []map[string]any
	var ids []string
	for _, l := range layers {
		ls = append(ls, map[string]any{"mediaType": l.mediaType, "size": len(l.body), "digest": r.blob(t, repo, l.body)})
		ids = append(ids, sum(l.raw))
	}
	full := map[string]any{"os": "linux", "architecture": "amd64", "rootfs": map[string]any{"type": "layers", "diff_ids": ids}}
	for k, v := range cfg {
		full[k] = v
	}
	cb, _ := json.Marshal(full)
	m := map[string]any{"schemaVersion": 2, "mediaType": kind, "layers": ls, "config": map[string]any{"mediaType": "application/vnd.oci.image.config.v1+json", "size": len(cb), "digest": r.blob(t, repo, cb)}}
	mb, _ := json.Marshal(m)
	return r.put(t, "/v2/"+repo+"/manifests/"+tag, kind, mb)
}

func openStore(t testing.TB, o image.Options) *image.Store {
	t.Helper()
	if o.Log == nil {
		o.Log = logx.ForTest(t)
	}
	if o.Stall == 0 {
		o.Stall = 2 * time.Second
	}
	s, err := image.Open(filepath.Join(t.TempDir(), "state", "images"), o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func resolve(t testing.TB, s *image.Store, text string, o image.ResolveOptions) (*image.Image, error) {
	t.Helper()
	if o.Platform == "" {
		o.Platform = "linux/amd64"
	}
	ref, err := s.Parse(text)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	img, err := s.Resolve(ctx, ref, o)
	t.Cleanup(func() { img.Close() })
	return img, err
}

// tree lists the files under a store, to prove that nothing was left.
func leftovers(t testing.TB, s *image.Store) []string {
	t.Helper()
	var out []string
	for _, d := range []string{"images", "blobs", "staging", "refs"} {
		ents, err := os.ReadDir(filepath.Join(s.Dir(), d))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ents {
			out = append(out, d+"/"+e.Name())
		}
	}
	return out
}

func TestPull(t *testing.T) {
	reg := newRegistry(t)
	base := gz(t, layer(t, f{name: "etc/os", body: "one"}, f{name: "bin/sh", body: "#!", mode: 0o755}))
	digest := reg.push(t, "team/app", "1", ociManifest, map[string]any{"config": map[string]any{
		"Env": []string{"A=b"}, "User": "1000:1000", "WorkingDir": "/srv", "Entrypoint": []string{"/e"}, "Cmd": []string{"c", "d"},
		"Volumes": map[string]any{"/v2": map[string]any{}, "/v1": map[string]any{}}, "ExposedPorts": map[string]any{"80/tcp": map[string]any{}},
		"Labels": map[string]string{"l": "m"}, "StopSignal": "SIGINT",
	}}, base, gz(t, layer(t, f{name: "etc/os", body: "two"})))
	s := openStore(t, image.Options{})
	var events []image.Progress
	img, err := resolve(t, s, "docker/"+reg.host()+"/team/app:1", image.ResolveOptions{Progress: func(p image.Progress) { events = append(events, p) }})
	if err != nil {
		t.Fatal(err)
	}
	if img.Digest != digest || img.FSType != "ext4" {
		t.Errorf("digest, type = %s, %s; want %s, ext4", img.Digest, img.FSType, digest)
	}
	c := img.Config
	if got, want := fmt.Sprintf("%v %v %v %v %v %v %v %v %v", c.Env, c.User, c.WorkingDir, c.Entrypoint, c.Cmd, c.Volumes, c.ExposedPorts, c.Labels, c.StopSignal),
		"[A=b] 1000:1000 /srv [/e] [c d] [/v1 /v2] [80/tcp] map[l:m] SIGINT"; got != want {
		t.Errorf("configuration = %s; want %s", got, want)
	}
	if got := cat(t, img.Path, "/etc/os"); got != "two" {
		t.Errorf("/etc/os = %q; want two", got)
	}
	var last image.Progress
	for _, e := range events {
		if e.Stage == "pull" && e.Layer != "" {
			last = e
		}
	}
	if last.AllDone == 0 || last.AllDone != last.AllTotal {
		t.Errorf("the last event of pulling counts %d of %d bytes", last.AllDone, last.AllTotal)
	}

	// Again: nothing is fetched but the manifest; by digest and if-not-present nothing at all.
	reg.misbehave(nil)
	if _, err := resolve(t, s, reg.host()+"/team/app:1", image.ResolveOptions{}); err != nil {
		t.Fatal(err)
	}
	if n := reg.count("/blobs/"); n != 0 {
		t.Errorf("%d blobs fetched for a kept image", n)
	}
	reg.misbehave(nil)
	for _, p := range []image.Policy{image.IfNotPresent, image.Never} {
		if _, err := resolve(t, s, "docker/"+reg.host()+"/team/app:1", image.ResolveOptions{Policy: p}); err != nil {
			t.Errorf("policy %s: %v", p, err)
		}
	}
	if n := reg.count(""); n != 0 {
		t.Errorf("%d requests although the policy allows none", n)
	}
	if _, err := resolve(t, s, "docker/"+reg.host()+"/team/app:2", image.ResolveOptions{Policy: image.Never}); fault.KindOf(err) != fault.NotFound {
		t.Errorf("policy never, unknown: %v; want %s", err, fault.NotFound)
	}

	// An image that shares a layer fetches only its own.
	reg.push(t, "team/app", "3", ociManifest, nil, base, gz(t, layer(t, f{name: "etc/os", body: "three"})))
	reg.misbehave(nil)
	img, err = resolve(t, s, reg.host()+"/team/app:3", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n := reg.count("GET /v2/team/app/blobs/"); n != 2 { // configuration and one layer
		t.Errorf("%d blobs fetched; want 2", n)
	}
	if got := cat(t, img.Path, "/etc/os"); got != "three" {
		t.Errorf("/etc/os = %q; want three", got)
	}
}

func TestPullS26(t *testing.T) {
	reg := newRegistry(t)
	raw := layer(t, f{name: "x", body: strings.Repeat("hello ", 1000)})
	lie := zs(t, raw)
	lie.mediaType = "application/vnd.docker.image.rootfs.diff.tar.gzip"
	asPlain := sent{raw, raw, "application/vnd.oci.image.layer.v1.tar"}
	var first []byte
	for i, l := range []sent{gz(t, raw), zs(t, raw), asPlain, lie} {
		for _, kind := range []string{ociManifest, dockerManifest} {
			reg.push(t, "s26", "t", kind, nil, l)
			s := openStore(t, image.Options{})
			img, err := resolve(t, s, reg.host()+"/s26:t", image.ResolveOptions{})
			if err != nil {
				t.Fatalf("form %d in %s: %v", i, kind, err)
			}
			b, err := os.ReadFile(img.Path)
			if err != nil {
				t.Fatal(err)
			}
			if first == nil {
				first = b
			} else if !bytes.Equal(first, b) {
				t.Errorf("form %d in %s: another filesystem", i, kind)
			}
		}
	}
}

func TestPlatforms(t *testing.T) {
	reg := newRegistry(t)
	l := gz(t, layer(t, f{name: "x"}))
	amd := reg.push(t, "p", "amd", ociManifest, nil, l)
	arm := reg.push(t, "p", "arm", ociManifest, map[string]any{"architecture": "arm64"}, l)
	idx, _ := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": ociIndex, "manifests": []any{
		map[string]any{"mediaType": ociManifest, "digest": arm, "size": 1, "platform": map[string]string{"os": "linux", "architecture": "arm64", "variant": "v8"}},
		map[string]any{"mediaType": ociManifest, "digest": amd, "size": 1, "platform": map[string]string{"os": "linux", "architecture": "amd64"}},
		map[string]any{"mediaType": ociManifest, "digest": amd, "size": 1, "platform": map[string]string{"os": "unknown", "architecture": "unknown"}},
	}})
	reg.put(t, "/v2/p/manifests/all", ociIndex, idx)
	s := openStore(t, image.Options{})
	for p, want := range map[string]string{"linux/amd64": amd, "linux/arm64": arm} {
		img, err := resolve(t, s, reg.host()+"/p:all", image.ResolveOptions{Platform: p})
		if err != nil || img.Digest != want {
			t.Errorf("%s: %v, %v; want %s", p, img, err, want)
		}
	}
	_, err := resolve(t, s, reg.host()+"/p:all", image.ResolveOptions{Platform: "linux/s390x"})
	if err == nil || !strings.Contains(err.Error(), "no image for linux/s390x; it has linux/amd64, linux/arm64/v8") {
		t.Errorf("missing platform: %v", err)
	}
	_, err = resolve(t, s, reg.host()+"/p:arm", image.ResolveOptions{Platform: "linux/amd64"})
	if err == nil || !strings.Contains(err.Error(), "made for linux/arm64, not for linux/amd64") {
		t.Errorf("other platform without an index: %v", err)
	}
}

// TestRegistryMisbehaves has one case for each way in which a registry, or
// what is between it and this host, goes wrong.
func TestRegistryMisbehaves(t *testing.T) {
	body := strings.Repeat("0123456789abcdef", 8192)
	var rnd strings.Builder
	for i := range 20000 {
		fmt.Fprintf(&rnd, "%x", sha256.Sum256([]byte{byte(i), byte(i >> 8)}))
	}
	l := gz(t, layer(t, f{name: "x", body: body}, f{name: "y", body: rnd.String()}))
	digest := sum(l.body)
	isLayer := func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, digest) }
	once := func(h func(w http.ResponseWriter, r *http.Request, next http.Handler) bool) func(http.ResponseWriter, *http.Request, http.Handler) bool {
		var n atomic.Int32
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) bool {
			return isLayer(r) && n.Add(1) == 1 && h(w, r, next)
		}
	}
	status := func(code int, header ...string) func(http.ResponseWriter, *http.Request, http.Handler) bool {
		return func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			for i := 0; i+1 < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(code)
			return true
		}
	}
	cut := func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		w.Header().Set("Content-Length", fmt.Sprint(len(l.body)))
		_, _ = w.Write(l.body[:len(l.body)/2])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	stall := func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		w.Header().Set("Content-Length", fmt.Sprint(len(l.body)))
		_, _ = w.Write(l.body[:1000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	}
	wrong := func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		b := bytes.Clone(l.body)
		b[len(b)/2] ^= 1
		_, _ = w.Write(b)
		return true
	}
	ranged := func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if isLayer(r) {
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(l.body))
			return true
		}
		return false
	}
	either := func(a, b func(http.ResponseWriter, *http.Request, http.Handler) bool) func(http.ResponseWriter, *http.Request, http.Handler) bool {
		return func(w http.ResponseWriter, r *http.Request, n http.Handler) bool { return a(w, r, n) || b(w, r, n) }
	}
	always := func(h func(http.ResponseWriter, *http.Request, http.Handler) bool) func(http.ResponseWriter, *http.Request, http.Handler) bool {
		return func(w http.ResponseWriter, r *http.Request, n http.Handler) bool { return isLayer(r) && h(w, r, n) }
	}
	for _, c := range []struct {
		name string
		hook func(http.ResponseWriter, *http.Request, http.Handler) bool
		kind fault.Kind // "" = must succeed
		text string
	}{
		{"429 once", once(status(429, "Retry-After", "0")), "", ""},
		{"500 once", once(status(500)), "", ""},
		{"503 once", once(status(503, "Retry-After", "0")), "", ""},
		{"cut at half, resumed with Range", either(once(cut), ranged), "", ""},
		{"cut at half, no ranges", once(cut), "", ""},
		{"stall, resumed", either(once(stall), ranged), "", ""},
		{"wrong byte once", once(wrong), "", ""},
		{"429 always", always(status(429, "Retry-After", "0")), fault.Unavailable, "limits how often"},
		{"500 always", always(status(500)), fault.Unavailable, "answered 500 Internal Server Error"},
		{"404", always(status(404)), fault.NotFound, "404 Not Found"},
		{"403", always(status(403)), fault.Denied, "denied access"},
		{"cut always", always(cut), fault.Unavailable, "cut the connection"},
		{"wrong digest always", always(wrong), fault.Unavailable, "sent other bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			reg := newRegistry(t)
			reg.push(t, "r", "1", ociManifest, nil, l)
			s := openStore(t, image.Options{Stall: 2 * time.Second, Retries: 3})
			reg.misbehave(c.hook)
			img, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
			if c.kind == "" {
				if err != nil {
					t.Fatal(err)
				}
				if got := cat(t, img.Path, "/x"); got != body {
					t.Errorf("/x has %d other bytes", len(got))
				}
				return
			}
			if fault.KindOf(err) != c.kind || !strings.Contains(fmt.Sprint(err), c.text) || !strings.Contains(fmt.Sprint(err), reg.host()) {
				t.Errorf("error = (%s) %v; want (%s) with %q and the registry's name", fault.KindOf(err), err, c.kind, c.text)
			}
			if fault.HintOf(err) == "" {
				t.Errorf("no hint: %v", err)
			}
			if left := leftovers(t, s); len(left) > 0 {
				t.Errorf("left in the store: %q", left)
			}
		})
	}
}

func TestCorruptLayers(t *testing.T) {
	good := gz(t, layer(t, f{name: "x", body: strings.Repeat("y", 100000)}))
	other := good
	other.raw = []byte("something else")
	cutShort := sent{good.body[:len(good.body)-20], good.raw, good.mediaType}
	noTar := gz(t, bytes.Repeat([]byte("no tar"), 1000))
	for _, c := range []struct {
		name string
		l    sent
		text string
	}{
		{"other diff id", other, "unpacks to"},
		{"gzip cut short", cutShort, "cannot be unpacked"},
		{"no tar", noTar, "cannot be unpacked"},
		{"bad entry", gz(t, layer(t, f{name: "../x"})), "leads out of the root"},
	} {
		t.Run(c.name, func(t *testing.T) {
			reg := newRegistry(t)
			reg.push(t, "r", "1", ociManifest, nil, c.l)
			s := openStore(t, image.Options{})
			_, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error = %v; want one with %q", err, c.text)
			}
			if left := leftovers(t, s); len(left) > 0 {
				t.Errorf("left in the store: %q", left)
			}
		})
	}
}

func TestUnreachable(t *testing.T) {
	reg := newRegistry(t)
	host := reg.host()
	reg.Close()
	s := openStore(t, image.Options{Retries: 2})
	_, err := resolve(t, s, host+"/x:1", image.ResolveOptions{})
	if fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), "refused the connection") {
		t.Errorf("nobody listens: %v", err)
	}
	_, err = resolve(t, s, "registry.invalid/x:1", image.ResolveOptions{})
	if fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), "registry.invalid") {
		t.Errorf("no such host: %v", err)
	}
}

// TestDamageOnDisk: a kept layer that went bad is noticed and fetched again.
func TestDamageOnDisk(t *testing.T) {
	reg := newRegistry(t)
	base := gz(t, layer(t, f{name: "x", body: strings.Repeat("data", 5000)}))
	reg.push(t, "r", "1", ociManifest, nil, base)
	reg.push(t, "r", "2", ociManifest, nil, base, gz(t, layer(t, f{name: "y"})))
	s := openStore(t, image.Options{})
	if _, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{}); err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(s.Dir(), "blobs", strings.Replace(sum(base.body), ":", "-", 1))
	if err := os.WriteFile(blob, append(bytes.Clone(base.body[:40]), make([]byte, len(base.body)-40)...), 0o600); err != nil {
		t.Fatal(err)
	}
	img, err := resolve(t, s, reg.host()+"/r:2", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := cat(t, img.Path, "/x"); got != strings.Repeat("data", 5000) {
		t.Errorf("/x has %d other bytes", len(got))
	}
}

func TestContext(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x", body: "1"})))
	s := openStore(t, image.Options{Stall: time.Minute})
	ctx, cancel := context.WithCancel(t.Context())
	reg.misbehave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			cancel()
			<-r.Context().Done()
			return true
		}
		return false
	})
	ref, err := s.Parse(reg.host() + "/r:1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Resolve(ctx, ref, image.ResolveOptions{Platform: "linux/amd64"}); !errors.Is(err, context.Canceled) {
		t.Errorf("error = %v; want %v", err, context.Canceled)
	}
	if left := leftovers(t, s); len(left) > 0 {
		t.Errorf("left in the store: %q", left)
	}
}

// TestInsecure: a certificate that nobody signed is refused, but for a
// registry that is listed.
func TestInsecure(t *testing.T) {
	plain := newRegistry(t)
	plain.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x", body: "1"})))
	srv := httptest.NewTLSServer(plain.Config.Handler)
	defer srv.Close()
	srv.Config.ErrorLog = nil2log()
	host := strings.TrimPrefix(srv.URL, "https://")
	_, err := resolve(t, openStore(t, image.Options{Retries: 1}), host+"/r:1", image.ResolveOptions{})
	if fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("unknown certificate: %v; want a refusal that names it", err)
	}
	if _, err := resolve(t, openStore(t, image.Options{Insecure: []string{host}}), host+"/r:1", image.ResolveOptions{}); err != nil {
		t.Errorf("listed under insecure: %v", err)
	}
}

// TestAttemptsDoNotMultiply: of a registry that takes requests and says
// nothing, each thing is asked for as often as configured and no more.
func TestAttemptsDoNotMultiply(t *testing.T) {
	l := gz(t, layer(t, f{name: "x", body: "1"}))
	for name, part := range map[string]string{"manifest": "/manifests/", "layer": sum(l.body)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reg := newRegistry(t)
			reg.push(t, "r", "1", ociManifest, nil, l)
			reg.misbehave(func(_ http.ResponseWriter, r *http.Request, _ http.Handler) bool {
				if !strings.Contains(r.URL.Path, part) {
					return false
				}
				<-r.Context().Done()
				return true
			})
			s := openStore(t, image.Options{Stall: time.Second, Retries: 2})
			_, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
			if fault.KindOf(err) != fault.Unavailable || !strings.Contains(fmt.Sprint(err), "stopped answering") {
				t.Errorf("error = (%s) %v", fault.KindOf(err), err)
			}
			if n := reg.count(part); n != 2 {
				t.Errorf("asked %d times; want 2", n)
			}
		})
	}
}
