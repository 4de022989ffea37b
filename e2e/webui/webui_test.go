package webui_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"virtkit/web/auth"
	"virtkit/web/auth/authtest"
)

// realPeer is the real provider, as the suite of providers wants one. A person's
// visit needs no browser.
type realPeer struct{}

func (realPeer) Client() auth.Client {
	return auth.Client{Issuer: issuer(), ID: clientID, Secret: secret, Redirect: origin() + "/auth/callback"}
}

func (realPeer) Visit(t testing.TB, at string, agree bool) *url.URL {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	var back *url.URL
	c := &http.Client{Jar: jar, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		if r.URL.Hostname() == hubHost {
			back = r.URL
			return http.ErrUseLastResponse
		}
		return nil
	}}
	form := regexp.MustCompile(`action="([^"]*)"`)
	abort := regexp.MustCompile(`href="([^"]*/abort)"`)
	resp, err := c.Get(at)
	for range 4 {
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if back != nil {
			return back
		}
		re := form
		if !agree {
			re = abort
		}
		m := re.FindSubmatch(body)
		if m == nil {
			t.Fatalf("the provider says %s:\n%s", resp.Status, body)
		}
		next, perr := resp.Request.URL.Parse(string(m[1]))
		if perr != nil {
			t.Fatal(perr)
		}
		if !agree {
			resp, err = c.Get(next.String())
			continue
		}
		prompt := "login"
		if !strings.Contains(string(body), `value="login"`) {
			prompt = "consent"
		}
		resp, err = c.PostForm(next.String(), url.Values{"prompt": {prompt}, "login": {"alice"}, "password": {"any"}})
	}
	t.Fatal("the provider goes on and on")
	return nil
}

func TestProvider(t *testing.T) {
	ready(t)
	authtest.RunSuite(t, realPeer{})
}

// TestDeepLink is case S41: a fresh profile follows a link to a page deep in the
// UI, signs in by one round trip, and is there. Links from other sites arrive
// signed in from then on.
func TestDeepLink(t *testing.T) {
	h := startHub(t, "")
	h.must("accounts", "grant", "alice@example.com", "--role", "operator")
	p := newProfile(t, "")
	n := p.tab()
	path := "/jobs/" + jobID(123)
	authorized := world.provider.count("GET /auth")
	n.shows("signed out", n.open(origin()+path), origin()+path, http.StatusUnauthorized, "Sign in with "+providerHost)
	if got := world.provider.count("GET /auth"); got != authorized {
		t.Errorf("the browser was sent to the provider %d times by itself", got-authorized)
	}
	if s := n.press("#sign-in"); !strings.HasPrefix(s.URL, issuer()) {
		t.Fatalf("the button leads to %s", s.URL)
	}
	n.shows("signed in", n.person("alice"), origin()+path, http.StatusOK, "build-123")
	if !strings.Contains(n.text(), "alice@example.com (operator)") {
		t.Errorf("it does not say who is signed in:\n%s", n.text())
	}
	if a, b, c := world.provider.count("GET /auth")-authorized, n.starts("/auth/login"), n.starts("/auth/callback"); a != 1 || b != 1 || c != 1 {
		t.Errorf("%d round trips, %d starts, %d callbacks:\n%s", a, b, c, strings.Join(n.visited(), "\n"))
	}
	cs := p.cookies(hubHost)
	if len(cs) != 1 {
		t.Fatalf("cookies %+v", cs)
	}
	c := cs[0]
	if c.Name != "__Host-vk-session" || c.SameSite != "Lax" || !c.Secure || !c.HTTPOnly || c.Path != "/" || c.Domain != hubHost {
		t.Errorf("the session's cookie is %+v", c)
	}
	if left := time.Until(time.Unix(int64(c.Expires), 0)); left > 12*time.Hour || left < 11*time.Hour {
		t.Errorf("the cookie lasts %v", left)
	}
	if log := h.log.String(); strings.Contains(log, c.Value) || strings.Contains(n.text(), c.Value) {
		t.Error("the session's secret is in the log or on the page")
	}
	// Links of another site's, and its frames.
	chat := serveChat(t, origin()+path)
	m := p.tab()
	m.open(chat)
	m.shows("a link from another site", m.press("#link"), origin()+path, http.StatusOK, "build-123")
	m.open(chat + "/frame")
	if got := m.complaints(); !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "frame-ancestors") || strings.Contains(s, "403") }) {
		t.Errorf("a page of another site's shows ours in a frame: %q", got)
	}
	if got := world.provider.count("GET /auth") - authorized; got != 1 {
		t.Errorf("%d round trips", got)
	}
	n.clean("401")
	if audit := h.must("audit"); !strings.Contains(audit, "(operator, alice@example.com)  signed in: through "+providerHost) {
		t.Errorf("the audit log:\n%s", audit)
	}
}

// serveChat is another site's page with a link to ours, and one with a frame.
func serveChat(t *testing.T, to string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		if r.URL.Path == "/frame" {
			fmt.Fprintf(w, `<!doctype html><title>chat</title><iframe src="%s"></iframe>`, to)
			return
		}
		fmt.Fprintf(w, `<!doctype html><title>chat</title><link rel="icon" href="data:,"><a id="link" href="%s">look at this job</a>`, to)
	})}
	go func() { _ = s.ServeTLS(l, world.cert, world.key) }()
	t.Cleanup(func() { s.Close() })
	return fmt.Sprintf("https://%s:%d", chatHost, l.Addr().(*net.TCPAddr).Port)
}

// TestReturnAddress: none leads off the hub's site, in a browser's own reading.
func TestReturnAddress(t *testing.T) {
	startHub(t, "default_role = \"viewer\"")
	n := newProfile(t, "").tab()
	n.shows("a plain path", n.signIn("/jobs?before=100", "bob"), origin()+"/jobs?before=100", http.StatusOK, "build-99")
	// A browser's reading of some; the unit tests have many more.
	for _, to := range []string{"//evil.test", `/\evil.test`, `\\evil.test`, "https:evil", "https://evil.test/", "/\t/evil.test", "/%5Cevil.test", "/%09/evil.test", "/jobs/..//evil.test", "javascript:alert(1)", "/auth/login"} {
		n.shows(fmt.Sprintf("to=%q", to), n.open(origin()+"/auth/login?to="+url.QueryEscape(to)), origin()+"/", http.StatusOK, "Nodes")
	}
	// What a browser asks for itself: the button leads to a plain path.
	m := newProfile(t, "").tab()
	for _, path := range []string{"//evil.test/", "/%5Cevil.test", "/jobs/%2e%2e/%2e%2e//evil.test"} {
		m.open(origin() + path)
		m.press("#sign-in")
		s := m.open(origin() + "/") // away again
		for _, v := range m.visited() {
			if strings.Contains(v, "evil") && !strings.HasPrefix(v, "GET "+origin()+"/") {
				t.Errorf("%s: the browser was sent to %s", path, v)
			}
		}
		if s.URL != origin()+"/" {
			t.Errorf("%s: at %s", path, s.URL)
		}
	}
	if got := m.signIn("/%2F%2Fevil.test", "carol"); got.URL != origin()+"/" {
		t.Errorf("signed in from an odd path, at %s", got.URL)
	}
}

// TestTabs: two tabs sign in at once, and each ends where it began.
func TestTabs(t *testing.T) {
	startHub(t, "default_role = \"viewer\"")
	p := newProfile(t, "")
	a, b := p.tab(), p.tab()
	for i, n := range []*tab{a, b} {
		n.open(origin() + "/jobs/" + jobID(11+i))
		n.press("#sign-in")
	}
	a.shows("the first tab", a.person("alice"), origin()+"/jobs/"+jobID(11), http.StatusOK, "build-11")
	// The second one has the provider's login page open still.
	b.shows("the second tab", b.person("alice"), origin()+"/jobs/"+jobID(12), http.StatusOK, "build-12")
}

// TestBack: the back button shows pages, and begins nothing.
func TestBack(t *testing.T) {
	startHub(t, "default_role = \"viewer\"")
	n := newProfile(t, "").tab()
	path := "/jobs/" + jobID(5)
	n.shows("signed in", n.signIn(path, "alice"), origin()+path, http.StatusOK, "build-5")
	before := len(n.visited())
	for range 3 {
		n.back()
	}
	if got := n.visited()[before:]; len(got) > 12 {
		t.Errorf("the back button makes the browser go\n%s", strings.Join(got, "\n"))
	}
	n.shows("then", n.open(origin()+path), origin()+path, http.StatusOK, "build-5")
	// The answer of the provider's, again.
	var answer string
	for _, v := range n.visited() {
		if strings.Contains(v, "/auth/callback?") {
			answer = strings.TrimPrefix(v, "GET ")
		}
	}
	n.shows("the answer again", n.open(answer), answer, http.StatusBadRequest, "This browser is signed in already")
}

// TestExpired: more than 5 minutes at the provider end in words, and the next
// try at the page that was asked for.
func TestExpired(t *testing.T) {
	h := startHub(t, "default_role = \"viewer\"")
	n := newProfile(t, "").tab()
	path := "/jobs/" + jobID(9)
	n.open(origin() + path)
	n.press("#sign-in")
	h.later(auth.FlowTTL + time.Second)
	s := n.person("alice")
	n.shows("late", s, s.URL, http.StatusBadRequest, "took more than 5 minutes")
	if !strings.HasPrefix(s.URL, origin()+"/auth/callback") || n.starts("/auth/login") != 1 {
		t.Errorf("at %s after\n%s", s.URL, strings.Join(n.visited(), "\n"))
	}
	// The provider knows who it is by now.
	n.shows("again", n.press("#sign-in"), origin()+path, http.StatusOK, "build-9")
	h.later(12 * time.Hour)
	n.shows("12 hours later", n.open(origin()+path), origin()+path, http.StatusUnauthorized, "Sign in with")
}

// TestNoCookies: a browser that keeps no cookies of the hub's ends at a page with
// words, each time somebody tries.
func TestNoCookies(t *testing.T) {
	startHub(t, "default_role = \"viewer\"")
	p := newProfile(t, hubHost)
	n := p.tab()
	s := n.signIn("/jobs", "alice")
	for i := range 2 {
		n.shows("without cookies", s, s.URL, http.StatusBadRequest, "does not keep cookies")
		if got := n.starts("/auth/login"); got != i+1 || !strings.HasPrefix(s.URL, origin()+"/auth/callback") {
			t.Errorf("at %s after %d starts:\n%s", s.URL, got, strings.Join(n.visited(), "\n"))
		}
		if i == 0 {
			s = n.press("#sign-in")
		}
	}
	if cs := p.cookies(hubHost); len(cs) != 0 {
		t.Errorf("it has cookies after all: %+v", cs)
	}
}

// TestDenied: declined at the provider, and signed in there but nobody here.
func TestDenied(t *testing.T) {
	h := startHub(t, "")
	h.must("accounts", "grant", "bob@example.com", "--role", "viewer")
	n := newProfile(t, "").tab()
	n.open(origin() + "/jobs")
	n.press("#sign-in")
	s := n.press("a[href$='/abort']")
	n.shows("declined", s, s.URL, http.StatusForbidden, "it was declined there")
	n.press("#sign-in")
	s = n.person("alice")
	n.shows("no grant", s, s.URL, http.StatusForbidden, "alice@example.com may not sign in")
	if n.starts("/auth/login") != 2 {
		t.Errorf("it came by\n%s", strings.Join(n.visited(), "\n"))
	}
	if audit := h.must("audit"); !strings.Contains(audit, "sign-in refused") {
		t.Errorf("the audit log:\n%s", audit)
	}
	h.must("accounts", "grant", "alice@example.com", "--role", "viewer")
	n.shows("granted meanwhile", n.press("#sign-in"), origin()+"/jobs", http.StatusOK, "build-130")
}

// TestProviderDown: a page of ours says so, and the same button works once the
// provider is back.
func TestProviderDown(t *testing.T) {
	startHub(t, "default_role = \"viewer\"")
	world.provider.stop()
	world.provider = nil
	n := newProfile(t, "").tab()
	n.open(origin() + "/jobs")
	s := n.press("#sign-in")
	n.shows("down", s, s.URL, http.StatusBadGateway, "cannot be used for signing in just now")
	if got := len(n.visited()); got != 2 {
		t.Errorf("%d visits", got)
	}
	ready(t)
	err := wait(t.Context(), "the button leads to the provider", func() bool { return strings.HasPrefix(n.press("#sign-in").URL, issuer()) })
	if err != nil {
		t.Fatal(err)
	}
	n.shows("up again", n.person("alice"), origin()+"/jobs", http.StatusOK, "build-130")
}

// TestSignOut: out, and in again by the button alone.
func TestSignOut(t *testing.T) {
	h := startHub(t, "default_role = \"viewer\"")
	p := newProfile(t, "")
	n := p.tab()
	n.signIn("/jobs", "alice")
	n.shows("out", n.press("#sign-out"), origin()+"/login?out", http.StatusOK, "You are signed out here")
	if cs := p.cookies(hubHost); len(cs) != 0 {
		t.Errorf("cookies are left: %+v", cs)
	}
	n.shows("the page", n.open(origin()+"/jobs"), origin()+"/jobs", http.StatusUnauthorized, "Sign in with")
	n.shows("in again", n.press("#sign-in"), origin()+"/jobs", http.StatusOK, "build-130")
	id := strings.Fields(strings.Split(h.must("ui", "sessions"), "\n")[1])[0]
	h.must("ui", "logout", id)
	n.shows("ended by an operator", n.open(origin()+"/jobs"), origin()+"/jobs", http.StatusUnauthorized, "Sign in with")
}

// TestLinkAndPages: a sign-in link, the pages behind it, the users, and a job
// with a hostile name.
func TestLinkAndPages(t *testing.T) {
	h := startHub(t, "")
	link := strings.TrimSpace(h.must("ui", "login", "--role", "operator"))
	n := newProfile(t, "").tab()
	for range 2 {
		n.shows("a link", n.open(link), link, http.StatusOK, "Sign in")
	}
	n.shows("spent", n.press("#use-link"), origin()+"/", http.StatusOK, "No node has joined")
	n.shows("jobs", n.open(origin()+"/jobs"), origin()+"/jobs", http.StatusOK, "build-130")
	n.shows("older ones", n.press("#older"), origin()+"/jobs?before=31", http.StatusOK, "<script>alert(1)</script>")
	n.shows("a hostile name", n.open(origin()+"/jobs/"+jobID(7)), origin()+"/jobs/"+jobID(7), http.StatusOK, "<script>alert(1)</script>")
	if n.has("main script") || n.has("main img") {
		t.Error("the name is more than text")
	}
	n.shows("no such job", n.open(origin()+"/jobs/123"), origin()+"/jobs/123", http.StatusNotFound, "no job")
	n.open(origin() + "/users")
	grant := func(address, role string) state {
		n.ask(nil, "fill", "at", "input[name=address]:not([type=hidden])", "text", address)
		n.ask(nil, "select", "at", "select[name=role]", "text", role)
		return n.press("#grant")
	}
	n.shows("granted", grant("Alice@example.com", "operator"), origin()+"/users", http.StatusOK, "alice@example.com")
	n.shows("asked", n.press("button[value=none]"), origin()+"/users", http.StatusOK, "Revoke the grant of alice@example.com")
	n.shows("the last operator", n.press("#confirm"), origin()+"/users", http.StatusConflict, "the last operator")
	n.open(origin() + "/users")
	grant("bob@example.com", "operator")
	n.press("tr:has-text('alice') button[value=none]")
	if s := n.press("#confirm"); s.Status != http.StatusOK || strings.Contains(n.text(), "alice@") {
		t.Errorf("revoked: %+v\n%s", s, n.text())
	}
	if out := h.must("accounts"); strings.Contains(out, "alice@") || !strings.Contains(out, "bob@example.com") {
		t.Errorf("vk-hub accounts:\n%s", out)
	}
	n.clean("404", "409")
	m := newProfile(t, "").tab()
	m.shows("the link again", m.open(link), link, http.StatusForbidden, "was used already")
}
