// Package memreg is a registry in memory for tests, which notes what it is
// asked.
package memreg

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
)

// Registry is one.
type Registry struct {
	Addr string // host:port

	mu    sync.Mutex
	asked []string
}

// Start starts one on loopback; it ends with the test.
func Start(t testing.TB) *Registry {
	r := &Registry{}
	in := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		r.mu.Lock()
		r.asked = append(r.asked, q.Method+" "+q.URL.Path)
		r.mu.Unlock()
		in.ServeHTTP(w, q)
	}))
	t.Cleanup(srv.Close)
	r.Addr = strings.TrimPrefix(srv.URL, "http://")
	return r
}

// Asked are the requests so far, "METHOD path".
func (r *Registry) Asked() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.asked)
}
