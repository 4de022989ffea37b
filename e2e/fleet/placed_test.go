package fleet_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
)

// producer submits jobs as a vk-gitlab does: each request signed, and tried
// again with the same body until the hub has answered.
type producer struct {
	f     *fleet
	relay string
	key   ed25519.PrivateKey
}

// try makes a request once. err is of the transport.
func (p *producer) try(ctx context.Context, method, target string, body []byte) (int, http.Header, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+p.f.addr+target, bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, err
	}
	q := dispatch.Request{Relay: p.relay, Method: method, Target: target, Body: body, Unix: time.Now().Unix(), Channel: wire.Plaintext}
	q.Sign(p.key, req.Header)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}).Do(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, out, err
}

// ask tries until the hub answers with what is not to be tried again.
func (p *producer) ask(ctx context.Context, method, target string, v any) (int, http.Header, []byte) {
	var body []byte
	if v != nil {
		body, _ = json.Marshal(v)
	}
	for {
		status, header, out, err := p.try(ctx, method, target, body)
		if err == nil && !(status >= 400 && dispatch.ReadError(status, out).Retry()) {
			return status, header, out
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return 0, nil, nil
		}
	}
}

// TestPlacedKills kills a hub at random while jobs flow over it. Every job that
// it took ends once, with its whole output or as lost; no node begins one twice
// or is left with a reservation.
func TestPlacedKills(t *testing.T) {
	f := newFleet(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	_, key, _ := ed25519.GenerateKey(nil)
	token, err := f.admin.TokenOf(ctx, hub.TokenGitLab, 3600)
	if err != nil {
		t.Fatal(err)
	}
	p := &producer{f: f, key: key}
	body, _ := json.Marshal(dispatch.NewEnrollRequest(token, key, wire.Plaintext, "gw", "test"))
	status, _, out, err := p.try(ctx, "POST", dispatch.EnrollPath, body)
	var enrolled dispatch.EnrollReply
	if err != nil || status != 200 || json.Unmarshal(out, &enrolled) != nil {
		t.Fatalf("enrolling: %d %s, %v", status, out, err)
	}
	p.relay = enrolled.Relay
	const server = "https://gitlab.example.com"
	bind(t, f, p, server)
	f.must("gitlabs", "approve", server, "--name", "gl")
	f.must("gitlabs", "projects", "approve", "gl", "1:acme/web")

	text := bytes.Repeat([]byte("some line of output\n"), 400)
	var nodes []*hubtest.Placed
	sessions, hangUp := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer func() { hangUp(); wg.Wait() }()
	for i := range 3 {
		n := f.placed(ctx, fmt.Sprint("n", i))
		n.Chunk = 500
		n.Work = func(*wire.Start) ([]byte, *wire.JobResult) {
			return text, &wire.JobResult{Artifacts: []wire.ArtifactResult{}}
		}
		nodes = append(nodes, n)
		wg.Go(func() {
			for sessions.Err() == nil {
				if c, err := (wsx.Dialer{}).Dial(sessions, "ws://"+f.addr+wire.SessionPath, nil); err == nil {
					_ = n.Session(sessions, c, wire.Plaintext)
				}
				time.Sleep(50 * time.Millisecond)
			}
		})
	}

	until := time.Now().Add(killTime)
	var killer sync.WaitGroup
	var kills atomic.Int64
	killer.Go(func() {
		for time.Now().Before(until) {
			time.Sleep(time.Duration(200+rand.IntN(900)) * time.Millisecond)
			f.hub.restart()
			kills.Add(1)
		}
	})
	place := dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 1}}
	var mu sync.Mutex
	var ids []string
	var work sync.WaitGroup
	var number atomic.Int64
	for range 6 {
		work.Go(func() {
			for time.Now().Before(until) {
				reservation := ""
				status, _, out := p.ask(ctx, "POST", dispatch.ReservationsPath, dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: place, LeaseSecs: 60, WaitSecs: 2})
				var g dispatch.ReservationGrant
				if status == 201 && json.Unmarshal(out, &g) == nil {
					reservation = g.Reservation
				}
				spec, err := hubtest.MakeJob(server, number.Add(1), func(j *job.CiJob) { j.Trace.LimitBytes = 1 << 20 })
				if err != nil {
					t.Error(err)
					return
				}
				status, _, out = p.ask(ctx, "POST", dispatch.JobsPath, dispatch.JobSubmission{RequestID: wire.NewID(), Placement: place, Reservation: reservation, PlaceWithinSecs: 60, Spec: spec})
				var v dispatch.JobView
				if status != 201 || json.Unmarshal(out, &v) != nil {
					t.Errorf("submitting: %d %s", status, out)
					return
				}
				mu.Lock()
				ids = append(ids, v.ID)
				mu.Unlock()
			}
		})
	}
	work.Wait()
	killer.Wait()
	f.up()
	count := map[string]int{}
	for _, id := range ids {
		v := p.finished(ctx, t, id)
		if v.Result == nil {
			continue
		}
		count[v.Result.Failure]++
		begun := 0
		for _, n := range nodes {
			n.Lock()
			begun += n.Starts[id]
			n.Unlock()
		}
		got := p.output(ctx, id)
		switch {
		case begun > 1:
			t.Errorf("job %s was begun %d times", id, begun)
		case v.Result.Failure == "" && (begun != 1 || !bytes.Equal(got, text)):
			t.Errorf("job %s, begun %d times, has %d bytes of output, want %d", id, begun, len(got), len(text))
		case v.Result.Failure != "" && v.Result.Failure != string(job.Lost) && v.Result.Failure != string(job.Canceled):
			t.Errorf("job %s ended as %+v", id, v.Result)
		case !bytes.HasPrefix(text, got):
			t.Errorf("job %s has output that its node did not print", id)
		}
		if status, _, out := p.ask(ctx, "POST", dispatch.SettlePath(id), nil); status != 204 {
			t.Errorf("settling %s: %d %s", id, status, out)
		}
	}
	t.Logf("%d kills, %d jobs: %v", kills.Load(), len(ids), count)
	if count[""] == 0 {
		t.Error("no job came to a good end")
	}
	f.eventually("no node holds a reservation", func() bool {
		for _, n := range nodes {
			if held, _ := n.Holds(); len(held) > 0 {
				return false
			}
		}
		return true
	})
	f.holdsNone("sesame-open-9", "glcbt-64_")
}

// holdsNone looks for secrets of jobs, in clear and in base64, in every file of
// the fleet's: the hub's database and its log, outputs, what it prints.
func (f *fleet) holdsNone(secrets ...string) {
	f.t.Helper()
	files := 0
	err := filepath.WalkDir(f.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // an output that was settled meanwhile
		}
		files++
		for _, s := range secrets {
			// At each of its three alignments base64 has a text of its own; all but
			// the ends of it are the same whatever is around.
			for shift := range 3 {
				coded := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", shift) + s))
				if coded = coded[4 : len(coded)-4]; bytes.Contains(b, []byte(coded)) {
					f.t.Errorf("%s holds %q in base64", path, s)
				}
			}
			if bytes.Contains(b, []byte(s)) {
				f.t.Errorf("%s holds %q", path, s)
			}
		}
		return err
	})
	if err != nil || files < 3 {
		f.t.Errorf("%d files were looked at, %v", files, err)
	}
}

// bind has a relay say which server it serves, over a session of its own.
func bind(t *testing.T, f *fleet, p *producer, server string) {
	t.Helper()
	c, err := wsx.Dialer{}.Dial(t.Context(), "ws://"+f.addr+dispatch.SessionPath, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	if _, err := (hubtest.Identity{ID: p.relay, Key: p.key}).Dial(t.Context(), c, wire.Plaintext, wire.NewID(), dispatch.Versions); err != nil {
		t.Fatal(err)
	}
	m, err := dispatch.Encode(&dispatch.Inventory{Hostname: "gw", ServerURL: server, Runners: []dispatch.Runner{}})
	if err == nil {
		err = c.Write(t.Context(), m)
	}
	if err != nil {
		t.Fatal(err)
	}
	f.eventually("the server is pending", func() bool {
		l, err := f.admin.GitLabs(t.Context())
		return err == nil && len(l.Pending) == 1
	})
}

// placed enrolls a node that runs no jobs but says so.
func (f *fleet) placed(ctx context.Context, name string) *hubtest.Placed {
	f.t.Helper()
	token, err := f.admin.Token(ctx, time.Hour)
	if err != nil {
		f.t.Fatal(err)
	}
	i := hubtest.NewKey()
	body, _ := json.Marshal(i.EnrollRequest(token, name, wire.Plaintext))
	resp, err := http.Post("http://"+f.addr+wire.EnrollPath, "application/json", bytes.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	var r wire.EnrollReply
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil || r.Check() != nil {
		f.t.Fatalf("enrolling %s: %+v, %v", name, r, err)
	}
	i.ID = r.Node
	f.must("nodes", "pools", i.ID, "ci")
	return hubtest.PlacedAs(i, name, 16, 32<<30)
}

// finished waits for a job's end.
func (p *producer) finished(ctx context.Context, t *testing.T, id string) (v dispatch.JobView) {
	t.Helper()
	for v.State != dispatch.Finished {
		status, _, out := p.ask(ctx, "GET", dispatch.JobPath(id, v.Revision, 5), nil)
		if status != 200 || json.Unmarshal(out, &v) != nil {
			t.Errorf("job %s: %d %s; it was %+v", id, status, out, v)
			return dispatch.JobView{}
		}
	}
	return v
}

// output reads all of a job's output.
func (p *producer) output(ctx context.Context, id string) (all []byte) {
	for {
		status, header, out := p.ask(ctx, "GET", dispatch.OutputPath(id, int64(len(all)), 5), nil)
		if status != 200 || header.Get(dispatch.HeaderOffset) != strconv.Itoa(len(all)) {
			return append(all, fmt.Sprintf(" HTTP %d %s", status, hex.EncodeToString(out))...)
		}
		if all = append(all, out...); header.Get(dispatch.HeaderComplete) == "true" {
			return all
		}
	}
}
