package ui_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"html"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/web/auth"
	"virtkit/web/auth/authtest"
	"virtkit/web/ui"
)

const origin = "https://hub.example.test"

// bench is a hub with a UI, a provider on another site, and a clock.
type bench struct {
	*hub.Hub
	t        *testing.T
	provider *authtest.Provider
	server   *httptest.Server
	log      *lockedBuffer
	mu       sync.Mutex
	ahead    time.Duration
	hits     []string // paths that the UI was asked for
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}
func (l *lockedBuffer) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

func (b *bench) later(d time.Duration) { b.mu.Lock(); b.ahead += d; b.mu.Unlock() }

func jobID(n int) string { return fmt.Sprintf("%032x", n) }

// start makes a hub with jobs of that name, numbered from 1.
func start(t *testing.T, jobs int, name string, def hub.Role) *bench {
	t.Helper()
	b := &bench{t: t, provider: authtest.New(t), log: &lockedBuffer{}}
	now := func() time.Time { b.mu.Lock(); defer b.mu.Unlock(); return time.Now().Add(b.ahead) }
	store := hubtest.NewMemory()
	var batch hub.Batch
	for n := 1; n <= jobs; n++ {
		batch.Jobs = append(batch.Jobs, &hub.Job{N: int64(n), ID: jobID(n), Owner: "r", State: dispatch.Finished, Submitted: 1_700_000_000, Settled: 1_700_000_001, Finished: 1_700_000_001,
			Result: &wire.JobResult{Message: name}, What: hub.What{Name: name, Path: name, Ref: name, Instance: "gl", GitLabJob: int64(n), URL: "javascript:alert(1)//"}})
	}
	if err := store.Apply(t.Context(), &batch); err != nil {
		t.Fatal(err)
	}
	log := logx.New(b.log, -4, false)
	ctx, cancel := context.WithCancel(context.Background())
	h, err := hub.New(ctx, store, hub.Options{Log: log, Now: now, People: hub.PeopleOptions{OIDC: true, DefaultRole: def}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = h.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	p, err := auth.NewOIDC(b.provider.Client())
	if err != nil {
		t.Fatal(err)
	}
	u, err := ui.New(ui.Options{Hub: h, Origin: origin, Issuer: b.provider.URL, Auth: auth.New(p, now), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	b.Hub = h
	b.server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		b.hits = append(b.hits, r.Method+" "+r.URL.Path)
		b.mu.Unlock()
		u.ServeHTTP(w, r)
	}))
	t.Cleanup(b.server.Close)
	return b
}

func (b *bench) count(hit string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range b.hits {
		if h == hit {
			n++
		}
	}
	return n
}

// browser is a client with a profile of its own, which follows redirects.
type browser struct {
	*http.Client
	b   *bench
	jar *cookiejar.Jar
}

func (b *bench) browser() *browser {
	b.t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		b.t.Fatal(err)
	}
	other, _ := url.Parse(b.provider.URL)
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == "hub.example.test:443" {
			addr = b.server.Listener.Addr().String()
		} else if addr != other.Host {
			return nil, fmt.Errorf("the browser was sent to %s", addr)
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	tr := &http.Transport{DialContext: dial, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	b.t.Cleanup(tr.CloseIdleConnections)
	return &browser{&http.Client{Transport: tr, Jar: jar, CheckRedirect: func(_ *http.Request, via []*http.Request) error {
		if len(via) > 6 {
			return fmt.Errorf("a loop of redirects")
		}
		return nil
	}}, b, jar}
}

// page is what a browser shows.
type page struct {
	*http.Response
	text string
	at   string
}

func (c *browser) do(r *http.Request) page {
	c.b.t.Helper()
	resp, err := c.Do(r)
	if err != nil {
		c.b.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		c.b.t.Fatal(err)
	}
	return page{resp, string(body), resp.Request.URL.String()}
}

func (c *browser) get(path string) page {
	c.b.t.Helper()
	r, err := http.NewRequest("GET", origin+path, nil)
	if err != nil {
		c.b.t.Fatal(err)
	}
	return c.do(r)
}

func (c *browser) post(path string, form url.Values, change func(*http.Request)) page {
	c.b.t.Helper()
	r, err := http.NewRequest("POST", origin+path, strings.NewReader(form.Encode()))
	if err != nil {
		c.b.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Origin", origin)
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	if change != nil {
		change(r)
	}
	return c.do(r)
}

var (
	button = regexp.MustCompile(`id="sign-in" href="([^"]*)"`)
	token  = regexp.MustCompile(`name="csrf" value="([0-9a-f]*)"`)
)

func first(re *regexp.Regexp, s string) string {
	if m := re.FindStringSubmatch(s); m != nil {
		return html.UnescapeString(m[1])
	}
	return ""
}

// press follows the button of a page that has one.
func (c *browser) press(p page) page {
	c.b.t.Helper()
	at := first(button, p.text)
	if at == "" {
		c.b.t.Fatalf("there is no button to sign in:\n%s", p.text)
	}
	return c.get(at)
}

func (b *bench) grant(address string, role hub.Role) {
	b.t.Helper()
	if _, _, err := b.SetGrant(b.t.Context(), "uid 0", hub.GrantChange{Address: address, Role: role}); err != nil {
		b.t.Fatal(err)
	}
}

// signedIn is a browser of somebody.
func (b *bench) signedIn(email string) (c *browser, csrf string) {
	b.t.Helper()
	b.provider.Set(authtest.Knobs{Claims: fmt.Sprintf(`{"sub":%q,"email":%q}`, email, email)})
	c = b.browser()
	p := c.press(c.get("/"))
	if p.StatusCode != 200 || p.at != origin+"/" {
		b.t.Fatalf("signing in ends at %s: %s\n%s", p.at, p.Status, p.text)
	}
	return c, first(token, p.text)
}

// TestDeepLink is S41: one round trip, back at the very page, and a cookie that
// comes along on links from elsewhere.
func TestDeepLink(t *testing.T) {
	b := start(t, 3, "build", "")
	b.grant("alice@example.com", hub.Operator)
	c := b.browser()
	path := "/jobs/" + jobID(2)
	p := c.get(path)
	if p.StatusCode != http.StatusUnauthorized || p.at != origin+path || b.provider.Asked("/authorize") != 0 {
		t.Fatalf("signed out: %s at %s", p.Status, p.at)
	}
	p = c.press(p)
	if p.StatusCode != 200 || p.at != origin+path || !strings.Contains(p.text, jobID(2)) {
		t.Fatalf("%s at %s", p.Status, p.at)
	}
	if n, m, k := b.provider.Asked("/authorize"), b.count("GET /auth/login"), b.count("GET /auth/callback"); n != 1 || m != 1 || k != 1 {
		t.Errorf("%d visits to the provider, %d starts, %d callbacks", n, m, k)
	}
	u, _ := url.Parse(origin)
	cs := c.jar.Cookies(u)
	if len(cs) != 1 || cs[0].Name != "__Host-vk-session" || !wire.IsHex(cs[0].Value, wire.TokenLen) {
		t.Fatalf("cookies %v", cs)
	}
	if _, s, ok := b.session(cs[0].Value); !ok || s.Role != hub.Operator || s.Identity != "alice@example.com" {
		t.Errorf("%+v, %v", s, ok)
	}
	if strings.Contains(b.log.String(), cs[0].Value) || strings.Contains(p.text, cs[0].Value) || strings.Contains(b.log.String(), authtest.Secret) {
		t.Error("a secret is in the log or in a page")
	}
	// Nothing asks again.
	for range 3 {
		if p := c.get(path); p.StatusCode != 200 {
			t.Errorf("then %s", p.Status)
		}
	}
	if n := b.provider.Asked("/authorize"); n != 1 {
		t.Errorf("%d visits to the provider", n)
	}
}

func (b *bench) session(secret string) (string, hub.UISession, bool) {
	s, ok := b.UISession(secret)
	return secret, s, ok
}

func TestCookie(t *testing.T) {
	b := start(t, 0, "", hub.Viewer)
	c := b.browser()
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	p := c.get("/auth/login?to=/jobs")
	back := b.provider.Visit(t, p.Header.Get("Location"), true)
	p = c.get(back.RequestURI())
	var found *http.Cookie
	for _, k := range p.Cookies() {
		if k.Name == "__Host-vk-session" {
			found = k
		}
	}
	if found == nil || !found.Secure || !found.HttpOnly || found.SameSite != http.SameSiteLaxMode || found.Path != "/" || found.Domain != "" || found.MaxAge != 12*3600 {
		t.Errorf("the session's cookie is %+v", found)
	}
	if to := p.Header.Get("Location"); to != "/jobs" || p.StatusCode != http.StatusSeeOther {
		t.Errorf("%s to %q", p.Status, to)
	}
}

func TestReturnAddress(t *testing.T) {
	b := start(t, 0, "", hub.Viewer)
	for _, to := range []string{"//evil.test", `/\evil.test`, "https:evil", "https://evil.test/", "/\t/evil.test", "/%5cevil.test", `\\evil.test`, "/jobs/../..//evil.test", "javascript:alert(1)", "/logout", "/auth/login", "\r\nLocation: https://evil.test"} {
		p := b.browser().get("/auth/login?to=" + url.QueryEscape(to))
		if p.at != origin+"/" || p.StatusCode != 200 {
			t.Errorf("%q ends at %s: %s", to, p.at, p.Status)
		}
	}
	if p := b.browser().get("/auth/login?to=" + url.QueryEscape("/jobs?before=7")); p.at != origin+"/jobs?before=7" {
		t.Errorf("a plain path ends at %s", p.at)
	}
	// A page that was asked for by a path that is no plain one leads to "/".
	for _, path := range []string{"//evil.test", "/jobs/%2e%2e/x", "/a%5Cb"} {
		r, _ := http.NewRequest("GET", origin, nil)
		r.URL.Opaque = path
		c := b.browser()
		c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		if at := first(button, c.do(r).text); at != "" && at != "/auth/login" {
			t.Errorf("%q: the button leads to %s", path, at)
		}
	}
}

// TestNoLoop: whatever goes wrong ends in a page with words and a button.
func TestNoLoop(t *testing.T) {
	b := start(t, 0, "", "")
	ends := func(name string, p page, status int, words string) {
		t.Helper()
		if p.StatusCode != status || !strings.Contains(html.UnescapeString(p.text), words) || first(button, p.text) == "" || !strings.HasPrefix(p.at, origin) {
			t.Errorf("%s: %s at %s\n%s", name, p.Status, p.at, p.text)
		}
	}
	c := b.browser()
	ends("no grant", c.press(c.get("/jobs")), http.StatusForbidden, "alice@example.com may not sign in")
	b.provider.Set(authtest.Knobs{Claims: `{"sub":"x","email":"alice@example.com","email_verified":false}`})
	b.grant("alice@example.com", hub.Viewer)
	ends("unverified", c.press(c.get("/jobs")), http.StatusForbidden, "its address alice@example.com is not verified")
	b.provider.Set(authtest.Knobs{Deny: true})
	ends("denied", c.press(c.get("/jobs")), http.StatusForbidden, "it was declined there")
	b.provider.Set(authtest.Knobs{Down: true})
	at := first(button, c.get("/jobs").text)
	if p := c.get(at); p.StatusCode == http.StatusBadGateway {
		ends("down", p, http.StatusBadGateway, "cannot be used for signing in")
	} // else its discovery document is known still, and the browser gets the provider's own answer
	b.provider.Set(authtest.Knobs{})
	c.Jar = nil // keeps no cookies
	p := c.press(c.get("/jobs"))
	ends("no cookies", p, http.StatusBadRequest, "does not keep cookies")
	if n := b.provider.Asked("/authorize"); n != 5 {
		t.Errorf("%d visits to the provider", n)
	}
	// Its button begins anew, and leads to the page that was asked for.
	c.Jar = c.jar
	if p := c.press(c.get("/jobs")); p.at != origin+"/jobs" || p.StatusCode != 200 {
		t.Errorf("%s at %s", p.Status, p.at)
	}
	// The back button, over the callback.
	late := b.browser()
	ends("an old answer", late.get("/auth/callback?state="+strings.Repeat("ab", wire.TokenLen)+"&code=x"), http.StatusBadRequest, "finished already")
	p = c.get("/auth/callback?state=" + strings.Repeat("ab", wire.TokenLen) + "&code=x")
	if !strings.Contains(p.text, "signed in already") || strings.Contains(p.text, "Not signed in") {
		t.Errorf("who is signed in is told:\n%s", p.text)
	}
}

func TestExpired(t *testing.T) {
	b := start(t, 0, "", hub.Viewer)
	c := b.browser()
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	back := b.provider.Visit(t, c.get("/auth/login?to=/jobs").Header.Get("Location"), true)
	b.later(auth.FlowTTL + time.Second)
	p := c.get(back.RequestURI())
	if p.StatusCode != http.StatusBadRequest || !strings.Contains(p.text, "more than 5 minutes") || first(button, p.text) != "/auth/login?to=%2Fjobs" {
		t.Errorf("%s\n%s", p.Status, p.text)
	}
	c, _ = b.signedIn("a@x")
	b.later(hub.SessionTTL)
	if p := c.get("/jobs"); p.StatusCode != http.StatusUnauthorized {
		t.Errorf("after 12 hours: %s", p.Status)
	}
}

func TestSignOut(t *testing.T) {
	b := start(t, 0, "", hub.Viewer)
	c, csrf := b.signedIn("a@x")
	for name, change := range map[string]func(*http.Request){
		"another origin":       func(r *http.Request) { r.Header.Set("Origin", "https://evil.test") },
		"origin null":          func(r *http.Request) { r.Header.Set("Origin", "null") },
		"two origins":          func(r *http.Request) { r.Header.Add("Origin", origin) },
		"no origin":            func(r *http.Request) { r.Header.Del("Origin"); r.Header.Del("Sec-Fetch-Site") },
		"no origin, same site": func(r *http.Request) { r.Header.Del("Origin"); r.Header.Set("Sec-Fetch-Site", "same-site") },
		"another site's": func(r *http.Request) {
			r.Header.Set("Sec-Fetch-Site", "cross-site")
			r.Header.Set("Sec-Fetch-Mode", "navigate")
			r.Header.Set("Sec-Fetch-Dest", "document")
		},
	} {
		if p := c.post("/logout", url.Values{"csrf": {csrf}}, change); p.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %s", name, p.Status)
		}
	}
	_, other := b.signedIn("b@x")
	for name, v := range map[string]string{"none": "", "wrong": strings.Repeat("0", 64), "another session's": other} {
		if p := c.post("/logout", url.Values{"csrf": {v}}, nil); p.StatusCode != http.StatusForbidden {
			t.Errorf("CSRF token %s: %s", name, p.Status)
		}
	}
	if p := c.get("/jobs"); p.StatusCode != 200 {
		t.Fatalf("signed out by what was refused: %s", p.Status)
	}
	if p := c.get("/logout"); p.StatusCode == 200 && c.get("/jobs").StatusCode != 200 {
		t.Error("signed out by a GET")
	}
	p := c.post("/logout", url.Values{"csrf": {csrf}}, func(r *http.Request) { r.Header.Del("Origin") })
	if p.at != origin+"/login?out" || !strings.Contains(p.text, "signed out") {
		t.Errorf("%s at %s", p.Status, p.at)
	}
	if p := c.get("/jobs"); p.StatusCode != http.StatusUnauthorized {
		t.Errorf("signed out: %s", p.Status)
	}
	b.provider.Set(authtest.Knobs{})
	if p := c.press(c.get("/jobs")); p.at != origin+"/jobs" || p.StatusCode != 200 {
		t.Errorf("in again: %s at %s", p.Status, p.at)
	}
}

func TestLink(t *testing.T) {
	b := start(t, 0, "", "")
	secret, _, err := b.CreateLink(t.Context(), "uid 7", hub.Operator, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	c := b.browser()
	for range 3 { // scanners and previews look at it
		if p := c.get("/login?t=" + secret); p.StatusCode != 200 || !strings.Contains(p.text, `id="use-link"`) {
			t.Fatalf("%s\n%s", p.Status, p.text)
		}
	}
	if p := c.post("/login", url.Values{"t": {secret}}, func(r *http.Request) { r.Header.Set("Origin", "https://evil.test") }); p.StatusCode != http.StatusForbidden {
		t.Errorf("from another site: %s", p.Status)
	}
	p := c.post("/login", url.Values{"t": {secret}}, nil)
	if p.at != origin+"/" || p.StatusCode != 200 || !strings.Contains(p.text, "link from uid 7 (operator)") {
		t.Fatalf("%s at %s\n%s", p.Status, p.at, p.text)
	}
	if p := b.browser().post("/login", url.Values{"t": {secret}}, nil); p.StatusCode != http.StatusForbidden || !strings.Contains(p.text, "used already") {
		t.Errorf("a second time: %s", p.Status)
	}
	if p := b.browser().get("/login?t=" + secret); p.StatusCode != http.StatusForbidden {
		t.Errorf("looked at later: %s", p.Status)
	}
}
