package supervise

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
	"virtkit/core/machine"
)

// Templates keeps saved states of guests that have booted and were told
// nothing yet (vmm/template). A later guest of the same key starts from there:
// it spares the whole boot, most of a short guest's life.
type Templates interface {
	// Get opens a state; fs.ErrNotExist when there is none.
	Get(key string) (*os.File, error)
	// Make keeps what write writes, all or nothing. It does not wait for a
	// process that makes one already: kept is false then, and write not called.
	Make(ctx context.Context, key string, write func(context.Context, *os.File) error) (kept bool, err error)
	// Drop removes a state that is no good.
	Drop(key string) error
}

// saveLimit bounds how long a guest's start may be held up by keeping its
// state; it takes about 0.3 s.
const saveLimit = 20 * time.Second

// origin is where the current boot of a guest comes from.
type origin struct {
	key      string // of its template; "" = it has none
	restored bool   // it started from the template
}

// fromTemplate opens the template that fits ms, if there is one, and notes the
// key under which this guest could become one. Whatever goes wrong here, the
// guest boots.
func (s *supervisor) fromTemplate(ctx context.Context, ms machine.Spec) (o origin, f *os.File) {
	r, ok := s.driver.(machine.Restorer)
	if !ok || s.d.Templates == nil || s.spec.NoTemplate {
		return o, nil
	}
	key, why, err := r.StateKey(ctx, ms)
	if err != nil {
		s.log.Warn("looking for a template of the guest", logx.Err, err)
		return o, nil
	}
	if key == "" {
		s.log.Debug("the guest has no template", "why", why)
		return o, nil
	}
	o.key = key
	if s.noRestore {
		return o, nil
	}
	if f, err = s.d.Templates.Get(key); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.log.Warn("opening the guest's template", "key", key, logx.Err, err)
		}
		return o, nil
	}
	o.restored = true
	return o, f
}

// keepTemplate saves a guest that has booted and answered, before it is told
// anything, for those to come. Not being able to costs time later, nothing now.
func (s *supervisor) keepTemplate(ctx context.Context) error {
	g := s.current()
	m, ok := g.m.(machine.Saver)
	if !ok || g.from.key == "" || g.from.restored {
		return nil
	}
	if have, want := s.timerKHz, m.TimerKHz(); have > 0 && want > 0 && !nearTo(have, want) {
		s.log.Info("the guest does not become a template: its kernel measured its timer wrong, as on a busy host", "khz", have, "right", want)
		return nil
	}
	ctx, cancel := g.with(ctx)
	defer cancel()
	kept, err := s.d.Templates.Make(ctx, g.from.key, func(ctx context.Context, f *os.File) error {
		// Frames on their way are in no state. A pong comes after all that was
		// sent before the ping has been taken in.
		if _, err := g.ch.session().Ping(); err != nil {
			return fmt.Errorf("asking the agent for quiet: %w", err)
		}
		sctx, cancel := context.WithTimeout(ctx, saveLimit)
		defer cancel()
		return m.Save(sctx, f)
	})
	switch {
	case err == nil:
		s.log.Info("template of the guest", "key", g.from.key, "kept", kept)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	default:
		s.log.Warn("keeping the guest as a template", "key", g.from.key, logx.Err, err)
	}
	return nil
}

// nearTo is whether a guest that takes want for have is good for all guests to
// come: what sleeps in them is late by as much. On a host as busy as those that
// run many guests, a fifth is common; without templates such hosts would be
// busier still.
func nearTo(have, want int) bool {
	const part = 4
	return have >= want-want/part && have <= want+want/part
}

// ofTheImage tells whether a guest's agent has got as far as the directories of
// the guest's user and could not make those: the image lacks the user, say. A
// boot ends the same way, and the template is good for the next guest.
func ofTheImage(err error) bool {
	re, ok := errors.AsType[*guestclient.RemoteError](err)
	return ok && re.Op == guestwire.OpSetup && re.Stage == "dirs"
}

// giveUpTemplate is what follows a restored guest that did not start well: its
// template goes, and the guest boots. The template need not be at fault, as when
// somebody killed the VMM, but that is not ours to know, and making another one
// costs little.
func (s *supervisor) giveUpTemplate(o origin, err error) {
	s.noRestore = true
	if se, ok := errors.AsType[*stepError](err); ok {
		err = se.err
	}
	s.log.Warn("a guest from a template did not start; booting it", "key", o.key, logx.Err, err)
	s.retried("its start from a template came to nothing: " + err.Error())
	fmt.Fprintf(s.console, "[no start from template %s: booting]\n", o.key)
	if err := s.d.Templates.Drop(o.key); err != nil {
		s.log.Warn("removing the template", "key", o.key, logx.Err, err)
	}
}
