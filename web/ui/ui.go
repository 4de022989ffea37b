// Package ui is the hub's web UI: pages for people, made on the server, without
// scripts. It shows what vk-hub's commands show (core/fleet/hubtext).
//
// Who is signed in has a session of the hub's (hub.UISession), whose secret a
// cookie carries: HttpOnly, Secure and __Host- over https, and Lax. Lax, so that
// a link from elsewhere, and the way back from the provider that signs people
// in, arrive signed in: a Strict one would not come along on either, and who
// follows a link would be asked to sign in for ever. What Lax lets through is
// top-level GETs, and no GET changes anything.
//
// A request is refused before it reaches a page unless its Host is ui_url's,
// and unless the browser says that it is of this site or a top-level
// navigation. A POST must be of this site's own pages, by Origin or
// Sec-Fetch-Site, and carry the session's CSRF token.
//
// Nothing here redirects to the provider by itself: who is not signed in gets a
// page with a button, and comes back from the provider to the page that had it,
// by a plain local path (auth.LocalPath). So no answer can begin a loop.
//
// A page is a handler in the table of routes, a template in templates/ that
// defines "main", and a line of the navigation in templates/page.html. What it
// is given is its own; session, navigation and CSRF token come with every page.
//
// Spec: fleet-reference, "ui_addr in hub.toml turns the listener on …" and "With
// an [oidc] table …"; fleet-design, Security.
package ui

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/ui"
	"virtkit/web/auth"
)

const (
	formStep = 10 * time.Second // for a form's body
	pageStep = 30 * time.Second // for an answer
	maxForm  = 64 << 10
)

//go:embed templates/*.html
var templates embed.FS

//go:embed static
var static embed.FS

// Options of a UI.
type Options struct {
	Hub    *hub.Hub
	Origin string        // ui_url, as a browser writes it
	Issuer string        // the provider's, "" = there is none
	Auth   *auth.Relying // nil = nobody signs in through a provider
	Log    *slog.Logger
}

// UI serves the pages. Make one with New.
type UI struct {
	o      Options
	https  bool
	host   string
	cookie string
	pages  map[string]*template.Template
	mux    *http.ServeMux
}

// New makes a UI.
func New(o Options) (*UI, error) {
	at, err := url.Parse(o.Origin)
	if err != nil {
		return nil, err
	}
	u := &UI{o: o, https: at.Scheme == "https", host: at.Host, cookie: "vk-session", pages: map[string]*template.Template{}, mux: http.NewServeMux()}
	u.o.Log = o.Log.With(logx.Comp, "ui")
	if u.https {
		u.cookie = "__Host-vk-session"
	}
	names, err := fs.Glob(templates, "templates/*.html")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		t, err := template.New("page.html").Funcs(funcs).ParseFS(templates, "templates/page.html", name)
		if err != nil {
			return nil, err
		}
		u.pages[strings.TrimSuffix(strings.TrimPrefix(name, "templates/"), ".html")] = t
	}
	u.routes()
	return u, nil
}

var funcs = template.FuncMap{
	"clean": ui.CleanLine,
	"stamp": hubtext.Stamp,
	"lower": strings.ToLower,
}

func (u *UI) routes() {
	u.mux.HandleFunc("GET /login", u.loginPage)
	u.mux.HandleFunc("POST /login", u.form(u.login))
	u.mux.HandleFunc("GET /auth/login", u.toProvider)
	u.mux.HandleFunc("GET /auth/callback", u.fromProvider)
	u.mux.HandleFunc("POST /logout", u.change(hub.Viewer, u.logout))
	u.mux.HandleFunc("GET /{$}", u.page(hub.Viewer, u.nodes))
	u.mux.HandleFunc("GET /jobs", u.page(hub.Viewer, u.jobs))
	u.mux.HandleFunc("GET /jobs/{id}", u.page(hub.Viewer, u.job))
	u.mux.HandleFunc("GET /users", u.page(hub.Operator, u.users))
	u.mux.HandleFunc("POST /users", u.change(hub.Operator, u.changeUsers))
	files := http.FileServerFS(static)
	u.mux.HandleFunc("GET /static/", func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/") { // no list of them
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Cache-Control", "no-cache")
		files.ServeHTTP(w, r)
	})
	u.mux.HandleFunc("/", u.page(hub.Viewer, func(*visit) (*answer, error) {
		return nil, fault.New(fault.NotFound, "there is no such page")
	}))
}

const policy = "default-src 'self'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

// ServeHTTP is http.Handler's.
func (u *UI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	for k, v := range map[string]string{"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "same-origin",
		"Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store"} {
		h.Set(k, v)
	}
	if u.https {
		h.Set("Strict-Transport-Security", "max-age=31536000")
	}
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(formStep))
	_ = rc.SetWriteDeadline(time.Now().Add(pageStep))
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	switch {
	case !strings.EqualFold(r.Host, u.host):
		// Not a page: a name that was made to resolve here learns nothing.
		http.Error(w, "This is not the host that was asked for.", http.StatusMisdirectedRequest)
	case !ours(r):
		http.Error(w, "This page is not for other sites' pages to load.", http.StatusForbidden)
	default:
		u.mux.ServeHTTP(w, r)
	}
}

// ours says whether a request is of this site, of no site, or a link that
// somebody follows from another: a top-level navigation by GET. Browsers of
// before Sec-Fetch-Site say nothing, and pages are not to be framed in any.
func ours(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
		return true
	}
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

// fromHere says whether a POST is of a page of this origin.
func (u *UI) fromHere(r *http.Request) bool {
	if o := r.Header.Values("Origin"); len(o) > 0 {
		return len(o) == 1 && o[0] == u.o.Origin
	}
	return r.Header.Get("Sec-Fetch-Site") == "same-origin"
}

// visit is a request of somebody who is signed in.
type visit struct {
	w      http.ResponseWriter
	r      *http.Request
	s      hub.UISession
	secret string
}

// Context is the request's.
func (v *visit) Context() context.Context { return v.r.Context() }

// answer is a page, or a redirect to a path of this site.
type answer struct {
	page   string // of templates/
	title  string
	data   any
	status int    // 0 = 200
	to     string // "" = no redirect
}

// session is the request's; two session cookies are none: another service of
// this host may have set one (only where it is plain http).
func (u *UI) session(r *http.Request) (s hub.UISession, secret string, ok bool) {
	cs := r.CookiesNamed(u.cookie)
	if len(cs) != 1 {
		return s, "", false
	}
	s, ok = u.o.Hub.UISession(cs[0].Value)
	return s, cs[0].Value, ok
}

// mac derives a value from a session's secret.
func mac(secret, what string) string {
	m := hmac.New(sha256.New, []byte(secret))
	m.Write([]byte("vk-hub ui " + what))
	return hex.EncodeToString(m.Sum(nil))
}

func csrf(secret string) string { return mac(secret, "csrf") }

// page makes a handler of a page for a role.
func (u *UI) page(role hub.Role, f func(*visit) (*answer, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s, secret, ok := u.session(r)
		if !ok {
			u.signedOut(w, r, http.StatusUnauthorized, "")
			return
		}
		u.answer(&visit{w, r, s, secret}, role, f)
	}
}

// form makes a handler of a POST of this site's pages.
func (u *UI) form(f http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !u.fromHere(r) {
			u.signedOut(w, r, http.StatusForbidden, "the request came from no page of this site")
			return
		}
		if err := r.ParseForm(); err != nil {
			u.signedOut(w, r, http.StatusBadRequest, "the form could not be read")
			return
		}
		f(w, r)
	}
}

// change makes a handler of a change by who is signed in.
func (u *UI) change(role hub.Role, f func(*visit) (*answer, error)) http.HandlerFunc {
	return u.form(func(w http.ResponseWriter, r *http.Request) {
		s, secret, ok := u.session(r)
		if !ok {
			u.signedOut(w, r, http.StatusUnauthorized, "nothing was changed: the session has ended")
			return
		}
		u.answer(&visit{w, r, s, secret}, role, func(v *visit) (*answer, error) {
			if !hmac.Equal([]byte(r.PostForm.Get("csrf")), []byte(csrf(secret))) {
				return nil, fault.New(fault.Denied, "the form is of another session: nothing was changed").Hint("load the page again")
			}
			return f(v)
		})
	})
}

func (u *UI) answer(v *visit, role hub.Role, f func(*visit) (*answer, error)) {
	var a *answer
	err := error(fault.Newf(fault.Denied, "this page is for operators, and you are signed in as a %s", v.s.Role))
	if v.s.Role.Covers(role) {
		a, err = f(v)
	}
	if err != nil {
		a = u.failure(err)
	}
	if a.to != "" {
		http.Redirect(v.w, v.r, a.to, http.StatusSeeOther)
		return
	}
	who := v.s.Identity
	if who == "" {
		who = "link from " + v.s.From
	}
	u.render(v.w, a, &frame{Who: who, Principal: v.s.Principal(), Role: v.s.Role, Operator: v.s.Role == hub.Operator, CSRF: csrf(v.secret), Path: v.r.URL.Path})
}

// failure is the page of an error.
func (u *UI) failure(err error) *answer {
	status := fault.Table[fault.KindOf(err)].HTTP
	if status >= 500 {
		u.o.Log.Error("a page failed", logx.Err, err)
	}
	return &answer{page: "error", title: "Not that way", status: status, data: struct{ Text, Hint string }{wire.Clean(err.Error(), 400), wire.Clean(fault.HintOf(err), 400)}}
}

// frame is what every page is given beside its own data.
type frame struct {
	Title     string
	Who       string // "" = nobody is signed in
	Principal string
	Role      hub.Role
	Operator  bool
	CSRF      string
	Path      string
	Now       int64
	Data      any
}

func (u *UI) render(w http.ResponseWriter, a *answer, f *frame) {
	f.Title, f.Data, f.Now = a.title, a.data, u.o.Hub.Now().Unix()
	var b bytes.Buffer
	status := a.status
	if err := u.pages[a.page].ExecuteTemplate(&b, "page.html", f); err != nil {
		u.o.Log.Error("a page cannot be made", "page", a.page, logx.Err, err)
		b.Reset()
		b.WriteString("<!doctype html><title>vk-hub</title><p>The page could not be made; the hub's log says why.\n")
		status = http.StatusInternalServerError
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if status != 0 {
		w.WriteHeader(status)
	}
	if _, err := w.Write(b.Bytes()); err != nil && !errors.Is(err, context.Canceled) {
		u.o.Log.Debug("a page was not taken", logx.Err, err)
	}
}
