package fleet_test

import (
	"bytes"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"time"
)

// unsteady is a GitLab that answers late, with errors, with the same errors
// after it has done what was asked, or not at all.
type unsteady struct {
	next http.Handler
	// befell is told which request of a job's artifacts was struck, and how.
	befell func(job int64, what string)

	mu   sync.Mutex
	rand *rand.Rand
	bad  bool // else as it would be
	did  map[string]int
}

func (u *unsteady) set(bad bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.bad = bad
}

// mishap is one that befalls a request.
type mishap struct {
	name   string
	status int  // of the answer; 0 = the connection is cut
	apply  bool // the request takes effect first
	delay  time.Duration
}

// pick takes one request in eight.
func (u *unsteady) pick(r *http.Request) *mishap {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.bad || u.rand.IntN(8) > 0 {
		return nil
	}
	faults := []mishap{
		{name: "500", status: 500}, {name: "502 done", status: 502, apply: true}, {name: "503", status: 503}, {name: "429", status: 429},
		{name: "cut"}, {name: "cut done", apply: true}, {name: "late", delay: time.Second},
	}
	if r.Method == http.MethodPut {
		faults = append(faults, mishap{name: "412", status: 412}, mishap{name: "202", status: 202})
	}
	f := faults[u.rand.IntN(len(faults))]
	if u.did == nil {
		u.did = map[string]int{}
	}
	u.did[f.name]++
	return &f
}

func (u *unsteady) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !strings.HasPrefix(r.URL.Path, "/api/v4/") {
		u.next.ServeHTTP(w, r)
		return
	}
	f := u.pick(r)
	if f == nil {
		u.next.ServeHTTP(w, r)
		return
	}
	if rest, ok := strings.CutSuffix(strings.TrimPrefix(r.URL.Path, "/api/v4/jobs/"), "/artifacts"); ok && u.befell != nil {
		id, _ := strconv.ParseInt(rest, 10, 64)
		u.befell(id, f.name)
	}
	if f.delay > 0 {
		time.Sleep(f.delay)
		u.next.ServeHTTP(w, r)
		return
	}
	if f.apply {
		u.next.ServeHTTP(httptest.NewRecorder(), r)
	} else {
		_, _ = bytes.NewBuffer(nil).ReadFrom(r.Body)
	}
	if f.status == 0 {
		panic(http.ErrAbortHandler)
	}
	http.Error(w, `{"message":"unsteady"}`, f.status)
}
