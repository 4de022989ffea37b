package hub

import (
	"context"
	"crypto/ed25519"
	"maps"
	"slices"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
	"virtkit/core/lazyre"
)

// API keys, of clients that are no relays.

// Scopes of a key.
const (
	ScopeJobs     = "jobs"     // the client API, but submitting jobs
	ScopeCapacity = "capacity" // POST /v1/capacity alone
)

const (
	keyMark   = "vkk_"
	maxKeyTTL = 365 * 24 * time.Hour
)

var keyName = lazyre.New(`^[A-Za-z0-9]([A-Za-z0-9._ -]{0,62})$`)

// CreateKey makes a key out of a Key with Name, Scopes, Pools and Max, and gives
// its text, of which the hub keeps the hash alone.
func (h *Hub) CreateKey(ctx context.Context, actor string, k Key, ttl time.Duration) (text string, err error) {
	switch {
	case !keyName.MatchString(k.Name):
		return "", fault.Newf(fault.Usage, "%q is no name of a key: 1 to 63 letters, digits, dots, dashes, underscores and spaces, beginning with a letter or a digit", wire.Clean(k.Name, 80))
	case ttl < time.Minute || ttl > maxKeyTTL:
		return "", fault.Newf(fault.Usage, "a key cannot be valid for %v: 1m to 365 days are allowed", ttl)
	case len(k.Pools) == 0 || len(k.Pools) > MaxPools:
		return "", fault.Newf(fault.Usage, "a key needs 1 to %d pools; * stands for any", MaxPools)
	case k.Max.Memory < 0 || k.Max.CPUs < 0 || k.Max.Disk < 0:
		return "", fault.New(fault.Usage, "the largest envelope has a negative size")
	}
	if len(k.Scopes) == 0 {
		k.Scopes = []string{ScopeJobs}
	}
	for _, s := range k.Scopes {
		if s != ScopeJobs && s != ScopeCapacity {
			return "", fault.Newf(fault.Usage, "%q is no scope: %s and %s are", wire.Clean(s, 40), ScopeJobs, ScopeCapacity)
		}
	}
	for _, p := range k.Pools {
		if p != "*" && !poolName.MatchString(p) {
			return "", fault.Newf(fault.Usage, "%q is no pool", wire.Clean(p, 80))
		}
	}
	digits := wire.NewHex(wire.TokenLen)
	text = keyMark + digits
	err = h.do(ctx, func(t *tx) error {
		if len(t.s.Keys) >= MaxKeys {
			return fault.Newf(fault.Busy, "the hub holds %d keys already", len(t.s.Keys)).Hint("vk-hub keys revoke NAME a second time removes what works no more")
		}
		for _, o := range t.s.Keys {
			if o.Name == k.Name && o.Works(t.unix()) {
				return fault.Newf(fault.Conflict, "key %s exists and works", k.Name).Hint("vk-hub keys revoke %q, or choose another name", k.Name)
			}
		}
		k.Hash, k.Prefix, k.Created, k.Actor, k.Expires = hashToken(text), digits[:8], t.unix(), actor, t.now.Add(ttl).Unix()
		t.key(k)
		t.audit("", actor, "key created", "key "+k.Name+", pools "+strings.Join(k.Pools, " ")+", scopes "+strings.Join(k.Scopes, " ")+", until "+stamp(k.Expires))
		t.event("", "key", k.Name+" created")
		return nil
	})
	return text, err
}

func (t *tx) key(k Key) {
	t.touched++
	own(&t.s.Keys, &t.ownKeys)
	t.s.Keys[k.Hash] = k
	t.b.Keys = append(t.b.Keys, k)
	t.b.Durable = true
}

// RevokeKey revokes the working key of a name; with none working, it removes
// those of that name.
func (h *Hub) RevokeKey(ctx context.Context, actor, name string) (removed int, err error) {
	err = h.do(ctx, func(t *tx) error {
		var dead []string
		for _, k := range t.s.Keys {
			switch {
			case k.Name != name:
			case k.Works(t.unix()):
				k.Revoked = t.unix()
				t.key(k)
				t.audit("", actor, "key revoked", "key "+name)
				t.event("", "key", name+" revoked")
				return nil
			default:
				dead = append(dead, k.Hash)
			}
		}
		if len(dead) == 0 {
			return fault.Newf(fault.NotFound, "no key %q", wire.Clean(name, 80)).Hint("vk-hub keys list")
		}
		t.touched++
		own(&t.s.Keys, &t.ownKeys)
		for _, hash := range dead {
			delete(t.s.Keys, hash)
			t.b.Keys = slices.DeleteFunc(t.b.Keys, func(k Key) bool { return k.Hash == hash })
			t.b.DropKeys = append(t.b.DropKeys, hash)
		}
		removed = len(dead)
		t.audit("", actor, "key removed", "key "+name)
		t.event("", "key", name+" removed")
		return nil
	})
	return removed, err
}

// KeyList is all keys by name, the newest of a name first.
func (s *Snapshot) KeyList() []Key {
	list := slices.Collect(maps.Values(s.Keys))
	slices.SortFunc(list, func(a, b Key) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return int(b.Created - a.Created)
	})
	return list
}

// ByKey is the owner whose key's text that is.
func (h *Hub) ByKey(text string) (Owner, *dispatch.Error) {
	digits, ok := strings.CutPrefix(text, keyMark)
	if !ok || !wire.IsHex(digits, wire.TokenLen) {
		return Owner{}, deny(dispatch.Unauthorized, "that is no key of this hub's")
	}
	k, ok := h.Snapshot().Keys[hashToken(text)]
	if !ok || !k.Works(h.o.Now().Unix()) {
		return Owner{}, deny(dispatch.Unauthorized, "the key does not work: it expired, was revoked, or was never one")
	}
	return Owner{ID: k.Hash, Name: "key " + k.Name, Key: &k}, nil
}

// ByRelay is the owner that is a relay, and its key.
func (h *Hub) ByRelay(id string) (Owner, ed25519.PublicKey, *dispatch.Error) {
	r := h.Snapshot().Relays[id]
	if r == nil {
		return Owner{}, nil, deny(dispatch.Unauthorized, "the hub has no such relay, or it was removed: join again")
	}
	return Owner{ID: id, Name: "relay " + id}, r.Key, nil
}

// Scoped says whether an owner may use the client API beyond capacity.
func (o *Owner) Scoped() bool { return o.Key == nil || slices.Contains(o.Key.Scopes, ScopeJobs) }

// HelloFrom stores what a client says of itself.
func (h *Hub) HelloFrom(ctx context.Context, o Owner, c dispatch.ClientHello) *dispatch.Error {
	if o.Key == nil {
		return deny(dispatch.Forbidden, "a relay says what it is in its session")
	}
	c = dispatch.ClientHello{Program: wire.Clean(c.Program, wire.MaxText), Version: wire.Clean(c.Version, wire.MaxText), Hostname: wire.Clean(c.Hostname, wire.MaxText)}
	err := h.do(ctx, func(t *tx) error {
		k, ok := t.s.Keys[o.ID]
		if !ok || k.Client != nil && *k.Client == c {
			return nil
		}
		k.Client = &c
		t.key(k)
		return nil
	})
	if err != nil {
		return denied(err)
	}
	return nil
}

// Deny makes the error of a request, for who reads one.
func Deny(code dispatch.Code, text string) *dispatch.Error { return deny(code, "%s", text) }
