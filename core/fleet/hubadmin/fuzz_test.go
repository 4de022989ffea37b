package hubadmin_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hubadmin"
)

// said is an answer of a hub's admin socket.
type said struct {
	status int
	body   []byte
}

// socket answers everything with what is stored last.
func socket(f *testing.F) (*hubadmin.Client, *atomic.Pointer[said]) {
	path := filepath.Join(f.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		f.Fatal(err)
	}
	now := new(atomic.Pointer[said])
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		a := now.Load()
		w.WriteHeader(a.status)
		_, _ = w.Write(a.body)
	})}}
	s.Start()
	f.Cleanup(s.Close)
	return hubadmin.Dial(path), now
}

// FuzzAnswers has a hub answer vk-hub's commands with anything: a command has an
// error with a status, or what it asked for.
func FuzzAnswers(f *testing.F) {
	for n, body := range []string{
		`{"nodes":[{"id":"00","name":"a","reach":"connected","desired":{"generation":3,"policy":{"ceiling":4}},"reported":{"node":"ready"},"heartbeat":{"load1":0.5}}]}`,
		`{"id":"00","conflict":{"since":1,"reasons":["x"]},"inventory":{"cpus":8}}`, `{"token":"00"}`, `{"nodes":[{"node":"00","list":[{"id":"0123456789abcdef"}]}]}`,
		`{"lines":[{"seq":1,"at":2,"node":"","actor":"uid 0","event":"e","detail":"d"}]}`, `{"nodes":3,"reach":{"connected":3},"states":{}}`,
	} {
		f.Add(uint8(n), 200, []byte(body))
	}
	f.Add(uint8(0), 409, []byte(`{"kind":"conflict","message":"no","hint":"%s"}`))
	f.Add(uint8(0), 500, []byte(`{"kind":"x","message":"y"}`))
	c, now := socket(f)
	f.Fuzz(func(t *testing.T, call uint8, status int, body []byte) {
		if status < 200 || status > 999 || status == 204 || status == 304 {
			return // nothing that a server of net/http says with a body
		}
		now.Store(&said{status, body})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var out any
		var err error
		switch call % 6 {
		case 0:
			out, err = c.Nodes(ctx)
		case 1:
			out, err = c.Node(ctx, "a")
		case 2:
			out, err = c.Token(ctx, time.Hour)
		case 3:
			out, err = c.Workloads(ctx, "")
		case 4:
			out, err = c.Audit(ctx, "", 5)
		case 5:
			out, err = c.Status(ctx)
		}
		if (status == 200) != (err == nil) && status != 200 {
			t.Errorf("status %d gives %+v", status, out)
		}
		if err != nil && (fault.ExitCode(err) == 0 || err.Error() == "") {
			t.Errorf("%#v ends with status %d", err, fault.ExitCode(err))
		}
		if err == nil {
			if _, jerr := json.Marshal(out); jerr != nil {
				t.Errorf("taken, and --json cannot show it: %v", jerr)
			}
		}
	})
}

// FuzzEvents has a hub's stream of events be anything.
func FuzzEvents(f *testing.F) {
	for _, s := range []string{
		"retry: 1000\n\nid: 0123456789abcdef-3\nevent: snapshot\ndata: {\"nodes\":[],\"jobs\":[]}\n\n: alive\n\nid: 0123456789abcdef-4\nevent: job\ndata: {\"at\":1,\"kind\":\"job\",\"job\":\"00\",\"text\":\"running\"}\n\n",
		"event: resync\ndata: {\"why\":\"the hub was started anew since\"}\n\n", "data:null\n\n", "event:snapshot\ndata: null\n\n", "id\n\n",
	} {
		f.Add([]byte(s))
	}
	c, now := socket(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		now.Store(&said{200, body})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := c.Follow(ctx, hubadmin.EventQuery{}, func(e hubadmin.Told) error {
			n := 0
			for _, is := range []bool{e.Event != nil, e.Snapshot != nil, e.Resync != ""} {
				if is {
					n++
				}
			}
			if n > 1 || e.Resync != "" && e.ID != "" {
				t.Errorf("told %+v", e)
			}
			return nil
		})
		if err != nil && fault.ExitCode(err) == 0 {
			t.Errorf("%#v is no failure", err)
		}
	})
}
