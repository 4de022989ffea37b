package supervise

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"virtkit/core/logx"
)

// A guest on trial (Spec.Trial) has been set up, and nothing of the user's has
// run in it. Under emulation one of some hundreds stops for ever in that state
// too, on a host that is busy far beyond its processors; it would fail its job
// for nothing, and late: HangLimit is made for jobs. So its silence is held to
// Times.Life, and it is booted anew, once, with an empty writable layer. That is
// told in State.Retried like a start that was given up.
const (
	trialOver int32 = iota // or there is none
	onTrial
	trialLost // the guest was booted anew, which is not done twice
)

// hung is that a guest counts as hung.
type hung struct {
	why   string
	again bool // it is booted anew
}

// bootEnd is how a boot of the guest ended.
type bootEnd struct {
	Exit
	again bool // the guest was on trial and is booted anew
}

// silenceLimit is how long the agent may be silent now, 0 = for ever, and
// whether that is so because the guest is on trial.
func (s *supervisor) silenceLimit() (limit time.Duration, trial bool) {
	limit = s.spec.HangLimit
	if s.trial.Load() != onTrial || limit > 0 && limit <= s.d.Times.Life {
		return limit, false
	}
	return s.d.Times.Life, true
}

// retry is hang for a guest on trial; false when it is not on trial any more.
func (s *supervisor) retry(g *guest, why string) bool {
	if !s.trial.CompareAndSwap(onTrial, trialLost) {
		return false
	}
	select {
	case g.hung <- hung{why, true}:
	default:
	}
	return true
}

// again ends a guest on trial and tells why; it returns the stage of the start
// that follows.
func (s *supervisor) again(why string) string {
	why += ", before anything of its job ran"
	s.log.Warn("the guest fell silent; booting it again", "why", why)
	s.board.update(func(st *State) { st.Phase = Booting }) // before it is told, lest somebody believe that it runs
	if from := s.from; from.restored {
		// Its template need not be at fault; but making another costs little.
		s.noRestore = true
		if err := s.d.Templates.Drop(from.key); err != nil {
			s.log.Warn("removing the guest's template", "key", from.key, logx.Err, err)
		}
	}
	s.killGuest()
	s.retried(why)
	return s.board.get().Stage
}

// freshLayer replaces the writable layer by an empty one.
func (s *supervisor) freshLayer(context.Context) error {
	if s.spec.Upper <= 0 {
		return nil
	}
	if s.d.Disk == nil {
		return errors.New("this program cannot make a writable layer")
	}
	path := filepath.Join(s.dir, UpperFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replacing the guest's writable layer: %w", err)
	}
	if err := s.d.Disk(path, s.spec.Upper); err != nil {
		return err
	}
	s.upper.begin(path)
	return nil
}
