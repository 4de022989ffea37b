package ledger

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"virtkit/core/admit"
)

// offerEvict bounds what an offer does to make room: whoever asked waits for the
// answer.
const offerEvict = 30 * time.Second

// Offer claims amounts for a job that is not there yet, as the claim
// "reservation-" + id, at once or not at all: it waits for nobody and does not
// overtake jobs that do. One that is short of disk has images evicted first.
// refused names the resource that is short ("memory", "disk"); "" with a Held
// that holds nothing when this host admits everything.
func (a *Admissions) Offer(ctx context.Context, id string, want admit.Amounts) (h admit.Held, refused string, err error) {
	if !a.o.Limits.Any() {
		return &claim{}, "", nil
	}
	w := &waiting{a: a, say: a.say, start: a.o.Now(), problems: map[string]bool{}, evicted: a.offered.at, could: a.offered.could}
	w.ask = admit.Ask{ID: ReservationPrefix + id, Amounts: want}
	if !ValidName(w.ask.ID) {
		return nil, "", fmt.Errorf("%q cannot name a reservation", id)
	}
	h, refused, err = w.offer(ctx)
	if err != nil || refused != "disk" || !w.evictable() {
		return h, refused, err
	}
	limited, cancel := context.WithTimeout(ctx, offerEvict)
	defer cancel()
	freed := w.evict(limited)
	a.offered.at, a.offered.could = w.evicted, w.could
	if !freed {
		return nil, refused, nil
	}
	return w.offer(ctx)
}

func (a *Admissions) say(line string) {
	if a.o.Say != nil {
		a.o.Say(line)
	}
}

// offer decides once.
func (w *waiting) offer(ctx context.Context) (h admit.Held, refused string, err error) {
	c := w.a.c
	lock, err := c.decide(ctx, false)
	if err != nil {
		return nil, "", err
	}
	defer lock.Close()
	live, problems, err := c.scan(true)
	if err != nil {
		return nil, "", err
	}
	w.complain(problems)
	w.ask.Seq = nextSeq(live)
	for _, f := range live {
		if f.ID == w.ask.ID {
			return nil, "", fmt.Errorf("%s is held already", f.ID)
		}
	}
	if err := w.verdict(live); err != nil {
		return nil, "", err
	}
	switch v := w.last; {
	case v.OK:
	case v.Memory, v.Ahead > 0 && !v.Disk && !v.Inodes && w.a.o.Limits.MemMiB > 0:
		return nil, "memory", nil
	default:
		return nil, "disk", nil
	}
	e := entry{ID: w.ask.ID, Seq: w.ask.Seq, Asked: w.start, Granted: w.ask.Amounts, Want: w.ask.Amounts}
	f, err := c.write(e)
	if err != nil {
		return nil, "", err
	}
	return &claim{c: c, f: f, e: e}, "", nil
}

// Name makes the claim of a reservation, whose descriptor this process holds,
// the claim of a job. It keeps its place and what it holds; f counts no more
// and is the caller's to close.
func (a *Admissions) Name(ctx context.Context, f *os.File, jobID string) (admit.Held, error) {
	if !ValidName(jobID) {
		return nil, fmt.Errorf("%q cannot name a claim", jobID)
	}
	lock, err := a.c.decide(ctx, false)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	e, err := a.c.adopt(f)
	if err != nil {
		return nil, err
	}
	if _, alive, err := a.c.lookAlone(jobID); err == nil && alive {
		return nil, fmt.Errorf("%s holds a claim already", jobID)
	}
	old := e.ID
	e.ID = jobID
	nf, err := a.c.write(e)
	if err != nil {
		return nil, err
	}
	if old != jobID {
		_ = os.Remove(filepath.Join(a.c.dir, old))
	}
	return &claim{c: a.c, f: nf, e: e}, nil
}

// ClaimInfo is one live claim.
type ClaimInfo struct {
	ID string `json:"id"`
	// Seq is its place in the queue: those that wait are let in in this order.
	Seq     uint64        `json:"seq"`
	Asked   time.Time     `json:"asked"`
	Waiting bool          `json:"waiting"`
	Granted admit.Amounts `json:"granted"`
	Want    admit.Amounts `json:"want"`
}

// Claims are the live claims, as they are at one moment. Problems are files
// among them that are no claims.
func (a *Admissions) Claims(ctx context.Context) (claims []ClaimInfo, problems []error, err error) {
	lock, err := a.c.decide(ctx, true)
	if err != nil {
		return nil, nil, err
	}
	defer lock.Close()
	live, problems, err := a.c.scan(false)
	if err != nil {
		return nil, problems, err
	}
	for _, f := range live {
		claims = append(claims, ClaimInfo{ID: f.ID, Seq: f.Seq, Asked: f.Asked, Waiting: f.Waiting, Granted: f.Granted, Want: f.Want})
	}
	return claims, problems, nil
}
