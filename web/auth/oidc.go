package auth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubconf"
	"virtkit/core/fleet/wire"
)

const (
	// How old a discovery document may be for sending a browser to the provider,
	// and for taking one back. The former is short, so that a provider that is
	// down is told of by the hub's page, and not by the browser's.
	startKept   = 10 * time.Second
	finishKept  = time.Hour
	failureKept = 5 * time.Second // how long a failed one is not asked for again
	maxAnswer   = 1 << 20         // bytes of an answer of the provider's
	askTimeout  = 10 * time.Second
	maxSubject  = 1024
)

// Client is this hub as a provider knows it.
type Client struct {
	Issuer   string
	ID       string
	Secret   string
	Redirect string            // where the provider sends browsers back to
	HTTP     http.RoundTripper // nil = the default one, with the environment's proxies
}

// OIDC is a Provider that is asked over HTTP.
type OIDC struct {
	c    Client
	host string
	http *http.Client

	mu     sync.Mutex // held while discovering: others wait for the same answer
	known  *discovered
	failed error
	asked  time.Time
}

type discovered struct {
	p      *oidc.Provider
	oauth2 oauth2.Config
}

// NewOIDC makes one; it is asked for nothing before somebody signs in.
func NewOIDC(c Client) (*OIDC, error) {
	if err := hubconf.CheckIssuer(c.Issuer); err != nil {
		return nil, fmt.Errorf("the issuer %w", err)
	}
	u, err := url.Parse(c.Issuer)
	if err != nil {
		return nil, err
	}
	if c.HTTP == nil {
		c.HTTP = http.DefaultTransport
	}
	return &OIDC{c: c, host: u.Host, http: &http.Client{Timeout: askTimeout, Transport: bounded{c.HTTP},
		// A redirect would carry the client's secret to who is not in the
		// discovery document.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}, nil
}

// bounded cuts answers off.
type bounded struct{ http.RoundTripper }

// RoundTrip is http.RoundTripper's.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, maxAnswer), resp.Body}
	}
	return resp, err
}

// Host is the issuer's.
func (o *OIDC) Host() string { return o.host }

// discover reads the provider's discovery document, or gives one that is not
// older than kept.
func (o *OIDC) discover(ctx context.Context, kept time.Duration) (*discovered, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch age := time.Since(o.asked); {
	case o.known != nil && age < kept:
		return o.known, nil
	case o.failed != nil && age < failureKept:
		return nil, o.failed
	}
	o.known, o.failed = nil, nil
	d, err := o.look(ctx)
	if ctx.Err() != nil && err != nil {
		return nil, err // says nothing of the provider
	}
	o.known, o.failed, o.asked = d, err, time.Now()
	return d, err
}

func (o *OIDC) look(ctx context.Context) (*discovered, error) {
	p, err := oidc.NewProvider(oidc.ClientContext(ctx, o.http), o.c.Issuer)
	if err != nil {
		return nil, fmt.Errorf("reading the discovery document of %s: %w", o.c.Issuer, short(err))
	}
	var doc struct {
		Authorization string   `json:"authorization_endpoint"`
		Token         string   `json:"token_endpoint"`
		UserInfo      string   `json:"userinfo_endpoint"`
		JWKS          string   `json:"jwks_uri"`
		Auth          []string `json:"token_endpoint_auth_methods_supported"`
	}
	if err := p.Claims(&doc); err != nil {
		return nil, fmt.Errorf("reading the discovery document of %s: %w", o.c.Issuer, err)
	}
	for _, e := range []struct{ name, at string }{{"authorization_endpoint", doc.Authorization}, {"token_endpoint", doc.Token}, {"userinfo_endpoint", doc.UserInfo}, {"jwks_uri", doc.JWKS}} {
		if e.at == "" && e.name == "jwks_uri" {
			continue
		}
		if u, err := url.Parse(e.at); err != nil || !hubconf.SafeURL(u) || u.Fragment != "" {
			return nil, fmt.Errorf("the discovery document of %s: its %s %q is not https (or http on loopback)", o.c.Issuer, e.name, wire.Clean(e.at, 200))
		}
	}
	d := &discovered{p: p, oauth2: oauth2.Config{ClientID: o.c.ID, ClientSecret: o.c.Secret, Endpoint: p.Endpoint(), RedirectURL: o.c.Redirect, Scopes: []string{oidc.ScopeOpenID, "email"}}}
	switch {
	case len(doc.Auth) == 0 || slices.Contains(doc.Auth, "client_secret_basic"): // the default: OpenID Connect Discovery 1.0, 3
		d.oauth2.Endpoint.AuthStyle = oauth2.AuthStyleInHeader
	case slices.Contains(doc.Auth, "client_secret_post"):
		d.oauth2.Endpoint.AuthStyle = oauth2.AuthStyleInParams
	default:
		return nil, fmt.Errorf("the discovery document of %s: it takes no client secret, neither by client_secret_basic nor by client_secret_post", o.c.Issuer)
	}
	return d, nil
}

// short cuts what a provider said: it may be a page.
func short(err error) error { return errors.New(wire.Clean(err.Error(), 300)) }

// AuthURL is Provider's.
func (o *OIDC) AuthURL(ctx context.Context, state, verifier string) (string, error) {
	d, err := o.discover(ctx, startKept)
	if err != nil {
		return "", err
	}
	return d.oauth2.AuthCodeURL(state, oauth2.S256ChallengeOption(verifier)), nil
}

// SignedIn is Provider's.
func (o *OIDC) SignedIn(ctx context.Context, code, verifier, iss string) (p hub.Person, err error) {
	if iss != "" && iss != o.c.Issuer {
		return p, fmt.Errorf("the answer is of %q, not of %s", wire.Clean(iss, 200), o.c.Issuer)
	}
	d, err := o.discover(ctx, finishKept)
	if err != nil {
		return p, err
	}
	ctx = oidc.ClientContext(ctx, o.http)
	token, err := d.oauth2.Exchange(ctx, code, oauth2.VerifierOption(verifier))
	if err != nil {
		if e, ok := errors.AsType[*oauth2.RetrieveError](err); ok { // whose text has the whole answer
			err = fmt.Errorf("status %d, %s", e.Response.StatusCode, wire.Clean(e.ErrorCode, 80))
		}
		return p, fmt.Errorf("exchanging the code: %w", short(err))
	}
	info, err := d.p.UserInfo(ctx, oauth2.StaticTokenSource(token))
	if err != nil {
		return p, fmt.Errorf("asking for UserInfo: %w", short(err))
	}
	if info.Subject == "" || len(info.Subject) > maxSubject {
		return p, errors.New("UserInfo names no subject")
	}
	var said struct {
		Verified json.RawMessage `json:"email_verified"`
	}
	if err := info.Claims(&said); err != nil {
		return p, fmt.Errorf("reading UserInfo: %w", err)
	}
	// A provider that says nothing of it is taken at its word.
	silent := said.Verified == nil
	return hub.Person{Subject: info.Subject, Email: info.Email, Unverified: !silent && !info.EmailVerified, Provider: o.host}, nil
}
