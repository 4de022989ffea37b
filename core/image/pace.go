package image

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

// errStalled is the cause of a connection cut by a watched body.
var errStalled = errors.New("the connection was silent, or nearly, for too long")

// leastPace is below what any line gives, in bytes a second: an answer that
// comes slower is kept back, and without this a registry could hold a pull for
// as long as it likes, one byte at a time.
const leastPace = 1 << 10

// smallLimit is Options.Small: at whatever pace, and there is no second attempt.
const smallLimit = 10 * time.Minute

// paced watches the bodies of all answers: of manifests and blobs, and of the
// tokens and refusals that others read.
type paced struct {
	inner http.RoundTripper
	stall time.Duration
}

func (p *paced) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := p.inner.RoundTrip(r)
	if err == nil && resp.Body != nil && resp.Body != http.NoBody {
		resp.Body = watch(resp.Body, p.stall)
	}
	return resp, err
}

// watched closes a body that gives next to nothing for a while, so that whoever
// waits for it gets an error and can resume. Only time in Read counts: the
// reader may have to wait for its disk.
type watched struct {
	io.ReadCloser
	limit time.Duration
	left  time.Duration // until the cut, unless got reaches least before
	got   int
	least int
	t     *time.Timer
	cut   atomic.Bool
}

func watch(body io.ReadCloser, limit time.Duration) *watched {
	w := &watched{ReadCloser: body, limit: limit, left: limit, least: int(limit.Seconds() * leastPace)}
	w.t = time.AfterFunc(limit, func() { w.cut.Store(true); body.Close() })
	w.t.Stop()
	return w
}

func (w *watched) Read(p []byte) (int, error) {
	start := time.Now()
	w.t.Reset(w.left)
	n, err := w.ReadCloser.Read(p)
	w.t.Stop()
	w.left = max(w.left-time.Since(start), time.Millisecond)
	if w.got += n; w.got >= w.least {
		w.got, w.left = 0, w.limit
	}
	if err != nil && err != io.EOF && w.cut.Load() {
		err = fmt.Errorf("%w (%w)", errStalled, io.ErrUnexpectedEOF)
	}
	return n, err
}
