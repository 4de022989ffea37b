package hub

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
)

func hashToken(token string) string {
	h := sha256.Sum256([]byte(token))
	return hex.EncodeToString(h[:])
}

// CreateToken issues a token that one enrollment may spend within ttl. The hub
// keeps its hash alone.
func (h *Hub) CreateToken(ctx context.Context, actor string, ttl time.Duration) (token string, err error) {
	return h.CreateTokenOf(ctx, actor, "", ttl)
}

// CreateTokenOf issues a token of a kind: "" for a node, TokenGitLab for a
// relay.
func (h *Hub) CreateTokenOf(ctx context.Context, actor, kind string, ttl time.Duration) (token string, err error) {
	if kind != "" && kind != TokenGitLab {
		return "", fault.Newf(fault.Usage, "%q is no kind of token; %s is", wire.Clean(kind, 40), TokenGitLab)
	}
	if ttl < time.Second || ttl > MaxTokenTTL*time.Second {
		return "", fault.Newf(fault.Usage, "a token cannot be valid for %v: 1s to 30 days are allowed", ttl)
	}
	token = wire.NewHex(wire.TokenLen)
	return token, h.do(ctx, func(t *tx) error {
		unspent := 0
		for _, tok := range t.s.Tokens {
			if tok.Spent == 0 && tok.Expires > t.unix() {
				unspent++
			}
		}
		if unspent >= MaxTokens {
			return fault.Newf(fault.Busy, "%d tokens are waiting to be spent already", unspent).Hint("they are forgotten as they expire")
		}
		tok := Token{Hash: hashToken(token), Created: t.unix(), Expires: t.now.Add(ttl).Unix(), Actor: actor, Kind: kind}
		t.token(tok)
		of := ""
		if kind != "" {
			of = " of kind " + kind
		}
		t.audit("", actor, "token created", fmt.Sprintf("token %s…%s, valid until %s", tok.Hash[:8], of, stamp(tok.Expires)))
		t.event("", "token", "created")
		return nil
	})
}

// RefusedError is why an enrollment or a session is refused.
type RefusedError struct {
	Code wire.Refusal
	Text string
}

func (e *RefusedError) Error() string { return string(e.Code) + ": " + e.Text }

func refuse(code wire.Refusal, format string, a ...any) *RefusedError {
	return &RefusedError{code, fmt.Sprintf(format, a...)}
}

// proven is a key in hex, whose holder signed what it is to have signed.
func proven(public, signature string, payload func(ed25519.PublicKey) []byte) (ed25519.PublicKey, error) {
	key, err := wire.ParseHex("public_key", public, wire.KeyLen)
	if err != nil {
		return nil, refuse(wire.BadRequest, "%v", err)
	}
	sig, err := wire.ParseHex("signature", signature, wire.SignatureLen)
	if err != nil {
		return nil, refuse(wire.BadRequest, "%v", err)
	}
	if !ed25519.Verify(key, payload(key), sig) {
		return nil, refuse(wire.BadSignature, "the signature is not that of the key over this connection; a proxy that terminates TLS breaks it")
	}
	return key, nil
}

// Enroll pins the key of a node that holds a token. channel is the binding of
// the connection that the request came on, and remote its address for the log.
// A refusal is a *RefusedError. A key that is enrolled gets its node's ID
// back, for a token of its own.
func (h *Hub) Enroll(ctx context.Context, r *wire.EnrollRequest, channel []byte, remote string) (*wire.EnrollReply, error) {
	if err := r.Check(); err != nil {
		return nil, refuse(wire.BadRequest, "%v", err)
	}
	// Before the token is looked at: who holds no key learns nothing of tokens.
	key, err := proven(r.PublicKey, r.Signature, func(key ed25519.PublicKey) []byte { return wire.EnrollPayload(r.Token, key, channel) })
	if err != nil {
		return nil, err
	}
	reply := &wire.EnrollReply{Hub: h.id}
	err = h.do(ctx, func(t *tx) error {
		if tok := t.s.Tokens[hashToken(r.Token)]; tok.Spent != 0 && t.s.byKey[string(key)] == tok.Node && tok.Node != "" {
			return refuse(wire.TokenUsed, "the token was spent, by this key: enroll again with a new one to get the node's ID back")
		}
		tok, err := t.spendable(r.Token, "")
		if err != nil {
			return err
		}
		for _, rv := range t.s.revoked {
			if rv.Key.Equal(ed25519.PublicKey(key)) {
				return refuse(wire.KeyRevoked, "the key's node %s was removed at %s: join with --replace", rv.Node, stamp(rv.At))
			}
		}
		name := wire.Clean(r.Hostname, wire.MaxText)
		rec, event := Record{ID: wire.NewID(), Key: key, Name: name, Enrolled: t.unix()}, "enrolled"
		n := &Node{Live: &Live{}}
		if id := t.s.byKey[string(key)]; id != "" {
			n, event, reply.Again = t.s.Nodes[id], "enrolled again", true
			rec = *n.Record
			if name != "" {
				rec.Name = name
			}
		}
		reply.Node = rec.ID
		t.put(n, rec)
		tok.Spent, tok.Node = t.unix(), rec.ID
		t.token(tok)
		t.audit(rec.ID, "token "+tok.Hash[:8], event, fmt.Sprintf("%s, from %s, token of %s", name, remote, tok.Actor))
		t.event(rec.ID, "enrolled", event)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return reply, nil
}

// spendable finds a token that an enrollment of that kind may spend now.
func (t *tx) spendable(token, kind string) (Token, error) {
	tok, ok := t.s.Tokens[hashToken(token)]
	switch {
	case !ok:
		return tok, refuse(wire.TokenInvalid, "the hub gave out no such token, or it expired long ago")
	case tok.Kind != kind && kind == "":
		return tok, refuse(wire.TokenInvalid, "the token is for vk-gitlab join, not for a node")
	case tok.Kind != kind:
		return tok, refuse(wire.TokenInvalid, "the token is for a node: vk-hub token create --kind gitlab issues one for vk-gitlab join")
	case tok.Spent != 0:
		return tok, refuse(wire.TokenUsed, "the token was spent at %s", stamp(tok.Spent))
	case tok.Expires <= t.unix():
		return tok, refuse(wire.TokenExpired, "the token expired at %s", stamp(tok.Expires))
	}
	return tok, nil
}

// Remove revokes a node and ends its session.
func (h *Hub) Remove(ctx context.Context, actor, name string) (id string, err error) {
	err = h.do(ctx, func(t *tx) error {
		n, err := t.node(name)
		if err != nil {
			return err
		}
		id = n.ID
		delete(t.nodes(), n.ID)
		delete(t.byKey(), string(n.Key))
		own(&t.s.revoked, &t.ownRevoked)
		rv := Revoked{Node: n.ID, Key: n.Key, At: t.unix()}
		t.s.revoked[n.ID] = rv
		t.b.Removed = append(t.b.Removed, n.ID)
		delete(t.h.issued, n.ID)
		// A record put by a change before in this batch must not bring it back.
		keep := t.b.Records[:0:0]
		for _, r := range t.b.Records {
			if r.ID != n.ID {
				keep = append(keep, r)
			}
		}
		t.b.Records = keep
		t.b.Commands = without(t.b.Commands, n.ID)
		t.b.Revoked = append(t.b.Revoked, rv)
		t.audit(n.ID, actor, "removed", n.Name)
		t.event(n.ID, "removed", "")
		t.after = append(t.after, func() { h.forget(n.ID) })
		return nil
	})
	return id, err
}

func without(list []*Command, node string) []*Command {
	keep := list[:0:0]
	for _, c := range list {
		if c.Node != node {
			keep = append(keep, c)
		}
	}
	return keep
}

// sweepTx forgets what is over: tokens that expired an hour ago, or were spent
// a day ago, and settled commands of long ago.
func sweepTx(t *tx) error {
	now := t.unix()
	for hash, tok := range t.s.Tokens {
		if tok.Expires < now-3600 || tok.Spent != 0 && tok.Spent < now-24*3600 {
			t.dropToken(hash)
		}
	}
	for _, n := range t.s.Nodes {
		var keep []*Command
		for _, c := range n.Open {
			// One that was never answered may still be: its node is away.
			if c.Expires >= now-SettledKept || c.Outcome == wire.Accepted {
				keep = append(keep, c)
				continue
			}
			settled := *c
			settled.Outcome, settled.Message, settled.Acked = wire.Expired, "never answered", now
			t.command(&settled)
			t.audit(n.ID, "hub", "command expired", fmt.Sprintf("%s %s was never answered", c.Op, c.ID))
		}
		if len(keep) != len(n.Open) {
			t.open(n, keep)
		}
	}
	t.sweepPeople()
	t.b.SettledBefore = now - SettledKept
	return nil
}

func stamp(unix int64) string { return time.Unix(unix, 0).UTC().Format(time.RFC3339) }
