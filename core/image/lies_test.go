package image_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/image"
)

// TestRegistryLies: answers that are well formed and not what they say they are.
func TestRegistryLies(t *testing.T) {
	for name, c := range map[string]struct {
		hook func(http.ResponseWriter, *http.Request, http.Handler) bool
		text string
		hint string
	}{
		// As from a proxy that keeps an old body under a new name.
		"a manifest is not what its digest says": {func(w http.ResponseWriter, r *http.Request, next http.Handler) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			rec := httptest.NewRecorder()
			next.ServeHTTP(rec, r)
			w.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
			w.Header().Set("Docker-Content-Digest", sum(rec.Body.Bytes()))
			_, _ = w.Write(append(rec.Body.Bytes(), ' '))
			return true
		}, "sent other bytes for r:1", "nothing was kept"},
		"the token server is another host, without TLS": {func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://token.invalid/t",service="s"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}, "sends its users to token.invalid", "list token.invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x", body: "1"})))
			s := openStore(t, image.Options{Retries: 2})
			reg.misbehave(c.hook)
			_, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
			if fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), c.text) || !strings.Contains(fault.HintOf(err), c.hint) {
				t.Errorf("(%s) %v, hint %q; want %q and the hint %q", fault.KindOf(err), err, fault.HintOf(err), c.text, c.hint)
			}
			if left := leftovers(t, s); len(left) > 0 {
				t.Errorf("left in the store: %q", left)
			}
		})
	}
}
