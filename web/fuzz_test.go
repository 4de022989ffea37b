package web_test

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
)

// FuzzBodies posts any body anywhere: it is answered, with no server's error,
// and the hub goes on.
func FuzzBodies(f *testing.F) {
	for n, body := range []string{
		`{"token":"00","public_key":"00","signature":"00","hostname":"ci-1"}`, `{"token":"00"}`,
		`{"pool":"ci","envelope":{"memory":1,"cpus":1}}`, `{"id":"0123456789abcdef0123456789abcdef","placement":{"pool":"ci","envelope":{"memory":1,"cpus":1}},"wait_secs":1}`,
		`{"lease_secs":60}`, `{"id":"0123456789abcdef0123456789abcdef","spec":{}}`, `{}`, `{}`, `{"name":"x"}`,
		`{"ttl_secs":1}`, `{"ceiling":1}`, `{"op":"drain"}`, `{"pools":["a"]}`, `{"adopt":true}`,
	} {
		f.Add(uint8(n), []byte(body))
	}
	f.Fuzz(func(t *testing.T, where uint8, body []byte) {
		b := start(t, false)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		key, err := b.CreateKey(ctx, "test", hub.Key{Name: "k", Pools: []string{"*"}, Scopes: []string{hub.ScopeJobs, hub.ScopeCapacity}}, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		id := "/" + wire.NewID()
		node := "/v1/nodes/" + i.ID
		paths := []string{wire.EnrollPath, dispatch.EnrollPath, dispatch.CapacityPath, dispatch.ReservationsPath, dispatch.ReservationsPath + id + "/renew",
			dispatch.JobsPath, dispatch.JobsPath + id + "/cancel", dispatch.JobsPath + id + "/settle", dispatch.ClientsPath,
			"/v1/token", node + "/policy", node + "/commands", node + "/pools", node + "/recover"}
		n := int(where) % len(paths)
		to, dial := "http://"+b.addr, (&net.Dialer{}).DialContext
		if n > 8 {
			to, dial = "http://admin", func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", b.sock)
			}
		}
		asked, stop := context.WithTimeout(ctx, 3*time.Second) // a reservation may wait longer
		defer stop()
		q, err := http.NewRequestWithContext(asked, http.MethodPost, to+paths[n], bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set("Authorization", "Bearer "+key)
		r, err := (&http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}).Do(q)
		if err != nil && asked.Err() == nil {
			t.Fatalf("%s: %v", paths[n], err)
		}
		if err == nil {
			r.Body.Close()
		}
		if err == nil && (r.StatusCode == http.StatusNotFound && n > 8 || r.StatusCode == http.StatusInternalServerError) {
			t.Errorf("%s answers %s", paths[n], r.Status)
		}
		if _, err := b.SetPools(ctx, "test", i.ID, []string{"after"}); err != nil {
			t.Errorf("the hub changes nothing any more: %v", err)
		}
	})
}
