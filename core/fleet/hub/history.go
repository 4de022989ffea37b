package hub

import (
	"context"
	"slices"
	"strings"
	"sync"

	"virtkit/core/logx"
)

// The history's index: what a query looks at, of every record, in memory. A
// record takes 48 bytes here; its texts are kept once each, as numbers. It is
// read from the store in the background as the hub starts; queries ask the
// store until it is whole.

// JobRow is what a JobQuery looks at, of a record.
type JobRow struct {
	N, Submitted                                                         int64
	Owner, Instance, Project, Ref, Name, Node, Pool, Outcome, StateOfJob string
}

// Row is a job's.
func (j *Job) Row() JobRow {
	return JobRow{j.N, j.Submitted, j.Owner, j.Instance, j.Path, j.Ref, j.Name, j.Node, j.Placement.Pool, j.Outcome(), string(j.State)}
}

// column is one of a row's texts.
type column int

const (
	colOwner column = iota
	colInstance
	colProject
	colRef
	colName
	colNode
	colPool
	colOutcome
	colState
	columns
)

func (r *JobRow) texts() [columns]string {
	return [columns]string{r.Owner, r.Instance, r.Project, r.Ref, r.Name, r.Node, r.Pool, r.Outcome, r.StateOfJob}
}

type packedRow struct {
	n    int64
	at   uint32 // submitted, Unix seconds
	cols [columns]uint32
}

// index holds the rows by N.
type index struct {
	mu    sync.RWMutex
	whole bool
	rows  []packedRow
	words map[string]uint32
	texts []string // by number
	late  []func() // what changed while it was read
}

func (x *index) word(s string) uint32 {
	if n, ok := x.words[s]; ok {
		return n
	}
	if x.words == nil {
		x.words = map[string]uint32{}
	}
	s = strings.Clone(s) // not what it is a part of
	n := uint32(len(x.texts))
	x.words[s], x.texts = n, append(x.texts, s)
	return n
}

// set puts rows in, or replaces them. mu is held.
func (x *index) set(r *JobRow) {
	p := packedRow{n: r.N, at: uint32(r.Submitted)}
	for c, s := range r.texts() {
		p.cols[c] = x.word(s)
	}
	if l := len(x.rows); l == 0 || x.rows[l-1].n < r.N {
		x.rows = append(x.rows, p)
		return
	}
	i, found := slices.BinarySearchFunc(x.rows, r.N, func(p packedRow, n int64) int { return int(p.n - n) })
	if found {
		x.rows[i] = p
	} else {
		x.rows = slices.Insert(x.rows, i, p)
	}
}

// change makes a change now, or once the index is whole.
func (x *index) change(f func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.whole {
		f()
	} else {
		x.late = append(x.late, f)
	}
}

func (x *index) put(jobs map[string]*Job) {
	rows := make([]JobRow, 0, len(jobs))
	for _, j := range jobs {
		rows = append(rows, j.Row())
	}
	x.change(func() {
		for i := range rows {
			x.set(&rows[i])
		}
	})
}

func (x *index) drop(gone map[int64]bool) {
	x.change(func() {
		x.rows = slices.DeleteFunc(x.rows, func(p packedRow) bool { return gone[p.n] })
	})
}

// indexPiece is how many rows are read at a time: a read is short.
const indexPiece = 20_000

// load reads the index, unless ctx ends first.
func (x *index) load(ctx context.Context, h *Hub) {
	for after := int64(0); ; {
		rows, err := h.store.History(ctx, after, indexPiece)
		if err != nil {
			if ctx.Err() == nil {
				h.log.Warn("the history is not indexed: queries take longer", logx.Err, err)
			}
			return
		}
		x.mu.Lock()
		for i := range rows {
			x.set(&rows[i])
			after = rows[i].N
		}
		if len(rows) < indexPiece {
			x.whole = true
			for _, f := range x.late {
				f()
			}
			x.late = nil
			x.mu.Unlock()
			return
		}
		x.mu.Unlock()
	}
}

// find is the numbers of the records that a query selects, newest first; ok is
// false while the index is not whole.
func (x *index) find(q *JobQuery) (ns []int64, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if !x.whole {
		return nil, false
	}
	want := [columns]string{colOwner: q.Owner, colInstance: q.Instance, colProject: q.Project, colRef: q.Ref, colName: q.Name, colNode: q.Node, colPool: q.Pool, colOutcome: q.Failure, colState: string(q.State)}
	below, tree := strings.CutSuffix(q.Project, "/**")
	if tree {
		want[colProject] = ""
		below += "/"
	}
	type test struct {
		col  column
		word uint32
	}
	var tests []test
	for c, s := range want {
		if s == "" {
			continue
		}
		w, known := x.words[s]
		if !known {
			return nil, true
		}
		tests = append(tests, test{column(c), w})
	}
rows:
	for i := len(x.rows) - 1; i >= 0 && len(ns) < q.Limit; i-- {
		r := &x.rows[i]
		for _, t := range tests {
			if r.cols[t.col] != t.word {
				continue rows
			}
		}
		if q.Before > 0 && r.n >= q.Before || int64(r.at) < q.Since || tree && !strings.HasPrefix(x.texts[r.cols[colProject]], below) {
			continue
		}
		ns = append(ns, r.n)
	}
	return ns, true
}

// Jobs returns the records that a query selects, newest first.
func (h *Hub) Jobs(ctx context.Context, q JobQuery) ([]*Job, error) {
	if q.ID != "" || q.Events { // which the index does not have
		return h.store.Jobs(ctx, q)
	}
	ns, ok := h.jobs.index.find(&q)
	if !ok {
		return h.store.Jobs(ctx, q)
	}
	return h.store.JobsOf(ctx, ns)
}

// Indexed says whether queries are answered by the index.
func (h *Hub) Indexed() bool {
	h.jobs.index.mu.RLock()
	defer h.jobs.index.mu.RUnlock()
	return h.jobs.index.whole
}
