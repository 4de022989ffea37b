package supervise_test

import (
	"slices"
	"strings"
	"testing"

	"virtkit/core/machine"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// A guest that stops on its way is booted again; one that only takes its time is
// left to it.
func TestStuck(t *testing.T) {
	w := run(t, &supervisetest.Driver{StuckIn: "network"}, soonStillborn)
	st, err := w.client.State(ctxFor(t))
	if err != nil || st.Phase != supervise.Running || w.driver.Boots() != 2 {
		t.Errorf("state = %+v, %v after %d boots; want it running after 2", st.Phase, err, w.driver.Boots())
	}
	if want := []string{`it stood still for 50ms (stage "guest: network")`}; !slices.Equal(st.Retried, want) {
		t.Errorf("told of starts given up: %q, want %q", st.Retried, want)
	}
	w = begin(t, &supervisetest.Driver{StuckIn: "checkout"}, func(s *supervise.Spec, d *supervise.Deps) {
		s.BootLimit, d.Times.Life = 6*soonLife, soonLife
	}, keep)
	w.wait()
	if st, err := supervise.ReadState(w.dir); err != nil || st.Exit == nil || st.Exit.Reason != supervise.ReasonBootTimeout || w.driver.Boots() != 1 {
		t.Errorf("a stage that may take long: %+v, %v after %d boots; want a boot timeout after 1", st.Exit, err, w.driver.Boots())
	}
}

// A reboot that fails says what the console said last.
func TestRebootThatFails(t *testing.T) {
	d := &supervisetest.Driver{DieAtBoot: func(boot int) machine.Reason {
		if boot == 2 {
			return machine.Panic
		}
		return ""
	}}
	w := run(t, d)
	_, err := w.client.Reboot(ctxFor(t))
	for _, want := range []string{"did not come back", "last lines of its console:", "Kernel panic"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Reboot = %v, want %q in it", err, want)
		}
	}
}

// A guest is held to the pace of those stages alone in which it has nothing long
// to do.
func TestShortStages(t *testing.T) {
	for stage, want := range map[string]bool{
		"boot": true, "waiting for the guest's agent": true, "setup": true, "guest: clock": true, "guest: root": true, "guest: kernel": true,
		"guest: network": true, "guest: switch": true, "guest: ready": true, "guest: dirs": true, "template": false, "command": false, "guest: checkout": false, "guest: mounts": false, "guest: tools": false,
	} {
		if got := supervise.ShortStage(stage); got != want {
			t.Errorf("%q is short: %v, want %v", stage, got, want)
		}
	}
}
