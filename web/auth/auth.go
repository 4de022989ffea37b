// Package auth signs people in through an OpenID provider: the relying party's
// side of the authorization code flow (OpenID Connect Core 1.0, 3.1; RFC 6749,
// 4.1), with PKCE S256 (RFC 7636).
//
// Vocabulary. A flow is one round trip: Start sends a browser to the provider,
// Finish takes it back. A flow is bound to its browser by a cookie of its own
// (__Host-, Lax, HttpOnly), which holds, sealed by a key of this process, the
// state, PKCE's verifier, when it ends and where the browser wanted to go. The
// hub keeps nothing of a flow until it is finished, so that nobody can fill it;
// several tabs have a flow each. Lax is what lets the cookie come along when the
// provider, another site, sends the browser back; a Strict one would not, and
// the browser would be sent to the provider again and again.
//
// Invariants. Finish spends a flow before the provider is asked anything, once.
// Nothing here sends a browser to the provider but Start, and Start runs only
// when somebody asked for it: whatever goes wrong ends in a Failure, which is
// shown, and never in another redirect.
//
// No ID token is looked at and no nonce sent: the cookie and PKCE bind the code
// to this browser and this client, and UserInfo, asked over TLS with the token
// that the code gave, says who it is (fleet-reference, With an [oidc] table …).
package auth

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/oauth2"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// Limits of signing in.
const (
	FlowTTL  = 5 * time.Minute
	maxFlows = 4      // that a browser has at once; a newer one replaces the oldest
	maxSpent = 10_000 // flows that were finished within FlowTTL
	maxAsks  = 16     // that ask the provider at once
)

// flowCookie begins the name of a flow's cookie; the first digits of the state's
// hash end it.
const flowCookie = "__Host-vk-signin-"

// Provider is an OpenID provider.
type Provider interface {
	// Host names it to people.
	Host() string
	// AuthURL is where a browser signs in.
	AuthURL(ctx context.Context, state, verifier string) (string, error)
	// SignedIn exchanges the code that the browser brought back. iss is what came
	// with it, "" = nothing (RFC 9207).
	SignedIn(ctx context.Context, code, verifier, iss string) (hub.Person, error)
}

// Relying sends browsers to a provider and takes them back.
type Relying struct {
	p    Provider
	now  func() time.Time
	aead cipher.AEAD
	asks chan struct{}

	mu    sync.Mutex
	spent map[string]time.Time // states, until when they would have been good
}

// New makes the relying party of a provider. now is the clock, nil = time.Now.
func New(p Provider, now func() time.Time) *Relying {
	if now == nil {
		now = time.Now
	}
	key := make([]byte, 32)
	rand.Read(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		panic("auth: " + err.Error()) // of a key of 32 bytes
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic("auth: " + err.Error())
	}
	return &Relying{p: p, now: now, aead: aead, asks: make(chan struct{}, maxAsks), spent: map[string]time.Time{}}
}

// Host names the provider to people.
func (r *Relying) Host() string { return r.p.Host() }

// Failure is why a sign-in did not come about, in words for who tried.
type Failure struct {
	Status int // of HTTP
	Text   string
	Cause  error // for the log, nil = there is no more to say
}

func (f *Failure) Error() string {
	if f.Cause != nil {
		return f.Text + ": " + f.Cause.Error()
	}
	return f.Text
}

// Unwrap is the cause.
func (f *Failure) Unwrap() error { return f.Cause }

// flow is what a cookie holds.
type flow struct {
	State    string `json:"s"`
	Verifier string `json:"v"`
	Ends     int64  `json:"e"` // Unix seconds
	To       string `json:"t"`
}

func cookieName(state string) string {
	h := sha256.Sum256([]byte(state))
	return flowCookie + hex.EncodeToString(h[:8])
}

func (r *Relying) seal(name string, f flow) string {
	b, err := json.Marshal(f)
	if err != nil {
		panic("auth: " + err.Error()) // of strings and a number
	}
	nonce := make([]byte, r.aead.NonceSize())
	rand.Read(nonce)
	return base64.RawURLEncoding.EncodeToString(r.aead.Seal(nonce, nonce, b, []byte(name)))
}

func (r *Relying) open(name, value string) (f flow, ok bool) {
	b, err := base64.RawURLEncoding.DecodeString(value)
	if err != nil || len(b) < r.aead.NonceSize() {
		return f, false
	}
	n := r.aead.NonceSize()
	b, err = r.aead.Open(nil, b[:n], b[n:], []byte(name))
	return f, err == nil && json.Unmarshal(b, &f) == nil && cookieName(f.State) == name
}

func setCookie(w http.ResponseWriter, name, value string, maxAge int) {
	http.SetCookie(w, &http.Cookie{Name: name, Value: value, Path: "/", Secure: true, HttpOnly: true, SameSite: http.SameSiteLaxMode, MaxAge: maxAge})
}

// Start begins a flow that ends at to, a path of this site, and gives the URL of
// the provider to send the browser to. It sets the flow's cookie, and takes the
// oldest ones away from a browser that has many.
func (r *Relying) Start(w http.ResponseWriter, req *http.Request, to string) (string, error) {
	f := flow{State: wire.NewHex(wire.TokenLen), Verifier: oauth2.GenerateVerifier(), Ends: r.now().Add(FlowTTL).Unix(), To: LocalPath(to)}
	ctx, done, err := r.ask(req.Context())
	if err != nil {
		return "", err
	}
	defer done()
	at, err := r.p.AuthURL(ctx, f.State, f.Verifier)
	if err != nil {
		return "", &Failure{http.StatusBadGateway, fmt.Sprintf("%s cannot be used for signing in just now: it does not answer, or not as an OpenID provider does", r.p.Host()), err}
	}
	r.prune(w, req)
	name := cookieName(f.State)
	setCookie(w, name, r.seal(name, f), int(FlowTTL/time.Second))
	return at, nil
}

// ask has at most maxAsks requests wait for the provider.
func (r *Relying) ask(ctx context.Context) (context.Context, func(), error) {
	select {
	case r.asks <- struct{}{}:
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		return ctx, func() { cancel(); <-r.asks }, nil
	default:
		return nil, nil, &Failure{Status: http.StatusServiceUnavailable, Text: "many people are signing in just now: try again in a moment"}
	}
}

// prune leaves a browser room for one flow more.
func (r *Relying) prune(w http.ResponseWriter, req *http.Request) {
	ends := map[string]int64{} // by the cookie's name
	for _, c := range req.Cookies() {
		if strings.HasPrefix(c.Name, flowCookie) {
			f, _ := r.open(c.Name, c.Value) // what is not ours is the oldest
			ends[c.Name] = f.Ends
		}
	}
	names := slices.SortedFunc(maps.Keys(ends), func(a, b string) int { return int(ends[b] - ends[a]) })
	for _, name := range names[min(len(names), maxFlows-1):] {
		setCookie(w, name, "", -1)
	}
}

// Finish ends the flow whose answer a request brings, and says who signed in
// and where the browser wanted to go. The error is a *Failure.
func (r *Relying) Finish(w http.ResponseWriter, req *http.Request) (p hub.Person, to string, err error) {
	q := req.URL.Query()
	state := q.Get("state")
	if !wire.IsHex(state, wire.TokenLen) || len(q["state"]) != 1 || len(q["code"]) > 1 {
		return p, "/", &Failure{Status: http.StatusBadRequest, Text: "this is no answer of a provider's to a sign-in that began here"}
	}
	name := cookieName(state)
	var found *flow
	for _, c := range req.Cookies() {
		if f, ok := r.open(c.Name, c.Value); c.Name == name && ok && f.State == state {
			found = &f
		}
	}
	if found == nil {
		return p, "/", &Failure{Status: http.StatusBadRequest, Text: "this browser has nothing of the sign-in that ends here. Either it does not keep cookies of this site, and signing in needs them; or the sign-in was finished already, began more than 5 minutes ago, began in another browser, or the hub was restarted meanwhile"}
	}
	setCookie(w, name, "", -1)
	to = LocalPath(found.To)
	if err := r.spend(found); err != nil {
		return p, to, err
	}
	if e := q.Get("error"); e != "" {
		text := fmt.Sprintf("%s did not sign you in (%s)", r.p.Host(), wire.Clean(e, 80))
		if e == "access_denied" {
			text = fmt.Sprintf("%s did not sign you in: it was declined there", r.p.Host())
		}
		return p, to, &Failure{Status: http.StatusForbidden, Text: text}
	}
	if q.Get("code") == "" {
		return p, to, &Failure{Status: http.StatusBadRequest, Text: fmt.Sprintf("%s sent neither a code nor an error", r.p.Host())}
	}
	ctx, done, err := r.ask(req.Context())
	if err != nil {
		return p, to, err
	}
	defer done()
	if p, err = r.p.SignedIn(ctx, q.Get("code"), found.Verifier, q.Get("iss")); err != nil {
		return hub.Person{}, to, &Failure{http.StatusBadGateway, fmt.Sprintf("%s did not confirm who you are", r.p.Host()), err}
	}
	return p, to, nil
}

// spend has a flow end once, and in time.
func (r *Relying) spend(f *flow) error {
	now := r.now()
	if f.Ends <= now.Unix() {
		return &Failure{Status: http.StatusBadRequest, Text: "the sign-in took more than 5 minutes"}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.spent, func(_ string, t time.Time) bool { return !t.After(now) })
	switch _, was := r.spent[f.State]; {
	case was:
		return &Failure{Status: http.StatusBadRequest, Text: "the sign-in was finished already"}
	case len(r.spent) >= maxSpent:
		return &Failure{Status: http.StatusServiceUnavailable, Text: "many people have signed in within the last 5 minutes: try again in a moment"}
	}
	r.spent[f.State] = time.Unix(f.Ends, 0)
	return nil
}
