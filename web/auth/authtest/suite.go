package authtest

import (
	"net/url"
	"strings"
	"testing"

	"golang.org/x/oauth2"

	"virtkit/core/fleet/wire"
	"virtkit/web/auth"
)

// Peer is a provider where one client is registered and Alice has an account.
type Peer interface {
	Client() auth.Client
	// Visit signs her in at a URL of the provider's, or declines, and gives the
	// URL that her browser is sent back to.
	Visit(t testing.TB, at string, agree bool) *url.URL
}

// RunSuite tests that a provider and auth.OIDC understand each other, and that
// the provider refuses what the hub relies on that it refuses.
func RunSuite(t *testing.T, peer Peer) {
	open := func(t *testing.T, change func(*auth.Client)) *auth.OIDC {
		c := peer.Client()
		if change != nil {
			change(&c)
		}
		o, err := auth.NewOIDC(c)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	begin := func(t *testing.T, o *auth.OIDC, agree bool) (answer url.Values, verifier string) {
		state := wire.NewHex(wire.TokenLen)
		verifier = oauth2.GenerateVerifier()
		at, err := o.AuthURL(t.Context(), state, verifier)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(at, verifier) || strings.Contains(at, peer.Client().Secret) {
			t.Errorf("the URL has a secret: %s", at)
		}
		back := peer.Visit(t, at, agree)
		if got := back.Scheme + "://" + back.Host + back.Path; got != peer.Client().Redirect {
			t.Fatalf("sent back to %s", back)
		}
		if got := back.Query().Get("state"); got != state {
			t.Errorf("state %q, want %q", got, state)
		}
		return back.Query(), verifier
	}
	t.Run("signs-in", func(t *testing.T) {
		o := open(t, nil)
		q, verifier := begin(t, o, true)
		p, err := o.SignedIn(t.Context(), q.Get("code"), verifier, q.Get("iss"))
		if err != nil || p.Subject != "alice" || p.Email != "alice@example.com" || p.Unverified || p.Provider != o.Host() {
			t.Errorf("%+v, %v", p, err)
		}
		if _, err := o.SignedIn(t.Context(), q.Get("code"), verifier, q.Get("iss")); err == nil {
			t.Error("a code is taken twice")
		}
	})
	t.Run("denied", func(t *testing.T) {
		if q, _ := begin(t, open(t, nil), false); q.Get("error") != "access_denied" || q.Get("code") != "" {
			t.Errorf("%v", q)
		}
	})
	t.Run("verifier", func(t *testing.T) {
		o := open(t, nil)
		q, _ := begin(t, o, true)
		if p, err := o.SignedIn(t.Context(), q.Get("code"), oauth2.GenerateVerifier(), q.Get("iss")); err == nil {
			t.Errorf("a code is taken with another verifier: %+v", p)
		}
	})
	t.Run("secret", func(t *testing.T) {
		q, verifier := begin(t, open(t, nil), true)
		wrong := open(t, func(c *auth.Client) { c.Secret = "another secret" })
		p, err := wrong.SignedIn(t.Context(), q.Get("code"), verifier, q.Get("iss"))
		if err == nil || strings.Contains(err.Error(), "another secret") || strings.Contains(err.Error(), q.Get("code")) {
			t.Errorf("with another secret: %+v, %v", p, err)
		}
	})
	t.Run("issuer", func(t *testing.T) {
		o := open(t, nil)
		q, verifier := begin(t, o, true)
		if p, err := o.SignedIn(t.Context(), q.Get("code"), verifier, "https://other.example.com"); err == nil {
			t.Errorf("an answer of another issuer's is taken: %+v", p)
		}
		slash := open(t, func(c *auth.Client) { c.Issuer += "/" })
		if at, err := slash.AuthURL(t.Context(), "s", oauth2.GenerateVerifier()); err == nil || !strings.Contains(err.Error(), "issuer") {
			t.Errorf("a discovery document of another issuer's is taken: %s, %v", at, err)
		}
	})
}
