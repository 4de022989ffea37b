package node_test

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
)

var token = strings.Repeat("ab", wire.TokenLen)

// enrollHub is a hub's enrollment over TLS: it checks the signature over the
// connection and gives each key one id.
type enrollHub struct {
	*httptest.Server
	ca []byte

	mu     sync.Mutex
	keys   map[string]string
	answer func(w http.ResponseWriter) bool // instead of its own
}

func newEnrollHub(t *testing.T, maxTLS uint16) *enrollHub {
	h := &enrollHub{keys: map[string]string{}}
	h.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.answer != nil && h.answer(w) {
			return
		}
		var req wire.EnrollRequest
		b, _ := io.ReadAll(io.LimitReader(r.Body, 1<<16))
		if err := json.Unmarshal(b, &req); err != nil || req.Check() != nil || r.Method != "POST" || r.URL.Path != wire.EnrollPath {
			http.Error(w, "bad", 400)
			return
		}
		channel, err := wire.Channel(r.TLS)
		key, _ := hex.DecodeString(req.PublicKey)
		sig, _ := hex.DecodeString(req.Signature)
		if err != nil || !ed25519.Verify(key, wire.EnrollPayload(req.Token, key, channel), sig) {
			refuse(w, wire.BadSignature)
			return
		}
		id, again := h.keys[req.PublicKey]
		if !again {
			id = wire.NewID()
			h.keys[req.PublicKey] = id
		}
		json.NewEncoder(w).Encode(wire.EnrollReply{Node: id, Hub: hubID, Again: again})
	}))
	h.Config.ErrorLog = log.New(io.Discard, "", 0)
	h.TLS = &tls.Config{MaxVersion: maxTLS}
	h.StartTLS()
	t.Cleanup(h.Close)
	h.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw})
	return h
}

const hubID = "0123456789abcdef0123456789abcdef"

func (h *enrollHub) set(answer func(http.ResponseWriter) bool) {
	h.mu.Lock()
	h.answer = answer
	h.mu.Unlock()
}

func refuse(w http.ResponseWriter, code wire.Refusal) {
	w.WriteHeader(403)
	json.NewEncoder(w).Encode(wire.EnrollRefused{Code: code, Message: "by the hub"})
}

func TestParseHub(t *testing.T) {
	for s, ok := range map[string]bool{
		"https://hub.example.com": true, "https://hub.example.com:8443/": true, "http://127.0.0.1:8443": true, "http://[::1]:1": true, "http://localhost": true,
		"http://hub.example.com": false, "http://127.0.0.1.example.com": false, "http://10.0.0.1": false, "hub.example.com": false, "https://": false,
		"ftp://hub": false, "https://hub/x": false, "https://hub?x=1": false, "https://hub#x": false, "https://u:geheim@hub": false, "https://hub:port:geheim@x": false, "": false, "https://[::1": false,
	} {
		u, err := node.ParseHub(s)
		if (err == nil) != ok {
			t.Errorf("ParseHub(%q) = %v, %v", s, u, err)
		}
		if err != nil && (strings.Contains(err.Error(), "geheim") || fault.KindOf(err) != fault.Usage || fault.HintOf(err) == "") {
			t.Errorf("ParseHub(%q): %v", s, err)
		}
	}
}

// TestJoin: a host enrolls, is refused a second time, and enrolls anew.
func TestJoin(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1") // nobody is there
	t.Setenv("https_proxy", "http://127.0.0.1:1")
	h := newEnrollHub(t, 0)
	state := t.TempDir()
	o := node.JoinOptions{StateDir: state, Hub: h.URL, Token: token + "\n", CA: h.ca, Hostname: "ci-7", VK: "test"}
	j, err := node.Join(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(state, node.Dir)
	e, err := node.LoadEnrollment(dir)
	if err != nil || e.Node != j.Node || e.Hub != hubID || e.URL != h.URL || string(e.CA) != string(h.ca) || j.Again || !e.Key.Equal(j.Key) {
		t.Fatalf("%+v, %v", e, err)
	}
	for _, f := range []string{"", node.KeyFile, node.EnrollmentFile, node.CAFile} {
		if st, err := os.Stat(filepath.Join(dir, f)); err != nil || st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: %v, %v", f, st.Mode(), err)
		}
		if b, _ := os.ReadFile(filepath.Join(dir, f)); f != "" && strings.Contains(string(b), token) {
			t.Errorf("%s holds the token", f)
		}
	}
	if _, err = node.Join(t.Context(), o); fault.KindOf(err) != fault.Conflict || !strings.Contains(err.Error(), j.Node) || !strings.Contains(fault.HintOf(err), "--replace") {
		t.Errorf("a second time: %v", err)
	}

	// The hub refuses: the old identity is where the error says.
	o.Replace = true
	h.set(func(w http.ResponseWriter) bool { refuse(w, wire.TokenUsed); return true })
	o.Now = func() time.Time { return time.Unix(1780000000, 0) }
	_, err = node.Join(t.Context(), o)
	aside := filepath.Join(state, "node.replaced-20260528T202640Z")
	if node.RefusalOf(err) != wire.TokenUsed || !strings.Contains(err.Error(), aside) || fault.HintOf(err) == "" {
		t.Fatalf("%v", err)
	}
	if old, err := node.LoadEnrollment(aside); err != nil || old.Node != j.Node {
		t.Errorf("%+v, %v", old, err)
	}
	if err := errors.Join(os.RemoveAll(dir), os.Rename(aside, dir)); err != nil {
		t.Fatal(err)
	}
	h.set(nil)
	o.Now = nil
	again, err := node.Join(t.Context(), o)
	if err != nil || again.Node == j.Node || again.OldNode != j.Node || again.Key.Equal(j.Key) || again.Again {
		t.Fatalf("%+v, %v", again, err)
	}
	if old, err := node.LoadEnrollment(again.Replaced); err != nil || old.Node != j.Node {
		t.Errorf("the old identity: %+v, %v", old, err)
	}
}

// TestLostAnswer: the key that was made stays, and gets its id back.
func TestLostAnswer(t *testing.T) {
	h := newEnrollHub(t, 0)
	o := node.JoinOptions{StateDir: t.TempDir(), Hub: h.URL, Token: token, CA: h.ca}
	lost := true
	h.set(func(w http.ResponseWriter) bool {
		if !lost {
			return false
		}
		c, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			c.Close()
		}
		return true
	})
	if _, err := node.Join(t.Context(), o); fault.KindOf(err) != fault.Unavailable {
		t.Fatalf("%v", err)
	}
	key, err := os.ReadFile(filepath.Join(o.StateDir, node.Dir, node.KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	lost = false
	seed, _ := hex.DecodeString(strings.TrimSpace(string(key)))
	h.keys[hex.EncodeToString(ed25519.NewKeyFromSeed(seed).Public().(ed25519.PublicKey))] = strings.Repeat("7", 32)
	h.mu.Unlock()
	j, err := node.Join(t.Context(), o)
	if err != nil || !j.Again || j.Node != strings.Repeat("7", 32) {
		t.Errorf("%+v, %v", j, err)
	}
}

// TestJoinRefused: every refusal, in words, with what to do.
func TestJoinRefused(t *testing.T) {
	h := newEnrollHub(t, 0)
	old := newEnrollHub(t, tls.VersionTLS12)
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	var moved bool
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { moved = true }))
	defer other.Close()
	o := node.JoinOptions{Hub: h.URL, Token: token, CA: h.ca}
	with := func(fn func(*node.JoinOptions)) node.JoinOptions { c := o; fn(&c); return c }
	says := func(fn func(http.ResponseWriter)) func(http.ResponseWriter) bool {
		return func(w http.ResponseWriter) bool { fn(w); return true }
	}
	code := func(c wire.Refusal) func(http.ResponseWriter) bool {
		return says(func(w http.ResponseWriter) { refuse(w, c) })
	}
	for name, c := range map[string]struct {
		o      node.JoinOptions
		answer func(http.ResponseWriter) bool
		words  string
		hint   string
		kind   fault.Kind
	}{
		"TLS 1.2":       {with(func(o *node.JoinOptions) { o.Hub, o.CA = old.URL, old.ca }), nil, "protocol version", "TLS 1.3", fault.Unavailable},
		"unknown CA":    {with(func(o *node.JoinOptions) { o.CA = nil }), nil, "certificate", "--ca", fault.Unavailable},
		"no CA in file": {with(func(o *node.JoinOptions) { o.CA = []byte("hello") }), nil, "no certificate in PEM", "", fault.Usage},
		"no TLS there":  {with(func(o *node.JoinOptions) { o.Hub = strings.Replace(plain.URL, "http:", "https:", 1) }), nil, "enrolling with", "", fault.Unavailable},
		"not a hub":     {with(func(o *node.JoinOptions) { o.Hub = plain.URL }), nil, "HTTP 404", "", fault.Unavailable},
		"bad token":     {with(func(o *node.JoinOptions) { o.Token = "GEHEIM" }), nil, "not 64 lowercase hex", "vk-hub token create", fault.Usage},
		"redirect":      {o, says(func(w http.ResponseWriter) { w.Header().Set("Location", other.URL); w.WriteHeader(303) }), "redirect", "itself listens", fault.Denied},
		"nonsense":      {o, says(func(w http.ResponseWriter) { io.WriteString(w, "{}") }), "does not answer as a hub", "", fault.Unavailable},
		"invalid":       {o, code(wire.TokenInvalid), "did not give out this token", "token create", fault.Denied},
		"used":          {o, code(wire.TokenUsed), "used already", "token create", fault.Denied},
		"expired":       {o, code(wire.TokenExpired), "expired", "token create", fault.Denied},
		"removed":       {o, code(wire.KeyRevoked), "removed", "--replace", fault.Denied},
		"signature":     {o, code(wire.BadSignature), "signature", "proxy", fault.Denied},
		"busy":          {o, code(wire.Overloaded), "busy", "", fault.Unavailable},
		"a later word":  {o, code("eclipse"), "eclipse", "", fault.Unavailable},
	} {
		h.set(c.answer)
		c.o.StateDir = t.TempDir()
		_, err := node.Join(t.Context(), c.o)
		if err == nil || !strings.Contains(err.Error(), c.words) || !strings.Contains(fault.HintOf(err), c.hint) || fault.KindOf(err) != c.kind {
			t.Errorf("%s: %v (hint %q, %s)", name, err, fault.HintOf(err), fault.KindOf(err))
			continue
		}
		if strings.Contains(err.Error(), token) || strings.Contains(err.Error(), "GEHEIM") {
			t.Errorf("%s: the error holds the token", name)
		}
		if _, err := node.LoadEnrollment(filepath.Join(c.o.StateDir, node.Dir)); err == nil {
			t.Errorf("%s: the host is enrolled", name)
		}
	}
	if moved {
		t.Error("the redirect was followed")
	}
	state := t.TempDir()
	dir, err := node.Own(state, true)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := node.Hold(t.Context(), dir, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	o.StateDir = state
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := node.Join(ctx, o); fault.KindOf(err) != fault.Busy || !strings.Contains(fault.HintOf(err), "--service") {
		t.Errorf("beside a running node: %v", err)
	}
}

// TestBound: over a real TLS WebSocket both ends derive the same binding, and
// a proxy that terminates TLS in between makes it differ.
func TestBound(t *testing.T) {
	channels := make(chan []byte, 4)
	hub := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		channel, err := wire.Channel(r.TLS)
		c, err2 := wsx.Accept(w, r)
		if err := errors.Join(err, err2); err != nil {
			t.Error(err)
			return
		}
		channels <- channel
		c.Read(r.Context())
		c.CloseNow()
	}))
	hub.StartTLS()
	defer hub.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hub.Certificate().Raw})

	dial := func(url string) []byte {
		t.Helper()
		u, err := node.ParseHub(url)
		if err != nil {
			t.Fatal(err)
		}
		c, err := (&node.HubDialer{URL: u, CA: ca}).Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer c.CloseNow()
		b, err := c.Channel()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	mine := dial(hub.URL)
	if theirs := <-channels; len(mine) != wire.ChannelLen || string(mine) != string(theirs) {
		t.Errorf("%x and %x", mine, theirs)
	}
	if again := dial(hub.URL); string(again) == string(mine) || string(<-channels) != string(again) {
		t.Error("two connections have one binding")
	}

	// The proxy has the hub's certificate, as one that terminates TLS does.
	front, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: hub.TLS.Certificates})
	if err != nil {
		t.Fatal(err)
	}
	defer front.Close()
	go func() {
		for {
			in, err := front.Accept()
			if err != nil {
				return
			}
			out, err := tls.Dial("tcp", hub.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}) // the test's own hub
			if err != nil {
				in.Close()
				return
			}
			go func() { io.Copy(out, in); out.Close() }()
			go func() { io.Copy(in, out); in.Close() }()
		}
	}()
	proxied := dial("https://" + front.Addr().String())
	if theirs := <-channels; string(proxied) == string(theirs) {
		t.Error("a proxy that terminates TLS keeps the binding")
	}
	// TLS 1.2 gets no session.
	weak := httptest.NewUnstartedServer(http.NotFoundHandler())
	weak.TLS = &tls.Config{MaxVersion: tls.VersionTLS12}
	weak.Config.ErrorLog = log.New(io.Discard, "", 0)
	weak.StartTLS()
	defer weak.Close()
	u, _ := node.ParseHub(weak.URL)
	if c, err := (&node.HubDialer{URL: u, CA: ca}).Dial(t.Context()); err == nil || !strings.Contains(err.Error(), "protocol version") {
		t.Errorf("TLS 1.2: %v, %v", c, err)
	}
	// A refused upgrade is an error to try again, with the status in it.
	full := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }))
	defer full.Close()
	u, _ = node.ParseHub(full.URL)
	d := &node.HubDialer{URL: u, Net: func(ctx context.Context, network, addr string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}
	if _, err := d.Dial(t.Context()); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("503: %v", err)
	}
}
