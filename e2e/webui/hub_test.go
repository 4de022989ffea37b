package webui_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/applets"
	"virtkit/applets/hubcmd"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
	"virtkit/hubdb"
)

// theHub is vk-hub serve, with some jobs of before.
type theHub struct {
	t     *testing.T
	conf  string
	admin *hubadmin.Client
	log   *lockedBuffer
	mu    sync.Mutex
	ahead time.Duration // of its clock
}

// hostile is what a project calls a job of its own.
const hostile = `</td><script>alert(1)</script><img src=x onerror=alert(2)>"'` + "\u202e"

func jobID(n int) string { return fmt.Sprintf("%08x%024x", n, n) }

// startHub starts one with [oidc]; extra are further keys of that table.
func startHub(t *testing.T, extra string) *theHub {
	t.Helper()
	ready(t)
	dir := t.TempDir()
	h := &theHub{t: t, conf: filepath.Join(dir, "hub.toml"), log: &lockedBuffer{}}
	data := filepath.Join(dir, "data")
	text := fmt.Sprintf("addr = \"127.0.0.1:%d\"\ndata_dir = %q\nui_addr = \"127.0.0.1:%d\"\nui_url = %q\nui_tls_cert = %q\nui_tls_key = %q\n[oidc]\nissuer = %q\nclient_id = %q\nclient_secret_file = %q\n%s\n",
		freePort(t), data, world.hubPort, origin(), world.cert, world.key, issuer(), clientID, filepath.Join(dir, "secret"), extra)
	for f, s := range map[string]string{h.conf: text, filepath.Join(dir, "secret"): secret + "\n"} {
		if err := os.WriteFile(f, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(data, 0o700); err != nil {
		t.Fatal(err)
	}
	h.seed(filepath.Join(data, "hub.sqlite"))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan int, 1)
	env := h.env("serve")
	env.Stdout, env.Stderr = h.log, h.log
	go func() { done <- hubcmd.Main(ctx, env) }()
	ended := func() bool { return len(done) > 0 }
	t.Cleanup(func() {
		cancel()
		if code := <-done; code != 0 {
			t.Errorf("vk-hub serve ends with %d", code)
		}
		if t.Failed() {
			t.Logf("the hub's log:\n%s", h.log.String())
			t.Logf("the provider says:\n%s", world.provider.notes.String())
		}
		if strings.Contains(h.log.String(), secret) {
			t.Error("the client's secret is in the log")
		}
	})
	h.admin = hubadmin.Dial(filepath.Join(data, "admin.sock"))
	if err := wait(t.Context(), "the hub answers", func() bool { _, err := h.admin.Status(t.Context()); return err == nil || ended() }); err != nil {
		t.Fatal(err)
	}
	if ended() {
		t.Fatalf("%v:\n%s", errEnded, h.log.String())
	}
	return h
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func (h *theHub) seed(file string) {
	h.t.Helper()
	db, err := hubdb.Open(h.t.Context(), file)
	if err != nil {
		h.t.Fatal(err)
	}
	b := hub.Batch{Durable: true}
	for n := 1; n <= 130; n++ {
		name := fmt.Sprintf("build-%d", n)
		if n == 7 {
			name = hostile
		}
		b.Jobs = append(b.Jobs, &hub.Job{N: int64(n), ID: jobID(n), Owner: wire.NewID(), State: dispatch.Finished, Submitted: 1_700_000_000, Finished: 1_700_000_009, Settled: 1_700_000_010,
			Result: &wire.JobResult{}, What: hub.What{Name: name, Path: "acme/web", Ref: "main", Instance: "gl", URL: "https://gitlab.example.com", GitLabJob: int64(n)}})
	}
	if err := db.Apply(h.t.Context(), &b); err != nil {
		h.t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		h.t.Fatal(err)
	}
}

func (h *theHub) env(args ...string) applets.Env {
	env := applets.FromOS()
	env.Args = append([]string{"vk-hub", "--config", h.conf}, args...)
	env.Now = func() time.Time { h.mu.Lock(); defer h.mu.Unlock(); return time.Now().Add(h.ahead) }
	return env
}

// later sets the hub's clock forward.
func (h *theHub) later(d time.Duration) { h.mu.Lock(); h.ahead += d; h.mu.Unlock() }

// must runs a command of vk-hub.
func (h *theHub) must(args ...string) string {
	h.t.Helper()
	var out, notes bytes.Buffer
	env := h.env(args...)
	env.Stdout, env.Stderr = &out, &notes
	if code := hubcmd.Main(h.t.Context(), env); code != 0 {
		h.t.Fatalf("vk-hub %q: status %d\n%s", args, code, notes.String())
	}
	return out.String()
}

// profile is a fresh profile of the browser; tab a page of it.
type profile struct {
	t  *testing.T
	id int
}

type tab struct {
	*profile
	id int
}

type state struct {
	URL    string
	Status int
}

type cookie struct {
	Name, Value, Domain, Path, SameSite string
	Secure, HTTPOnly                    bool
	Expires                             float64
}

func newProfile(t *testing.T, noCookiesOf string) *profile {
	t.Helper()
	p := &profile{t: t}
	// Not the test's own directory: Chromium may write there as that is removed.
	dir, err := os.MkdirTemp(world.dir, "profile")
	if err != nil {
		t.Fatal(err)
	}
	world.browser.do(t, &p.id, "open", map[string]any{"dir": dir, "noCookiesOf": noCookiesOf})
	t.Cleanup(func() { world.browser.do(t, nil, "close", map[string]any{"profile": p.id}) })
	return p
}

func (p *profile) tab() *tab {
	p.t.Helper()
	n := &tab{profile: p}
	world.browser.do(p.t, &n.id, "tab", map[string]any{"profile": p.id})
	return n
}

func (p *profile) cookies(host string) (list []cookie) {
	p.t.Helper()
	var all []cookie
	world.browser.do(p.t, &all, "cookies", map[string]any{"profile": p.id})
	for _, c := range all {
		if strings.TrimPrefix(c.Domain, ".") == host {
			list = append(list, c)
		}
	}
	return list
}

func (n *tab) ask(out any, op string, kv ...string) {
	n.t.Helper()
	args := map[string]any{"tab": n.id}
	for i := 0; i < len(kv); i += 2 {
		args[kv[i]] = kv[i+1]
	}
	world.browser.do(n.t, out, op, args)
}

func (n *tab) open(url string) (s state) { n.t.Helper(); n.ask(&s, "go", "url", url); return s }
func (n *tab) press(at string) (s state) { n.t.Helper(); n.ask(&s, "click", "at", at); return s }
func (n *tab) back() (s state)           { n.t.Helper(); n.ask(&s, "back"); return s }
func (n *tab) text() (s string)          { n.t.Helper(); n.ask(&s, "text"); return s }
func (n *tab) has(at string) bool {
	n.t.Helper()
	var c int
	n.ask(&c, "count", "at", at)
	return c > 0
}
func (n *tab) visited() (list []string)    { n.t.Helper(); n.ask(&list, "visited"); return list }
func (n *tab) complaints() (list []string) { n.t.Helper(); n.ask(&list, "complaints"); return list }

// clean checks that the browser had nothing to complain of on the hub's pages,
// but for the statuses of pages that are meant to have one.
func (n *tab) clean(statuses ...string) {
	n.t.Helper()
	for _, c := range n.complaints() {
		if strings.HasPrefix(c, origin()) && !slices.ContainsFunc(statuses, func(s string) bool { return strings.Contains(c, "status of "+s) }) {
			n.t.Errorf("the browser complains: %s", c)
		}
	}
}

// starts counts this tab's visits to a path of the hub's.
func (n *tab) starts(path string) (c int) {
	n.t.Helper()
	for _, v := range n.visited() {
		if at, _, _ := strings.Cut(v, "?"); at == "GET "+origin()+path {
			c++
		}
	}
	return c
}

// person signs in at the provider, whose page the tab shows: by name, and by
// agreeing to what the hub asks for.
func (n *tab) person(name string) state {
	n.t.Helper()
	n.ask(nil, "fill", "at", "input[name=login]", "text", name)
	n.ask(nil, "fill", "at", "input[name=password]", "text", "any")
	s := n.press("button[type=submit]")
	if strings.HasPrefix(s.URL, issuer()) { // it asks whether they agree, unless they did
		s = n.press("button[type=submit]")
	}
	return s
}

// signIn goes the whole way from a page of the hub's.
func (n *tab) signIn(path, name string) state {
	n.t.Helper()
	n.open(origin() + path)
	n.press("#sign-in")
	return n.person(name)
}

// shows checks where a tab is, and what it says.
func (n *tab) shows(what string, s state, url string, status int, words string) {
	n.t.Helper()
	if s.URL != url || s.Status != status {
		n.t.Errorf("%s: at %s with %d, want %s with %d; it came by\n%s", what, s.URL, s.Status, url, status, strings.Join(n.visited(), "\n"))
	}
	if text := n.text(); !strings.Contains(text, words) {
		n.t.Errorf("%s: it lacks %q:\n%s", what, words, text)
	}
}
