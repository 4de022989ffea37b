// Package gitsrv serves Git repositories over HTTP as a GitLab does to its
// runners: basic authentication with the job's token, and git's own
// http-backend behind it. For tests and the demo.
package gitsrv

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/cgi"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// User is the name that goes with a job's token.
const User = "gitlab-ci-token"

// Server serves the repositories below a directory.
type Server struct {
	root string
	git  string

	mu       sync.Mutex
	tokens   map[string]bool
	any      bool
	requests []Request
}

// Request is what was asked for.
type Request struct {
	Method, Path, UserAgent, Correlation string
	Status                               int
}

// New serves root. The error says which program is missing.
func New(root string) (*Server, error) {
	git, err := exec.LookPath("git")
	if err != nil {
		return nil, errors.New("needs git: apt-get install git")
	}
	return &Server{root: root, git: git, tokens: map[string]bool{}}, nil
}

// Allow lets a token in. "*" lets every token in that looks like a job's.
func (s *Server) Allow(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if token == "*" {
		s.any = true
	}
	s.tokens[token] = true
}

// Requests returns what was asked for since the last call.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.requests
	s.requests = nil
	return r
}

// Serve serves l until ctx ends.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	srv := &http.Server{Handler: s, ReadHeaderTimeout: 30 * time.Second}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (s *Server) allowed(r *http.Request) bool {
	user, token, ok := r.BasicAuth()
	if !ok || user != User {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tokens[token] || s.any && strings.HasPrefix(token, "glcbt-")
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rec := &status{ResponseWriter: w, code: http.StatusOK}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.requests = append(s.requests, Request{r.Method, r.URL.Path, r.UserAgent(), r.Header.Get("X-Gitaly-Correlation-ID"), rec.code})
	}()
	if !strings.Contains(r.URL.Path, ".git/") {
		http.Error(rec, "no such page", http.StatusNotFound)
		return
	}
	if !s.allowed(r) {
		rec.Header().Set("WWW-Authenticate", `Basic realm="GitLab"`)
		http.Error(rec, "HTTP Basic: Access denied", http.StatusUnauthorized)
		return
	}
	env := []string{"GIT_PROJECT_ROOT=" + s.root, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"}
	if p := r.Header.Get("Git-Protocol"); p != "" {
		env = append(env, "GIT_PROTOCOL="+p)
	}
	h := cgi.Handler{Path: s.git, Args: []string{"http-backend"}, Dir: s.root, Env: env, InheritEnv: []string{"PATH", "HOME"}}
	h.ServeHTTP(rec, r)
}

type status struct {
	http.ResponseWriter
	code int
}

func (s *status) WriteHeader(c int) { s.code = c; s.ResponseWriter.WriteHeader(c) }
