package dispatch

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"virtkit/core/fleet/wire"
)

// Headers of a signed request.
const (
	HeaderRelay     = "vk-relay" // the relay's ID
	HeaderTime      = wire.HeaderTime
	HeaderSignature = wire.HeaderSignature // hex
)

// Request is what a relay signs of a request.
type Request struct {
	Relay   string
	Method  string // GET, POST, DELETE
	Target  string // path and query, as the request line has it
	Body    []byte
	Unix    int64  // when it was signed
	Channel []byte // wire.Channel of the TLS connection that it goes over
}

// Message is the bytes that are signed.
func (r *Request) Message() []byte {
	sum := sha256.Sum256(r.Body)
	return wire.RequestPayload(r.Relay, r.Method, r.Target, sum[:], r.Unix, r.Channel)
}

// Sign puts the three headers into h.
func (r *Request) Sign(key ed25519.PrivateKey, h http.Header) {
	h.Set(HeaderRelay, r.Relay)
	h.Set(HeaderTime, strconv.FormatInt(r.Unix, 10))
	h.Set(HeaderSignature, hex.EncodeToString(ed25519.Sign(key, r.Message())))
}

// Claim reads a request's headers: who it says it is of, and when it was
// signed. The signature is checked by Verify, once the body was read.
func Claim(h http.Header, now time.Time) (relay string, unix int64, err error) {
	relay = h.Get(HeaderRelay)
	if !wire.IsHex(relay, wire.IDLen) {
		return "", 0, errors.New("the request names no relay: header " + HeaderRelay + " is missing or is no ID")
	}
	unix, err = strconv.ParseInt(h.Get(HeaderTime), 10, 64)
	if err != nil {
		return "", 0, errors.New("header " + HeaderTime + " is no time in Unix seconds")
	}
	if d := now.Unix() - unix; d > wire.DownloadMaxSkewSecs || d < -wire.DownloadMaxSkewSecs {
		return "", 0, errors.New("the request's time is more than 5 minutes from the hub's clock: set the relay's clock")
	}
	return relay, unix, nil
}

// Verify checks the signature in h.
func (r *Request) Verify(key ed25519.PublicKey, h http.Header) error {
	sig, err := wire.ParseHex(HeaderSignature, h.Get(HeaderSignature), wire.SignatureLen)
	if err != nil || !ed25519.Verify(key, r.Message(), sig) {
		return errors.New("the signature is not that of the relay's key over this request and connection; a proxy that terminates TLS breaks it")
	}
	return nil
}

// EnrollRequest is the body of a POST to EnrollPath. A refusal is a
// wire.EnrollRefused with a status of 400 or more.
type EnrollRequest struct {
	Token     string `json:"token"`
	PublicKey string `json:"public_key"`
	Signature string `json:"signature"` // of EnrollPayload, by that key
	Hostname  string `json:"hostname,omitempty"`
	Version   string `json:"version,omitempty"` // of vk-gitlab
}

// Check says what is wrong with the request. It names no value of it.
func (m *EnrollRequest) Check() error {
	for _, f := range []struct {
		name, text string
		n          int
	}{{"token", m.Token, wire.TokenLen}, {"public_key", m.PublicKey, wire.KeyLen}, {"signature", m.Signature, wire.SignatureLen}} {
		if _, err := wire.ParseHex(f.name, f.text, f.n); err != nil {
			return err
		}
	}
	return nil
}

// EnrollReply answers it with status 200.
type EnrollReply struct {
	Relay string `json:"relay"`
	Hub   string `json:"hub"` // id of the hub's database
	// Again says that the key was enrolled before: the relay has its old id.
	Again bool `json:"again,omitempty"`
}

// Check says what is wrong with the reply.
func (m *EnrollReply) Check() error {
	if !wire.IsHex(m.Relay, wire.IDLen) || !wire.IsHex(m.Hub, wire.IDLen) {
		return errors.New("the reply has no relay's and no hub's ID")
	}
	return nil
}

// NewEnrollRequest makes one for a connection.
func NewEnrollRequest(token string, key ed25519.PrivateKey, channel []byte, hostname, version string) *EnrollRequest {
	pub := key.Public().(ed25519.PublicKey)
	return &EnrollRequest{Token: token, PublicKey: hex.EncodeToString(pub), Hostname: hostname, Version: version,
		Signature: hex.EncodeToString(ed25519.Sign(key, wire.RelayEnrollPayload(token, pub, channel)))}
}

func normalURL(u *url.URL) string {
	scheme, host, port := strings.ToLower(u.Scheme), strings.ToLower(u.Hostname()), u.Port()
	if scheme == "http" && port == "80" || scheme == "https" && port == "443" {
		port = ""
	}
	switch {
	case port != "":
		host = net.JoinHostPort(host, port)
	case strings.Contains(host, ":"):
		host = "[" + host + "]"
	}
	return scheme + "://" + host + strings.TrimRight(u.EscapedPath(), "/")
}
