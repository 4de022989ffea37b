package image_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/image"
)

// TestBusyWithoutEnd: a registry that asks again and again to be waited for is
// waited for as long as Options.Patience says, not that often.
func TestBusyWithoutEnd(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x"})))
	var asked atomic.Int32
	reg.misbehave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Retry-After", "120")
		if asked.Add(1) == 1 {
			w.Header().Set("Retry-After", "1")
		}
		w.WriteHeader(429)
		return true
	})
	s := openStore(t, image.Options{Patience: time.Minute})
	var notes []string
	_, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{Progress: func(p image.Progress) { notes = append(notes, p.Text) }})
	if fault.KindOf(err) != fault.Unavailable || !strings.Contains(fmt.Sprint(err), "is too busy for r:1: 429 Too Many Requests; it would have to be waited for another 2m0s, and is waited for 1m0s in all") || fault.HintOf(err) == "" {
		t.Errorf("error = (%s) %v; want that it is not waited for", fault.KindOf(err), err)
	}
	if n := asked.Load(); n != 2 {
		t.Errorf("it was asked %d times, want 2", n)
	}
	if !slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, "429 Too Many Requests; attempt 2 of 6 in 1s") }) {
		t.Errorf("progress = %q; want a line for the wait", notes)
	}
}

// TestRedirectsWithoutEnd are told as that, whatever is asked for.
func TestRedirectsWithoutEnd(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x"})))
	for _, part := range []string{"/v2/", "/manifests/", "/blobs/"} {
		reg.misbehave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if !strings.HasSuffix(r.URL.Path, part) && (part == "/v2/" || !strings.Contains(r.URL.Path, part)) {
				return false
			}
			http.Redirect(w, r, r.URL.Path, http.StatusFound)
			return true
		})
		_, err := resolve(t, openStore(t, image.Options{Retries: 1}), reg.host()+"/r:1", image.ResolveOptions{})
		if fault.KindOf(err) != fault.Unavailable || !strings.Contains(fmt.Sprint(err), "redirects without end") || !strings.Contains(fmt.Sprint(err), reg.host()) {
			t.Errorf("%s: error = (%s) %v; want that it redirects without end", part, fault.KindOf(err), err)
		}
	}
}
