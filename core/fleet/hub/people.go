package hub

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/mail"
	"slices"
	"strings"
	"time"
	"unicode"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// Who may use the web UI: grants of roles to addresses, sign-in links, and the
// sessions of browsers. The hub keeps the hashes of links and of sessions'
// secrets alone (fleet-reference, With an [oidc] table …).

// Role is what a session of the web UI may do.
type Role string

// Roles. An operator may what a viewer may, and change things.
const (
	NoRole   Role = "none"
	Viewer   Role = "viewer"
	Operator Role = "operator"
)

func (r Role) rank() int { return slices.Index([]Role{Viewer, Operator}, r) }

// Covers says whether r may all that o may.
func (r Role) Covers(o Role) bool { return r.rank() >= o.rank() }

// Limits of sign-in.
const (
	SessionTTL     = 12 * time.Hour
	MaxLinkTTL     = 24 * time.Hour
	MaxLinks       = 1024   // that wait to be spent
	MaxUISessions  = 10_000 // in all
	MaxOfIdentity  = 8      // sessions of one; a newer one ends the oldest
	MaxGrants      = 10_000
	maxAddress     = 254 // bytes (RFC 5321, 4.5.3.1.3, less the brackets)
	quietFor       = 10 * time.Minute
	quietMax       = 60 // lines an hour
	quietHour      = time.Hour
	UISessionIDLen = 12 // hex digits
)

// Everyone is the address of the grant for whom no grant of their own names.
const Everyone = "*"

// PeopleOptions are the hub's that sign-in needs.
type PeopleOptions struct {
	// DefaultRole is of whom no grant admits: Viewer, or NoRole ("" too).
	DefaultRole Role
	OIDC        bool // there is a provider
}

// Grant gives whom the provider signs in with an address a role.
type Grant struct {
	Address string // in lower case, or Everyone
	Role    Role
	Actor   string
	At      int64
}

// Link is a sign-in link that was not used yet.
type Link struct {
	Hash    string // sha256 of the token's text, hex
	Role    Role
	Actor   string
	Created int64
	Expires int64
}

// UISession is a browser that is signed in.
type UISession struct {
	Hash     string // sha256 of the secret's text, hex
	Role     Role
	Identity string // whom the provider named; "" = opened by a link
	Email    string // the address that grants name, "" = none
	From     string // who issued the link, or the provider's host
	Created  int64
	Expires  int64
	// Fallback is of one that no grant of its own admitted: its coming and going
	// is audited within bounds.
	Fallback bool
}

// ID names the session to operators: 12 hex digits.
func (s *UISession) ID() string { return s.Hash[:UISessionIDLen] }

// Principal is who acts, as the audit log has it.
func (s *UISession) Principal() string {
	if s.Identity == "" {
		return fmt.Sprintf("ui session %s (%s)", s.ID(), s.Role)
	}
	return fmt.Sprintf("ui session %s (%s, %s)", s.ID(), s.Role, s.Identity)
}

// LoadedPeople is the part of Loaded that sign-in needs.
type LoadedPeople struct {
	Grants     []Grant
	Links      []Link
	UISessions []UISession
}

// PeopleBatch is the part of a Batch that sign-in needs. No key is both put
// and dropped in one.
type PeopleBatch struct {
	Grants         []Grant
	DropGrants     []string // by address
	Links          []Link
	DropLinks      []string // by hash
	UISessions     []UISession
	DropUISessions []string // by hash
}

// Empty says whether there is nothing to store.
func (b *PeopleBatch) Empty() bool {
	return len(b.Grants)+len(b.DropGrants)+len(b.Links)+len(b.DropLinks)+len(b.UISessions)+len(b.DropUISessions) == 0
}

func (s *Snapshot) loadPeople(l *LoadedPeople) {
	s.Grants, s.Links, s.UISessions = map[string]Grant{}, map[string]Link{}, map[string]UISession{}
	for _, g := range l.Grants {
		s.Grants[g.Address] = g
	}
	for _, k := range l.Links {
		s.Links[k.Hash] = k
	}
	for _, u := range l.UISessions {
		s.UISessions[u.Hash] = u
	}
}

// Address is an address as grants are kept under: ASCII letters in lower case.
func Address(s string) (string, error) {
	if s == Everyone {
		return s, nil
	}
	bad := func(why string) (string, error) {
		return "", fault.Newf(fault.Usage, "%q is no email address: %s", wire.Clean(s, 80), why).Hint("name one such as alice@example.com, or * for everyone whom the provider signs in")
	}
	if len(s) > maxAddress {
		return bad(fmt.Sprintf("it has more than %d bytes", maxAddress))
	}
	if i := strings.IndexFunc(s, func(r rune) bool {
		return r == unicode.ReplacementChar || !unicode.IsPrint(r) || strings.ContainsRune(" \"<>()[],;:\\", r)
	}); i >= 0 {
		return bad("it has a character that none has")
	}
	if a, err := mail.ParseAddress(s); err != nil || a.Address != s {
		return bad("it is not LOCAL@DOMAIN")
	}
	return strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' {
			r += 'a' - 'A'
		}
		return r
	}, s), nil
}

// admits is the role of whom the provider signs in with an address ("" =
// without one) and whether that comes of no grant of its own; NoRole is nobody's.
func (s *Snapshot) admits(email string, def Role) (r Role, fallback bool) {
	if g, ok := s.Grants[email]; ok && email != "" && email != Everyone {
		return g.Role, false
	}
	if g, ok := s.Grants[Everyone]; ok {
		return g.Role, true
	}
	return cmp.Or(def, NoRole), true
}

// GrantList is all grants by address.
func (s *Snapshot) GrantList() []Grant {
	return slices.SortedFunc(maps.Values(s.Grants), func(a, b Grant) int { return strings.Compare(a.Address, b.Address) })
}

// UISessionList is the sessions that last, newest first.
func (s *Snapshot) UISessionList(now time.Time) []UISession {
	var list []UISession
	for _, u := range s.UISessions {
		if u.Expires > now.Unix() {
			list = append(list, u)
		}
	}
	slices.SortFunc(list, newest)
	return list
}

func newest(a, b UISession) int {
	return cmp.Or(cmp.Compare(b.Created, a.Created), strings.Compare(a.Hash, b.Hash))
}

// UISession is the session whose secret that is.
func (h *Hub) UISession(secret string) (UISession, bool) {
	if !wire.IsHex(secret, wire.TokenLen) {
		return UISession{}, false
	}
	s := h.Snapshot()
	u, ok := s.UISessions[hashToken(secret)]
	if !ok || u.Expires <= h.o.Now().Unix() {
		return UISession{}, false
	}
	// Run ends such a session, as it starts: nobody gets in before.
	if u.Identity != "" && !s.allows(&u, h.o.People.DefaultRole) {
		return UISession{}, false
	}
	return u, true
}

// allows says whether the grants still admit a session of the provider's.
func (s *Snapshot) allows(u *UISession, def Role) bool {
	role, _ := s.admits(u.Email, def)
	return role != NoRole && role.Covers(u.Role)
}

// People are the options of sign-in.
func (h *Hub) People() PeopleOptions { return h.o.People }

// The tx's part.

// put has v be what key names, in a map of the snapshot and in the batch.
func put[V any](t *tx, m *map[string]V, is *bool, puts *[]V, drops *[]string, key string, v V) {
	t.touched++
	own(m, is)
	(*m)[key] = v
	*puts = append(*puts, v)
	*drops = slices.DeleteFunc(*drops, func(k string) bool { return k == key })
	t.b.Durable = true
}

// drop reverses put; keyOf is the key of what is put.
func drop[V any](t *tx, m *map[string]V, is *bool, puts *[]V, drops *[]string, key string, keyOf func(V) string) {
	t.touched++
	own(m, is)
	delete(*m, key)
	*puts = slices.DeleteFunc(*puts, func(v V) bool { return keyOf(v) == key })
	*drops = append(*drops, key)
	t.b.Durable = true
}

func (t *tx) grant(g Grant) {
	put(t, &t.s.Grants, &t.ownGrants, &t.b.Grants, &t.b.DropGrants, g.Address, g)
}

func (t *tx) dropGrant(address string) {
	drop(t, &t.s.Grants, &t.ownGrants, &t.b.Grants, &t.b.DropGrants, address, func(g Grant) string { return g.Address })
}

func (t *tx) link(k Link) {
	put(t, &t.s.Links, &t.ownLinks, &t.b.Links, &t.b.DropLinks, k.Hash, k)
}

func (t *tx) dropLink(hash string) {
	drop(t, &t.s.Links, &t.ownLinks, &t.b.Links, &t.b.DropLinks, hash, func(k Link) string { return k.Hash })
}

func (t *tx) uiSession(u UISession) {
	put(t, &t.s.UISessions, &t.ownUISessions, &t.b.UISessions, &t.b.DropUISessions, u.Hash, u)
}

func (t *tx) dropUISession(hash string) {
	drop(t, &t.s.UISessions, &t.ownUISessions, &t.b.UISessions, &t.b.DropUISessions, hash, func(u UISession) string { return u.Hash })
}

// quiet bounds the audit lines that anybody with an account at the provider can
// cause: one of a key every 10 minutes, 60 an hour in all. It is Run's.
type quiet struct {
	last map[string]time.Time
	sent []time.Time // of the last hour
}

// allow says whether a line may be written now.
func (q *quiet) allow(key string, now time.Time) bool {
	old := func(t time.Time, d time.Duration) bool { return now.Sub(t) >= d || now.Before(t) }
	q.sent = slices.DeleteFunc(q.sent, func(t time.Time) bool { return old(t, quietHour) })
	maps.DeleteFunc(q.last, func(_ string, t time.Time) bool { return old(t, quietFor) })
	if _, had := q.last[key]; had || len(q.sent) >= quietMax {
		return false
	}
	if q.last == nil {
		q.last = map[string]time.Time{}
	}
	q.last[key], q.sent = now, append(q.sent, now)
	return true
}

// bounded writes an audit line if the bounds allow it, and says so in the log
// otherwise.
func (t *tx) bounded(key, actor, event, detail string) {
	q := &t.h.quiet
	if q.allow(key, t.now) {
		t.undo = append(t.undo, func() { delete(q.last, key); q.sent = q.sent[:len(q.sent)-1] })
		t.audit("", actor, event, detail)
		return
	}
	t.after = append(t.after, func() {
		t.h.log.Info("not audited again so soon", "actor", actor, "event", event, "detail", detail)
	})
}

// sweepPeople forgets what is over.
func (t *tx) sweepPeople() {
	for hash, u := range t.s.UISessions {
		if u.Expires <= t.unix() {
			t.dropUISession(hash)
		}
	}
	for hash, k := range t.s.Links {
		if k.Expires <= t.unix() {
			t.dropLink(hash)
		}
	}
}

// aboveGrantsTx ends the sessions that the provider opened and that the grants
// and the default role admit no more, as the hub starts.
func aboveGrantsTx(t *tx) error {
	t.endAbove("hub", "the grants and default_role admit it no more")
	return nil
}

func (t *tx) endAbove(actor, why string) {
	for _, u := range t.s.UISessionList(t.now) {
		if u.Identity != "" && !t.s.allows(&u, t.h.o.People.DefaultRole) {
			t.end(actor, u, why)
		}
	}
}

func (t *tx) end(actor string, u UISession, why string) {
	t.dropUISession(u.Hash)
	t.audit("", actor, "session ended", u.Principal()+": "+why)
}

// PeopleWarnings are what an operator should know as the hub starts.
func (h *Hub) PeopleWarnings() []string {
	o, s := h.o.People, h.Snapshot()
	if !o.OIDC {
		return nil
	}
	switch {
	case o.DefaultRole == Viewer:
		return []string{"default_role = \"viewer\" of [oidc] admits everyone whom the provider signs in, as a viewer"}
	case len(s.Grants) == 0:
		return []string{"[oidc] is set, but no grant and no default_role lets anyone sign in: vk-hub accounts grant ADDRESS --role operator"}
	}
	return nil
}

// linksWaiting counts the links that may be used.
func (t *tx) linksWaiting() (n int) {
	for _, k := range t.s.Links {
		if k.Expires > t.unix() {
			n++
		}
	}
	return n
}

// CreateLink issues a sign-in link's token, which one sign-in may spend within
// ttl.
func (h *Hub) CreateLink(ctx context.Context, actor string, role Role, ttl time.Duration) (token string, k Link, err error) {
	if role != Viewer && role != Operator {
		return "", k, fault.Newf(fault.Usage, "%q is no role: %s and %s are", wire.Clean(string(role), 40), Viewer, Operator)
	}
	if ttl < time.Second || ttl > MaxLinkTTL {
		return "", k, fault.Newf(fault.Usage, "a sign-in link cannot be valid for %v: 1s to 24h are allowed", ttl)
	}
	token = wire.NewHex(wire.TokenLen)
	var made Link
	err = h.do(ctx, func(t *tx) error {
		if n := t.linksWaiting(); n >= MaxLinks {
			return fault.Newf(fault.Busy, "%d sign-in links are waiting to be used already", n).Hint("they are forgotten as they expire")
		}
		k := Link{Hash: hashToken(token), Role: role, Actor: actor, Created: t.unix(), Expires: t.now.Add(ttl).Unix()}
		t.link(k)
		t.audit("", actor, "sign-in link created", fmt.Sprintf("link %s… for %s, valid until %s", k.Hash[:8], role, stamp(k.Expires)))
		made = k
		return nil
	})
	if err != nil {
		return "", k, err
	}
	return token, made, nil
}

// LinkWorks says whether a link's token can be spent, without spending it.
func (h *Hub) LinkWorks(token string) bool {
	k, ok := h.Snapshot().Links[hashToken(token)]
	return ok && wire.IsHex(token, wire.TokenLen) && k.Expires > h.o.Now().Unix()
}

// SignInByLink spends a link and opens a session, whose secret it gives.
func (h *Hub) SignInByLink(ctx context.Context, token string) (secret string, u UISession, err error) {
	secret = wire.NewHex(wire.TokenLen)
	var made UISession
	err = h.do(ctx, func(t *tx) error {
		k, ok := t.s.Links[hashToken(token)]
		if !ok || k.Expires <= t.unix() || !wire.IsHex(token, wire.TokenLen) {
			return fault.New(fault.Denied, "the sign-in link was used already, has expired, or was never one").Hint("vk-hub ui login prints another")
		}
		if err := t.room(); err != nil {
			return err
		}
		u := UISession{Hash: hashToken(secret), Role: k.Role, From: k.Actor, Created: t.unix(), Expires: t.now.Add(SessionTTL).Unix()}
		t.dropLink(k.Hash)
		t.uiSession(u)
		t.audit("", u.Principal(), "signed in", fmt.Sprintf("by link %s… of %s", k.Hash[:8], k.Actor))
		made = u
		return nil
	})
	if err != nil {
		return "", u, err
	}
	return secret, made, nil
}

func (t *tx) room() error {
	if n := len(t.s.UISessions); n >= MaxUISessions {
		return fault.Newf(fault.Busy, "%d sessions of the web UI are open already", n).Hint("vk-hub ui logout ends some")
	}
	return nil
}

// Person is whom a provider signed in.
type Person struct {
	Subject    string // the provider's name for them, never empty
	Email      string // as the provider gave it, "" = none
	Unverified bool   // the provider says that the address is not verified
	Provider   string // its host
}

// identity is who that is for the hub: the address when the provider gives one
// that it does not call unverified, else the subject.
func (p *Person) identity() (identity, email string) {
	if p.Email != "" && p.Email != Everyone && !p.Unverified {
		if a, err := Address(p.Email); err == nil {
			return a, a
		}
	}
	return "sub " + wire.Clean(p.Subject, 200), ""
}

// NotAdmittedError is why whom the provider signed in may not come in.
type NotAdmittedError struct {
	Identity   string
	Unverified string // the address, if it counts for nothing because it is not verified
}

func (e *NotAdmittedError) Error() string {
	if e.Unverified != "" {
		return fmt.Sprintf("%s may not sign in: the provider says that its address %s is not verified", e.Identity, e.Unverified)
	}
	return e.Identity + " may not sign in: no grant names it"
}

// SignIn opens a session for whom the provider signed in, and gives its secret.
// The error is a *NotAdmittedError for whom no grant or default role admits.
func (h *Hub) SignIn(ctx context.Context, p Person) (secret string, u UISession, err error) {
	if p.Subject == "" {
		return "", u, fault.New(fault.Denied, "the provider named nobody")
	}
	secret = wire.NewHex(wire.TokenLen)
	identity, email := p.identity()
	var refusal *NotAdmittedError // not the change's error: it may write a line
	var made UISession
	err = h.do(ctx, func(t *tx) error {
		refusal = nil
		role, fallback := t.s.admits(email, t.h.o.People.DefaultRole)
		if role == NoRole {
			refusal = &NotAdmittedError{Identity: identity}
			if p.Unverified && p.Email != "" {
				refusal.Unverified = wire.Clean(p.Email, maxAddress)
			}
			t.bounded(identity, identity, "sign-in refused", refusal.Error())
			return nil
		}
		if err := t.room(); err != nil {
			return err
		}
		u := UISession{Hash: hashToken(secret), Role: role, Identity: identity, Email: email, From: p.Provider, Created: t.unix(), Expires: t.now.Add(SessionTTL).Unix(), Fallback: fallback}
		t.newestOf(&u)
		t.uiSession(u)
		detail := "through " + p.Provider
		if fallback {
			t.bounded("in "+identity, u.Principal(), "signed in", detail+", by * or default_role")
		} else {
			t.audit("", u.Principal(), "signed in", detail)
		}
		made = u
		return nil
	})
	if err == nil && refusal != nil {
		err = refusal
	}
	if err != nil {
		h.log.Info("sign-in refused", "identity", identity, logx.Err, err)
		return "", u, err
	}
	return secret, made, nil
}

// newestOf ends the oldest sessions of an identity that has too many.
func (t *tx) newestOf(u *UISession) {
	var of []UISession
	for _, o := range t.s.UISessions {
		if o.Identity == u.Identity {
			of = append(of, o)
		}
	}
	slices.SortFunc(of, newest)
	for _, o := range of[min(len(of), MaxOfIdentity-1):] {
		t.dropUISession(o.Hash)
		t.bounded("in "+u.Identity, u.Principal(), "session ended", fmt.Sprintf("%s: %s has %d sessions at most", o.Principal(), u.Identity, MaxOfIdentity))
	}
}
