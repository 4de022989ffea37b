package ui

import (
	"errors"
	"net/http"
	"net/url"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/web/auth"
)

// signIn is the page of who is not signed in: why, and the ways in.
type signIn struct {
	Problem  string // why they were not, "" = they never were
	Hint     string
	Done     bool   // they signed out
	Provider string // the provider's host, "" = there is none
	At       string // where its button leads to
	Again    bool   // the button is for another try
	Token    string // a link's, that the button spends
	SignedIn bool   // they are, after all: the page leads back
	To       string
}

// signedOut answers with the page that has the ways in, for coming back to the
// page that was asked for.
func (u *UI) signedOut(w http.ResponseWriter, r *http.Request, status int, problem string) {
	to := "/"
	if r.Method == http.MethodGet {
		to = auth.LocalPath(r.URL.RequestURI())
	}
	u.ways(w, r, status, &signIn{Problem: problem, To: to})
}

func (u *UI) ways(w http.ResponseWriter, r *http.Request, status int, p *signIn) {
	if u.o.Auth != nil {
		p.Provider = u.o.Auth.Host()
		p.At = "/auth/login"
		if p.To != "/" && p.To != "" {
			p.At += "?" + url.Values{"to": {p.To}}.Encode()
		}
	}
	p.Again = p.Problem != ""
	if _, _, ok := u.session(r); ok {
		p.SignedIn = true
	}
	u.render(w, &answer{page: "signin", title: "Sign in", status: status, data: p}, &frame{})
}

// loginPage shows a link's button, or the provider's. Looking at it spends
// nothing: mail scanners and chats' previews follow links too.
func (u *UI) loginPage(w http.ResponseWriter, r *http.Request) {
	p := &signIn{To: "/", Done: r.URL.Query().Has("out")}
	if q := r.URL.Query(); q.Has("t") {
		if token := q.Get("t"); u.o.Hub.LinkWorks(token) {
			p.Token = token
		} else {
			p.Problem, p.Hint = "the sign-in link was used already, has expired, or was never one", "vk-hub ui login, on the hub's host, prints another"
			u.ways(w, r, http.StatusForbidden, p)
			return
		}
	}
	u.ways(w, r, http.StatusOK, p)
}

// login spends a link. The answer moves on, so that the token is not what the
// address bar is left with.
func (u *UI) login(w http.ResponseWriter, r *http.Request) {
	secret, s, err := u.o.Hub.SignInByLink(r.Context(), r.PostForm.Get("t"))
	if err != nil {
		u.ways(w, r, fault.Table[fault.KindOf(err)].HTTP, &signIn{Problem: wire.Clean(err.Error(), 400), Hint: fault.HintOf(err), To: "/"})
		return
	}
	u.enter(w, r, secret, s, "/")
}

// enter gives the browser its session.
func (u *UI) enter(w http.ResponseWriter, r *http.Request, secret string, s hub.UISession, to string) {
	u.o.Log.Info("signed in", "session", s.ID(), "role", s.Role, "identity", s.Identity, "remote", r.RemoteAddr)
	u.setCookie(w, secret, int(hub.SessionTTL/time.Second))
	http.Redirect(w, r, auth.LocalPath(to), http.StatusSeeOther)
}

func (u *UI) setCookie(w http.ResponseWriter, secret string, maxAge int) {
	http.SetCookie(w, &http.Cookie{Name: u.cookie, Value: secret, Path: "/", HttpOnly: true, Secure: u.https, SameSite: http.SameSiteLaxMode, MaxAge: maxAge})
}

// toProvider sends the browser to the provider, since somebody pressed a button
// or a portal's link.
func (u *UI) toProvider(w http.ResponseWriter, r *http.Request) {
	if u.o.Auth == nil {
		u.ways(w, r, http.StatusNotFound, &signIn{Problem: "nobody signs in here through a provider: hub.toml has no [oidc]", Hint: "vk-hub ui login, on the hub's host, prints a sign-in link", To: "/"})
		return
	}
	to := auth.LocalPath(r.URL.Query().Get("to"))
	at, err := u.o.Auth.Start(w, r, to)
	if err != nil {
		u.failed(w, r, err, to)
		return
	}
	http.Redirect(w, r, at, http.StatusSeeOther)
}

// fromProvider takes the browser back.
func (u *UI) fromProvider(w http.ResponseWriter, r *http.Request) {
	if u.o.Auth == nil {
		u.toProvider(w, r)
		return
	}
	who, to, err := u.o.Auth.Finish(w, r)
	if err != nil {
		u.failed(w, r, err, to)
		return
	}
	secret, s, err := u.o.Hub.SignIn(r.Context(), who)
	if err != nil {
		u.failed(w, r, err, to)
		return
	}
	u.enter(w, r, secret, s, to)
}

// failed is the page of a sign-in that did not come about. It leads on by a
// button alone.
func (u *UI) failed(w http.ResponseWriter, r *http.Request, err error, to string) {
	p := &signIn{To: to}
	if e, ok := errors.AsType[*auth.Failure](err); ok {
		u.o.Log.Info("sign-in failed", "remote", r.RemoteAddr, logx.Err, err)
		p.Problem = e.Text
		u.ways(w, r, e.Status, p)
		return
	}
	if e, ok := errors.AsType[*hub.NotAdmittedError](err); ok {
		p.Problem, p.Hint = e.Error(), "an operator can grant it: vk-hub accounts grant, or the Users page"
		u.ways(w, r, http.StatusForbidden, p)
		return
	}
	p.Problem, p.Hint = wire.Clean(err.Error(), 400), fault.HintOf(err)
	u.ways(w, r, fault.Table[fault.KindOf(err)].HTTP, p)
}

// logout ends the hub's session, and says nothing to the provider.
func (u *UI) logout(v *visit) (*answer, error) {
	if err := u.o.Hub.SignOut(v.Context(), v.s); err != nil {
		return nil, err
	}
	u.setCookie(v.w, "", -1)
	return &answer{to: "/login?out"}, nil
}
