package web_test

import (
	"strings"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
)

// TestPeople: grants, links and sessions over the admin socket, each audited as
// its caller's.
func TestPeople(t *testing.T) {
	b := start(t, false)
	ctx := b.ctx()
	if _, err := b.admin.Grant(ctx, "not an address", hub.Viewer); fault.KindOf(err) != fault.Usage {
		t.Errorf("%v", err)
	}
	if _, err := b.admin.Grant(ctx, "a@x", hub.NoRole); fault.KindOf(err) != fault.Usage {
		t.Errorf("no role: %v", err)
	}
	if r, err := b.admin.Grant(ctx, "A@x", hub.Operator); err != nil || r.Address != "a@x" || r.Role != hub.Operator || !strings.HasPrefix(r.Actor, "uid ") {
		t.Fatalf("%+v, %v", r, err)
	}
	_, u, err := b.SignIn(ctx, hub.Person{Subject: "s", Email: "a@x", Provider: "p"})
	if err != nil {
		t.Fatal(err)
	}
	if l, err := b.admin.UISessions(ctx); err != nil || len(l.Sessions) != 1 || l.Sessions[0].ID != u.ID() || l.Sessions[0].Identity != "a@x" {
		t.Errorf("%+v, %v", l, err)
	}
	if l, err := b.admin.Accounts(ctx); err != nil || len(l.Grants) != 1 || l.Default != hub.NoRole || l.OIDC {
		t.Errorf("%+v, %v", l, err)
	}
	// The socket may take the last operator, whose session ends.
	if r, err := b.admin.Revoke(ctx, "a@X"); err != nil || r.Ended != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := b.admin.Revoke(ctx, "a@x"); fault.KindOf(err) != fault.NotFound {
		t.Errorf("%v", err)
	}
	if _, err := b.admin.Link(ctx, hub.Viewer, time.Minute); fault.KindOf(err) != fault.Conflict {
		t.Errorf("a link of a hub without a UI: %v", err)
	}
	for id, kind := range map[string]fault.Kind{"xyz": fault.Usage, "000000000000": fault.NotFound} {
		if _, err := b.admin.UILogout(ctx, id); fault.KindOf(err) != kind {
			t.Errorf("%s: %v", id, err)
		}
	}
	if l, err := b.admin.UILogout(ctx, ""); err != nil || len(l.Sessions) != 0 {
		t.Errorf("%+v, %v", l, err)
	}
	lines, err := b.Store().Audit(ctx, hub.AuditQuery{Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		if l.Event != "signed in" && !strings.HasPrefix(l.Actor, "uid ") {
			t.Errorf("%+v", l)
		}
	}
	if len(lines) != 4 {
		t.Errorf("%d lines: %+v", len(lines), lines)
	}
}
