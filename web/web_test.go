package web_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/outstore"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/wsx"
	"virtkit/web"
)

// certificate makes a self-signed one for loopback, and what trusts it.
func certificate(t *testing.T) (*web.Certificate, *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "hub"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	pk, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c, k := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for f, b := range map[string]*pem.Block{c: {Type: "CERTIFICATE", Bytes: der}, k: {Type: "PRIVATE KEY", Bytes: pk}} {
		if err := os.WriteFile(f, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cert, err := web.LoadCertificate(c, k, logx.ForTest(t))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return cert, &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
}

// bench is a hub that listens.
type bench struct {
	*hub.Hub
	t     *testing.T
	nodes *web.Nodes
	addr  string
	tls   *tls.Config
	admin *hubadmin.Client
	sock  string // the admin socket
}

func start(t *testing.T, secure bool) *bench {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out, err := outstore.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h, err := hub.New(ctx, hubtest.NewMemory(), hub.Options{Log: logx.Discard(), Jobs: hub.JobOptions{Outputs: out}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{Hub: h, t: t, nodes: web.NewNodes(h, logx.Discard(), l), addr: l.Addr().String()}
	var cert *web.Certificate
	if secure {
		cert, b.tls = certificate(t)
	}
	sock := filepath.Join(t.TempDir(), "admin.sock")
	al, err := web.ListenAdmin(sock)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(sock); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the admin socket: %v, %v", info.Mode(), err)
	}
	b.admin, b.sock = hubadmin.Dial(sock), sock
	a := &web.Admin{Hub: h, Log: logx.Discard(), Backup: func(_ context.Context, file string) error { return fault.New(fault.Conflict, file).Hint("hinted") }}
	writing, stop := context.WithCancel(context.Background())
	ended := make(chan error, 3)
	wrote := make(chan error, 2)
	go func() { wrote <- h.Run(writing) }()
	go func() { wrote <- out.Run(writing, h.Synced) }()
	go func() { ended <- b.nodes.Serve(ctx, cert) }()
	go func() { ended <- a.Serve(ctx, al) }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		stop()
		for range 2 {
			if err := <-wrote; err != nil {
				t.Error(err)
			}
		}
	})
	return b
}

func (b *bench) url(scheme, path string) string {
	if b.tls != nil {
		scheme += "s"
	}
	return scheme + "://" + b.addr + path
}

func (b *bench) ctx() context.Context {
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	b.t.Cleanup(cancel)
	return ctx
}

// enroll joins as a node would: on a connection of its own.
func (b *bench) enroll(name string) hubtest.Identity {
	b.t.Helper()
	token, err := b.admin.Token(b.ctx(), time.Hour)
	if err != nil {
		b.t.Fatal(err)
	}
	i := hubtest.NewKey()
	status, reply := b.post(func(channel []byte) any { return i.EnrollRequest(token, name, channel) })
	var r wire.EnrollReply
	if err := json.Unmarshal(reply, &r); err != nil || status != 200 {
		b.t.Fatalf("enrollment: %d %s", status, reply)
	}
	i.ID = r.Node
	return i
}

// post sends a body made for its connection to the enrollment's path.
func (b *bench) post(body func(channel []byte) any) (int, []byte) {
	b.t.Helper()
	return b.postTo(wire.EnrollPath, body)
}

func hubGitLab(action, url, name string) hubadmin.GitLabRequest {
	return hubadmin.GitLabRequest{Action: action, URL: url, Name: name}
}

func (b *bench) postTo(path string, body func(channel []byte) any) (int, []byte) {
	b.t.Helper()
	raw, err := net.Dial("tcp", b.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	defer raw.Close()
	conn, channel := raw, wire.Plaintext
	if b.tls != nil {
		conf := b.tls.Clone()
		conf.ServerName = "127.0.0.1"
		tc := tls.Client(raw, conf)
		if err := tc.HandshakeContext(b.ctx()); err != nil {
			b.t.Fatal(err)
		}
		state := tc.ConnectionState()
		if channel, err = wire.Channel(&state); err != nil {
			b.t.Fatal(err)
		}
		conn = tc
	}
	data, err := json.Marshal(body(channel))
	if err != nil {
		b.t.Fatal(err)
	}
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }, DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }}
	resp, err := (&http.Client{Transport: tr}).Post(b.url("http", path), "application/json", bytes.NewReader(data))
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	reply, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, reply
}

func (b *bench) dial(i hubtest.Identity) (*hubtest.Client, error) {
	c, err := wsx.Dialer{TLS: b.tls}.Dial(b.ctx(), b.url("ws", wire.SessionPath), nil)
	if err != nil {
		return nil, err
	}
	b.t.Cleanup(c.CloseNow)
	channel, err := wire.Channel(c.TLS())
	if err != nil {
		return nil, err
	}
	return i.Dial(b.ctx(), c, channel, wire.NewID(), wire.Spoken)
}

func TestSessionEndToEnd(t *testing.T) {
	for name, secure := range map[string]bool{"tls": true, "plain": false} {
		t.Run(name, func(t *testing.T) {
			b := start(t, secure)
			i := b.enroll("ci-1")
			c, err := b.dial(i)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Send(b.ctx(), &wire.Report{State: &wire.State{Node: wire.Ready, Acquisition: wire.Taking, Runner: wire.RunnerNone}}); err != nil {
				t.Fatal(err)
			}
			cmd, err := b.admin.Issue(b.ctx(), "ci-1", wire.OpDrain)
			if err != nil {
				t.Fatal(err)
			}
			m, err := hubtest.Next[*wire.Command](b.ctx(), c)
			if err != nil || m.ID != cmd.ID {
				t.Fatalf("%+v, %v", m, err)
			}
			if err := c.Send(b.ctx(), &wire.Ack{Command: m.ID, Outcome: wire.Done}); err != nil {
				t.Fatal(err)
			}
			if r, err := hubtest.Next[*wire.Recorded](b.ctx(), c); err != nil || r.Command != m.ID {
				t.Fatalf("%+v, %v", r, err)
			}
			n, err := b.admin.Node(b.ctx(), i.ID)
			if err != nil || n.Reach != hub.Connected || len(n.Commands) != 1 || n.Commands[0].Outcome != wire.Done {
				t.Errorf("%+v, %v", n, err)
			}
			lines, err := b.admin.Audit(b.ctx(), "ci-1", 100)
			if err != nil || !slices.ContainsFunc(lines.Lines, func(l hub.AuditLine) bool {
				return l.Actor == fmt.Sprint("uid ", os.Getuid()) && l.Event == "command issued"
			}) {
				t.Errorf("%+v, %v", lines, err)
			}
			// The connection of the enrollment gives its place back a moment after
			// its answer.
			for deadline := time.Now().Add(time.Minute); b.nodes.Unauthenticated() > 0 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			}
			if n := b.nodes.Unauthenticated(); n != 0 {
				t.Errorf("%d connections count as unauthenticated, with one node connected", n)
			}
		})
	}
}

func TestEnrollRefusals(t *testing.T) {
	b := start(t, true)
	i := hubtest.NewKey()
	token, err := b.admin.Token(b.ctx(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for what, tc := range map[string]struct {
		body   func([]byte) any
		status int
		code   wire.Refusal
	}{
		"no JSON of ours":    {func([]byte) any { return "x" }, 400, wire.BadRequest},
		"another connection": {func([]byte) any { return i.EnrollRequest(token, "x", wire.Plaintext) }, 403, wire.BadSignature},
		"a wrong token":      {func(ch []byte) any { return i.EnrollRequest(wire.NewHex(wire.TokenLen), "x", ch) }, 403, wire.TokenInvalid},
		"a large one":        {func([]byte) any { return strings.Repeat("x", 65<<10) }, 400, wire.BadRequest},
	} {
		status, reply := b.post(tc.body)
		var r wire.EnrollRefused
		if err := json.Unmarshal(reply, &r); err != nil || status != tc.status || r.Code != tc.code || strings.Contains(string(reply), token) {
			t.Errorf("%s: %d %s, want %d %s", what, status, reply, tc.status, tc.code)
		}
	}
}

// TestProxy puts a proxy that terminates TLS between node and hub.
func TestProxy(t *testing.T) {
	b := start(t, true)
	i := b.enroll("ci-1")
	cert, trust := certificate(t)
	_ = cert
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				near := tls.Server(c, web.ConfigOf(cert))
				far, err := tls.Dial("tcp", b.addr, b.tls)
				if err != nil {
					return
				}
				defer far.Close()
				go io.Copy(far, near)
				io.Copy(near, far)
			}()
		}
	}()
	c, err := wsx.Dialer{TLS: trust}.Dial(b.ctx(), "wss://"+l.Addr().String()+wire.SessionPath, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	channel, err := wire.Channel(c.TLS())
	if err != nil {
		t.Fatal(err)
	}
	_, err = i.Dial(b.ctx(), c, channel, wire.NewID(), wire.Spoken)
	if r, ok := errors.AsType[*hub.RefusedError](err); !ok || r.Code != wire.BadSignature || !strings.Contains(r.Text, "proxy") {
		t.Errorf("through a proxy that terminates TLS: %v", err)
	}
}

// TestHandshakeLimit: past the handshakes that may run at once a node is told to
// try again, and one that waits for its end makes room, as a session does once it
// is open.
func TestHandshakeLimit(t *testing.T) {
	b := start(t, false)
	i, j := b.enroll("ci-1"), b.enroll("ci-2")
	free := web.HoldHandshakes(b.nodes, web.MaxHandshakes-1)
	if _, err := b.dial(i); err != nil { // and its session, which is none any more
		t.Fatal(err)
	}
	waits, err := wsx.Dialer{}.Dial(b.ctx(), b.url("ws", wire.SessionPath), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer waits.CloseNow()
	_, err = b.dial(j)
	if e, ok := errors.AsType[*wsx.StatusError](err); !ok || e.Status != http.StatusServiceUnavailable || !strings.Contains(e.Body, "try again") {
		t.Fatalf("past the limit: %v", err)
	}
	waits.CloseNow()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err = b.dial(j); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("once one has ended: %v", err)
		}
	}
	free()
}

func TestOldTLSIsRefused(t *testing.T) {
	b := start(t, true)
	conf := b.tls.Clone()
	conf.MinVersion, conf.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if c, err := tls.Dial("tcp", b.addr, conf); err == nil {
		c.Close()
		t.Error("TLS 1.2 was taken")
	}
}

func TestPlainOnLoopbackAlone(t *testing.T) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	h, err := hub.New(t.Context(), hubtest.NewMemory(), hub.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := web.NewNodes(h, logx.Discard(), l).Serve(t.Context(), nil); fault.KindOf(err) != fault.Usage {
		t.Errorf("plain text on every address: %v", err)
	}
}

// TestUnauthenticatedLimit fills the places with connections that say nothing:
// one more is closed at once, and a node that has authenticated takes none.
func TestUnauthenticatedLimit(t *testing.T) {
	b := start(t, false)
	i := b.enroll("ci-1")
	if _, err := b.dial(i); err != nil {
		t.Fatal(err)
	}
	// The connections of enrollment and session give their places back a
	// moment after their answers.
	for deadline := time.Now().Add(time.Minute); b.nodes.Unauthenticated() > 0 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	var held []net.Conn
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	for range web.MaxUnauthenticated {
		c, err := net.Dial("tcp", b.addr)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	for deadline := time.Now().Add(time.Minute); b.nodes.Unauthenticated() < web.MaxUnauthenticated && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	c, err := net.Dial("tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(9 * time.Second)) // sooner than headers time out
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one past the limit: %v, want it closed at once", err)
	}
	if b.nodes.Turned() == 0 {
		t.Error("it was not counted")
	}
}

func TestAdminErrors(t *testing.T) {
	b := start(t, false)
	_, err := b.admin.Node(b.ctx(), "nobody")
	if fault.KindOf(err) != fault.NotFound || fault.HintOf(err) == "" {
		t.Errorf("a node that is none: %v", err)
	}
	if _, err := b.admin.Node(b.ctx(), "../../v1/status"); fault.KindOf(err) == "" || err == nil {
		t.Errorf("a name with slashes: %v", err)
	}
	if err := b.admin.Backup(b.ctx(), "/x"); fault.KindOf(err) != fault.Conflict || err.Error() != "/x" || fault.HintOf(err) != "hinted" {
		t.Errorf("Backup: %v, hint %q", err, fault.HintOf(err))
	}
	if err := b.admin.Backup(b.ctx(), "x"); fault.KindOf(err) != fault.Usage {
		t.Errorf("a relative file: %v", err)
	}
	if _, err := b.admin.Token(b.ctx(), 9000*time.Hour); fault.KindOf(err) != fault.Usage {
		t.Errorf("a token for a year: %v", err)
	}
	if _, err := hubadmin.Dial(filepath.Join(t.TempDir(), "none")).Status(b.ctx()); fault.KindOf(err) != fault.Unavailable || !strings.Contains(fault.HintOf(err), "vk-hub serve") {
		t.Errorf("without a hub: %v, hint %q", err, fault.HintOf(err))
	}
	s, err := b.admin.Status(b.ctx())
	if err != nil || s.Hub != b.ID() {
		t.Errorf("status: %+v, %v", s, err)
	}
	w, err := b.admin.Workloads(b.ctx(), "")
	if err != nil || w.Nodes == nil {
		t.Errorf("workloads: %+v, %v", w, err)
	}
}

func TestMetrics(t *testing.T) {
	b := start(t, false)
	i := b.enroll(`ci"1`)
	c, err := b.dial(i)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []wire.Message{&wire.Report{State: &wire.State{Node: wire.Ready, Acquisition: wire.Taking, Runner: wire.RunnerNone}}, &wire.Heartbeat{Admission: wire.Admission{Running: 7}}} {
		if err := c.Send(b.ctx(), m); err != nil {
			t.Fatal(err)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	const token = "0123456789abcdef"
	go func() { done <- web.ServeMetrics(ctx, l, web.Metrics(b.Hub, b.nodes, token)) }()
	get := func(auth string) (int, string) {
		req, err := http.NewRequestWithContext(b.ctx(), "GET", "http://"+l.Addr().String()+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", auth)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(text)
	}
	for _, auth := range []string{"", "Bearer wrong", "Basic " + token} {
		if status, _ := get(auth); status != 401 {
			t.Errorf("with %q: %d, want 401", auth, status)
		}
	}
	text := ""
	for deadline := time.Now().Add(time.Minute); !strings.Contains(text, "vk_hub_node_jobs_running") && time.Now().Before(deadline); {
		var status int
		if status, text = get("Bearer " + token); status != 200 {
			t.Fatalf("%d: %s", status, text)
		}
	}
	for _, want := range []string{`vk_hub_node_jobs_running{hostname="ci\"1",node="` + i.ID + `"} 7`, `vk_hub_nodes{reach="connected"} 1`, "vk_hub_sessions_total 1", `vk_hub_node_up{`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "vk_") {
			t.Errorf("promlint: %s: %s", p.Metric, p.Text)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
