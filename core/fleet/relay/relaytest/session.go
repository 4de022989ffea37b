package relaytest

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"net/http"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
)

// serveSession is one relay's session.
func (h *Hub) serveSession(w http.ResponseWriter, r *http.Request) {
	c, err := wsx.Accept(w, r)
	if err != nil {
		return
	}
	defer c.CloseNow()
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	relay, ok := h.handshake(ctx, c)
	if !ok {
		return
	}
	h.mu.Lock()
	h.sessions++
	began := h.drops
	h.changeLocked()
	h.mu.Unlock()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for {
			data, err := c.Read(ctx)
			if err != nil {
				return
			}
			m, err := dispatch.Decode(dispatch.FromRelay, data)
			if err != nil {
				return
			}
			h.hear(m)
		}
	}()
	said := dispatch.ServerStatus{}
	ping := time.NewTicker(wire.MinHeartbeat)
	defer ping.Stop()
	for {
		h.mu.Lock()
		changed, status, there, removed, drops := h.changed, h.status, h.inventory != nil, relay.removed, h.drops
		h.mu.Unlock()
		if drops != began {
			return
		}
		if removed {
			say(ctx, c, &dispatch.Closing{Code: wire.Revoked})
			c.Close(wsx.Normal, "removed")
			return
		}
		if there && said != status {
			if say(ctx, c, &status) != nil {
				return
			}
			said = status
		}
		select {
		case <-changed:
		case <-gone:
			return
		case <-ping.C:
			if say(ctx, c, &dispatch.Ping{}) != nil {
				return
			}
		}
	}
}

// DropSessions ends all sessions without a word.
func (h *Hub) DropSessions() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drops++
	h.changeLocked()
}

func say(ctx context.Context, c *wsx.Conn, m dispatch.Message) error {
	b, err := dispatch.Encode(m)
	if err != nil {
		return err
	}
	return c.Write(ctx, b)
}

func (h *Hub) hear(m dispatch.Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch m := m.(type) {
	case *dispatch.Inventory:
		h.inventory = m
	case *dispatch.Heartbeat:
		h.beats++
	case *dispatch.RunnerState:
		h.states = append(h.states, *m)
	}
	h.changeLocked()
}

func (h *Hub) handshake(ctx context.Context, c *wsx.Conn) (*relayOf, bool) {
	ctx, cancel := context.WithTimeout(ctx, wire.HandshakeStep)
	defer cancel()
	send := func(version int, m wire.Message) bool {
		b, err := wire.Encode(version, m)
		return err == nil && c.Write(ctx, b) == nil
	}
	read := func() wire.Message {
		data, err := c.Read(ctx)
		if err != nil {
			return nil
		}
		m, err := wire.Decode(wire.FromNode, 0, data)
		if err != nil {
			return nil
		}
		return m
	}
	hello, ok := read().(*wire.Hello)
	if !ok {
		return nil, false
	}
	h.mu.Lock()
	relay := h.relays[hello.Node]
	h.mu.Unlock()
	if relay == nil || relay.removed {
		send(0, &wire.Refused{Code: wire.NotEnrolled})
		return nil, false
	}
	v, ok := wire.Negotiate(dispatch.Versions, hello.Versions)
	if !ok {
		send(0, &wire.Refused{Code: wire.NoVersion})
		return nil, false
	}
	ch := &wire.Challenge{Nonce: wire.NewHex(wire.NonceLen), Versions: dispatch.Versions, Version: v}
	if !send(0, ch) {
		return nil, false
	}
	auth, ok := read().(*wire.Auth)
	if !ok {
		return nil, false
	}
	channel, err := wire.Channel(c.TLS())
	if err != nil {
		return nil, false
	}
	payload, err := wire.AuthPayload(hello, ch, channel)
	if err != nil {
		return nil, false
	}
	sig, err := hex.DecodeString(auth.Signature)
	if err != nil || !ed25519.Verify(relay.key, payload, sig) {
		send(0, &wire.Refused{Code: wire.BadSignature})
		return nil, false
	}
	return relay, send(1, &wire.Welcome{Hub: h.ID, HeartbeatSecs: 1, Time: time.Now().Unix()})
}
