package web_test

import (
	"fmt"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/hubadmin"
)

// TestDecisions: what an operator decides on servers and projects is what is
// listed, word for word of each action.
func TestDecisions(t *testing.T) {
	b := start(t, false)
	hubtest.NewRelay(t, b.Hub, gitlab, "gl")
	const other = "https://other.example.com"
	shown := func() string {
		t.Helper()
		l, err := b.admin.GitLabs(b.ctx())
		if err != nil {
			t.Fatal(err)
		}
		p, err := b.admin.Projects(b.ctx(), "gl", false)
		if err != nil {
			t.Fatal(err)
		}
		var s []string
		for _, v := range l.Instances {
			s = append(s, fmt.Sprintf("%s=%s by %d", v.Name, v.URL, v.Relays))
		}
		for _, v := range l.Rejected {
			s = append(s, "not "+v.URL)
		}
		for _, v := range p.Projects {
			if v.ID >= 900 {
				s = append(s, fmt.Sprintf("%d %s %s", v.ID, v.Path, v.State))
			}
		}
		return strings.Join(s, ", ")
	}
	set := func(action string) error {
		return b.admin.SetGitLab(b.ctx(), hubadmin.GitLabRequest{Action: action, URL: other, Name: "gl"})
	}
	decide := func(action string) error {
		return b.admin.SetProjects(b.ctx(), action, "gl", []hub.ProjectRef{{ID: 900, Path: "acme/x"}})
	}
	mine := "gl=" + gitlab + " by 1"
	for _, tt := range []struct {
		do   func(string) error
		what string
		want string
	}{
		{set, "reject", mine + ", not " + other},
		{set, "forget", mine},
		{decide, "approve", mine + ", 900 acme/x " + string(dispatch.Approved)},
		{decide, "reject", mine + ", 900 acme/x " + string(dispatch.Rejected)},
		{decide, "forget", mine},
	} {
		if err := tt.do(tt.what); err != nil {
			t.Fatalf("%s: %v", tt.what, err)
		}
		if got := shown(); got != tt.want {
			t.Errorf("after %s: %s, want %s", tt.what, got, tt.want)
		}
	}
	for _, do := range []func(string) error{set, decide} {
		if err := do("burn"); fault.KindOf(err) != fault.Usage {
			t.Errorf("no such action: %v", err)
		}
	}
	if _, err := b.admin.Projects(b.ctx(), "none", false); fault.KindOf(err) != fault.NotFound {
		t.Errorf("projects of no instance: %v", err)
	}
}
