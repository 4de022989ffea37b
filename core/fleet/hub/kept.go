package hub

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/logx"
	"virtkit/core/zst"
)

// What is kept of jobs that are over: redacted specs, compressed with a
// dictionary that is trained on the newest of them; and the ends of outputs,
// those of failed jobs with the record, the others in a cache that is bounded
// in all.

const (
	dictFrom  = 500      // specs, before the first dictionary
	dictEvery = 5000     // submissions, between two
	dictOf    = 1000     // newest specs that one is trained on
	dictBytes = 16 << 20 // of them
)

// kept is the placer's part of it.
type kept struct {
	plain *zst.Dict // without a dictionary

	mu       sync.Mutex
	dict     *zst.Dict // plain before the first
	dictID   uint32
	specs    int64 // stored since the last training, or in all before the first
	training bool
	tails    []TailSize // of the cache, oldest first
	total    int64
	trimmed  time.Time
	trimming bool
}

func (k *kept) load(l *LoadedJobs) error {
	var err error
	if k.plain, err = zst.Plain(); err != nil {
		return err
	}
	k.dict, k.specs, k.tails = k.plain, l.Specs, l.Tails
	for _, t := range l.Tails {
		k.total += t.Bytes
	}
	if l.Dict.ID != 0 {
		if k.dict, err = zst.NewDict(l.Dict.Data); err != nil {
			return err
		}
		k.dictID, k.specs = l.Dict.ID, 0
	}
	return nil
}

// packSpec redacts and compresses a spec.
func (k *kept) packSpec(s *job.CiJob) (Spec, error) {
	b, err := json.Marshal(s.Redacted())
	if err != nil {
		return Spec{}, err
	}
	k.mu.Lock()
	d, id := k.dict, k.dictID
	k.mu.Unlock()
	return Spec{Dict: id, Data: d.Compress(b)}, nil
}

// unpackSpec reads what packSpec made.
func (k *kept) unpackSpec(s *Spec, dict []byte) ([]byte, error) {
	if s.Dict == 0 {
		return k.plain.Expand(s.Data, 2*dispatch.MaxSpec)
	}
	d, err := zst.NewDict(dict)
	if err != nil {
		return nil, err
	}
	return d.Expand(s.Data, 2*dispatch.MaxSpec)
}

// Spec is a job's redacted spec as JSON, nil when it is not kept any more.
func (h *Hub) Spec(ctx context.Context, j *Job) (json.RawMessage, error) {
	s, dict, err := h.store.Spec(ctx, j.N)
	if err != nil || s == nil {
		return nil, err
	}
	b, err := h.jobs.kept.unpackSpec(s, dict)
	if err != nil {
		return nil, fmt.Errorf("expanding a spec: %w", err)
	}
	return b, nil
}

// learn trains a dictionary in the background when it is time for one.
func (k *kept) learn(h *Hub) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.specs++
	if k.training || k.dictID == 0 && k.specs < dictFrom || k.dictID != 0 && k.specs < dictEvery {
		return
	}
	k.training = true
	go func() {
		err := k.train(h)
		k.mu.Lock()
		defer k.mu.Unlock()
		k.training, k.specs = false, 0
		if err != nil {
			h.log.Warn("no dictionary for specs was made", logx.Err, err)
		}
	}()
}

func (k *kept) train(h *Hub) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	list, err := h.store.Specs(ctx, dictOf, dictBytes)
	if err != nil {
		return err
	}
	var samples [][]byte
	dicts := map[uint32]*zst.Dict{0: k.plain} // a thousand specs share one or two
	for _, s := range list {
		d := dicts[s.Dict]
		if d == nil {
			data, err := h.store.Dict(ctx, s.Dict)
			if err != nil {
				return err
			}
			if d, err = zst.NewDict(data); err != nil {
				return err
			}
			dicts[s.Dict] = d
		}
		b, err := d.Expand(s.Data, 2*dispatch.MaxSpec)
		if err != nil {
			return err
		}
		samples = append(samples, b)
	}
	k.mu.Lock()
	id := k.dictID + 1
	k.mu.Unlock()
	data, err := zst.Train(id, samples)
	if err != nil {
		return err
	}
	d, err := zst.NewDict(data)
	if err != nil {
		return err
	}
	err = h.do(ctx, func(t *tx) error {
		t.touched++
		t.b.Dicts = append(t.b.Dicts, Dict{id, data})
		t.b.Durable = true
		return nil
	})
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dict, k.dictID = d, id
	return nil
}

// tail is what is kept of a finished job's output, nil for nothing.
func (p *placer) tail(j *Job) *Tail {
	n := p.o.Kept
	failed := j.Result != nil && j.Result.Failure != "" && job.Failure(j.Result.Failure) != job.Canceled
	if failed {
		n = p.o.KeptFailure
	}
	if p.out == nil || n == 0 || !failed && p.o.KeptTotal == 0 {
		return nil
	}
	_, length, err := p.out.Held(j.ID)
	if err != nil || length == 0 {
		return nil
	}
	// Whole lines: from the first one that starts in the last n bytes.
	start := max(0, length-n)
	data, _, err := p.out.Read(j.ID, max(0, start-1), int(n)+1)
	if err != nil {
		p.h.log.Warn("the end of an output cannot be kept", logx.Job, j.ID, logx.Err, err)
		return nil
	}
	if start > 0 {
		i := bytes.IndexByte(data, '\n')
		if i < 0 || i == len(data)-1 {
			i = 0 // one line without an end: as much of it as may be
		}
		data, start = data[i+1:], start+int64(i)
	}
	return &Tail{N: j.N, Failed: failed, Size: length, Start: start, Data: p.kept.plain.Compress(data)}
}

// keep stores the end of an output, and takes the oldest ones of the cache out
// until it fits.
func (t *tx) keep(j *Job, tail *Tail) {
	k := &t.h.jobs.kept
	if tail == nil {
		return
	}
	size := int64(len(tail.Data))
	if tail.Failed {
		t.b.Tails = append(t.b.Tails, *tail)
		return
	}
	if size > t.h.jobs.o.KeptTotal {
		return
	}
	drop := t.evict(size)
	t.b.Tails = append(t.b.Tails, *tail)
	t.after = append(t.after, func() { k.take(drop, &TailSize{j.N, size}) })
}

// evict drops the oldest ends of the cache until size more would fit.
func (t *tx) evict(size int64) (drop []TailSize) {
	k := &t.h.jobs.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	total := k.total + size
	for _, old := range k.tails {
		if total <= t.h.jobs.o.KeptTotal {
			break
		}
		total -= old.Bytes
		drop = append(drop, old)
		t.b.DropTails = append(t.b.DropTails, old.N)
	}
	return drop
}

// take changes the cache's list: some go, one comes.
func (k *kept) take(gone []TailSize, come *TailSize) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[int64]bool{}
	for _, g := range gone {
		out[g.N] = true
	}
	list := k.tails[:0]
	for _, t := range k.tails {
		if out[t.N] {
			k.total -= t.Bytes
		} else {
			list = append(list, t)
		}
	}
	k.tails = list
	if come != nil {
		k.tails, k.total = append(k.tails, *come), k.total+come.Bytes
	}
}

// Ending is the end of a job's output.
type Ending struct {
	Data  []byte
	Start int64 // offset of the first byte
	Size  int64 // of the whole output
}

// Ending is what the hub has of a job's output, before it is settled as much as
// settling would keep; nil for nothing.
func (h *Hub) Ending(ctx context.Context, j *Job) (*Ending, error) {
	var t *Tail
	if j.Settled == 0 {
		t = h.jobs.tail(j)
	} else {
		var err error
		if t, err = h.store.Tail(ctx, j.N); err != nil {
			return nil, err
		}
	}
	if t == nil {
		return nil, nil
	}
	data, err := h.jobs.kept.plain.Expand(t.Data, 8<<20)
	if err != nil {
		return nil, fmt.Errorf("expanding the end of an output: %w", err)
	}
	return &Ending{data, t.Start, t.Size}, nil
}

// clean deletes the outputs of jobs that the hub does not follow any more. It
// is called once, at the start.
func (p *placer) clean() {
	if p.out == nil {
		return
	}
	list, err := p.out.Jobs()
	if err != nil {
		p.h.log.Error("outputs cannot be listed", logx.Err, err)
		return
	}
	now := p.h.o.Now().Unix()
	for _, id := range list {
		p.mu.RLock()
		j := p.jobs[id]
		p.mu.RUnlock()
		if j == nil || j.Finished != 0 && now-j.Finished >= UnsettledKept {
			p.dropOutput(id)
		}
	}
	// kept_output_total may have been lowered.
	var gone []TailSize
	err = p.h.attempt([]*change{{done: make(chan error, 1), fn: func(t *tx) error {
		if gone = t.evict(0); len(gone) > 0 {
			t.touched++
		}
		return nil
	}}})
	if err == nil {
		p.kept.take(gone, nil)
	}
}

// History is how many records are kept.
func (h *Hub) History() int {
	return h.jobs.o.History
}

// trim has the history trimmed, once an hour.
func (h *Hub) trim(now time.Time) {
	k := &h.jobs.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.trimming || now.Sub(k.trimmed) < trimEvery*time.Second {
		return
	}
	k.trimming, k.trimmed = true, now
	go func() {
		if err := h.Trim(context.Background()); err != nil {
			h.log.Warn("the history cannot be trimmed", logx.Err, err)
		}
		k.mu.Lock()
		k.trimming = false
		k.mu.Unlock()
	}()
}

// Trim drops the oldest records past the history's length, some per write, and
// what else is past its time: outputs of jobs that were never settled, specs,
// answers to requests.
func (h *Hub) Trim(ctx context.Context) error {
	unix := h.o.Now().Unix()
	err := h.do(ctx, func(t *tx) error {
		t.touched++
		t.b.DropSpecs, t.b.DropRequests = unix-UnsettledKept, unix-dispatch.IdempotentSecs
		return nil
	})
	if err != nil {
		return err
	}
	p := h.jobs
	p.mu.RLock()
	var over []string
	for id, j := range p.jobs {
		if j.Finished != 0 && unix-j.Finished >= UnsettledKept {
			over = append(over, id)
		}
	}
	p.mu.RUnlock()
	for _, id := range over {
		p.dropOutput(id)
	}
	for {
		old, err := h.store.Old(ctx, h.History(), unix-UnsettledKept, TrimAtOnce)
		if err != nil || len(old) == 0 {
			return err
		}
		var gone []TailSize
		err = h.do(ctx, func(t *tx) error {
			t.touched++
			gone = nil
			for _, j := range old {
				t.b.DropJobs = append(t.b.DropJobs, j.N)
				gone = append(gone, TailSize{N: j.N})
			}
			return nil
		})
		if err != nil {
			return err
		}
		p.kept.take(gone, nil)
		left := map[int64]bool{}
		p.mu.Lock()
		for _, j := range old {
			delete(p.jobs, j.ID)
			left[j.N] = true
		}
		p.index.drop(left)
		p.mu.Unlock()
	}
}
