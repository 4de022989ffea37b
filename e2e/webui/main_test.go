// Package webui tests the hub's web UI with a real browser and a real OpenID
// provider, each on a site of its own: Chromium, driven by playwright-core
// (browser.mjs), and npm's oidc-provider (provider.mjs), with TLS by a CA made
// for the run. The hub is vk-hub serve itself, in this process, so that a test
// can set its clock.
//
// Hosts are names of example sites. The browser maps them to loopback by itself
// (--host-resolver-rules) and knows no other; the hub reaches the provider
// through a proxy that this process is (HTTPS_PROXY).
package webui_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	hubHost      = "hub.example.test"
	providerHost = "login.other.test"
	chatHost     = "chat.third.test" // any other site
	clientID     = "vk-hub"
	secret       = "a secret of the client's, of this run"
)

// world is what all tests share.
var world struct {
	dir                string
	hubPort, loginPort int
	cert, key, ca      string // files
	spki               string // of the certificate, as Chromium wants it
	proxy              net.Listener
	chromium           string
	missing            error // why there are no such tests here
	provider           *provider
	browser            *driver
}

func origin() string { return fmt.Sprintf("https://%s:%d", hubHost, world.hubPort) }
func issuer() string { return fmt.Sprintf("https://%s:%d", providerHost, world.loginPort) }

func TestMain(m *testing.M) {
	code, err := 1, setUp()
	if err == nil {
		code = m.Run()
	} else {
		fmt.Fprintln(os.Stderr, "webui:", err)
	}
	tearDown()
	os.Exit(code)
}

func setUp() (err error) {
	if world.missing = lacks(); world.missing != nil {
		return nil
	}
	if world.dir, err = os.MkdirTemp("", "webui"); err != nil {
		return err
	}
	for _, p := range []*int{&world.hubPort, &world.loginPort} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		*p = l.Addr().(*net.TCPAddr).Port
		defer l.Close() // both are taken before either is free again
	}
	if err := certify(); err != nil {
		return err
	}
	if world.proxy, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return err
	}
	go func() { _ = http.Serve(world.proxy, http.HandlerFunc(connect)) }()
	// Before anything here makes a connection: both are read once.
	for k, v := range map[string]string{"SSL_CERT_FILE": world.ca, "SSL_CERT_DIR": world.dir, "HTTPS_PROXY": "http://" + world.proxy.Addr().String(), "https_proxy": "", "NO_PROXY": "", "no_proxy": ""} {
		if err := os.Setenv(k, v); err != nil {
			return err
		}
	}
	return nil
}

func tearDown() {
	if world.browser != nil {
		world.browser.stop()
	}
	if world.provider != nil {
		world.provider.stop()
	}
	if world.proxy != nil {
		world.proxy.Close()
	}
	if world.dir != "" {
		os.RemoveAll(world.dir)
	}
}

// lacks says what this host lacks.
func lacks() error {
	for _, name := range []string{"node", "chromium"} {
		at, err := exec.LookPath(name)
		if err != nil {
			pkg := map[string]string{"node": "nodejs npm", "chromium": "chromium"}[name]
			return fmt.Errorf("needs %s: apt-get install --no-install-recommends %s", name, pkg)
		}
		if name == "chromium" {
			world.chromium = at
		}
	}
	for _, name := range []string{"oidc-provider", "playwright-core"} {
		if _, err := os.Stat(filepath.Join("node_modules", name, "package.json")); err != nil {
			return fmt.Errorf("needs npm's %s in e2e/webui/node_modules: make setup-test", name)
		}
	}
	return nil
}

// ready skips a test where the tools are missing, and starts what is shared.
func ready(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a browser, which -short leaves out")
	}
	if world.missing != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(world.missing)
		}
		t.Skip(world.missing)
	}
	var err error
	if world.provider == nil {
		if world.provider, err = startProvider(); err != nil {
			t.Fatal(err)
		}
	}
	if world.browser == nil {
		if world.browser, err = startDriver(); err != nil {
			t.Fatal(err)
		}
	}
}

// connect is a proxy that finds all hosts here.
func connect(w http.ResponseWriter, r *http.Request) {
	_, port, err := net.SplitHostPort(r.Host)
	if r.Method != http.MethodConnect || err != nil {
		http.Error(w, "CONNECT alone", http.StatusMethodNotAllowed)
		return
	}
	far, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", port), 10*time.Second)
	if err != nil {
		http.Error(w, "nobody is there", http.StatusBadGateway)
		return
	}
	defer far.Close()
	near, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer near.Close()
	_, _ = io.WriteString(near, "HTTP/1.1 200 OK\r\n\r\n")
	done := make(chan struct{})
	go func() { _, _ = io.Copy(far, buf); far.(*net.TCPConn).CloseWrite(); close(done) }()
	_, _ = io.Copy(near, far)
	near.Close()
	<-done
}

// certify makes a CA, and a certificate by it for all hosts.
func certify() error {
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	from, to := time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA of this run"}, NotBefore: from, NotAfter: to, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	if err != nil {
		return err
	}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: hubHost}, NotBefore: from, NotAfter: to, DNSNames: []string{hubHost, providerHost, chatHost},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		return err
	}
	pk, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	pub, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(pub)
	world.spki = base64.StdEncoding.EncodeToString(sum[:])
	world.cert, world.key, world.ca = filepath.Join(world.dir, "cert.pem"), filepath.Join(world.dir, "key.pem"), filepath.Join(world.dir, "ca.pem")
	for f, b := range map[string]*pem.Block{world.cert: {Type: "CERTIFICATE", Bytes: der}, world.key: {Type: "PRIVATE KEY", Bytes: pk}, world.ca: {Type: "CERTIFICATE", Bytes: caDER}} {
		if err := os.WriteFile(f, pem.EncodeToMemory(b), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// program is a script of ours that node runs; it ends with its standard input.
type program struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	notes lockedBuffer // its standard error
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

func run(script string, conf any) (*program, error) {
	b, err := json.Marshal(conf)
	if err != nil {
		return nil, err
	}
	p := &program{cmd: exec.Command("node", script, string(b))}
	p.cmd.Stderr = &p.notes
	p.cmd.WaitDelay = 10 * time.Second
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	return p, p.cmd.Start()
}

// stop ends it, by force when it does not end by itself.
func (p *program) stop() {
	p.in.Close()
	kill := time.AfterFunc(20*time.Second, func() { _ = p.cmd.Process.Kill() })
	defer kill.Stop()
	_ = p.cmd.Wait()
}

// provider is provider.mjs.
type provider struct {
	*program
	mu   sync.Mutex
	hits map[string]int
	done chan struct{} // closed when its output has ended
}

func startProvider() (*provider, error) {
	prog, err := run("provider.mjs", map[string]any{"port": world.loginPort, "issuer": issuer(), "cert": world.cert, "key": world.key, "clientID": clientID, "secret": secret,
		"redirects": []string{origin() + "/auth/callback"}})
	if err != nil {
		return nil, err
	}
	if line, err := prog.out.ReadString('\n'); err != nil || line != "ready\n" {
		prog.stop()
		return nil, fmt.Errorf("the provider does not start: %q, %v\n%s", line, err, prog.notes.String())
	}
	p := &provider{program: prog, hits: map[string]int{}, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		for {
			line, err := p.out.ReadString('\n')
			if err != nil {
				return
			}
			p.mu.Lock()
			p.hits[strings.TrimSpace(line)]++
			p.mu.Unlock()
		}
	}()
	return p, nil
}

func (p *provider) stop() { p.in.Close(); <-p.done; p.program.stop() }

// count is how often a METHOD PATH was asked for since the start.
func (p *provider) count(hit string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits[hit]
}

// driver is browser.mjs.
type driver struct {
	*program
	mu sync.Mutex
}

func startDriver() (*driver, error) {
	args := []string{"--host-resolver-rules=MAP " + hubHost + " 127.0.0.1, MAP " + providerHost + " 127.0.0.1, MAP " + chatHost + " 127.0.0.1, MAP * ~NOTFOUND",
		"--ignore-certificate-errors-spki-list=" + world.spki, "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-proxy-server"}
	p, err := run("browser.mjs", map[string]any{"executable": world.chromium, "args": args})
	if err != nil {
		return nil, err
	}
	return &driver{program: p}, nil
}

// do asks for an operation, and reads its value into out unless that is nil.
func (d *driver) do(t *testing.T, out any, op string, args map[string]any) {
	t.Helper()
	req := map[string]any{"op": op}
	for k, v := range args {
		req[k] = v
	}
	b, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err = d.in.Write(append(b, '\n')); err != nil {
		t.Fatalf("the browser's driver is gone: %v\n%s", err, d.notes.String())
	}
	line, err := d.program.out.ReadBytes('\n')
	if err != nil {
		t.Fatalf("the browser's driver is gone: %v\n%s", err, d.notes.String())
	}
	var answer struct {
		Value json.RawMessage
		Error string
	}
	if err := json.Unmarshal(line, &answer); err != nil {
		t.Fatalf("the browser's driver says %q: %v", line, err)
	}
	if answer.Error != "" {
		t.Fatalf("%s %v: %s", op, args, answer.Error)
	}
	if out != nil {
		if err := json.Unmarshal(answer.Value, out); err != nil {
			t.Fatal(err)
		}
	}
}

var errEnded = errors.New("the hub has ended")

// wait is for what comes within two minutes.
func wait(ctx context.Context, what string, ok func() bool) error {
	for deadline := time.Now().Add(2 * time.Minute); !ok(); {
		if time.Now().After(deadline) {
			return fmt.Errorf("it did not come to pass: %s", what)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}
