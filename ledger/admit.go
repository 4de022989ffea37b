package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/numa"
)

// AdmitOptions are a host's rules of admission.
type AdmitOptions struct {
	Limits admit.Limits
	// Wait is how long an ask may wait; 0 = not at all.
	Wait time.Duration
	// Evict removes images that nobody uses until need bytes are free on the
	// filesystem of the job directories, or nothing when that much cannot come
	// free. keep are digests that stay. Nil evicts nothing.
	Evict func(ctx context.Context, need int64, keep []string) (admit.Evicted, error)
	// Place chooses a memory node for a job that is let in beside others; nil
	// chooses none.
	Place func(ask admit.Ask, others []admit.Claim) *numa.Placement
	// Say hears what is done to make room for an Offer; nil = nobody does.
	Say func(line string)
	// Now is the clock; nil = time.Now.
	Now func() time.Time
	// Room looks at the filesystem of the job directories; nil = the kernel's
	// word. For tests.
	Room func(dir string) (admit.Room, error)
}

// Admissions let jobs in. It is an admit.Gate. One value serves one ask after
// another; processes and values that share a state directory share its claims.
type Admissions struct {
	o        AdmitOptions
	c        *Claims
	stateDir string
	offered  struct { // of the last eviction for an Offer
		at    time.Time
		could int64
	}
}

var _ admit.Gate = (*Admissions)(nil)

// Admissions opens <state_dir>/admit.
func (j *Jobs) Admissions(o AdmitOptions) (*Admissions, error) {
	state := filepath.Dir(j.dir)
	c, err := openClaims(state, j.dir)
	if err != nil {
		return nil, err
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Room == nil {
		o.Room = roomOf
	}
	return &Admissions{o: o, c: c, stateDir: state}, nil
}

// Limits are the host's.
func (a *Admissions) Limits() admit.Limits { return a.o.Limits }

// Room is the filesystem of the job directories.
func (a *Admissions) Room() (admit.Room, error) { return a.o.Room(a.c.jobs) }

// Intervals of waiting.
const (
	// noWait bounds what an ask that may not wait does besides.
	noWait = 10 * time.Second
	// headPoll is between two decisions of the first in the queue.
	headPoll = 50 * time.Millisecond
	// recheck is when whoever waits decides anew, whatever it has seen.
	recheck = 5 * time.Second
	// retell is between two words on a wait that goes on with other figures.
	retell = time.Minute
	// evictAgain is when room that could not be made is asked for anew.
	evictAgain = time.Minute
)

// waiting is one ask on its way.
type waiting struct {
	a     *Admissions
	ask   admit.Ask
	say   func(string)
	start time.Time
	claim *claim // held since the first decision

	last      admit.Verdict
	room      *admit.Room
	resources []string  // that were waited for, in words
	told      time.Time // zero = never
	lines     []string
	evicted   time.Time // when the last try was
	could     int64     // what that one could have freed
	problems  map[string]bool
	cost      time.Duration // of a decision
	before    *found        // next before ours in the queue
	ahead     ahead
}

// Admit implements admit.Gate.
func (a *Admissions) Admit(ctx context.Context, ask admit.Ask, say func(string)) (admit.Held, error) {
	w := &waiting{a: a, ask: ask, say: say, start: a.o.Now(), problems: map[string]bool{}}
	if !a.o.Limits.Any() && ask.Prior == nil {
		return &claim{}, nil
	}
	if err := a.possible(ask); err != nil {
		return nil, err
	}
	limit := a.o.Wait
	if limit <= 0 {
		limit = noWait
	}
	lctx, cancel := context.WithTimeoutCause(ctx, limit, errWaited)
	defer cancel()
	for {
		ok, err := w.decide(lctx)
		if err == nil && ok {
			w.tellAdmitted()
			return w.claim, nil
		}
		if err == nil && w.evictable() && w.evict(lctx) {
			continue // there is room now
		}
		if err == nil {
			w.tellWaiting()
			if err = errWaited; a.o.Wait > 0 {
				err = w.pause(lctx)
			}
		}
		if err != nil {
			if rerr := w.claim.Release(); rerr != nil {
				w.complain([]error{rerr})
			}
			if errors.Is(err, errWaited) && ctx.Err() == nil {
				err = w.gaveUp()
			}
			return nil, err
		}
	}
}

var errWaited = errors.New("ledger: waited for too long")

// possible refuses what no amount of waiting can grant.
func (a *Admissions) possible(ask admit.Ask) error {
	if !ValidName(ask.ID) {
		return fmt.Errorf("%q cannot name a claim", ask.ID)
	}
	if b := a.o.Limits.MemMiB; b > 0 && ask.MemMiB > b {
		return fault.Newf(fault.System, "%d MiB can never be admitted to a memory budget of %d MiB", ask.MemMiB, b).
			Hint("raise [executor.schedule] mem_budget, or keep [executor.vm] mem at or under it")
	}
	return nil
}

// decide makes one decision.
func (w *waiting) decide(ctx context.Context) (bool, error) {
	lock, err := w.a.c.decide(ctx, false)
	if err != nil {
		return false, err
	}
	began := time.Now()
	ok, err := w.decideLocked()
	w.cost = time.Since(began)
	lock.Close()
	return ok, err
}

func (w *waiting) decideLocked() (bool, error) {
	c := w.a.c
	live, problems, err := c.scan(true)
	if err != nil {
		return false, err
	}
	w.complain(problems)
	var e entry
	switch {
	case w.claim != nil:
		e = w.claim.e
	case w.ask.Prior != nil:
		if e, err = c.adopt(w.ask.Prior); err != nil {
			return false, err
		}
	default:
		e = entry{ID: w.ask.ID, Seq: nextSeq(live), Asked: w.start}
	}
	w.ask.Seq = e.Seq
	own := e.ID
	if w.claim == nil {
		for _, f := range live {
			if f.ID == w.ask.ID && f.ID != own || f.ID == own && w.ask.Prior == nil {
				return false, fault.Newf(fault.Conflict, "%s holds a claim already", f.ID).
					Hint("a guest of this job still runs: `vk list` shows it, `vk stop` ends it")
			}
		}
	}
	others := slices.DeleteFunc(live, func(f found) bool { return f.ID == own })
	if err := w.verdict(others); err != nil {
		return false, err
	}
	ok := w.last.OK
	if w.claim != nil && !ok {
		return false, nil // as before
	}
	e.ID, e.Want, e.Waiting = w.ask.ID, w.ask.Amounts, !ok
	if ok {
		e.Granted = e.Want
		if p := w.a.o.Place; p != nil {
			e.Place = p(w.ask, claimsOf(others))
		}
	}
	f, err := c.write(e)
	if err != nil {
		return false, err
	}
	if own != e.ID {
		_ = os.Remove(filepath.Join(c.dir, own)) // its lock goes with its last descriptor
	}
	if w.claim != nil {
		w.claim.f.Close()
	}
	w.claim = &claim{c: c, f: f, e: e}
	return ok, nil
}

func claimsOf(fs []found) []admit.Claim {
	out := make([]admit.Claim, len(fs))
	for i, f := range fs {
		out[i] = admit.Claim{ID: f.ID, Seq: f.Seq, Waiting: f.Waiting, Granted: f.Granted, Place: f.Place}
	}
	return out
}

// verdict decides, measuring job directories only when that can matter.
func (w *waiting) verdict(others []found) error {
	l := w.a.o.Limits
	claims := claimsOf(others)
	w.before = nil
	for i, f := range others {
		if f.Waiting && f.Seq < w.ask.Seq && (w.before == nil || f.Seq > w.before.Seq) {
			w.before = &others[i]
		}
	}
	w.room = nil
	if l.Disk && w.ask.Disk > 0 {
		r, err := w.a.o.Room(w.a.c.jobs)
		if err != nil {
			return err
		}
		w.room = &r
	}
	// Nothing written yet is the worst that can be: it need not be measured when
	// there is room for that.
	w.last = admit.Decide(w.ask, claims, l, w.room)
	if w.room == nil || !w.last.Disk && !w.last.Inodes {
		return nil
	}
	for i, f := range others {
		if f.Granted.Disk > 0 && !strings.HasPrefix(f.ID, ReservationPrefix) {
			var err error
			if claims[i].Used, claims[i].UsedInodes, err = fsx.Taken(filepath.Join(w.a.c.jobs, f.ID)); err != nil {
				w.complain([]error{err})
			}
		}
	}
	w.last = admit.Decide(w.ask, claims, l, w.room)
	return nil
}

// complain tells of each problem once.
func (w *waiting) complain(problems []error) {
	for _, p := range problems {
		if !w.problems[p.Error()] {
			w.problems[p.Error()] = true
			w.say("warning: " + p.Error())
		}
	}
}

// evictable reports whether images are to make room now: for the first in the
// queue, when the last try may have changed its mind.
func (w *waiting) evictable() bool {
	if w.a.o.Evict == nil || !w.last.Disk || w.last.Ahead > 0 || w.last.Short == 0 {
		return false
	}
	return w.evicted.IsZero() || w.last.Short <= w.could || w.a.o.Now().Sub(w.evicted) >= evictAgain
}

// evict makes room and reports whether anything went.
func (w *waiting) evict(ctx context.Context) bool {
	need := w.last.Short
	got, err := w.a.o.Evict(ctx, need, w.ask.Keep)
	w.evicted, w.could = w.a.o.Now(), got.Could
	if err != nil {
		w.complain([]error{fmt.Errorf("evicting images: %w", err)})
	}
	if got.Images == 0 && got.Chunks == 0 {
		return false
	}
	w.could = 0 // it is gone
	w.say(got.Line(w.a.stateDir, w.a.c.jobs, need))
	return true
}

// pause returns when a decision may come out otherwise.
func (w *waiting) pause(ctx context.Context) error {
	wait := max(headPoll, 10*w.cost)
	var gone <-chan struct{} // never, for the first in the queue
	if w.before != nil {
		wait, gone = recheck, w.a.c.goneOf(*w.before, &w.ahead)
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(wait):
	case <-gone:
	}
	return nil
}

// ahead is the claim that a waiter waits behind.
type ahead struct {
	of   version
	gone chan struct{}
}

// goneOf is closed when a claim is not as it was found any more: its holder has
// ended, or put another in its place. Nobody looks for that again and again,
// not even where 64 wait: the kernel wakes who waits for the lock. It cannot be
// told to give up, so that a wait that ends early leaves its thread until the
// claim goes; was keeps the one there is.
func (c *Claims) goneOf(f found, was *ahead) <-chan struct{} {
	if was.gone != nil && was.of == f.version {
		return was.gone
	}
	gone := make(chan struct{})
	*was = ahead{f.version, gone}
	fd, err := openRead(unix.AT_FDCWD, filepath.Join(c.dir, f.ID))
	if err != nil {
		close(gone)
		return gone
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || (version{st.Ino, st.Mtim}) != f.version {
		unix.Close(fd)
		close(gone)
		return gone
	}
	go func() {
		defer close(gone)
		defer unix.Close(fd)
		for unix.Flock(fd, unix.LOCK_SH) == unix.EINTR {
		}
	}()
	return gone
}

// tellWaiting says why the ask waits: at first, when another resource is short,
// and now and then with new figures.
func (w *waiting) tellWaiting() {
	res := w.last.Resource(w.a.o.Limits)
	lines := w.last.WaitLines(w.ask, w.a.o.Limits, w.room)
	now := w.a.o.Now()
	known := slices.Contains(w.resources, res)
	if known && (now.Sub(w.told) < retell || slices.Equal(lines, w.lines)) {
		return
	}
	if !known {
		w.resources = append(w.resources, res)
	}
	w.told, w.lines = now, lines
	for _, l := range lines {
		w.say(l)
	}
}

func (w *waiting) tellAdmitted() {
	if w.told.IsZero() {
		return
	}
	// One that waited for memory, and then for memory and disk space, waited
	// for "memory and disk space".
	var words []string
	for _, r := range w.resources {
		for part := range strings.SplitSeq(r, " and ") {
			if !slices.Contains(words, part) {
				words = append(words, part)
			}
		}
	}
	w.say(admit.AdmittedLine(w.a.o.Now().Sub(w.start), strings.Join(words, " and ")))
}

func (w *waiting) gaveUp() error {
	lines := w.last.WaitLines(w.ask, w.a.o.Limits, w.room)
	return fault.Newf(fault.Busy, "gave up after %ds of %s", int64(w.a.o.Wait.Seconds()), strings.Join(lines, " and ")).
		Hint("[executor.schedule] wait_timeout_secs says how long to wait; `retry: {max: 2, when: runner_system_failure}` lets GitLab try again")
}

// Release implements admit.Gate.
func (a *Admissions) Release(id string) error {
	if !ValidName(id) {
		return nil
	}
	if _, err := os.Lstat(filepath.Join(a.c.dir, id)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	lock, err := a.c.decide(context.Background(), false)
	if err != nil {
		return err
	}
	defer lock.Close()
	if _, alive, err := a.c.lookAlone(id); err != nil || alive {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	return os.Remove(filepath.Join(a.c.dir, id))
}

// claim is a granted claim, or one on its way.
type claim struct {
	c *Claims
	f *os.File // nil: nothing is held
	e entry
}

func (c *claim) File() *os.File { return c.f }

func (c *claim) Place() *numa.Placement { return c.e.Place }

func (c *claim) Close() error {
	if c == nil || c.f == nil {
		return nil
	}
	f := c.f
	c.f = nil
	return f.Close()
}

// Release gives the claim up. Others that inherited its descriptor keep the
// lock of a file without a name, which counts nowhere.
func (c *claim) Release() error {
	if c == nil || c.f == nil {
		return nil
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), decideWait)
	defer cancel()
	lock, err := c.c.decide(ctx, false)
	if err != nil {
		return err // the kernel drops it with this process
	}
	defer lock.Close()
	return c.c.unlink(c.f, c.e.ID)
}

// unlink removes a claim's name if it is still that file's.
func (c *Claims) unlink(f *os.File, id string) error {
	path := filepath.Join(c.dir, id)
	var a, b unix.Stat_t
	if unix.Fstat(int(f.Fd()), &a) != nil || unix.Lstat(path, &b) != nil || a.Ino != b.Ino {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing a claim: %w", err)
	}
	return nil
}
