// Package authtest has what tests of signing in need: an OpenID provider in
// this process, and the suite that it and a real one pass.
package authtest

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/wire"
	"virtkit/web/auth"
)

// What the provider has of its one client.
const (
	ClientID = "vk-hub"
	Secret   = "a secret of the client's"
	Redirect = "https://hub.example.test/auth/callback"
)

// Provider is an OpenID provider that signs in whom a test names. Its fields
// are knobs, to be set by Set.
type Provider struct {
	*httptest.Server
	mu sync.Mutex
	Knobs
	codes  map[string]grant
	tokens map[string]string // to their claims
	asked  map[string]int    // requests, by path
}

// Knobs of a Provider. The zero value signs in alice@example.com, verified.
type Knobs struct {
	Claims string // of UserInfo, JSON; "" = Alice's
	Deny   bool   // she declines
	Down   bool   // every answer is 503
	// Doc changes the discovery document.
	Doc func(map[string]any)
	// TokenIs, UserInfoIs answer in place of the real thing.
	TokenIs, UserInfoIs http.HandlerFunc
}

type grant struct {
	challenge, redirect, claims string
	until                       time.Time
}

// Alice is what UserInfo says of her.
const Alice = `{"sub": "alice", "email": "alice@example.com", "email_verified": true}`

// New starts a provider with TLS.
func New(t testing.TB) *Provider {
	p := &Provider{codes: map[string]grant{}, tokens: map[string]string{}, asked: map[string]int{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", p.document)
	mux.HandleFunc("GET /authorize", p.authorize)
	mux.HandleFunc("POST /token", p.token)
	mux.HandleFunc("GET /userinfo", p.userinfo)
	p.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		p.asked[r.URL.Path]++
		down := p.Down
		p.mu.Unlock()
		if down {
			http.Error(w, "down", http.StatusServiceUnavailable)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(p.Close)
	return p
}

// Set turns the knobs.
func (p *Provider) Set(k Knobs) { p.mu.Lock(); p.Knobs = k; p.mu.Unlock() }

// Asked counts the requests of a path.
func (p *Provider) Asked(path string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked[path]
}

func (p *Provider) knobs() Knobs { p.mu.Lock(); defer p.mu.Unlock(); return p.Knobs }

// Client is the hub that is registered here.
func (p *Provider) Client() auth.Client {
	return auth.Client{Issuer: p.URL, ID: ClientID, Secret: Secret, Redirect: Redirect, HTTP: p.Server.Client().Transport}
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func (p *Provider) document(w http.ResponseWriter, _ *http.Request) {
	doc := map[string]any{"issuer": p.URL, "authorization_endpoint": p.URL + "/authorize", "token_endpoint": p.URL + "/token", "userinfo_endpoint": p.URL + "/userinfo",
		"jwks_uri": p.URL + "/jwks", "response_types_supported": []string{"code"}, "code_challenge_methods_supported": []string{"S256"}}
	if f := p.knobs().Doc; f != nil {
		f(doc)
	}
	reply(w, http.StatusOK, doc)
}

func (p *Provider) authorize(w http.ResponseWriter, r *http.Request) {
	q, k := r.URL.Query(), p.knobs()
	if q.Get("client_id") != ClientID || q.Get("redirect_uri") != Redirect || q.Get("response_type") != "code" || !strings.Contains(" "+q.Get("scope")+" ", " openid ") {
		http.Error(w, "no such client, or not what it registered", http.StatusBadRequest)
		return
	}
	back, _ := url.Parse(Redirect)
	v := url.Values{"state": {q.Get("state")}, "iss": {p.URL}}
	switch {
	case q.Get("code_challenge_method") != "S256" || q.Get("code_challenge") == "":
		v.Set("error", "invalid_request")
	case k.Deny:
		v.Set("error", "access_denied")
	default:
		claims := k.Claims
		if claims == "" {
			claims = Alice
		}
		code := wire.NewID()
		p.mu.Lock()
		p.codes[code] = grant{q.Get("code_challenge"), q.Get("redirect_uri"), claims, time.Now().Add(time.Minute)}
		p.mu.Unlock()
		v.Set("code", code)
	}
	back.RawQuery = v.Encode()
	http.Redirect(w, r, back.String(), http.StatusFound)
}

func (p *Provider) token(w http.ResponseWriter, r *http.Request) {
	if f := p.knobs().TokenIs; f != nil {
		f(w, r)
		return
	}
	id, secret, ok := r.BasicAuth()
	if ok { // form-encoded before they are put together (RFC 6749, 2.3.1)
		id, _ = url.QueryUnescape(id)
		secret, _ = url.QueryUnescape(secret)
	} else {
		id, secret = r.PostFormValue("client_id"), r.PostFormValue("client_secret")
	}
	if id != ClientID || subtle.ConstantTimeCompare([]byte(secret), []byte(Secret)) != 1 {
		reply(w, http.StatusUnauthorized, map[string]string{"error": "invalid_client"})
		return
	}
	p.mu.Lock()
	g, known := p.codes[r.PostFormValue("code")]
	delete(p.codes, r.PostFormValue("code"))
	p.mu.Unlock()
	sum := sha256.Sum256([]byte(r.PostFormValue("code_verifier")))
	if !known || g.until.Before(time.Now()) || r.PostFormValue("grant_type") != "authorization_code" || g.redirect != r.PostFormValue("redirect_uri") ||
		g.challenge != base64.RawURLEncoding.EncodeToString(sum[:]) {
		reply(w, http.StatusBadRequest, map[string]string{"error": "invalid_grant"})
		return
	}
	token := wire.NewID()
	p.mu.Lock()
	p.tokens[token] = g.claims
	p.mu.Unlock()
	reply(w, http.StatusOK, map[string]any{"access_token": token, "token_type": "Bearer", "expires_in": 60})
}

func (p *Provider) userinfo(w http.ResponseWriter, r *http.Request) {
	if f := p.knobs().UserInfoIs; f != nil {
		f(w, r)
		return
	}
	p.mu.Lock()
	claims, ok := p.tokens[strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")]
	p.mu.Unlock()
	if !ok {
		reply(w, http.StatusUnauthorized, map[string]string{"error": "invalid_token"})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write([]byte(claims))
}

// Visit is a person's visit to the provider: it opens the URL and gives the one
// that the browser is sent back to. Of Peer.
func (p *Provider) Visit(t testing.TB, at string, agree bool) *url.URL {
	t.Helper()
	was := p.knobs()
	k := was
	k.Deny = !agree
	p.Set(k)
	defer p.Set(was)
	c := p.Server.Client()
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := c.Get(at)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	u, err := resp.Location()
	if err != nil {
		t.Fatalf("the provider answers %s: %v", resp.Status, err)
	}
	return u
}
