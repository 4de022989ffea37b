package hub_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/logx"
)

// people is a bubble's hub with a provider and a default role.
func people(t *testing.T, def hub.Role, f func(*testing.T, *bench)) {
	synctest.Test(t, func(t *testing.T) {
		b := startWith(t, hubtest.NewMemory(), def)
		defer b.stop()
		f(t, b)
	})
}

func startWith(t *testing.T, store *hubtest.Memory, def hub.Role) *bench {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	b := &bench{t: t, store: store}
	h, err := hub.New(ctx, store, hub.Options{Log: logx.ForTest(t), People: hub.PeopleOptions{OIDC: true, DefaultRole: def},
		Now: func() time.Time { return time.Now().Add(time.Duration(b.ahead.Load())) }})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := h.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	b.Hub, b.ctx, b.stop = h, ctx, func() { cancel(); <-done }
	return b
}

func (b *bench) grants(address string, role hub.Role) {
	b.t.Helper()
	if _, _, err := b.SetGrant(b.t.Context(), "uid 0", hub.GrantChange{Address: address, Role: role}); err != nil {
		b.t.Fatal(err)
	}
}

func person(email string) hub.Person {
	return hub.Person{Subject: "s1", Email: email, Provider: "login.example.com"}
}

func (b *bench) signIn(p hub.Person) (string, hub.UISession) {
	b.t.Helper()
	secret, u, err := b.SignIn(b.t.Context(), p)
	if err != nil {
		b.t.Fatal(err)
	}
	if got, ok := b.UISession(secret); !ok || got != u {
		b.t.Fatalf("the session of the secret: %+v, %v; want %+v", got, ok, u)
	}
	return secret, u
}

func (b *bench) lines(event string) (n int) {
	b.t.Helper()
	lines, err := b.Store().Audit(b.t.Context(), hub.AuditQuery{Limit: 10_000})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, l := range lines {
		if l.Event == event {
			n++
		}
	}
	return n
}

func TestAdmits(t *testing.T) {
	for name, c := range map[string]struct {
		grants map[string]hub.Role
		def    hub.Role
		p      hub.Person
		role   hub.Role
		as     string
	}{
		"nobody":                   {nil, "", person("a@x"), hub.NoRole, ""},
		"own grant":                {map[string]hub.Role{"A@X": hub.Operator}, "", person("a@x"), hub.Operator, "a@x"},
		"ignoring case":            {map[string]hub.Role{"a@x": hub.Operator}, "", person("A@x"), hub.Operator, "a@x"},
		"another's grant":          {map[string]hub.Role{"b@x": hub.Operator}, "", person("a@x"), hub.NoRole, ""},
		"everyone":                 {map[string]hub.Role{"*": hub.Viewer}, "", person("a@x"), hub.Viewer, "a@x"},
		"everyone, no address":     {map[string]hub.Role{"*": hub.Viewer}, "", person(""), hub.Viewer, "sub s1"},
		"an address of *":          {map[string]hub.Role{"*": hub.Viewer}, "", person("*"), hub.Viewer, "sub s1"},
		"default":                  {nil, hub.Viewer, person("a@x"), hub.Viewer, "a@x"},
		"own grant before default": {map[string]hub.Role{"a@x": hub.Operator}, hub.Viewer, person("a@x"), hub.Operator, "a@x"},
		"own before everyone":      {map[string]hub.Role{"a@x": hub.Operator, "*": hub.Viewer}, "", person("a@x"), hub.Operator, "a@x"},
		"unverified": {map[string]hub.Role{"a@x": hub.Operator}, "",
			hub.Person{Subject: "s1", Email: "a@x", Unverified: true, Provider: "p"}, hub.NoRole, ""},
		"unverified, everyone": {map[string]hub.Role{"a@x": hub.Operator, "*": hub.Viewer}, "",
			hub.Person{Subject: "s1", Email: "a@x", Unverified: true, Provider: "p"}, hub.Viewer, "sub s1"},
		"no address at all": {map[string]hub.Role{"a@x": hub.Operator}, "", person("a@x, b@x"), hub.NoRole, ""},
	} {
		t.Run(name, func(t *testing.T) {
			people(t, c.def, func(t *testing.T, b *bench) {
				for a, r := range c.grants {
					b.grants(a, r)
				}
				secret, u, err := b.SignIn(t.Context(), c.p)
				e, refused := errors.AsType[*hub.NotAdmittedError](err)
				if c.role == hub.NoRole {
					if !refused || secret != "" || len(b.Snapshot().UISessions) != 0 || b.lines("sign-in refused") != 1 || c.p.Unverified != (e.Unverified != "") {
						t.Errorf("%+v, %v, %d lines", u, err, b.lines("sign-in refused"))
					}
					return
				}
				if err != nil || u.Role != c.role || u.Identity != c.as || b.lines("signed in") != 1 {
					t.Errorf("%+v, %v; want %s as %s", u, err, c.as, c.role)
				}
			})
		})
	}
}

func TestSessionsOfOne(t *testing.T) {
	people(t, "", func(t *testing.T, b *bench) {
		b.grants("a@x", hub.Viewer)
		b.grants("b@x", hub.Viewer)
		_, other := b.signIn(person("b@x"))
		var all []string
		for range hub.MaxOfIdentity + 2 {
			secret, _ := b.signIn(person("a@x"))
			all = append(all, secret)
			time.Sleep(2 * time.Second)
		}
		for i, secret := range all {
			if _, ok := b.UISession(secret); ok != (i >= 2) {
				t.Errorf("session %d of %d: there is %v", i, len(all), ok)
			}
		}
		if _, ok := b.Snapshot().UISessions[other.Hash]; !ok {
			t.Error("another identity's session has ended too")
		}
		b.ahead.Add(int64(hub.SessionTTL))
		if _, ok := b.UISession(all[len(all)-1]); ok || len(b.Snapshot().UISessions) == 0 {
			t.Errorf("after %v, before the hub forgets it: %v", hub.SessionTTL, ok)
		}
		b.later(0)
		if _, ok := b.UISession(all[len(all)-1]); ok || len(b.Snapshot().UISessions) != 0 {
			t.Errorf("after %v: %v, %d sessions", hub.SessionTTL, ok, len(b.Snapshot().UISessions))
		}
	})
}

func TestLinks(t *testing.T) {
	people(t, "", func(t *testing.T, b *bench) {
		ctx := t.Context()
		for _, ttl := range []time.Duration{0, -1, 24*time.Hour + 1} {
			if _, _, err := b.CreateLink(ctx, "uid 0", hub.Viewer, ttl); fault.KindOf(err) != fault.Usage {
				t.Errorf("a link for %v: %v", ttl, err)
			}
		}
		if _, _, err := b.CreateLink(ctx, "uid 0", "admin", time.Hour); fault.KindOf(err) != fault.Usage {
			t.Errorf("a link of no role: %v", err)
		}
		token, k, err := b.CreateLink(ctx, "uid 7", hub.Operator, 10*time.Minute)
		if err != nil || strings.Contains(fmt.Sprint(b.Snapshot().Links), token) {
			t.Fatalf("%+v, %v; or the token itself is kept", k, err)
		}
		if !b.LinkWorks(token) || b.LinkWorks(token[1:]+"0") {
			t.Error("which link works is not told")
		}
		secret, u, err := b.SignInByLink(ctx, token)
		if err != nil || u.Role != hub.Operator || u.From != "uid 7" || u.Identity != "" {
			t.Fatalf("%+v, %v", u, err)
		}
		if _, ok := b.UISession(secret); !ok || b.LinkWorks(token) {
			t.Error("no session, or the link works on")
		}
		if _, _, err := b.SignInByLink(ctx, token); fault.KindOf(err) != fault.Denied {
			t.Errorf("a second use: %v", err)
		}
		late, _, _ := b.CreateLink(ctx, "uid 7", hub.Viewer, 10*time.Minute)
		b.ahead.Add(int64(10 * time.Minute))
		if _, _, err := b.SignInByLink(ctx, late); fault.KindOf(err) != fault.Denied || b.LinkWorks(late) {
			t.Errorf("an expired link: %v", err)
		}
		b.later(time.Minute)
		if n := len(b.Snapshot().Links); n != 0 {
			t.Errorf("%d links are left", n)
		}
		// No grant says anything of a link's session.
		b.grants("a@x", hub.Viewer)
		b.grants("a@x", hub.NoRole)
		if _, ok := b.UISession(secret); !ok {
			t.Error("a link's session has ended with a grant")
		}
		for range hub.MaxLinks {
			if _, _, err = b.CreateLink(ctx, "uid 7", hub.Viewer, time.Hour); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err = b.CreateLink(ctx, "uid 7", hub.Viewer, time.Hour); fault.KindOf(err) != fault.Busy {
			t.Errorf("one link too many: %v", err)
		}
	})
}

func TestGrantsEndSessions(t *testing.T) {
	people(t, hub.Viewer, func(t *testing.T, b *bench) {
		b.grants("op@x", hub.Operator)
		op, _ := b.signIn(person("op@x"))
		v, _ := b.signIn(person("v@x"))
		here := func(secret string) bool { _, ok := b.UISession(secret); return ok }
		b.grants("v@x", hub.Operator) // raising ends nothing
		if !here(op) || !here(v) {
			t.Fatal("a raised grant has ended a session")
		}
		_, n, err := b.SetGrant(t.Context(), "uid 0", hub.GrantChange{Address: "OP@x", Role: hub.Viewer})
		if err != nil || n != 1 || here(op) || !here(v) || b.lines("session ended") != 1 {
			t.Errorf("lowered: %d sessions ended, %v", n, err)
		}
		v2, u := b.signIn(person("v@x"))
		if u.Role != hub.Operator {
			t.Fatalf("%+v", u)
		}
		b.grants("v@x", hub.NoRole) // default_role still has it as a viewer
		if here(v2) || !here(v) {
			t.Errorf("revoked: operator %v, viewer %v", here(v2), here(v))
		}
	})
}

// TestStartEndsSessions: with a lower default_role, and with a grant that is
// gone from a restored database.
func TestStartEndsSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := hubtest.NewMemory()
		b := startWith(t, store, hub.Viewer)
		b.grants("op@x", hub.Operator)
		op, _ := b.signIn(person("op@x"))
		v, _ := b.signIn(person("v@x"))
		token, _, _ := b.CreateLink(t.Context(), "uid 0", hub.Operator, time.Hour)
		link, _, _ := b.SignInByLink(t.Context(), token)
		b.stop()
		b = startWith(t, store, "")
		defer b.stop()
		synctest.Wait()
		for name, c := range map[string]struct {
			secret string
			want   bool
		}{"by a grant": {op, true}, "by default_role": {v, false}, "by a link": {link, true}} {
			if _, ok := b.UISession(c.secret); ok != c.want {
				t.Errorf("%s: the session is there %v", name, ok)
			}
		}
		lines, _ := b.Store().Audit(t.Context(), hub.AuditQuery{Limit: 1})
		if len(lines) != 1 || lines[0].Actor != "hub" || lines[0].Event != "session ended" {
			t.Errorf("%+v", lines)
		}
		if w := b.PeopleWarnings(); len(w) != 0 {
			t.Errorf("warnings %q", w)
		}
	})
}

func TestGrantRefusals(t *testing.T) {
	people(t, "", func(t *testing.T, b *bench) {
		set := func(c hub.GrantChange) error { _, _, err := b.SetGrant(t.Context(), "uid 0", c); return err }
		for _, a := range []string{"", "a", "a@", "@x", "a@x b", "A <a@x>", "a@x,b@x", "**", "a@x\n", "a\u202e@x", strings.Repeat("a", 251) + "@x.y"} {
			if err := set(hub.GrantChange{Address: a, Role: hub.Viewer}); fault.KindOf(err) != fault.Usage {
				t.Errorf("address %q: %v", a, err)
			}
		}
		if err := set(hub.GrantChange{Address: "*", Role: hub.Operator}); fault.KindOf(err) != fault.Usage {
			t.Errorf("* as operator: %v", err)
		}
		if err := set(hub.GrantChange{Address: "a@x", Role: "root"}); fault.KindOf(err) != fault.Usage {
			t.Errorf("a role that is none: %v", err)
		}
		if err := set(hub.GrantChange{Address: "a@x", Role: hub.NoRole}); fault.KindOf(err) != fault.NotFound {
			t.Errorf("revoking nothing: %v", err)
		}
		b.grants("a@x", hub.Operator)
		seen := b.Snapshot().Grants["a@x"]
		for _, r := range []hub.Role{hub.Viewer, hub.NoRole} {
			if err := set(hub.GrantChange{Address: "a@x", Role: r, KeepLast: true}); fault.KindOf(err) != fault.Conflict {
				t.Errorf("the last operator to %s: %v", r, err)
			}
		}
		b.grants("b@x", hub.Operator)
		other := seen
		other.At--
		for name, c := range map[string]hub.GrantChange{
			"another than was seen": {Address: "a@x", Role: hub.Viewer, Checked: true, Seen: &other},
			"none was seen":         {Address: "a@x", Role: hub.Viewer, Checked: true},
			"one that is gone":      {Address: "c@x", Role: hub.Viewer, Checked: true, Seen: &seen},
		} {
			if err := set(c); !errors.Is(err, hub.ErrChanged) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := set(hub.GrantChange{Address: "a@x", Role: hub.NoRole, Checked: true, Seen: &seen, KeepLast: true}); err != nil {
			t.Errorf("as it was seen: %v", err)
		}
		if err := set(hub.GrantChange{Address: "b@x", Role: hub.NoRole}); err != nil {
			t.Errorf("the admin socket, the last operator: %v", err)
		}
		if w := b.PeopleWarnings(); len(w) != 1 || !strings.Contains(w[0], "no grant and no default_role") {
			t.Errorf("warnings %q", w)
		}
	})
}

// TestRefusalsAreBounded: once per identity in 10 minutes, and 60 an hour in
// all.
func TestRefusalsAreBounded(t *testing.T) {
	people(t, "", func(t *testing.T, b *bench) {
		try := func(i int) {
			t.Helper()
			if _, _, err := b.SignIn(t.Context(), hub.Person{Subject: fmt.Sprint(i), Provider: "p"}); err == nil {
				t.Fatal("admitted")
			}
		}
		for range 5 {
			try(0)
		}
		if n := b.lines("sign-in refused"); n != 1 {
			t.Errorf("one identity, five times: %d lines", n)
		}
		time.Sleep(10 * time.Minute)
		try(0)
		if n := b.lines("sign-in refused"); n != 2 {
			t.Errorf("after 10 minutes: %d lines", n)
		}
		// What could not be stored has used nothing up.
		b.store.Fail(hub.ErrFull)
		try(1)
		b.store.Fail(nil)
		for i := range 100 {
			try(i)
		}
		if n := b.lines("sign-in refused"); n != 60 {
			t.Errorf("100 identities: %d lines", n)
		}
		time.Sleep(time.Hour)
		try(99)
		if n := b.lines("sign-in refused"); n != 61 {
			t.Errorf("an hour later: %d lines", n)
		}
	})
	people(t, hub.Viewer, func(t *testing.T, b *bench) {
		for range 20 {
			_, u := b.signIn(person("a@x"))
			if err := b.SignOut(t.Context(), u); err != nil {
				t.Fatal(err)
			}
		}
		if in, out := b.lines("signed in"), b.lines("signed out"); in != 1 || out != 1 {
			t.Errorf("by default_role, 20 times: %d and %d lines", in, out)
		}
	})
}

func TestEndUISessions(t *testing.T) {
	people(t, hub.Viewer, func(t *testing.T, b *bench) {
		secret, u := b.signIn(person("a@x"))
		_, v := b.signIn(person("b@x"))
		for id, kind := range map[string]fault.Kind{"0123": fault.Usage, "zzzzzzzzzzzz": fault.Usage, "000000000000": fault.NotFound} {
			if _, err := b.EndUISessions(t.Context(), "uid 0", id); fault.KindOf(err) != kind {
				t.Errorf("%q: %v", id, err)
			}
		}
		ended, err := b.EndUISessions(t.Context(), "uid 0", u.ID())
		if _, ok := b.UISession(secret); ok || err != nil || !slices.Equal(ended, []hub.UISession{u}) {
			t.Errorf("%v, %+v, %v", ok, ended, err)
		}
		if ended, err := b.EndUISessions(t.Context(), "uid 0", ""); err != nil || len(ended) != 1 || ended[0] != v {
			t.Errorf("all: %+v, %v", ended, err)
		}
		if ended, err := b.EndUISessions(t.Context(), "uid 0", ""); err != nil || len(ended) != 0 {
			t.Errorf("all of none: %+v, %v", ended, err)
		}
	})
}

// TestPutAndDroppedAtOnce: changes of one key that are stored together leave the
// last one alone in the batch, whose order a store does not know.
func TestPutAndDroppedAtOnce(t *testing.T) {
	g := hub.Grant{Address: "a@b", Role: hub.Viewer}
	for _, c := range []struct {
		puts []bool
		want hub.PeopleBatch
	}{
		{[]bool{true, false}, hub.PeopleBatch{Grants: []hub.Grant{}, DropGrants: []string{"a@b"}}},
		{[]bool{false, true}, hub.PeopleBatch{Grants: []hub.Grant{g}, DropGrants: []string{}}},
		{[]bool{true, false, true}, hub.PeopleBatch{Grants: []hub.Grant{g}, DropGrants: []string{}}},
	} {
		if got := hub.PeopleOf(g, c.puts...); len(got.Grants) != len(c.want.Grants) || len(got.DropGrants) != len(c.want.DropGrants) {
			t.Errorf("%v: %+v, want %+v", c.puts, got, c.want)
		}
	}
}
