package supervise

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
	"virtkit/core/machine"
)

// commandEnd is how Spec.Command ended.
type commandEnd struct {
	code   int
	detail string
}

// bootReady boots the guest until it is set up. One that reboots on the way is
// given a few tries, and one that stands still another; one from a template that
// does not start at all, whatever ended it, is booted instead. Each of these is
// told (State.Retried).
func (s *supervisor) bootReady(ctx context.Context, undo *[]func()) error {
	for try := 1; ; try++ {
		wctx, cancel := context.WithCancel(ctx)
		var stuck atomic.Pointer[string]
		go s.endStuck(wctx, try == 1, s.console.Total(), &stuck)
		err := s.whyGone(ctx, s.runSteps(ctx, s.bootSteps(), undo))
		cancel()
		if err != nil && s.from.restored && ctx.Err() == nil && !ofTheImage(err) {
			s.giveUpTemplate(s.from, err)
			s.killGuest()
			try = 0
			continue
		}
		var gone *guestGone
		still := stuck.Load()
		if !errors.As(err, &gone) || try == bootTries || gone.exit.Reason != machine.Reboot && still == nil {
			return err
		}
		why := "it reset itself before it was ready" + s.resetWhy()
		if still != nil {
			why = *still
		}
		s.log.Warn("the guest did not start; booting it again", "why", why)
		s.retried(why)
		s.killGuest()
	}
}

// goneWait is how long after the way to its agent broke a guest's end may come.
const goneWait = 5 * time.Second

// whyGone makes a guestGone of the error of a step whose way to the guest broke
// because the guest ended, which is seen a moment later.
func (s *supervisor) whyGone(ctx context.Context, err error) error {
	g := s.current()
	if _, known := errors.AsType[*guestGone](err); known || g == nil || !errors.Is(err, guestclient.ErrGuestGone) {
		return err
	}
	select {
	case <-g.done:
	case <-ctx.Done():
		return err
	case <-time.After(goneWait):
		return err
	}
	gone := &guestGone{g.exit}
	if se, ok := errors.AsType[*stepError](err); ok {
		return &stepError{se.step, gone}
	}
	return gone
}

// retried notes why the guest is booted again: a start that was given up is told
// to whoever waits for it, even when the next one comes off.
func (s *supervisor) retried(why string) {
	s.board.update(func(st *State) {
		st.Stage = "booting again: " + why
		st.Retried = append(slices.Clip(st.Retried), why)
	})
}

// lifePart of the boot limit is how long a guest that starts may stand still.
const lifePart = 3

// endStuck kills a guest that has stood still for a third of the boot limit while
// it was started: its console said nothing and its start reached no other stage.
// On a host with many more processors' worth of guests than it has, an emulated
// guest now and then stops for ever (4 of 96 measured): agent/timer.go has the
// cause of those that were looked at. It would fail its job for
// nothing. One of which the VMM knows that it cannot go on is not waited for; any
// other is left to its limit unless stands says that standing still is enough.
// before is the length of the console when it was booted; why is set before the
// kill.
func (s *supervisor) endStuck(ctx context.Context, stands bool, before int64, why *atomic.Pointer[string]) {
	type progress struct {
		console int64
		stage   string
		guest   *guest
	}
	look := func() progress { return progress{s.console.Total(), s.board.get().Stage, s.current()} }
	last, since := look(), time.Now()
	at, dead := "", false
	tick := time.NewTicker(s.d.Times.Life / 8)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := look()
		// Its VMM may not even have been started.
		if now != last || now.guest == nil || !short(now.stage) {
			last, since = now, time.Now()
			continue
		}
		if at, dead = standsAt(ctx, now.guest); dead || stands && time.Since(since) >= s.d.Times.Life {
			break
		}
	}
	stood := s.d.Times.Life
	if dead {
		stood = time.Since(since).Round(time.Millisecond)
	}
	alive := last.console != before || s.answered.Load()
	if s.restoring.Load() { // what is on its console is ours
		alive = s.answered.Load()
	}
	words := fmt.Sprintf("it gave no sign of life for %v", stood)
	if alive {
		words = fmt.Sprintf("it stood still for %v (stage %q)", stood, last.stage)
	}
	words += at
	if ctx.Err() != nil {
		return
	}
	why.Store(&words)
	if err := last.guest.m.Kill(); err != nil {
		s.log.Warn("killing a guest that stands still", logx.Err, err)
	}
}

// standsAt is what the VMM says of a guest that says nothing, as an appendix that
// may be empty, and whether that guest cannot go on.
func standsAt(ctx context.Context, g *guest) (words string, dead bool) {
	m, ok := g.m.(machine.Stander)
	if !ok {
		return "", false
	}
	at, dead := m.StandsAt(ctx)
	if at == "" {
		return "", dead
	}
	return " (" + at + ")", dead
}

// resetWhy is what the agent said of a reset before the guest was ready, as an
// appendix; may be empty.
func (s *supervisor) resetWhy() string {
	lines := s.console.Tail()
	for i := len(lines) - 1; i >= 0; i-- {
		if _, why, ok := strings.Cut(lines[i], "vk-agent: "+guestwire.ResetPhrase); ok {
			return ": " + why
		}
	}
	return ""
}

// short says whether nothing that a guest does in this stage of its start takes
// long: the kernel's part, and most of the agent's. A checkout, a mount of the
// host's or a template's writing may.
func short(stage string) bool {
	if step, ok := strings.CutPrefix(stage, "guest: "); ok {
		return slices.Contains([]string{"clock", "root", "kernel", "network", "switch", "identity", "dirs", "services", "ready"}, step)
	}
	return stage != "template" && stage != "command"
}

// watch follows a running guest through its reboots to its end.
func (s *supervisor) watch(ctx context.Context) Exit {
	for {
		g := s.current()
		hctx, cancel := context.WithCancel(ctx)
		go s.heartbeat(hctx, g)
		go s.record(hctx, g)
		x, reboot := s.watchBoot(ctx, g)
		cancel()
		stage, boots := "rebooting", 1
		switch {
		case reboot:
			s.killGuest()
		case x.again:
			stage, boots = s.again(x.Detail), 0
		default:
			return x.Exit
		}
		s.board.update(func(st *State) { st.Phase, st.Stage, st.VMMPID, st.VMMStart = Booting, stage, 0, 0 })
		start := time.Now()
		bctx, cancel := context.WithTimeoutCause(ctx, s.spec.BootLimit, &ending{reason: ReasonBootTimeout})
		var err error
		if x.again {
			err = s.runSteps(bctx, []step{{"disk", s.freshLayer, nil}}, nil)
		}
		if err == nil {
			err = s.bootReady(bctx, new([]func()))
		}
		cancel()
		if err != nil {
			return s.failedStart(err, time.Since(start))
		}
		s.board.update(func(st *State) { st.Phase, st.Stage, st.Boots = Running, "running", st.Boots+boots })
	}
}

// watchBoot waits for the end of one boot and says whether another follows.
func (s *supervisor) watchBoot(ctx context.Context, g *guest) (x bootEnd, reboot bool) {
	select {
	case <-ctx.Done():
		e, ok := errors.AsType[*ending](context.Cause(ctx))
		if !ok {
			e = &ending{reason: ReasonStopped, detail: context.Cause(ctx).Error()}
		}
		s.lastSample(g)
		s.vmmThreads(g)
		s.stop(g, e.grace)
		return bootEnd{Exit: Exit{Reason: e.reason, Detail: e.detail}}, false
	case c := <-s.command:
		s.lastSample(g)
		s.vmmThreads(g)
		s.stop(g, 0)
		return bootEnd{Exit: Exit{Reason: ReasonExited, Detail: c.detail, Code: &c.code}}, false
	case h := <-g.hung:
		s.vmmThreads(g)
		return bootEnd{Exit: Exit{Reason: ReasonHang, Detail: h.why}, again: h.again}, false
	case <-g.done:
		return bootEnd{Exit: Exit{Reason: string(g.exit.Reason), Detail: g.exit.Detail}}, g.exit.Reason == machine.Reboot
	}
}

// stop asks the guest to end and waits until it did, or its time is over; who
// takes the start's steps back kills it then.
func (s *supervisor) stop(g *guest, grace time.Duration) {
	if grace <= 0 {
		grace = s.d.Times.Grace
	}
	s.board.update(func(st *State) { st.Phase, st.Stage = Stopping, "stopping" })
	ctx, cancel := context.WithTimeout(context.Background(), grace+s.d.Times.Power)
	defer cancel()
	ctx, cancel2 := g.with(ctx)
	defer cancel2()
	go func() {
		select {
		case <-s.kill:
			cancel()
		case <-ctx.Done():
		}
	}()
	select {
	case <-s.kill:
		return
	default:
	}
	// An agent that does not even answer gets the grace and no more.
	actx, cancel3 := context.WithTimeout(ctx, grace+time.Second)
	err := bounded(actx, func(ctx context.Context) error {
		return g.ch.client().Shutdown(ctx, guestwire.Shutdown{Grace: grace})
	})
	cancel3()
	if err != nil {
		if _, gone := errors.AsType[*guestGone](err); !gone {
			s.log.Warn("the guest does not end by itself", logx.Err, err)
		}
		return
	}
	<-ctx.Done() // the guest's end, the end of its time, or a kill
}

// startCommand starts Spec.Command and goes on; its end is the guest's.
func (s *supervisor) startCommand(ctx context.Context) error {
	c := s.spec.Command
	if c == nil {
		return nil
	}
	g := s.current()
	if s.launcher.conn != nil && s.commandEnv == nil {
		select {
		case env := <-s.launcher.env:
			s.commandEnv = append([]string{}, env...) // kept for the boots to come
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	req := guestwire.ExecRequest{Argv: c.Argv, Env: s.commandEnv, Dir: c.Dir, User: c.User, TTY: c.TTY}
	go func() {
		r, err := g.ch.client().Exec(context.WithoutCancel(ctx), req, guestclient.Stdio{Out: s.output, Err: s.output}, nil)
		if err != nil {
			// The guest's own end tells more, and may be a reboot.
			limit := time.Second
			if r.Down {
				limit = s.d.Times.Grace + s.d.Times.Power
			}
			select {
			case <-g.done:
			case <-time.After(limit):
				s.hang(g, "the command's connection broke: "+err.Error())
			}
			return
		}
		s.command <- commandEnd{code: r.Code, detail: r.Err}
	}()
	return nil
}
