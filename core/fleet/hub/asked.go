package hub

import (
	"context"
	"hash/maphash"
	"sync"

	"virtkit/core/logx"
)

// asked knows which requests were answered, so that the store is not searched
// for each new one: nearly all are. It may take a request for one that was
// answered, never the other way round.
type asked struct {
	mu    sync.RWMutex
	whole bool // all of the store's are in
	keys  map[uint64]struct{}
}

// maxAsked is how many it holds: past it, it asks the store for all of them.
const maxAsked = 1 << 20

var askedSeed = maphash.MakeSeed()

func askedKey(owner, id string) uint64 { return maphash.String(askedSeed, owner+" "+id) }

// add is for a request that is about to be stored.
func (a *asked) add(owner, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.keys) >= maxAsked {
		a.whole, a.keys = false, nil
	}
	if a.keys == nil {
		a.keys = map[uint64]struct{}{}
	}
	a.keys[askedKey(owner, id)] = struct{}{}
}

// never says that a request was not answered.
func (a *asked) never(owner, id string) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	_, has := a.keys[askedKey(owner, id)]
	return a.whole && !has
}

// load reads the store's.
func (a *asked) load(ctx context.Context, h *Hub) {
	n := 0
	err := h.store.Requests(ctx, func(owner, id string) {
		if n++; n <= maxAsked/2 {
			a.add(owner, id)
		}
	})
	if err != nil {
		if ctx.Err() == nil {
			h.log.Warn("requests are looked up in the database each", logx.Err, err)
		}
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.whole = n <= maxAsked/2
}

// request is what a create with an owner's request_id was answered, nil for one
// that was not made.
func (h *Hub) request(ctx context.Context, owner, id string) (*Request, error) {
	if h.jobs.asked.never(owner, id) {
		return nil, nil
	}
	return h.store.Request(ctx, owner, id)
}
