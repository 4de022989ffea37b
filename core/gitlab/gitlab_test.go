package gitlab

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestMapReason(t *testing.T) {
	all := []string{"unknown_failure", "image_pull_failure", "runner_system_failure"}
	for _, c := range []struct {
		reason string
		known  []string
		want   string
	}{
		{"", nil, "script_failure"},
		{"script_failure", nil, "script_failure"},
		{"job_execution_timeout", nil, "job_execution_timeout"},
		{"image_pull_failure", all, "image_pull_failure"},
		{"image_pull_failure", nil, "runner_system_failure"},
		{"runner_configuration_error", all, "script_failure"},
		{"runner_external_dependency_failure", nil, "runner_system_failure"},
		{"job_canceled", all, "unknown_failure"},
		{"runner_interrupted", nil, "unknown_failure"},
	} {
		if got := MapReason(c.reason, c.known); got != c.want {
			t.Errorf("MapReason(%q, %q) = %q, expected %q", c.reason, c.known, got, c.want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, base := range []string{"", "gitlab.example.com", "ftp://h", "https://", "https://user:secret@h", "https://h/?x", "https://h/#x", "https://h:port"} {
		if _, err := New(base, "a", Info{}, http.DefaultClient); err == nil {
			t.Errorf("%q is taken", base)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: the error shows a password: %v", base, err)
		}
	}
	c, err := New("https://h/gitlab/", "a", Info{}, http.DefaultClient)
	if err != nil || c.base != "https://h/gitlab/api/v4" {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestRetryWaits(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	r := newRetry()
	r.now = func() time.Time { return now }
	for _, c := range []struct {
		name, value string
		try         int
		min, max    time.Duration
	}{
		{"", "", 0, 50 * time.Millisecond, 100 * time.Millisecond},
		{"", "", 3, 400 * time.Millisecond, 800 * time.Millisecond},
		{"", "", 30, 30 * time.Second, time.Minute},
		{"Retry-After", "2", 0, 2 * time.Second, 2 * time.Second},
		{"Retry-After", "900", 0, time.Minute, time.Minute},
		{"Retry-After", "99999999999999", 0, time.Minute, time.Minute},
		{"Retry-After", "soon", 0, 50 * time.Millisecond, 100 * time.Millisecond},
		{"RateLimit-ResetTime", now.Add(7 * time.Second).Format(http.TimeFormat), 0, 7 * time.Second, 7 * time.Second},
		{"RateLimit-ResetTime", now.Add(-time.Hour).Format(http.TimeFormat), 0, 0, 0},
	} {
		a := &answer{header: http.Header{}}
		a.header.Set(c.name, c.value)
		if d := r.wait(a, c.try); d < c.min || d > c.max {
			t.Errorf("%s %q, try %d: %v, expected %v to %v", c.name, c.value, c.try, d, c.min, c.max)
		}
	}
}

// serve answers each request with the next status of the list.
func serve(t *testing.T, statuses ...int) (*Client, *[]*http.Request) {
	var seen []*http.Request
	ts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = append(seen, r)
		s := statuses[min(len(seen), len(statuses))-1]
		if s == http.StatusFound {
			w.Header().Set("Location", "/elsewhere")
		}
		w.WriteHeader(s)
		json.NewEncoder(w).Encode(map[string]string{"message": "no\nway " + strings.Repeat("x", 300)})
	}))
	t.Cleanup(ts.Close)
	c, err := New(ts.URL, "agent", Info{}, ts.Client())
	if err != nil {
		t.Fatal(err)
	}
	c.retry.sleep = func(context.Context, time.Duration) error { return nil }
	return c, &seen
}

func TestTransportRetries(t *testing.T) {
	for _, c := range []struct {
		statuses []int
		calls    int
		ok       bool
	}{
		{[]int{204}, 1, true},
		{[]int{503, 429, 500, 408, 204}, 5, true},
		{[]int{502}, 5, false},
		{[]int{520}, 5, false},
		{[]int{501}, 1, false},
		{[]int{403}, 1, false},
		{[]int{302}, 1, false}, // a token is not taken elsewhere
	} {
		cl, seen := serve(t, c.statuses...)
		_, err := cl.RequestJob(context.Background(), "glrt-secret", "s", "")
		if len(*seen) != c.calls || (err == nil) != c.ok {
			t.Errorf("%v: %d calls, %v", c.statuses, len(*seen), err)
		}
		ids := map[string]bool{}
		for _, r := range *seen {
			ids[r.Header.Get("X-Request-Id")] = true
		}
		if len(ids) != 1 {
			t.Errorf("%v: %d request ids", c.statuses, len(ids))
		}
		if c.ok {
			continue
		}
		var se *StatusError
		if !errors.As(err, &se) || se.Status != c.statuses[len(c.statuses)-1] || strings.ContainsAny(se.Message, "\n") || len(se.Message) > 210 {
			t.Errorf("%v: %#v", c.statuses, err)
		}
		if strings.Contains(err.Error(), "glrt-secret") {
			t.Errorf("the error shows the token: %v", err)
		}
	}
}

// A GitLab that is not there is an error that shows no token, and a call ends
// with its context.
func TestUnreachable(t *testing.T) {
	c, err := New("http://127.0.0.1:1", "agent", Info{}, &http.Client{})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.update(context.Background(), Job{ID: 7, Token: "glcbt-secret"}, jobUpdate{State: Running}); err == nil || strings.Contains(err.Error(), "secret") || !strings.HasPrefix(err.Error(), "PUT /jobs/7: ") {
		t.Errorf("%v", err)
	}
	cl, _ := serve(t, 503)
	cl.retry.sleep = sleep
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("shutting down"))
	if _, err := cl.RequestJob(ctx, "t", "s", ""); err == nil {
		t.Error("a call outlives its context")
	}
}

// What is said of vk-gitlab is what gitlab-dispatch.txt lists, and what its
// executor does beyond: aliases, and options of images.
func TestOurFeatures(t *testing.T) {
	b, _ := json.Marshal(Ours())
	var m map[string]bool
	json.Unmarshal(b, &m)
	var off []string
	for k, on := range m {
		if !on {
			off = append(off, k)
		}
	}
	slices.Sort(off)
	want := "job_inputs native_steps_integration proxy session shared terminal vault_secrets"
	if got := strings.Join(off, " "); got != want {
		t.Errorf("not advertised: %s, expected %s", got, want)
	}
}
