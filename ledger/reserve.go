package ledger

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"virtkit/core/admit"
)

// Offer claims amounts for a job that is not there yet, as the claim
// "reservation-" + id, at once or not at all: it waits for nobody and does not
// overtake jobs that do. refused names the resource that is short ("memory",
// "disk"); "" with a Held that holds nothing when this host admits everything.
func (a *Admissions) Offer(ctx context.Context, id string, want admit.Amounts) (h admit.Held, refused string, err error) {
	if !a.o.Limits.Any() {
		return &claim{}, "", nil
	}
	lock, err := a.c.decide(ctx, false)
	if err != nil {
		return nil, "", err
	}
	defer lock.Close()
	w := &waiting{a: a, say: func(string) {}, start: a.o.Now(), problems: map[string]bool{}}
	w.ask = admit.Ask{ID: ReservationPrefix + id, Amounts: want}
	if !ValidName(w.ask.ID) {
		return nil, "", fmt.Errorf("%q cannot name a reservation", id)
	}
	live, _, err := a.c.scan(true)
	if err != nil {
		return nil, "", err
	}
	w.ask.Seq = nextSeq(live)
	for _, f := range live {
		if f.ID == w.ask.ID {
			return nil, "", fmt.Errorf("reservation %s is held already", id)
		}
	}
	if err := w.verdict(live); err != nil {
		return nil, "", err
	}
	switch v := w.last; {
	case v.OK:
	case v.Memory, v.Ahead > 0 && !v.Disk && !v.Inodes && a.o.Limits.MemMiB > 0:
		return nil, "memory", nil
	default:
		return nil, "disk", nil
	}
	e := entry{ID: w.ask.ID, Seq: w.ask.Seq, Asked: w.start, Granted: want, Want: want}
	f, err := a.c.write(e)
	if err != nil {
		return nil, "", err
	}
	return &claim{c: a.c, f: f, e: e}, "", nil
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
	ID      string        `json:"id"`
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
		claims = append(claims, ClaimInfo{ID: f.ID, Asked: f.Asked, Waiting: f.Waiting, Granted: f.Granted, Want: f.Want})
	}
	return claims, problems, nil
}
