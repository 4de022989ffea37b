package auth_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/web/auth"
	"virtkit/web/auth/authtest"
)

func TestSuite(t *testing.T) { authtest.RunSuite(t, authtest.New(t)) }

// TestSuiteOfPost is of a provider that wants the client's secret in the form.
func TestSuiteOfPost(t *testing.T) {
	p := authtest.New(t)
	p.Set(authtest.Knobs{Doc: func(d map[string]any) { d["token_endpoint_auth_methods_supported"] = []string{"client_secret_post"} }})
	authtest.RunSuite(t, p)
}

func TestLocalPath(t *testing.T) {
	for _, s := range []string{"/", "/jobs/123", "/jobs?before=12", "/jobs/0a1b?x=%2F", "/users", "/jobs/", "/a.b/c~d", "/jobs?a=b&c=d+e"} {
		if got := auth.LocalPath(s); got != s {
			t.Errorf("%q becomes %q", s, got)
		}
	}
	for _, s := range []string{"", "jobs", "//evil.test", "///evil.test", `/\evil.test`, `\\evil.test`, `\/evil.test`, "https:evil", "https://evil.test", "https:/evil.test", "HTTPS://evil.test",
		"javascript:alert(1)", "data:text/html,x", "/%2Fevil.test", "/%2fevil.test", "/%5Cevil.test", "/%5cevil.test", "%2F%2Fevil.test", "/%09/evil.test", "/\tevil.test", "/\t/evil.test", "/\n/evil.test", "/\r\nSet-Cookie: a=b",
		" //evil.test", " /jobs", "/jobs ", "\x00/jobs", "/jobs\x00", "/jobs\x7f", "/a//evil.test", "/jobs//", "/./jobs", "/..//evil.test", "/jobs/../../evil", "/jobs/..", "/.", "/jobs/.", "/@evil.test", "/evil.test:80", "/jobs#//evil.test", "/jobs?a#b",
		"/jobs?x=\\", "/jobs?x=a b", "/\u2215evil.test", "/\uff0fevil.test", "/j\u00f6bs", "/jobs;x", "/login", "/login?t=abc", "/logout", "/auth/login", "/auth/login?to=/jobs", "/auth/callback", "/static/ui.css", "?a=b", "/" + strings.Repeat("a", 600)} {
		if got := auth.LocalPath(s); got != "/" {
			t.Errorf("%q becomes %q", s, got)
		}
	}
}

// FuzzLocalPath has a browser's reading of what is taken: it stays on the site.
func FuzzLocalPath(f *testing.F) {
	for _, s := range []string{"/jobs/1", "//evil", `/\evil`, "https:evil", "/jobs?x=%0a"} {
		f.Add(s)
	}
	base, _ := url.Parse("https://hub.example.test/login")
	f.Fuzz(func(t *testing.T, s string) {
		got := auth.LocalPath(s)
		// What browsers do before they parse (WHATWG URL, basic URL parser).
		seen := strings.Map(func(r rune) rune {
			switch r {
			case '\t', '\n', '\r':
				return -1
			case '\\':
				return '/'
			}
			return r
		}, strings.Trim(got, " \x00\x01\x1f"))
		u, err := base.Parse(seen)
		if err != nil || u.Scheme != "https" || u.Host != "hub.example.test" || u.User != nil || u.RequestURI() != got {
			t.Errorf("%q becomes %q, which is %v, %v", s, got, u, err)
		}
		if got != s && got != "/" {
			t.Errorf("%q becomes %q", s, got)
		}
	})
}

// site is a relying party, a browser's jar and a clock.
type site struct {
	*auth.Relying
	t   *testing.T
	jar map[string]*http.Cookie
	now time.Time
	mu  sync.Mutex
}

func newSite(t *testing.T, p auth.Provider) *site {
	s := &site{t: t, jar: map[string]*http.Cookie{}, now: time.Unix(1_800_000_000, 0)}
	s.Relying = auth.New(p, func() time.Time { s.mu.Lock(); defer s.mu.Unlock(); return s.now })
	return s
}

func (s *site) later(d time.Duration) { s.mu.Lock(); s.now = s.now.Add(d); s.mu.Unlock() }

func (s *site) request(at string) *http.Request {
	r := httptest.NewRequest("GET", at, nil)
	for _, c := range s.jar {
		r.AddCookie(c)
	}
	return r
}

// keep does what a browser does with a response's cookies.
func (s *site) keep(w *httptest.ResponseRecorder) {
	s.t.Helper()
	for _, c := range w.Result().Cookies() {
		if !strings.HasPrefix(c.Name, "__Host-vk-signin-") || !c.Secure || !c.HttpOnly || c.SameSite != http.SameSiteLaxMode || c.Path != "/" || c.Domain != "" {
			s.t.Errorf("cookie %+v", c)
		}
		if c.MaxAge < 0 {
			delete(s.jar, c.Name)
			continue
		}
		if c.MaxAge != 300 {
			s.t.Errorf("cookie %s is kept for %d s", c.Name, c.MaxAge)
		}
		s.jar[c.Name] = c
	}
}

func (s *site) start(to string) string {
	s.t.Helper()
	w := httptest.NewRecorder()
	at, err := s.Start(w, s.request("/auth/login"), to)
	if err != nil {
		s.t.Fatal(err)
	}
	s.keep(w)
	for _, c := range s.jar {
		if strings.Contains(at, c.Value) || strings.Contains(c.Value, "jobs") {
			s.t.Errorf("the cookie's text is in the URL, or is no secret")
		}
	}
	return at
}

func (s *site) finish(back *url.URL) (hub.Person, string, error) {
	s.t.Helper()
	w := httptest.NewRecorder()
	p, to, err := s.Finish(w, s.request(back.RequestURI()))
	s.keep(w)
	if err != nil {
		if f, ok := errors.AsType[*auth.Failure](err); !ok || f.Status < 400 || f.Text == "" {
			s.t.Errorf("the failure is %#v", err)
		}
	}
	return p, to, err
}

func provider(t *testing.T) (*authtest.Provider, auth.Provider) {
	t.Helper()
	p := authtest.New(t)
	o, err := auth.NewOIDC(p.Client())
	if err != nil {
		t.Fatal(err)
	}
	return p, o
}

func TestFlow(t *testing.T) {
	p, o := provider(t)
	s := newSite(t, o)
	back := p.Visit(t, s.start("/jobs/123"), true)
	who, to, err := s.finish(back)
	if err != nil || to != "/jobs/123" || who.Email != "alice@example.com" {
		t.Fatalf("%+v, %q, %v", who, to, err)
	}
	if len(s.jar) != 0 {
		t.Errorf("cookies are left: %v", s.jar)
	}
	if n := p.Asked("/authorize"); n != 1 {
		t.Errorf("%d round trips", n)
	}
	if _, _, err := s.finish(back); err == nil {
		t.Error("the same answer is taken again")
	}
	// A path that is no plain one was dropped as the flow began.
	if _, to, err := s.finish(p.Visit(t, s.start("//evil.test"), true)); to != "/" || err != nil {
		t.Errorf("%q, %v", to, err)
	}
}

func TestFlowRefusals(t *testing.T) {
	p, o := provider(t)
	s := newSite(t, o)
	for name, f := range map[string]func(*url.URL){
		"no cookie":        func(*url.URL) { clear(s.jar) },
		"another's cookie": func(*url.URL) { other := newSite(t, o); other.start("/"); s.jar = other.jar },
		"a forged cookie": func(*url.URL) {
			for _, c := range s.jar {
				c.Value = c.Value[:len(c.Value)-2] + "AA"
			}
		},
		"a cookie of another flow": func(*url.URL) {
			var name string
			for n := range s.jar {
				name = n
			}
			first := s.jar[name]
			clear(s.jar)
			s.start("/")
			for _, c := range s.jar {
				c.Name = first.Name
			}
		},
		"too late":                func(*url.URL) { s.later(auth.FlowTTL) },
		"no state":                func(u *url.URL) { q := u.Query(); q.Del("state"); u.RawQuery = q.Encode() },
		"two states":              func(u *url.URL) { u.RawQuery += "&state=" + u.Query().Get("state") },
		"no code":                 func(u *url.URL) { q := u.Query(); q.Del("code"); u.RawQuery = q.Encode() },
		"another code":            func(u *url.URL) { q := u.Query(); q.Set("code", "x"); u.RawQuery = q.Encode() },
		"another issuer":          func(u *url.URL) { q := u.Query(); q.Set("iss", "https://evil.test"); u.RawQuery = q.Encode() },
		"an error":                func(u *url.URL) { q := u.Query(); q.Set("error", "server_error"); u.RawQuery = q.Encode() },
		"a provider that is down": func(*url.URL) { p.Set(authtest.Knobs{Down: true}) },
	} {
		clear(s.jar)
		p.Set(authtest.Knobs{})
		back := p.Visit(t, s.start("/jobs"), true)
		f(back)
		asked := p.Asked("/authorize")
		who, _, err := s.finish(back)
		if err == nil || who != (hub.Person{}) {
			t.Errorf("%s: %+v", name, who)
		}
		if p.Asked("/authorize") != asked {
			t.Errorf("%s: the provider was asked again", name)
		}
	}
}

// TestSpentOnce: of two requests with the same answer at once, one is taken.
func TestSpentOnce(t *testing.T) {
	p, o := provider(t)
	s := newSite(t, o)
	back := p.Visit(t, s.start("/"), true)
	p.Set(authtest.Knobs{TokenIs: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"access_token":"x","token_type":"Bearer"}`)
	}, UserInfoIs: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, authtest.Alice) }})
	errs := make(chan error, 8)
	for range cap(errs) {
		r := s.request(back.RequestURI())
		go func() { _, _, err := s.Finish(httptest.NewRecorder(), r); errs <- err }()
	}
	well := 0
	for range cap(errs) {
		if err := <-errs; err == nil {
			well++
		}
	}
	if well != 1 {
		t.Errorf("taken %d times", well)
	}
}

// TestTabs: each has a flow of its own, the oldest one goes when there are many.
func TestTabs(t *testing.T) {
	p, o := provider(t)
	s := newSite(t, o)
	var at []string
	for i := range 6 {
		at = append(at, s.start(fmt.Sprintf("/jobs/%d", i)))
		s.later(time.Second)
	}
	if len(s.jar) != 4 {
		t.Errorf("%d cookies", len(s.jar))
	}
	for i, u := range at {
		_, to, err := s.finish(p.Visit(t, u, true))
		if (err == nil) != (i >= 2) || err == nil && to != fmt.Sprintf("/jobs/%d", i) {
			t.Errorf("tab %d: %q, %v", i, to, err)
		}
	}
	// A jar full of what is not ours leaves room too.
	for i := range 10 {
		name := fmt.Sprintf("__Host-vk-signin-%016x", i)
		s.jar[name] = &http.Cookie{Name: name, Value: "junk"}
	}
	if _, _, err := s.finish(p.Visit(t, s.start("/"), true)); err != nil || len(s.jar) > 4 {
		t.Errorf("%v, %d cookies", err, len(s.jar))
	}
}

func TestDiscoveryRefusals(t *testing.T) {
	for name, change := range map[string]func(map[string]any){
		"another issuer":             func(d map[string]any) { d["issuer"] = "https://other.test" },
		"no issuer":                  func(d map[string]any) { delete(d, "issuer") },
		"a token endpoint of http":   func(d map[string]any) { d["token_endpoint"] = "http://login.example.com/token" },
		"no userinfo endpoint":       func(d map[string]any) { delete(d, "userinfo_endpoint") },
		"an authorization of script": func(d map[string]any) { d["authorization_endpoint"] = "javascript:alert(1)" },
		"an authorization of a user": func(d map[string]any) { d["authorization_endpoint"] = "https://u:p@h/" },
		"keys of http":               func(d map[string]any) { d["jwks_uri"] = "http://login.example.com/jwks" },
		"no client secret":           func(d map[string]any) { d["token_endpoint_auth_methods_supported"] = []string{"none"} },
	} {
		p, o := provider(t)
		p.Set(authtest.Knobs{Doc: change})
		s := newSite(t, o)
		w := httptest.NewRecorder()
		at, err := s.Start(w, s.request("/auth/login"), "/")
		if f, ok := errors.AsType[*auth.Failure](err); !ok || f.Status != http.StatusBadGateway || at != "" || len(w.Result().Cookies()) != 0 {
			t.Errorf("%s: %q, %v", name, at, err)
		}
		// It is not asked again for every request.
		_, _ = s.Start(w, s.request("/auth/login"), "/")
		if n := p.Asked("/.well-known/openid-configuration"); n != 1 {
			t.Errorf("%s: asked %d times", name, n)
		}
	}
	p, o := provider(t)
	p.Set(authtest.Knobs{Doc: func(d map[string]any) { d["token_endpoint"] = "http://127.0.0.1:1/token" }})
	if _, err := o.AuthURL(t.Context(), "s", "v"); err != nil {
		t.Errorf("http on loopback: %v", err)
	}
}

func TestNoIssuer(t *testing.T) {
	for _, s := range []string{"", "http://login.example.com", "login", "https://h?x", "https://u:p@h"} {
		if _, err := auth.NewOIDC(auth.Client{Issuer: s}); err == nil {
			t.Errorf("%q is taken", s)
		}
	}
}

func TestUserInfo(t *testing.T) {
	p, o := provider(t)
	for claims, want := range map[string]hub.Person{
		`{"sub":"s","email":"a@x"}`:                          {Subject: "s", Email: "a@x"},
		`{"sub":"s","email":"a@x","email_verified":null}`:    {}, // neither a truth value nor silence
		`{"sub":"s","email":"a@x","email_verified":false}`:   {Subject: "s", Email: "a@x", Unverified: true},
		`{"sub":"s","email":"a@x","email_verified":"false"}`: {Subject: "s", Email: "a@x", Unverified: true},
		`{"sub":"s","email":"a@x","email_verified":"true"}`:  {Subject: "s", Email: "a@x"},
		`{"sub":"s"}`:              {Subject: "s"},
		`{"email":"a@x"}`:          {},
		`{"sub":"","email":"a@x"}`: {},
		`{"sub":5}`:                {},
		`<html>`:                   {},
		``:                         {},
		`{"sub":"` + strings.Repeat("s", 2000) + `"}`:          {},
		`{"sub":"s","x":"` + strings.Repeat("y", 2<<20) + `"}`: {}, // longer than is read
	} {
		p.Set(authtest.Knobs{UserInfoIs: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, claims) }})
		s := newSite(t, o)
		who, _, err := s.finish(p.Visit(t, s.start("/"), true))
		if want.Subject != "" {
			want.Provider = o.Host()
		}
		if who != want || (err == nil) != (want.Subject != "") {
			t.Errorf("%.80s: %+v, %v", claims, who, err)
		}
	}
	for status, body := range map[int]string{302: "", 500: "a secret", 200: "access_token=x"} {
		p.Set(authtest.Knobs{TokenIs: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "https://evil.test/")
			w.WriteHeader(status)
			io.WriteString(w, body)
		}})
		s := newSite(t, o)
		if who, _, err := s.finish(p.Visit(t, s.start("/"), true)); err == nil && status != 200 || err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("a token endpoint that answers %d: %+v, %v", status, who, err)
		}
	}
}

// slow is a provider that answers when it is let to.
type slow struct{ let chan struct{} }

func (s slow) Host() string { return "slow" }
func (s slow) AuthURL(ctx context.Context, _, _ string) (string, error) {
	select {
	case <-s.let:
		return "https://slow.test/", nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}
func (s slow) SignedIn(context.Context, string, string, string) (hub.Person, error) {
	return hub.Person{}, errors.New("nobody")
}

// TestAsksAreBounded: a provider that hangs holds so many requests and no more.
func TestAsksAreBounded(t *testing.T) {
	p := slow{make(chan struct{})}
	r := auth.New(p, nil)
	errs := make(chan error, 40)
	for range cap(errs) {
		go func() {
			_, err := r.Start(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil), "/")
			errs <- err
		}()
	}
	for range cap(errs) - 16 {
		if f, ok := errors.AsType[*auth.Failure](<-errs); !ok || f.Status != http.StatusServiceUnavailable {
			t.Fatal("more than 16 wait")
		}
	}
	close(p.let)
	for range 16 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
