package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/outstore"
	"virtkit/core/fleet/wire"
	"virtkit/hubdb"
)

// Placements: a reservation, a submission, a start and its acceptance, each
// stored durably as in the hub that runs, over simulated nodes in this process:
// their work counts, too. The goals are those of issue 6.
// The rate is that of placers who begin anew at once; how long one takes is
// measured at the rate that is the goal, from the moment at which it was due, so
// that a wait behind others counts.
// VIRTKIT_BENCH_PLACE_SECS is how long each is measured (10).

const (
	placeGoal   = 1000.0 // a second
	placeGoalMS = 50.0   // 99 of 100
	placers     = 48     // at once
	benchServer = "https://gitlab.example.com"
)

func (b *bench) placing(ctx context.Context) error {
	secs, err := envInt("VIRTKIT_BENCH_PLACE_SECS", 10)
	if err != nil {
		return err
	}
	for _, nodes := range []int{200, 2000} {
		rate, p99, err := b.place(ctx, nodes, time.Duration(secs)*time.Second)
		if err != nil {
			return fmt.Errorf("%d nodes: %w", nodes, err)
		}
		b.addRate("placing", fmt.Sprintf("durable placements over %d nodes", nodes), "a second", rate, "the goal", placeGoal, 1)
		b.add("placing", fmt.Sprintf("99 of 100 at %.0f a second, over %d nodes", placeGoal, nodes), "ms", p99, "the goal", placeGoalMS, 1)
	}
	return nil
}

// place measures how many jobs a second a hub places, and how long one takes.
func (b *bench) place(ctx context.Context, count int, long time.Duration) (rate, p99 float64, err error) {
	dir := filepath.Join(b.dir, fmt.Sprint("placing-", count))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, 0, err
	}
	db, err := hubdb.Open(ctx, filepath.Join(dir, "db"))
	if err != nil {
		return 0, 0, err
	}
	defer db.Close()
	out, err := outstore.Open(filepath.Join(dir, "jobs"))
	if err != nil {
		return 0, 0, err
	}
	h, err := hub.New(ctx, db, hub.Options{Jobs: hub.JobOptions{Outputs: out}})
	if err != nil {
		return 0, 0, err
	}
	running, stop := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { h.Run(running) })
	group.Go(func() { out.Run(running, h.Synced) })
	sessions, hangUp := context.WithCancel(context.Background())
	var peers sync.WaitGroup
	defer func() { hangUp(); peers.Wait(); stop(); group.Wait() }()

	done := func(*wire.Start) ([]byte, *wire.JobResult) {
		return nil, &wire.JobResult{Artifacts: []wire.ArtifactResult{}}
	}
	for i := range count {
		n, err := hubtest.MakePlaced(ctx, h, fmt.Sprint("n", i), "ci", 64, 256<<30)
		if err != nil {
			return 0, 0, err
		}
		n.Work = done
		near, far := hubtest.Pipe()
		peers.Go(func() { h.Serve(sessions, far, hub.Peer{Channel: wire.Plaintext, Remote: "bench"}) })
		peers.Go(func() { n.Session(sessions, near, wire.Plaintext) })
	}
	owner, _, err := hubtest.MakeRelay(ctx, h, benchServer, "gl")
	if err != nil {
		return 0, 0, err
	}
	p := dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 4 << 30, CPUs: 2, Disk: 1 << 30}}
	q := &dispatch.CapacityRequest{Placement: p, WaitSecs: 10}
	for deadline := time.Now().Add(2 * time.Minute); ; {
		c, e := h.Capacity(ctx, owner, q)
		if e != nil {
			return 0, 0, e
		}
		if c.Fits >= count*64 {
			break
		}
		if time.Now().After(deadline) {
			return 0, 0, fmt.Errorf("room for %d after two minutes", c.Fits)
		}
		q.After = c.Revision
	}
	spec, err := hubtest.MakeJob(benchServer, 1, nil)
	if err != nil {
		return 0, 0, err
	}
	if path := os.Getenv("VIRTKIT_BENCH_PROFILE"); path != "" {
		stopProfile, err := profile(fmt.Sprintf("%s.placing-%d", path, count))
		if err != nil {
			return 0, 0, err
		}
		defer stopProfile()
	}
	one := func() (time.Duration, error) { return onePlacement(ctx, h, owner, p, spec) }
	began := time.Now()
	took, err := saturated(ctx, long, one)
	elapsed := time.Since(began)
	if err != nil {
		return 0, 0, err
	}
	batches := h.Stats.Batches.Load()
	fmt.Fprintf(os.Stderr, "bench: placing: %d nodes, %d at once: %d jobs in %v, half of them within %v, 99 of 100 within %v; %d transactions, %v writing\n",
		count, placers, len(took), elapsed.Round(time.Millisecond), took[len(took)/2].Round(time.Microsecond), took[len(took)*99/100].Round(time.Microsecond), batches, time.Duration(h.Stats.StoreNanos.Load()).Round(time.Millisecond))
	rate = float64(len(took)) / elapsed.Seconds()
	if took, err = paced(ctx, int(long.Seconds()*placeGoal), one); err != nil {
		return 0, 0, err
	}
	fmt.Fprintf(os.Stderr, "bench: placing: %d nodes, %.0f a second: %d jobs, half of them within %v, 99 of 100 within %v\n",
		count, placeGoal, len(took), took[len(took)/2].Round(time.Microsecond), took[len(took)*99/100].Round(time.Microsecond))
	return rate, took[len(took)*99/100].Seconds() * 1000, nil
}

// saturated has placers place for so long, each beginning anew at once, and
// returns how long each placement took, the shortest first.
func saturated(ctx context.Context, long time.Duration, one func() (time.Duration, error)) ([]time.Duration, error) {
	var mu sync.Mutex
	var took []time.Duration
	work, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for range placers {
		work.Go(func() error {
			var mine []time.Duration
			for time.Since(began) < long && ctx.Err() == nil {
				d, err := one()
				if err != nil {
					return err
				}
				mine = append(mine, d)
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, mine...)
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		return nil, err
	}
	if len(took) == 0 {
		return nil, fmt.Errorf("nothing was placed in %v", long)
	}
	slices.Sort(took)
	return took, nil
}

// paced begins count placements at the rate of the goal, however long those
// before take, and returns how long after it was due each was placed, the
// shortest first.
func paced(ctx context.Context, count int, one func() (time.Duration, error)) ([]time.Duration, error) {
	took := make([]time.Duration, count)
	work, working := errgroup.WithContext(ctx)
	began := time.Now()
	for i := range took {
		due := began.Add(time.Duration(float64(i) / placeGoal * float64(time.Second)))
		time.Sleep(time.Until(due))
		if working.Err() != nil {
			break
		}
		work.Go(func() error {
			late := time.Since(due)
			d, err := one()
			took[i] = late + d
			return err
		})
	}
	if err := cmp.Or(work.Wait(), context.Cause(ctx)); err != nil {
		return nil, err
	}
	slices.Sort(took)
	return took, nil
}

// onePlacement reserves, submits and waits until a node has accepted, which is
// what counts; then it waits for the job's end and settles it.
func onePlacement(ctx context.Context, h *hub.Hub, o hub.Owner, p dispatch.Placement, spec json.RawMessage) (time.Duration, error) {
	began := time.Now()
	g, e := h.Reserve(ctx, o, &dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: p, LeaseSecs: 90, WaitSecs: 30}, "b")
	if e != nil {
		return 0, e
	}
	v, e := h.Submit(ctx, o, &dispatch.JobSubmission{RequestID: wire.NewID(), Placement: p, Reservation: g.Reservation, PlaceWithinSecs: 60, Spec: spec}, "b")
	if e != nil {
		return 0, e
	}
	var took time.Duration
	for v.State != dispatch.Finished {
		if v, e = h.View(ctx, o, v.ID, v.Revision, time.Minute); e != nil {
			return 0, e
		}
		if took == 0 && (v.State == dispatch.Running || v.State == dispatch.Finished) {
			took = time.Since(began)
		}
	}
	if e := h.Settle(ctx, o, v.ID); e != nil {
		return 0, e
	}
	return took, nil
}

// jobHistory measures what a history costs: a filter that finds little, the
// start, and the memory held.
func (b *bench) jobHistory(ctx context.Context) error {
	for _, count := range []int{100_000, 1_000_000} {
		if err := b.historyOf(ctx, count); err != nil {
			return fmt.Errorf("%d jobs: %w", count, err)
		}
	}
	return nil
}

func (b *bench) historyOf(ctx context.Context, count int) error {
	path := filepath.Join(b.dir, fmt.Sprint("history-", count))
	db, err := hubdb.Open(ctx, path)
	if err != nil {
		return err
	}
	for n := 1; n <= count; {
		var batch hub.JobBatch
		for range min(5000, count-n+1) {
			batch.Jobs = append(batch.Jobs, benchJob(n))
			n++
		}
		if err := db.Apply(ctx, &hub.Batch{JobBatch: batch}); err != nil {
			db.Close()
			return err
		}
	}
	if err := db.Close(); err != nil {
		return err
	}
	held := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, began := held(), time.Now()
	if db, err = hubdb.Open(ctx, path); err != nil {
		return err
	}
	defer db.Close()
	h, err := hub.New(ctx, db, hub.Options{})
	if err != nil {
		return err
	}
	started := time.Since(began)
	running, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() { defer close(ended); h.Run(running) }()
	defer func() { stop(); <-ended }()
	for !h.Indexed() {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	indexed := time.Since(began)
	var scans []float64
	for range b.rounds {
		at := time.Now()
		list, err := h.Jobs(ctx, hub.JobQuery{Limit: 100, Name: "test 7", Ref: "main", Node: fmt.Sprintf("%032x", 8)}) // no job of both
		if err != nil || len(list) != 0 {
			return fmt.Errorf("%d jobs were found, %w", len(list), err)
		}
		scans = append(scans, time.Since(at).Seconds()*1000)
	}
	mem := float64(held()-min(before, held())) / (1 << 20)
	runtime.KeepAlive(h)
	// The reference scans 100,000 in tens of milliseconds with 25 MB.
	scale := float64(count) / 100_000
	b.add("placing", fmt.Sprintf("a filter over %d jobs of history", count), "ms", median(scans), "the reference", 30*scale, 0.5)
	b.add("placing", fmt.Sprintf("memory held with %d jobs of history", count), "MB", max(mem, 0.01), "the reference", 25*scale, 0.5)
	fmt.Fprintf(os.Stderr, "bench: placing: a hub with %d jobs of history starts in %v, and has it indexed after %v\n", count, started.Round(time.Millisecond), indexed.Round(time.Millisecond))
	return nil
}

// benchJob is a record as jobs leave them.
func benchJob(n int) *hub.Job {
	code := n % 3
	r := &wire.JobResult{ExitCode: &code, OutputLen: 12345, Artifacts: []wire.ArtifactResult{{Name: "junit", Outcome: "uploaded"}}, Usage: &wire.JobUsage{WallMS: int64(n), CPUs: 4, MemMiB: 8192}}
	if code != 0 {
		r.Failure, r.Message = "script", fmt.Sprintf("exit status %d", code)
	}
	return &hub.Job{N: int64(n), ID: fmt.Sprintf("%032x", n), Owner: fmt.Sprintf("%032x", n%5), State: dispatch.Finished, Revision: 7, Node: fmt.Sprintf("%032x", n%200),
		Placement: dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 8 << 30, CPUs: 4}}, Submitted: int64(1_700_000_000 + n), Accepted: int64(1_700_000_002 + n),
		Finished: int64(1_700_000_100 + n), Settled: int64(1_700_000_101 + n), Result: r, OutputLen: 12345, Stage: "cleanup", TraceLimit: 4 << 20,
		What: hub.What{Instance: "gl", URL: benchServer, Project: int64(n % 300), Path: fmt.Sprintf("acme/project-%d", n%300), Ref: "main", Name: fmt.Sprintf("test %d", n%40),
			Stage: "test", GitLabJob: int64(n), Pipeline: int64(n / 10), SHA: fmt.Sprintf("%040x", n), Runner: "ci"}}
}
