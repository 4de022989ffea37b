package main

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
	"virtkit/hubdb"
)

// The hub beside a floor: a program that terminates the same TLS WebSockets
// and decodes the same JSON, and does nothing with it. Each is a process of
// its own, whose CPU time is what is compared; the simulated nodes are of this
// one. VIRTKIT_BENCH_NODES and VIRTKIT_BENCH_HUB_SECS make it smaller or
// longer (2000 nodes, 20 s).

// floorWord makes this program the floor: bench floorWord CERT KEY.
const floorWord = "hub-floor"

// runHubFloor prints its address and serves until it is killed.
func runHubFloor(cert, key string) error {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+wire.SessionPath, func(w http.ResponseWriter, r *http.Request) {
		c, err := wsx.Accept(w, r)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			b, err := c.Read(context.Background())
			if err != nil {
				return
			}
			if _, err := wire.Decode(wire.FromNode, wire.VersionEgress, b); err != nil {
				return
			}
		}
	})
	fmt.Println(l.Addr())
	s := &http.Server{Handler: mux, TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){}}
	return s.Serve(tls.NewListener(l, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"}}))
}

// fleetBench is what the rows of the hub share.
type fleetBench struct {
	b         *bench
	dir       string
	cert, key string
	trust     *tls.Config
	nodes     []hubtest.Identity
	admin     *hubadmin.Client
	conf      string
}

func envInt(name string, def int) (int, error) {
	s := os.Getenv(name)
	if s == "" {
		return def, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%s=%q: expected a number from 1", name, s)
	}
	return n, nil
}

func (b *bench) hub(ctx context.Context) error {
	count, err := envInt("VIRTKIT_BENCH_NODES", 2000)
	if err != nil {
		return err
	}
	secs, err := envInt("VIRTKIT_BENCH_HUB_SECS", 20)
	if err != nil {
		return err
	}
	f := &fleetBench{b: b, dir: filepath.Join(b.dir, "hub")}
	if err := f.prepare(); err != nil {
		return err
	}
	hubProc, addr, err := f.startHub(ctx)
	if err != nil {
		return err
	}
	defer func() { hubProc.Process.Kill(); hubProc.Wait() }()
	if err := f.enroll(ctx, addr, count); err != nil {
		return fmt.Errorf("enrolling: %w", err)
	}
	floor, floorAddr, err := f.startFloor(ctx)
	if err != nil {
		return err
	}
	defer func() { floor.Process.Kill(); floor.Wait() }()

	// One after the other: on a small machine they would measure each other.
	hubCPU, _, err := f.steady(ctx, hubProc.Process.Pid, addr, time.Duration(secs)*time.Second, true)
	if err != nil {
		return fmt.Errorf("the hub: %w", err)
	}
	floorCPU, _, err := f.steady(ctx, floor.Process.Pid, floorAddr, time.Duration(secs)*time.Second, false)
	if err != nil {
		return fmt.Errorf("the floor: %w", err)
	}
	b.add("hub", fmt.Sprintf("CPU of %d nodes at a 5 s heartbeat", count), "% of a core", hubCPU, "floor", floorCPU, 2)
	if err := f.commands(ctx, addr); err != nil {
		return fmt.Errorf("commands: %w", err)
	}
	hubProc.Process.Kill()
	hubProc.Wait()
	if hubProc, addr, err = f.startHub(ctx); err != nil {
		return err
	}
	back, peak, err := f.reconnect(ctx, hubProc.Process.Pid, addr, true)
	if err != nil {
		return fmt.Errorf("reconnecting: %w", err)
	}
	floor.Process.Kill()
	floor.Wait()
	if floor, floorAddr, err = f.startFloor(ctx); err != nil {
		return err
	}
	floorBack, floorPeak, err := f.reconnect(ctx, floor.Process.Pid, floorAddr, false)
	if err != nil {
		return fmt.Errorf("reconnecting to the floor: %w", err)
	}
	b.add("hub", fmt.Sprintf("%d sessions back after a restart", count), "s", back, "floor", floorBack, 2)
	b.add("hub", "peak memory of that", "MiB", peak, "floor", floorPeak, 2)
	few, err := f.auditPage(ctx)
	if err != nil {
		return err
	}
	hubProc.Process.Kill()
	hubProc.Wait()
	if err := f.fillAudit(ctx); err != nil {
		return fmt.Errorf("filling the audit log: %w", err)
	}
	if hubProc, _, err = f.startHub(ctx); err != nil {
		return err
	}
	many, err := f.auditPage(ctx)
	if err != nil {
		return err
	}
	b.add("hub", "audit page of a node, 100,000 lines", "ms", many, "floor: few lines", few, 3)
	return nil
}

// prepare makes a certificate, hub.toml and what trusts the hub.
func (f *fleetBench) prepare() error {
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	tpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "hub"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key)
	if err != nil {
		return err
	}
	pk, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	f.cert, f.key, f.conf = filepath.Join(f.dir, "cert.pem"), filepath.Join(f.dir, "key.pem"), filepath.Join(f.dir, "hub.toml")
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(certPEM)
	f.trust = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13, ServerName: "127.0.0.1"}
	data := filepath.Join(f.dir, "data")
	f.admin = hubadmin.Dial(filepath.Join(data, "admin.sock"))
	for file, text := range map[string][]byte{f.cert: certPEM, f.key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pk}),
		f.conf: fmt.Appendf(nil, "addr = \"127.0.0.1:0\"\ntls_cert = %q\ntls_key = %q\ndata_dir = %q\n", f.cert, f.key, data)} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// startHub starts vk-hub serve on one core and waits until it answers.
func (f *fleetBench) startHub(ctx context.Context) (*exec.Cmd, string, error) {
	cmd := exec.CommandContext(ctx, f.b.vk, "hub", "--config", f.conf, "serve")
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	log, err := os.Create(filepath.Join(f.dir, "hub.log"))
	if err != nil {
		return nil, "", err
	}
	defer log.Close()
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if s, err := f.admin.Status(ctx); err == nil {
			return cmd, s.Addr, nil
		}
	}
	cmd.Process.Kill()
	cmd.Wait()
	text, _ := os.ReadFile(log.Name())
	return nil, "", fmt.Errorf("the hub does not answer:\n%s", text)
}

func (f *fleetBench) startFloor(ctx context.Context) (*exec.Cmd, string, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", floorWord, f.cert, f.key)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	return cmd, strings.TrimSpace(line), err
}

// enroll makes count nodes, each over a connection of its own.
func (f *fleetBench) enroll(ctx context.Context, addr string, count int) error {
	for i := range count {
		token, err := f.admin.Token(ctx, time.Minute)
		if err != nil {
			return err
		}
		c, err := tls.Dial("tcp", addr, f.trust)
		if err != nil {
			return err
		}
		state := c.ConnectionState()
		channel, err := wire.Channel(&state)
		if err != nil {
			return err
		}
		id := hubtest.NewKey()
		tr := &http.Transport{DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return c, nil }}
		body, err := json.Marshal(id.EnrollRequest(token, fmt.Sprintf("node-%d", i), channel))
		if err != nil {
			return err
		}
		resp, err := (&http.Client{Transport: tr}).Post("https://"+addr+wire.EnrollPath, "application/json", strings.NewReader(string(body)))
		if err != nil {
			return err
		}
		var r wire.EnrollReply
		err = json.NewDecoder(resp.Body).Decode(&r)
		resp.Body.Close()
		c.Close()
		if err != nil || r.Node == "" {
			return fmt.Errorf("status %d, %v", resp.StatusCode, err)
		}
		id.ID = r.Node
		f.nodes = append(f.nodes, id)
		if i%500 == 499 { // spent tokens are remembered for a while, and their number is bounded
			fmt.Fprintf(os.Stderr, "bench: hub: %d nodes enrolled\n", i+1)
		}
	}
	return nil
}

// connect opens a node's session: with the hub the whole handshake, with the
// floor the connection alone.
func (f *fleetBench) connect(ctx context.Context, i hubtest.Identity, addr string, handshake bool) (*hubtest.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		c, err := wsx.Dialer{TLS: f.trust}.Dial(ctx, "wss://"+addr+wire.SessionPath, nil)
		if err != nil { // more at once than the hub lets in: again, as a node does
			select {
			case <-time.After(50 * time.Millisecond):
				continue
			case <-ctx.Done():
				return nil, err
			}
		}
		n := &hubtest.Client{C: c, Version: wire.VersionEgress}
		if handshake {
			channel, err := wire.Channel(c.TLS())
			if err != nil {
				return nil, err
			}
			if n, err = i.Dial(ctx, c, channel, wire.NewID(), wire.Spoken); err != nil {
				return nil, err
			}
		}
		return n, n.Send(ctx, &wire.Report{State: &wire.State{Node: wire.Ready, Acquisition: wire.Taking, Runner: wire.RunnerManaged}})
	}
}

// all connects every node, a hundred at a time. Those that are in send
// heartbeats meanwhile: on a slow machine the last come when the first would
// have been found silent.
func (f *fleetBench) all(ctx context.Context, addr string, handshake bool) ([]*hubtest.Client, error) {
	clients := make([]*hubtest.Client, len(f.nodes))
	gate := make(chan struct{}, 100)
	var wg, beating sync.WaitGroup
	in := make(chan *hubtest.Client, len(f.nodes))
	beating.Go(func() {
		var up []*hubtest.Client
		tick := time.NewTicker(wire.DefaultHeartbeat)
		defer tick.Stop()
		for {
			select {
			case c, more := <-in:
				if !more {
					return
				}
				up = append(up, c)
			case <-tick.C:
				for n, c := range up {
					c.Send(ctx, beatOf(n)) // one that is gone shows in what is counted
				}
			}
		}
	})
	defer beating.Wait()
	defer close(in)
	var failed atomic.Pointer[error]
	for i := range f.nodes {
		wg.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			c, err := f.connect(ctx, f.nodes[i], addr, handshake)
			if err != nil {
				failed.Store(&err)
			}
			clients[i] = c
			if c != nil {
				in <- c
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return clients, *err
	}
	return clients, nil
}

func hangUp(clients []*hubtest.Client) {
	for _, c := range clients {
		if c != nil {
			c.Close()
		}
	}
}

// beatOf is a heartbeat of a busy host.
func beatOf(n int) *wire.Heartbeat {
	load := float64(n%16) + 0.25
	stall := &wire.Stall{Some10: 1.5, Some60: 2.25, Full10: 0.5, Full60: 0.25}
	return &wire.Heartbeat{Admission: wire.Admission{Committed: int64(n%32) << 30, Budget: 64 << 30, Running: n % 8, Waiting: n % 3}, Concurrency: 8, MemAvailable: int64(n%64) << 30,
		Filesystems: []wire.FSReading{{Role: wire.RoleJobs, Free: int64(n) << 20, FreeInodes: 1 << 20}, {Role: wire.RoleCheckouts, Free: int64(n) << 19, FreeInodes: 1 << 20}},
		VMs:         map[string]int64{fmt.Sprintf("%016x", n): 512 << 20, fmt.Sprintf("%016x", n+1): 768 << 20}, Load1: &load,
		Pressure: &wire.Pressure{CPU: stall, Memory: stall, IO: stall}, Stages: &wire.Stages{Running: n % 8}, Clock: time.Now().Unix()}
}

// steady is the CPU, in percent of a core, that a process takes to hold all
// nodes for a while, each sending a heartbeat every 5 s.
func (f *fleetBench) steady(ctx context.Context, pid int, addr string, d time.Duration, handshake bool) (percent, peak float64, err error) {
	clients, err := f.all(ctx, addr, handshake)
	defer hangUp(clients)
	if err != nil {
		return 0, 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var sent atomic.Int64
	var wg sync.WaitGroup
	for i, c := range clients {
		wg.Go(func() { // what the hub says is read, or it would wait
			for {
				if _, err := c.C.Read(ctx); err != nil {
					return
				}
			}
		})
		wg.Go(func() {
			// Spread over the interval, as nodes that started at any time are.
			t := time.NewTimer(time.Duration(i) * wire.DefaultHeartbeat / time.Duration(len(clients)))
			defer t.Stop()
			for n := i; ; n++ {
				select {
				case <-t.C:
				case <-ctx.Done():
					return
				}
				if c.Send(ctx, beatOf(n)) != nil {
					return
				}
				sent.Add(1)
				t.Reset(wire.DefaultHeartbeat)
			}
		})
	}
	time.Sleep(wire.DefaultHeartbeat) // what came with connecting is over
	before, was := cpuOf(pid), sent.Load()
	start := time.Now()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
	took, cpu, beats := time.Since(start), cpuOf(pid)-before, sent.Load()-was
	cancel()
	hangUp(clients)
	wg.Wait()
	// On a machine too slow for the rate, the CPU for the rate is what counts.
	want := float64(len(clients)) * took.Seconds() / wire.DefaultHeartbeat.Seconds()
	if beats == 0 {
		return 0, 0, fmt.Errorf("no heartbeat went out in %v", took)
	}
	return 100 * cpu.Seconds() / took.Seconds() * want / float64(beats), peakOf(pid), nil
}

// reconnect is how long it takes until every node has a session, and the peak
// memory of the process in MiB.
func (f *fleetBench) reconnect(ctx context.Context, pid int, addr string, handshake bool) (secs, peak float64, err error) {
	start := time.Now()
	clients, err := f.all(ctx, addr, handshake)
	defer hangUp(clients)
	secs = time.Since(start).Seconds()
	if err == nil && handshake {
		s, serr := f.admin.Status(ctx)
		if serr != nil || s.Reach["connected"] != len(f.nodes) {
			err = fmt.Errorf("the hub counts %v of %d, %v", s.Reach, len(f.nodes), serr)
		}
	}
	return secs, peakOf(pid), err
}

// commands measures commands from issue to recorded ack, beside a floor of as
// many fsyncs of a line in a file.
func (f *fleetBench) commands(ctx context.Context, addr string) error {
	const each = 10
	nodes := f.nodes[:min(len(f.nodes), 20)]
	var wg sync.WaitGroup
	errs := make(chan error, 2*len(nodes))
	var clients []*hubtest.Client
	defer func() { hangUp(clients) }()
	for _, i := range nodes {
		c, err := f.connect(ctx, i, addr, true)
		if err != nil {
			return err
		}
		clients = append(clients, c)
	}
	start := time.Now()
	for n, c := range clients {
		wg.Go(func() {
			for range each {
				if _, err := f.admin.Issue(ctx, nodes[n].ID, wire.OpDrain); err != nil {
					errs <- err
					return
				}
			}
		})
		wg.Go(func() {
			for recorded := 0; recorded < each; {
				m, err := c.Receive(ctx)
				if err != nil {
					errs <- err
					return
				}
				switch m := m.(type) {
				case *wire.Command:
					err = c.Send(ctx, &wire.Ack{Command: m.ID, Outcome: wire.Done})
				case *wire.Recorded:
					recorded++
				}
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(start).Seconds()
	select {
	case err := <-errs:
		return err
	default:
	}
	// The floor: the same number of durable steps, two a command, one by one.
	file, err := os.Create(filepath.Join(f.dir, "floor"))
	if err != nil {
		return err
	}
	defer file.Close()
	start = time.Now()
	const steps = 100
	for range steps {
		if _, err := file.WriteString(strings.Repeat("x", 200)); err != nil {
			return err
		}
		if err := file.Sync(); err != nil {
			return err
		}
	}
	floor := steps / 2 / time.Since(start).Seconds()
	f.b.addRate("hub", "commands issued to recorded", "1/s", each*float64(len(clients))/took, "floor: two fsyncs each", floor, 0.5)
	return nil
}

// auditPage asks for a node's newest 50 lines, the best of 20 times, in ms.
func (f *fleetBench) auditPage(ctx context.Context) (float64, error) {
	best := time.Hour
	for range 20 {
		start := time.Now()
		if _, err := f.admin.Audit(ctx, f.nodes[0].ID, 50); err != nil {
			return 0, err
		}
		best = min(best, time.Since(start))
	}
	return best.Seconds() * 1000, nil
}

// fillAudit brings the log of a hub that does not run to its 100,000 lines.
func (f *fleetBench) fillAudit(ctx context.Context) error {
	db, err := hubdb.Open(ctx, filepath.Join(f.dir, "data/hub.sqlite"))
	if err != nil {
		return err
	}
	defer db.Close()
	l, err := db.Load(ctx)
	if err != nil {
		return err
	}
	for seq := l.LastAudit; seq < hub.AuditKept; {
		var batch hub.Batch
		for range 1000 {
			seq++
			batch.Audit = append(batch.Audit, hub.AuditLine{Seq: seq, At: time.Now().Unix(), Node: f.nodes[seq%uint64(len(f.nodes))].ID, Actor: "uid 0", Event: "pools", Detail: "big small"})
		}
		if err := db.Apply(ctx, &batch); err != nil {
			return err
		}
	}
	return nil
}
