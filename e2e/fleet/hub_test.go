package fleet_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/outstore"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/relay/relaytest"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/hubdb"
	"virtkit/web"
)

// realHub is a hub with its database, its outputs and its listener, in this
// process.
type realHub struct {
	*hub.Hub
	t   *testing.T
	url string
	ca  []byte
}

// newCertificate makes one for loopback.
func newCertificate(t *testing.T, dir string) (cert, key string, ca []byte) {
	t.Helper()
	priv, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "hub"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, priv.Public(), priv)
	if err != nil {
		t.Fatal(err)
	}
	kb, err := x509.MarshalPKCS8PrivateKey(priv)
	if err != nil {
		t.Fatal(err)
	}
	ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, b := range map[string][]byte{cert: ca, key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kb})} {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key, ca
}

func newRealHub(t *testing.T) *realHub {
	t.Helper()
	dir := t.TempDir()
	cert, key, ca := newCertificate(t, dir)
	log := logx.ForTest(t)
	db, err := hubdb.Open(t.Context(), filepath.Join(dir, "hub.sqlite"))
	if err != nil {
		t.Fatal(err)
	}
	out, err := outstore.Open(filepath.Join(dir, "jobs"))
	if err != nil {
		t.Fatal(err)
	}
	h, err := hub.New(t.Context(), db, hub.Options{Heartbeat: time.Second, Log: log, Jobs: hub.JobOptions{Outputs: out}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := web.LoadCertificate(cert, key, log)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nodes := web.NewNodes(h, log, l)
	serving, hangUp := context.WithCancel(context.Background())
	writing, stop := context.WithCancel(context.Background())
	var sessions, writer sync.WaitGroup
	writer.Go(func() { h.Run(writing) })
	writer.Go(func() { out.Run(writing, h.Synced) })
	sessions.Go(func() { nodes.Serve(serving, c) })
	t.Cleanup(func() {
		hangUp()
		sessions.Wait()
		stop()
		writer.Wait()
		db.Close()
	})
	return &realHub{Hub: h, t: t, url: "https://" + l.Addr().String(), ca: ca}
}

const server = "https://gitlab.example.com"

// join enrolls a relay of the server, which is approved with its project 1.
func (h *realHub) join(dir string) *relay.Enrollment {
	h.t.Helper()
	ctx := h.t.Context()
	token, err := h.CreateTokenOf(ctx, "test", hub.TokenGitLab, time.Hour)
	if err != nil {
		h.t.Fatal(err)
	}
	j, err := relay.Join(ctx, relay.JoinOptions{StateDir: dir, Hub: h.url, CA: h.ca, Token: token, Hostname: "gw", VK: "test"})
	if err != nil {
		h.t.Fatal(err)
	}
	return j.Enrollment
}

// approve has the relay of an enrollment bound to a server, and takes that and
// a project.
func (h *realHub) approve(e *relay.Enrollment, url string, project int64) {
	h.t.Helper()
	ctx := h.t.Context()
	if err := h.BindRelay(ctx, e.Relay, &dispatch.Inventory{Hostname: "gw", ServerURL: url, Runners: []dispatch.Runner{}}); err != nil {
		h.t.Fatal(err)
	}
	if _, err := h.ApproveServer(ctx, "test", url, "gl"); err != nil {
		h.t.Fatal(err)
	}
	if err := h.DecideProjects(ctx, "test", "gl", []hub.ProjectRef{{ID: project}}, dispatch.Approved); err != nil {
		h.t.Fatal(err)
	}
}

// listener is a node's connection that hears what the hub says first, and may
// keep it to itself.
type listener struct {
	hub.Conn
	keep func(wire.Message) bool
}

func (k *listener) Read(ctx context.Context) ([]byte, error) {
	for {
		b, err := k.Conn.Read(ctx)
		if err != nil {
			return b, err
		}
		if m, err := wire.Decode(wire.FromHub, wire.VersionEgress, b); err == nil && k.keep(m) {
			continue
		}
		return b, nil
	}
}

// placed is a test as a real hub's node.
type placed struct {
	*hubtest.Placed
	mu       sync.Mutex
	changed  chan struct{}
	canceled map[string]wire.CancelMode
}

func newPlaced(h *realHub, room int) *placed {
	p := &placed{Placed: hubtest.NewPlaced(h.t, h.Hub, "n1", "ci", 16, int64(room)<<30), changed: make(chan struct{}), canceled: map[string]wire.CancelMode{}}
	near, far := hubtest.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() { h.Serve(context.Background(), far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) })
	wg.Go(func() {
		p.Session(context.Background(), &listener{near, p.hear}, wire.Plaintext)
	})
	h.t.Cleanup(func() { near.CloseNow(); wg.Wait() })
	return p
}

// hear keeps cancels to itself: the test says how a job ends.
func (p *placed) hear(m wire.Message) (keep bool) {
	c, ok := m.(*wire.Cancel)
	if !ok {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.canceled[c.Job] = c.Mode
	close(p.changed)
	p.changed = make(chan struct{})
	return true
}

// poll asks f until it says so: hubtest's node tells nobody of its changes.
func poll(ctx context.Context, what string, f func() bool) error {
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for !f() {
		select {
		case <-t.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		}
	}
	return nil
}

func (p *placed) Accept(ctx context.Context, id string) error {
	return poll(ctx, "the job is begun", func() bool { return p.Start(id) != nil })
}

func (p *placed) Output(_ context.Context, id string, b []byte) error { return p.Print(id, b) }

func (p *placed) Finish(_ context.Context, id string, r wire.JobResult) error {
	if r.Artifacts == nil {
		r.Artifacts = []wire.ArtifactResult{}
	}
	return p.End(id, &r)
}

func (p *placed) Canceled(ctx context.Context, id string, mode wire.CancelMode) error {
	for {
		p.mu.Lock()
		got, changed := p.canceled[id], p.changed
		p.mu.Unlock()
		if got == mode {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waiting for a cancel: %w", ctx.Err())
		}
	}
}

// The hub keeps to what a relay relies on, over its real listener and database.
func TestRelaySuite(t *testing.T) {
	relaytest.RunSuite(t, func(t *testing.T) relaytest.World {
		h := newRealHub(t)
		client := func() *relay.Client {
			e := h.join(filepath.Join(t.TempDir(), "state"))
			h.approve(e, server, 1)
			c, err := relay.NewClient(e, nil)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		w := relaytest.World{Relay: client(), Other: client(), Room: 2,
			Placement: dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 1, Disk: 1 << 30}},
			Spec:      func(id int64) json.RawMessage { return hubtest.Job(t, server, id, nil) },
			Node:      newPlaced(h, 2)}
		return w
	})
}
