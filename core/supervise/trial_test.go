package supervise_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"virtkit/core/guestwire"
	"virtkit/core/machine"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

func onTrial(s *supervise.Spec, d *supervise.Deps) {
	s.Trial, s.HangLimit, s.BootLimit, s.Keep = true, time.Hour, time.Minute, true
	d.Times.Ping, d.Times.Life = 5*time.Millisecond, 150*time.Millisecond
}

// A guest that falls silent while nothing of the user's has run in it is booted
// anew, with an empty layer, once.
func TestSilentOnTrial(t *testing.T) {
	layers := 0
	w := run(t, &supervisetest.Driver{Key: "k"}, onTrial, func(s *supervise.Spec, d *supervise.Deps) {
		d.Disk = func(path string, size int64) error {
			layers++
			f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err != nil {
				return err
			}
			return f.Close()
		}
	})
	if err := os.WriteFile(filepath.Join(w.dir, supervise.UpperFile), []byte("of the first guest"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.driver.Last().Hang()
	eventually(t, "another boot", func() bool {
		st, err := w.client.State(ctxFor(t))
		return err == nil && len(st.Retried) == 1 && st.Phase == supervise.Running
	})
	st, err := w.client.Begin(ctxFor(t))
	want := []string{"the guest's agent was silent for 150ms, before anything of its job ran"}
	if err != nil || !slices.Equal(st.Retried, want) || st.Boots != 1 || w.driver.Boots() != 2 {
		t.Errorf("Begin = %+v, %v after %d boots, want one told retry %q, Boots 1, two boots", st, err, w.driver.Boots(), want)
	}
	if b, err := os.ReadFile(filepath.Join(w.dir, supervise.UpperFile)); err != nil || len(b) != 0 || layers != 2 {
		t.Errorf("the layer holds %q, %v, and was made %d times, want an empty one, made twice", b, err, layers)
	}
	if r := len(w.driver.Last().Setups()); r != 1 {
		t.Errorf("the second guest was set up %d times", r)
	}
}

// The second guest is the last one, and one in which something of the user's has
// begun has the time that jobs have.
func TestTrialEnds(t *testing.T) {
	w := run(t, &supervisetest.Driver{}, onTrial, func(s *supervise.Spec, _ *supervise.Deps) { s.HangLimit = 2 * time.Second })
	w.driver.Last().Hang()
	eventually(t, "another boot", func() bool { return w.driver.Boots() == 2 })
	eventually(t, "the second guest", func() bool {
		st, err := w.client.State(ctxFor(t))
		return err == nil && st.Phase == supervise.Running
	})
	w.driver.Last().Hang()
	w.wait()
	if st, err := supervise.ReadState(w.dir); err != nil || st.Exit == nil || st.Exit.Reason != supervise.ReasonHang ||
		st.Exit.Detail != "the guest's agent was silent for 2s" || w.driver.Boots() != 2 {
		t.Errorf("state = %+v, %v after %d boots, want a hang of 2 s after two", st.Exit, err, w.driver.Boots())
	}

	w = run(t, &supervisetest.Driver{}, onTrial, func(s *supervise.Spec, _ *supervise.Deps) { s.HangLimit = 2 * time.Second })
	if _, err := w.client.Begin(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	w.driver.Last().Hang()
	w.wait()
	if st, err := supervise.ReadState(w.dir); err != nil || st.Exit == nil || st.Exit.Detail != "the guest's agent was silent for 2s" || w.driver.Boots() != 1 {
		t.Errorf("state = %+v, %v after %d boots, want a hang of 2 s after one", st.Exit, err, w.driver.Boots())
	}
}

// One from a template is booted, and its template goes.
func TestRestoredOnTrial(t *testing.T) {
	s := &templates{dir: t.TempDir()}
	d := &supervisetest.Driver{Key: "k"}
	run(t, d, s.with)
	w := run(t, d, s.with, onTrial)
	if st := works(t, w); !st.Restored {
		t.Fatal("the second guest was booted")
	}
	s.stuck = true // not even one that cannot be removed is used again
	d.Last().Hang()
	eventually(t, "another boot", func() bool { return d.Boots() == 3 })
	if _, err := w.client.Begin(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	if st := works(t, w); st.Restored || s.drops != 1 {
		t.Errorf("restored %v, %d templates dropped; want a boot, and one dropped", st.Restored, s.drops)
	}
}

// A guest that its VMM knows to be dead is not waited for: not on trial, nor at
// any of its first boots.
func TestDeadGuestIsNotWaitedFor(t *testing.T) {
	long := func(s *supervise.Spec, d *supervise.Deps) {
		onTrial(s, d)
		s.BootLimit, d.Times.Life = time.Hour, 900*time.Millisecond // of which an eighth passes between two looks
	}
	w := run(t, &supervisetest.Driver{Dead: 1}, long)
	w.driver.Last().Hang()
	if eventually(t, "another boot", func() bool { return w.driver.Boots() == 2 }); t.Failed() {
		return
	}
	st, err := w.client.Begin(ctxFor(t))
	if err != nil || len(st.Retried) != 1 || !strings.Contains(st.Retried[0], "(the fake stands), before anything of its job ran") {
		t.Errorf("Begin = %+v, %v", st, err)
	}
	// The second boot stands still too, and would have all of an hour.
	w = run(t, &supervisetest.Driver{Stillborn: 2, Dead: 2}, long)
	st, err = w.client.State(ctxFor(t))
	if err != nil || len(st.Retried) != 2 || !strings.HasSuffix(st.Retried[1], " (the fake stands)") || w.driver.Boots() != 3 {
		t.Errorf("State = %+v, %v after %d boots; want the third", st, err, w.driver.Boots())
	}
}

// Why a guest reset itself is told as its agent told its console.
func TestWhyItResetItself(t *testing.T) {
	d := &supervisetest.Driver{DieAtBoot: func(boot int) machine.Reason {
		if boot == 1 {
			return machine.Reboot
		}
		return ""
	}, Words: "vk-agent: stage init\r\nvk-agent: " + guestwire.ResetPhrase + "no timer\r\n"}
	w := run(t, d)
	st, err := w.client.State(ctxFor(t))
	if want := []string{"it reset itself before it was ready: no timer"}; err != nil || !slices.Equal(st.Retried, want) {
		t.Errorf("told of starts given up: %q, %v; want %q", st.Retried, err, want)
	}
}

// A guest whose kernel measured its timer wrong makes no template.
func TestTimerOfATemplate(t *testing.T) {
	for khz, want := range map[int]int{0: 1, 1000: 1, 760: 1, 1240: 1, 700: 0, 1300: 0, 3000: 0} {
		s := &templates{dir: t.TempDir()}
		run(t, &supervisetest.Driver{Key: "k", Timer: khz}, s.with)
		if s.makes != want {
			t.Errorf("with a timer of %d kHz instead of 1000: %d templates made, want %d", khz, s.makes, want)
		}
	}
}

// Whoever says that something begins while the guest is booted anew hears when
// it is there.
func TestBeginWaitsForTheGuest(t *testing.T) {
	w := run(t, &supervisetest.Driver{Late: 50 * time.Millisecond}, onTrial)
	w.driver.Last().Hang()
	eventually(t, "another boot", func() bool { return w.driver.Boots() == 2 })
	st, err := w.client.Begin(ctxFor(t))
	if err != nil || st.Phase != supervise.Running || len(st.Retried) != 1 {
		t.Errorf("Begin = %+v, %v, want a running guest that was booted again", st, err)
	}
}
