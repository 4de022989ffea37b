package dispatch_test

import (
	"crypto/ed25519"
	"encoding/hex"
	"net/http"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
)

// FuzzClaim reads the headers of any request: what is taken names a relay and a
// time near now, and no signature but the key's own is good.
func FuzzClaim(f *testing.F) {
	now := time.Unix(1_800_000_000, 0)
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		f.Fatal(err)
	}
	req := dispatch.Request{Relay: strings.Repeat("0a", wire.IDLen), Method: http.MethodPost, Target: "/v1/jobs?x=1", Body: []byte("{}"), Unix: now.Unix(), Channel: wire.Plaintext}
	h := http.Header{}
	req.Sign(key, h)
	good := h.Get(dispatch.HeaderSignature)
	f.Add(req.Relay, h.Get(dispatch.HeaderTime), strings.Repeat("00", ed25519.SignatureSize))
	f.Add("", "-9223372036854775808", "")
	f.Add(strings.ToUpper(req.Relay), "9223372036854775807", good[1:])
	f.Fuzz(func(t *testing.T, relay, unix, signature string) {
		h := http.Header{}
		h.Set(dispatch.HeaderRelay, relay)
		h.Set(dispatch.HeaderTime, unix)
		h.Set(dispatch.HeaderSignature, signature)
		name, at, err := dispatch.Claim(h, now)
		if err == nil && (!wire.IsHex(name, wire.IDLen) || at < now.Unix()-wire.DownloadMaxSkewSecs || at > now.Unix()+wire.DownloadMaxSkewSecs) {
			t.Errorf("%q at %q is taken for %q at %d", relay, unix, name, at)
		}
		if req.Verify(pub, h) == nil && signature != good {
			sig, _ := hex.DecodeString(signature)
			t.Errorf("the signature %q of %d bytes is good", signature, len(sig))
		}
	})
}

// FuzzServerURL normalizes any URL: the outcome is one that stays as it is.
func FuzzServerURL(f *testing.F) {
	for _, s := range []string{"https://GitLab.Example.com:443/sub/", "http://[::1]:80", "https://u:p@h/?q#f", "https://h/%2F/", "http://h:/", "http://:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		u, err := dispatch.ServerURL(s)
		if err != nil {
			return
		}
		if again, err := dispatch.ServerURL(u); err != nil || again != u || strings.ContainsAny(u, "?#") {
			t.Errorf("%q is %q, which is %q, %v", s, u, again, err)
		}
	})
}
