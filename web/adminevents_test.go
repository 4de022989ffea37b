package web_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hubadmin"
)

// TestEvents follows a fleet through the admin socket, over a break.
func TestEvents(t *testing.T) {
	b := start(t, false)
	stay, gone := b.enroll("stay"), b.enroll("gone")
	enough := errors.New("enough")
	// take follows until n things were told.
	take := func(q hubadmin.EventQuery, n int, meanwhile func()) (list []hubadmin.Told) {
		t.Helper()
		err := b.admin.Follow(b.ctx(), q, func(e hubadmin.Told) error {
			if list = append(list, e); len(list) == 1 && meanwhile != nil {
				meanwhile()
			}
			if len(list) == n {
				return enough
			}
			return nil
		})
		if !errors.Is(err, enough) {
			t.Fatalf("told %d of %d: %v", len(list), n, err)
		}
		return list
	}
	stop := true
	list := take(hubadmin.EventQuery{Nodes: []string{"stay"}, Kinds: []string{"desired"}}, 2, func() {
		for _, name := range []string{"gone", "stay"} {
			if _, err := b.admin.SetPolicy(b.ctx(), name, hubadmin.PolicyRequest{Stop: &stop}); err != nil {
				t.Fatal(err)
			}
		}
	})
	if s := list[0].Snapshot; s == nil || len(s.Nodes) != 2 || !slices.ContainsFunc(s.Nodes, func(n hubadmin.NodeNow) bool { return n.ID == stay.ID && n.Name == "stay" && n.Reach != "" }) {
		t.Errorf("snapshot: %+v", list[0].Snapshot)
	}
	if e := list[1].Event; e == nil || e.Node != stay.ID || e.Kind != "desired" || e.At == 0 {
		t.Fatalf("told %+v", list[1])
	}
	after := list[1].ID
	if _, err := b.admin.Remove(b.ctx(), "gone"); err != nil {
		t.Fatal(err)
	}
	list = take(hubadmin.EventQuery{After: after}, 1, nil)
	if e := list[0].Event; e == nil || e.Kind != "removed" || e.Node != gone.ID {
		t.Fatalf("after %s: %+v", after, list[0])
	}
	// Also by the whole ID of a node that is gone.
	if list = take(hubadmin.EventQuery{After: after, Nodes: []string{gone.ID}}, 1, nil); list[0].Event == nil {
		t.Fatalf("after %s: %+v", after, list[0])
	}
	list = take(hubadmin.EventQuery{After: "0123456789abcdef-3"}, 2, nil)
	if !strings.Contains(list[0].Resync, "started anew") || list[1].Snapshot == nil || len(list[1].Snapshot.Nodes) != 1 {
		t.Fatalf("after an ID of another start: %+v", list)
	}

	for _, q := range []hubadmin.EventQuery{{Nodes: []string{"nobody"}}, {Kinds: []string{"weather"}}} {
		err := b.admin.Follow(b.ctx(), q, func(hubadmin.Told) error { return nil })
		if k := fault.KindOf(err); k != fault.NotFound && k != fault.Usage {
			t.Errorf("%+v: %v", q, err)
		}
	}
	// One who leaves is told why it ended: by itself.
	ctx, leave := context.WithTimeout(t.Context(), time.Minute)
	if err := b.admin.Follow(ctx, hubadmin.EventQuery{}, func(hubadmin.Told) error { leave(); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("left: %v", err)
	}
}
