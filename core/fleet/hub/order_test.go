package hub

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
)

// TestOrderIsThatOfAllNodes: whatever changes, the node that is picked is the
// one that a look at all of them would find.
func TestOrderIsThatOfAllNodes(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	p := &placer{spots: map[string]*spot{}, orders: map[string]*order{}}
	sess := &Session{}
	for i := range 40 {
		s := p.spot(fmt.Sprint("n", i))
		s.sess, s.held, s.ok, s.pools, s.cpus, s.mem, s.disk, s.hasDisk = sess, true, true, []string{"ci"}, 8, 8<<30, 1<<40, true
	}
	var pls []dispatch.Placement
	for i := range maxOrders + 4 { // more than are kept
		pls = append(pls, dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: int64(1+i) << 28, CPUs: 1 + i%4}})
	}
	pls[1].Labels = []string{"big"}
	scan := func(pl *dispatch.Placement, not func(*spot) bool) *spot {
		var best *ranked
		for _, s := range p.spots {
			if r, ok := s.rank(pl); ok && !not(s) && (best == nil || r.compare(best) < 0) {
				best = &r
			}
		}
		if best == nil {
			return nil
		}
		return best.s
	}
	for step := range 20_000 {
		s := p.spots[fmt.Sprint("n", rnd.IntN(40))]
		switch rnd.IntN(7) {
		case 0: // a heartbeat
			s.mem, s.load1, s.hasLoad = int64(rnd.IntN(16))<<29, float64(rnd.IntN(8)), rnd.IntN(2) == 0
			s.sum()
		case 1, 2: // an offer
			id := fmt.Sprint(step)
			s.res[id] = &reservation{id: id, spot: s, claim: claim{env: pls[rnd.IntN(3)].Envelope}}
			s.sum()
		case 3, 4: // one is over
			for id := range s.res {
				delete(s.res, id)
				break
			}
			s.sum()
		case 5: // it goes, or comes
			if s.sess = sess; rnd.IntN(2) == 0 {
				s.sess = nil
			}
			p.changed(s)
		case 6:
			s.labels, s.cap = nil, rnd.IntN(5)
			if rnd.IntN(2) == 0 {
				s.labels = []string{"big"}
			}
			p.changed(s)
		}
		if rnd.IntN(3) > 0 {
			continue
		}
		pl := &pls[rnd.IntN(3)]
		if rnd.IntN(50) == 0 {
			pl = &pls[rnd.IntN(len(pls))]
		}
		refused := fmt.Sprint("n", rnd.IntN(40))
		not := func(s *spot) bool { return s.id == refused }
		if got, want := p.pick(pl, not), scan(pl, not); got != want {
			t.Fatalf("step %d: picked %v, a look at all finds %v", step, got, want)
		}
	}
}

func BenchmarkPick(b *testing.B) {
	p := &placer{spots: map[string]*spot{}, orders: map[string]*order{}}
	pl := &dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 4 << 30, CPUs: 2}}
	for i := range 2000 {
		s := p.spot(fmt.Sprint("n", i))
		s.sess, s.held, s.ok, s.pools, s.cpus, s.mem = &Session{}, true, true, []string{"ci"}, 64, 256<<30
	}
	for n := 0; b.Loop(); n++ {
		s := p.pick(pl, func(*spot) bool { return false })
		r := &reservation{id: fmt.Sprint(n), spot: s, claim: claim{env: pl.Envelope}}
		s.res[r.id] = r
		s.sum()
		if n > 1000 {
			for id := range s.res {
				delete(s.res, id)
				break
			}
			s.sum()
		}
	}
}
