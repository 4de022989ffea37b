package ui_test

import (
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
)

// TestRequests: what is refused before it reaches a page, and what every answer
// carries.
func TestRequests(t *testing.T) {
	b := start(t, 1, "build", hub.Viewer)
	c, _ := b.signedIn("a@x")
	try := func(method string, h map[string]string) int {
		r, _ := http.NewRequest(method, origin+"/jobs", nil)
		for k, v := range h {
			if k == "Host" {
				r.Host = v
			}
			r.Header.Set(k, v)
		}
		p := c.do(r)
		for k, want := range map[string]string{"Content-Security-Policy": "frame-ancestors 'none'", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin", "Cache-Control": "no-store",
			"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin", "Strict-Transport-Security": "max-age="} {
			if !strings.Contains(p.Header.Get(k), want) {
				t.Errorf("%v: %s is %q", h, k, p.Header.Get(k))
			}
		}
		if csp := p.Header.Get("Content-Security-Policy"); strings.Contains(csp, "unsafe") {
			t.Errorf("policy %q", csp)
		}
		return p.StatusCode
	}
	link := map[string]string{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
	with := func(k, v string) map[string]string {
		m := map[string]string{k: v}
		for o, w := range link {
			if o != k {
				m[o] = w
			}
		}
		return m
	}
	for _, tt := range []struct {
		method string
		h      map[string]string
		want   int
	}{
		{"GET", nil, 200}, {"HEAD", nil, 200}, {"GET", link, 200}, {"GET", with("Sec-Fetch-Site", "same-site"), 200}, {"GET", map[string]string{"Sec-Fetch-Site": "none"}, 200},
		{"GET", with("Sec-Fetch-Dest", "iframe"), 403}, {"GET", with("Sec-Fetch-Mode", "no-cors"), 403}, {"GET", map[string]string{"Sec-Fetch-Site": "cross-site"}, 403}, {"POST", link, 403},
		{"GET", map[string]string{"Host": "evil.test"}, 421}, {"GET", map[string]string{"Host": "hub.example.test:444"}, 421}, {"GET", map[string]string{"Host": "HUB.example.test"}, 200},
	} {
		if got := try(tt.method, tt.h); got != tt.want {
			t.Errorf("%s %v: %d, want %d", tt.method, tt.h, got, tt.want)
		}
	}
	u, _ := url.Parse(origin + "/x") // two session cookies are none
	r, _ := http.NewRequest("GET", origin+"/jobs", nil)
	r.Header.Set("Cookie", "__Host-vk-session="+c.jar.Cookies(u)[0].Value) // the jar adds another
	if p := c.do(r); p.StatusCode != http.StatusUnauthorized {
		t.Errorf("two session cookies (%v): %s", c.jar.Cookies(u), p.Status)
	}
	if p := c.get("/nowhere"); p.StatusCode != http.StatusNotFound {
		t.Errorf("no such page: %s", p.Status)
	}
	if p := c.get("/jobs/123"); p.StatusCode != http.StatusNotFound || !strings.Contains(p.text, "no job") {
		t.Errorf("no such job: %s", p.Status)
	}
	if p := c.get("/static/ui.css"); p.StatusCode != 200 || !strings.HasPrefix(p.Header.Get("Content-Type"), "text/css") {
		t.Errorf("the style: %s, %s", p.Status, p.Header.Get("Content-Type"))
	}
	if p := c.get("/static/"); strings.Contains(p.text, "ui.css") && p.StatusCode == 200 {
		t.Error("the files are listed")
	}
}

// TestHostileNames: what a project calls its job is text, wherever it is shown.
func TestHostileNames(t *testing.T) {
	const name = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\"'`{{.CSRF}}\u202e\x1b[31m\r\n"
	b := start(t, 1, name, hub.Viewer)
	c, _ := b.signedIn(`a@x`)
	for _, path := range []string{"/jobs", "/jobs/" + jobID(1)} {
		p := c.get(path)
		if p.StatusCode != 200 || !strings.Contains(p.text, "&lt;script&gt;alert(1)&lt;/script&gt;") {
			t.Errorf("%s: %s, and the name is not there", path, p.Status)
		}
		for _, bad := range []string{"<script", "<img", "onerror=alert(2)>", "\u202e", "\x1b", "href=\"javascript"} {
			if strings.Contains(p.text, bad) {
				t.Errorf("%s has %q", path, bad)
			}
		}
	}
}

func TestJobsPages(t *testing.T) {
	b := start(t, 250, "build", hub.Viewer)
	c, _ := b.signedIn("a@x")
	older := regexp.MustCompile(`id="older" href="([^"]*)"`)
	seen := 0
	for path := "/jobs"; path != ""; {
		p := c.get(path)
		n := strings.Count(p.text, `href="/jobs/0`)
		if n == 0 || n > 100 {
			t.Fatalf("%s has %d jobs", path, n)
		}
		if first := jobID(250 - seen); !strings.Contains(p.text, first) {
			t.Errorf("%s does not begin with %s", path, first)
		}
		seen += n
		path = first(older, p.text)
	}
	if seen != 250 {
		t.Errorf("%d jobs", seen)
	}
	for _, q := range []string{"x", "-1", "99999999999999999999"} {
		if p := c.get("/jobs?before=" + q); p.StatusCode != http.StatusBadRequest {
			t.Errorf("before=%s: %s", q, p.Status)
		}
	}
}

func TestUsers(t *testing.T) {
	b := start(t, 0, "", hub.Viewer)
	viewer, vcsrf := b.signedIn("v@x")
	if p := viewer.get("/users"); p.StatusCode != http.StatusForbidden || strings.Contains(viewer.get("/").text, "/users") {
		t.Errorf("a viewer: %s", p.Status)
	}
	form := func(csrf string, kv ...string) url.Values {
		v := url.Values{"csrf": {csrf}}
		for i := 0; i < len(kv); i += 2 {
			v.Set(kv[i], kv[i+1])
		}
		return v
	}
	if p := viewer.post("/users", form(vcsrf, "address", "v@x", "role", "operator"), nil); p.StatusCode != http.StatusForbidden || len(b.Snapshot().Grants) != 0 {
		t.Errorf("a viewer grants: %s", p.Status)
	}
	b.grant("op@x", hub.Operator)
	op, csrf := b.signedIn("op@x")
	set := func(kv ...string) page { t.Helper(); return op.post("/users", form(csrf, kv...), nil) }
	if p := set("address", " New@X ", "role", "operator"); p.at != origin+"/users" || p.StatusCode != 200 || !strings.Contains(p.text, "new@x") || !strings.Contains(p.text, "viewers, by default_role") {
		t.Errorf("granting: %s\n%s", p.Status, p.text)
	}
	if g := b.Snapshot().Grants["new@x"]; g.Role != hub.Operator || !strings.HasPrefix(g.Actor, "ui session ") || !strings.Contains(g.Actor, "op@x") {
		t.Errorf("%+v", g)
	}
	for _, bad := range [][]string{{"address", "x"}, {"address", "x", "role", "viewer"}, {"address", "*", "role", "operator"}, {"address", "n@x", "role", "root"}, {"address", "nobody@x", "role", "none"}} {
		if p := set(bad...); p.StatusCode < 400 {
			t.Errorf("%q: %s", bad, p.Status)
		}
	}
	// What takes something is asked first, and the answer is of what was asked.
	asked := regexp.MustCompile(`name="(address|role|confirm|ends)" value="([^"]*)"`)
	question := func(address, role string) url.Values {
		t.Helper()
		p := set("address", address, "role", role)
		v := form(csrf)
		for _, m := range asked.FindAllStringSubmatch(p.text, -1) {
			v.Set(m[1], html.UnescapeString(m[2]))
		}
		if v.Get("confirm") == "" {
			t.Fatalf("nothing is asked: %s\n%s", p.Status, p.text)
		}
		return v
	}
	q := question("new@x", "viewer")
	if b.Snapshot().Grants["new@x"].Role != hub.Operator {
		t.Error("changed before the answer")
	}
	for k, v := range map[string]string{"address": "op@x", "role": "none", "confirm": strings.Repeat("0", 64), "ends": "99999999999"} {
		w, _ := url.ParseQuery(q.Encode())
		w.Set(k, v)
		if p := op.post("/users", w, nil); p.StatusCode != http.StatusConflict {
			t.Errorf("another %s: %s", k, p.Status)
		}
	}
	later := question("new@x", "none")
	if p := op.post("/users", q, nil); p.StatusCode != 200 || b.Snapshot().Grants["new@x"].Role != hub.Viewer {
		t.Errorf("answered: %s", p.Status)
	}
	if p := op.post("/users", later, nil); p.StatusCode != http.StatusConflict {
		t.Errorf("an answer to what was: %s", p.Status)
	}
	late := question("new@x", "none")
	b.later(10 * time.Minute)
	if p := op.post("/users", late, nil); p.StatusCode != http.StatusConflict {
		t.Errorf("an answer 10 minutes late: %s", p.Status)
	}
	// The last operator stays, also by a grant that is none of a question's.
	if p := op.post("/users", question("op@x", "none"), nil); p.StatusCode != http.StatusConflict || !strings.Contains(p.text, "last operator") {
		t.Errorf("the last operator: %s", p.Status)
	}
	if p := op.post("/users", question("new@x", "none"), nil); p.StatusCode != 200 || strings.Contains(p.text, "new@x") {
		t.Errorf("revoked: %s", p.Status)
	}
	b.grant("o2@x", hub.Operator)
	b.grant("op@x", hub.Viewer)
	if p := op.get("/users"); p.StatusCode != http.StatusUnauthorized {
		t.Errorf("lowered meanwhile: %s", p.Status)
	}
}

// TestForms: a body that is too large, or never comes, ends.
func TestForms(t *testing.T) {
	b := start(t, 0, "", hub.Viewer)
	if p := b.browser().post("/login", url.Values{"t": {strings.Repeat("x", 1<<20)}}, nil); p.StatusCode != http.StatusBadRequest {
		t.Errorf("a large form: %s", p.Status)
	}
}
