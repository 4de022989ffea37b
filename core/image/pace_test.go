package image_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/image"
)

// TestTrickle: a registry that sends a byte now and then is as good as one that
// is silent, whatever is asked for, a token too; and there is a limit in all for a manifest.
func TestTrickle(t *testing.T) {
	l := gz(t, layer(t, f{name: "x", body: "1"}))
	stall := image.Options{Stall: 500 * time.Millisecond, Retries: 2}
	drip := func(w http.ResponseWriter, r *http.Request) {
		for {
			if _, err := io.WriteString(w, " "); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	for _, c := range []struct {
		name, part string
		o          image.Options
		text       string
		asked      int // 0: a slow host may need more attempts
	}{
		{"manifest", "/manifests/", stall, "stopped answering", 0},
		{"layer", sum(l.body), stall, "stopped answering", 0},
		{"token", "/token", stall, "stopped answering", 0},
		{"manifest, in all", "/manifests/", image.Options{Stall: time.Minute, Small: 500 * time.Millisecond, Retries: 2}, "had sent only", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			reg := newRegistry(t)
			reg.push(t, "r", "1", ociManifest, nil, l)
			reg.misbehave(func(w http.ResponseWriter, r *http.Request, next http.Handler) bool {
				if strings.Contains(r.URL.Path, c.part) {
					drip(w, r)
					return true
				}
				return c.name == "token" && tokenAuth(reg, "joe", "pw")(w, r, next)
			})
			s := openStore(t, c.o)
			start := time.Now()
			_, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
			if fault.KindOf(err) != fault.Unavailable || !strings.Contains(fmt.Sprint(err), c.text) || fault.HintOf(err) == "" {
				t.Errorf("after %s: error = (%s) %v; want one with %q", time.Since(start), fault.KindOf(err), err, c.text)
			}
			if n := reg.count(c.part); c.asked > 0 && n != c.asked {
				t.Errorf("asked %d times; want %d", n, c.asked)
			}
		})
	}
}
