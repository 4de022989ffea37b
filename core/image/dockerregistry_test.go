package image_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/image"
)

// dockerRegistry runs Debian's docker-registry on loopback and returns its
// host:port.
func dockerRegistry(t *testing.T) string {
	t.Helper()
	bin, err := exec.LookPath("docker-registry")
	if err != nil {
		t.Skip("needs docker-registry: apt-get install docker-registry")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	dir := t.TempDir()
	conf := filepath.Join(dir, "config.yml")
	body := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: %s}\n", filepath.Join(dir, "data"), addr)
	if err := os.WriteFile(conf, []byte(body), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "serve", conf)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if resp, err := http.Get("http://" + addr + "/v2/"); err == nil {
			resp.Body.Close()
			return addr
		}
		if time.Now().After(deadline) {
			t.Fatal("docker-registry does not answer")
		}
	}
}

// TestDockerRegistry pulls from the reference registry through a proxy that
// asks for tokens and is unkind: busy, cut at half, stalled.
func TestDockerRegistry(t *testing.T) {
	addr := dockerRegistry(t)
	reg := &fakeRegistry{Server: &httptest.Server{URL: "http://" + addr}} // for its push
	var rnd strings.Builder
	for i := range 30000 {
		rnd.WriteString(sum([]byte(strconv.Itoa(i))))
	}
	big := gz(t, layer(t, f{name: "big", body: rnd.String()}))
	push := func(tag string, layers ...sent) { pushUploads(t, reg.URL, "team/app", tag, layers...) }
	push("1", big, zs(t, layer(t, f{name: "small", body: "1"})))

	target, err := url.Parse(reg.URL)
	if err != nil {
		t.Fatal(err)
	}
	back := httputil.NewSingleHostReverseProxy(target)
	var layerRequests, ranges, busy atomic.Int32
	front := &fakeRegistry{}
	front.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if tokenAuth(front, "joe", "pw")(w, r, nil) {
			return
		}
		r.Header.Del("Authorization")
		if strings.Contains(r.URL.Path, "/manifests/") && busy.Add(1) == 1 {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		if strings.HasSuffix(r.URL.Path, sum(big.body)) {
			if r.Header.Get("Range") != "" {
				ranges.Add(1)
			}
			switch layerRequests.Add(1) {
			case 1:
				w.WriteHeader(http.StatusInternalServerError)
				return
			case 2, 3: // half of what is asked for, then cut; then silent
				rec := httptest.NewRecorder()
				back.ServeHTTP(rec, r)
				for k, v := range rec.Header() {
					w.Header()[k] = v
				}
				w.WriteHeader(rec.Code)
				_, _ = io.CopyN(w, rec.Body, int64(rec.Body.Len()/2))
				w.(http.Flusher).Flush()
				if layerRequests.Load() == 3 {
					<-r.Context().Done()
				}
				panic(http.ErrAbortHandler)
			}
		}
		back.ServeHTTP(w, r)
	}))
	defer front.Close()

	s := openStore(t, image.Options{Stall: 2 * time.Second})
	auth := image.Auth{DockerAuthConfig: `{"auths":{"` + front.host() + `":{"auth":"` + basic("joe", "pw") + `"}}}`}
	img, err := resolve(t, s, "docker/"+front.host()+"/team/app:1", image.ResolveOptions{Auth: auth})
	if err != nil {
		t.Fatal(err)
	}
	if cat(t, img.Path, "/small") != "1" || cat(t, img.Path, "/big") != rnd.String() {
		t.Error("the root has other content")
	}
	if ranges.Load() != 2 {
		t.Errorf("%d requests with a range; want 2", ranges.Load())
	}
}

// pushUploads is the registry API's upload, which the in-memory registry
// shortens.
func pushUploads(t testing.TB, base, repo, tag string, layers ...sent) {
	t.Helper()
	do := func(method, u, ct string, body string, want int) *http.Response {
		req, err := http.NewRequest(method, u, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", ct)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != want {
			b, _ := io.ReadAll(resp.Body)
			t.Fatalf("%s %s: %s: %s", method, u, resp.Status, b)
		}
		return resp
	}
	blob := func(b []byte) string {
		loc := do(http.MethodPost, base+"/v2/"+repo+"/blobs/uploads/", "", "", http.StatusAccepted).Header.Get("Location")
		sep := "?"
		if strings.Contains(loc, "?") {
			sep = "&"
		}
		do(http.MethodPut, loc+sep+"digest="+sum(b), "application/octet-stream", string(b), http.StatusCreated)
		return sum(b)
	}
	var ls, ids []string
	for _, l := range layers {
		ls = append(ls, fmt.Sprintf(`{"mediaType":%q,"size":%d,"digest":%q}`, l.mediaType, len(l.body), blob(l.body)))
		ids = append(ids, strconv.Quote(sum(l.raw)))
	}
	cfg := `{"os":"linux","architecture":"amd64","config":{},"rootfs":{"type":"layers","diff_ids":[` + strings.Join(ids, ",") + `]}}`
	man := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":%d,"digest":%q},"layers":[%s]}`,
		ociManifest, len(cfg), blob([]byte(cfg)), strings.Join(ls, ","))
	do(http.MethodPut, base+"/v2/"+repo+"/manifests/"+tag, ociManifest, man, http.StatusCreated)
}
