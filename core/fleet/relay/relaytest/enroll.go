package relaytest

import (
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
)

// who checks a request's signature.
func (h *Hub) who(r *http.Request, body []byte) (string, error) {
	id, unix, err := dispatch.Claim(r.Header, time.Now())
	if err != nil {
		return "", err
	}
	h.mu.Lock()
	relay := h.relays[id]
	h.mu.Unlock()
	if relay == nil || relay.removed {
		return "", errors.New("the hub does not know this relay")
	}
	channel, err := wire.Channel(r.TLS)
	if err != nil {
		return "", err
	}
	req := dispatch.Request{Relay: id, Method: r.Method, Target: r.RequestURI, Body: body, Unix: unix, Channel: channel}
	return id, req.Verify(relay.key, r.Header)
}

func (h *Hub) enroll(r *http.Request, body []byte) (int, any) {
	var e dispatch.EnrollRequest
	if json.Unmarshal(body, &e) != nil || e.Check() != nil {
		return http.StatusBadRequest, wire.EnrollRefused{Code: wire.BadRequest}
	}
	key, _ := hex.DecodeString(e.PublicKey)
	sig, _ := hex.DecodeString(e.Signature)
	channel, err := wire.Channel(r.TLS)
	if err != nil || !ed25519.Verify(key, wire.RelayEnrollPayload(e.Token, key, channel), sig) {
		return http.StatusForbidden, wire.EnrollRefused{Code: wire.BadSignature}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, r := range h.relays {
		if r.key.Equal(ed25519.PublicKey(key)) {
			if r.removed {
				return http.StatusForbidden, wire.EnrollRefused{Code: wire.KeyRevoked}
			}
			return http.StatusOK, dispatch.EnrollReply{Relay: id, Hub: h.ID, Again: true}
		}
	}
	if !h.tokens[e.Token] {
		return http.StatusForbidden, wire.EnrollRefused{Code: wire.TokenInvalid}
	}
	delete(h.tokens, e.Token)
	id := wire.NewID()
	h.relays[id] = &relayOf{key: key}
	return http.StatusOK, dispatch.EnrollReply{Relay: id, Hub: h.ID}
}
