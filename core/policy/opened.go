package policy

import (
	"container/heap"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// How long a lookup opens an address: the answer's TTL, but at least
// openMinTTL, and openGrace beyond.
const (
	openMinTTL = 30 * time.Second
	openGrace  = 60 * time.Second
)

// maxOpened bounds the entries of an OpenedTable: with names of at most 253
// bytes it holds less than 8 MiB.
const maxOpened = 16384

// OpenedTable remembers which addresses the lookups of each VM opened, and by
// which name looked up (the question's; the aliases an answer went through
// need not be allowed and open nothing of their own). Past 64 names on one
// address of one VM, or 16384 entries in all, the entries soonest to expire
// close. Safe for concurrent use; the clock is the caller's.
type OpenedTable struct {
	mu   sync.RWMutex
	at   map[openKey][]*opening
	heap openHeap
}

type openKey struct {
	vm   string
	addr netip.Addr
}

type opening struct {
	key   openKey
	name  string
	until time.Time
	due   time.Time // its place in the heap: until, or an earlier one; see soonest
	index int       // in the heap
}

// NewOpenedTable is an empty table.
func NewOpenedTable() *OpenedTable { return &OpenedTable{at: map[openKey][]*opening{}} }

// Open opens, to a VM, the IPv4 addresses that the lookup of a name gave.
// Opening again never shortens. Addresses that are nobody's on a network
// (0.0.0.0/8, loopback, link-local, multicast and up) are not opened, whatever
// a name server says.
func (t *OpenedTable) Open(vm, name string, addrs []netip.Addr, ttl time.Duration, now time.Time) {
	name = CanonicalName(name)
	until := now.Add(max(ttl, openMinTTL) + openGrace)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	for _, a := range addrs {
		if a = a.Unmap(); openable(a) {
			t.open(openKey{vm, a}, name, until)
		}
	}
}

func openable(a netip.Addr) bool {
	return a.Is4() && a.As4()[0] != 0 && a.As4()[0] < 224 && !a.IsLoopback() && !a.IsLinkLocalUnicast()
}

func (t *OpenedTable) open(k openKey, name string, until time.Time) {
	list := t.at[k]
	for _, o := range list {
		if o.name == name {
			if until.After(o.until) {
				o.until = until
			}
			return
		}
	}
	o := &opening{key: k, name: strings.Clone(name), until: until, due: until}
	heap.Push(&t.heap, o)
	t.at[k] = append(list, o)
	if list = t.at[k]; len(list) > maxOpeners {
		soonest := list[0]
		for _, o := range list[1:] {
			if o.until.Before(soonest.until) {
				soonest = o
			}
		}
		t.drop(soonest)
	}
	if len(t.heap) > maxOpened {
		t.drop(t.soonest())
	}
}

// soonest is the entry soonest to expire, of which there is one. An entry that is
// opened again keeps its place in the heap until it comes up here: names are asked
// for far more often than they expire.
func (t *OpenedTable) soonest() *opening {
	for {
		o := t.heap[0]
		if o.due.Equal(o.until) {
			return o
		}
		o.due = o.until
		heap.Fix(&t.heap, 0)
	}
}

func (t *OpenedTable) expire(now time.Time) {
	for len(t.heap) > 0 && !now.Before(t.heap[0].due) {
		if o := t.soonest(); now.Before(o.until) {
			return
		} else {
			t.drop(o)
		}
	}
}

func (t *OpenedTable) drop(o *opening) {
	heap.Remove(&t.heap, o.index)
	list := t.at[o.key]
	for i, x := range list {
		if x == o {
			list[i] = list[len(list)-1]
			list[len(list)-1] = nil
			list = list[:len(list)-1]
			break
		}
	}
	if len(list) == 0 {
		delete(t.at, o.key)
		return
	}
	t.at[o.key] = list
}

// Openers appends to buf the names that hold an address open to a VM: at most
// 64. It does not allocate when buf has the room.
func (t *OpenedTable) Openers(vm string, a netip.Addr, now time.Time, buf []string) []string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, o := range t.at[openKey{vm, a.Unmap()}] {
		if now.Before(o.until) {
			buf = append(buf, o.name)
		}
	}
	return buf
}

// Len is the number of entries, those not yet swept included.
func (t *OpenedTable) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.heap)
}

// openHeap has the entry soonest to expire at its root.
type openHeap []*opening

func (h openHeap) Len() int           { return len(h) }
func (h openHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h openHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *openHeap) Push(x any) {
	o := x.(*opening)
	o.index = len(*h)
	*h = append(*h, o)
}

func (h *openHeap) Pop() any {
	last := len(*h) - 1
	o := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return o
}
