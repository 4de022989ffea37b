package fleet_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/e2e/host"
)

// certify makes a certificate for ip, signed by itself.
func certify(t *testing.T, ip, cert, key string) (ca []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "hub"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.ParseIP(ip)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	pk, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for file, b := range map[string][]byte{cert: ca, key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pk})} {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return ca
}

// Addresses of the hub's host and the node's: TEST-NET-1, which nobody has.
const (
	hubIP  = "192.0.2.1"
	nodeIP = "192.0.2.2"
)

const inNamespace = "VK_E2E_FLEET_INSIDE"

// inside runs the rest of the test in a process with a network of its own, in
// which it returns true. The caller returns on false.
func inside(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inNamespace) != "" {
		return true
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to make network namespaces")
	}
	for _, p := range []string{"nft", "ip", "nsenter"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs %s: apt-get install nftables iproute2 util-linux", p)
		}
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=15m")
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is of the thread
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	switch {
	case err != nil || !bytes.Contains(out, []byte("--- ")):
		t.Errorf("in a namespace of its own: %v\n%s", err, out)
	case bytes.Contains(out, []byte("--- SKIP")):
		t.Skipf("%s", out)
	default:
		t.Logf("%s", out)
	}
	return false
}

func sh(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// farHost makes a second host beside this one, a wire between them; ns is the
// file of its network.
func farHost(t *testing.T) (ns string) {
	t.Helper()
	end, ready := make(chan struct{}), make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		ns = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		ready <- unix.Unshare(unix.CLONE_NEWNET)
		<-end
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(end) })
	sh(t, fmt.Sprintf(`ip link set lo up
ip link add h0 type veth peer name n0 netns %[1]s
ip addr add %[2]s/24 dev h0
ip link set h0 up
nsenter --net=%[1]s ip link set lo up
nsenter --net=%[1]s ip addr add %[3]s/24 dev n0
nsenter --net=%[1]s ip link set n0 up`, ns, hubIP, nodeIP))
	return ns
}

// cuts are ways to part the node from the hub, as rules of the node's host.
// What is dropped is not told to anybody: no connection is reset.
var cuts = []struct{ name, rules string }{
	{"both ways", "chain i { type filter hook input priority 0; iifname n0 drop; }\nchain o { type filter hook output priority 0; oifname n0 drop; }"},
	{"what the hub sends is lost", "chain i { type filter hook input priority 0; iifname n0 drop; }"},
	{"what the node sends is lost", "chain o { type filter hook output priority 0; oifname n0 drop; }"},
}

// slowRunner stands in for gitlab-runner: it takes one job after the other,
// each over once the file long is not there, and ends on SIGQUIT after the one
// that it has.
const slowRunner = `#!/bin/sh
[ "$1" = run ] || { echo "Version: 17.0.0"; exit; }
trap q=1 QUIT
while [ -z "$q" ]; do
	echo take >>"%[1]s/log"
	sleep 0.2
	while [ -e "%[1]s/long" ]; do sleep 0.1; done
	echo over >>"%[1]s/log"
done
echo end >>"%[1]s/log"
`

// TestPartition parts a node and its gitlab-runner from the hub with the packet
// filter, both ways and each way alone, during ordinary work and during a
// drain: work goes on by what the node holds, a drain stays, and the hub never
// shows the node as idle while it cannot know.
func TestPartition(t *testing.T) {
	if !inside(t) {
		return
	}
	ns := farHost(t)
	f := newFleetAt(t, hubIP, true)
	r := f.record("partition during ordinary work and during a drain")
	r.version("nft", firstLine("nft", "--version"))
	dir := filepath.Join(f.dir, "far")
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	h, err := host.New("../..", dir, fmt.Sprintf("[node]\nrunner = \"managed\"\ngitlab_runner = %q\nrunner_config = %q\n", at("gitlab-runner"), at("runner.toml")))
	if host.IsMissing(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"gitlab-runner": fmt.Sprintf(slowRunner, dir), "runner.toml": "concurrent = 9\n", "log": "", "ca.pem": string(f.ca)} {
		if err := os.WriteFile(at(name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	vk := func(args ...string) *exec.Cmd {
		cmd := exec.Command(h.VK, args...)
		cmd.Env = h.Env()
		return cmd
	}
	join := exec.Command("nsenter", "--net="+ns, h.VK, "node", "join", f.url(f.addr), "--ca", at("ca.pem"), "--token", strings.TrimSpace(f.must("token", "create")))
	join.Env = h.Env()
	var said bytes.Buffer
	join.Stderr = &said
	out, err := join.Output()
	if err != nil {
		t.Fatalf("vk node join: %v\n%s", err, said.Bytes())
	}
	id := strings.TrimSpace(string(out))
	p := &process{t: t, ns: ns, log: filepath.Join(f.dir, "node.log"), command: func() *exec.Cmd { return vk("node", "run") }}
	p.start()
	t.Cleanup(func() {
		os.Remove(at("long"))
		p.kill(syscall.SIGTERM) // with its runner
		if t.Failed() {
			f.show(p.log)
		}
	})
	count := func(word string) int { return strings.Count(string(read(at("log"))), word) }
	takes := func(when string) {
		t.Helper()
		was := count("take")
		f.eventually("a runner takes jobs "+when, func() bool { return count("take") > was })
	}
	concurrent := func() string { return string(read(at("runner.toml"))) }
	part := func(name, rules string) (heal func()) {
		r.fault("packets are dropped: %s: %s", name, strings.ReplaceAll(rules, "\n", " "))
		sh(t, "nsenter --net="+ns+" nft -f - <<'E'\ntable inet cut {\n"+rules+"\n}\nE")
		return func() {
			r.fault("mended: %s", name)
			sh(t, "nsenter --net="+ns+" nft delete table inet cut")
		}
	}
	unreachable := func() { f.eventually("it is unreachable", func() bool { return f.node(id).Reach == hub.Unreachable }) }
	settled := func(what string, ok func() bool) {
		f.eventually("after the cut: "+what, func() bool {
			n := f.node(id)
			return n.Reach == hub.Connected && n.Pending == 0 && n.Sync == "ok" && n.Reported != nil && ok()
		})
	}

	for i, cut := range cuts {
		// Ordinary work.
		asked, later := 9-2*i, 8-2*i // falling: a pass that raises comes every half minute
		f.must("nodes", "ceiling", id, fmt.Sprint(asked))
		has := fmt.Sprintf("concurrent = %d\n", asked)
		settled("the ceiling is in force", func() bool { return concurrent() == has })
		takes("before the cut")
		heal := part(cut.name, cut.rules)
		unreachable()
		f.must("nodes", "ceiling", id, fmt.Sprint(later)) // waits for it
		takes("by what the node holds")
		r.fault("kill -9 of the node")
		p.restart()
		takes("under the next node, which has seen no hub")
		if got := concurrent(); got != has {
			t.Errorf("%s: cut off, the runner's configuration is %q, want %q", cut.name, got, has)
		}
		if n := f.node(id); n.Reach == hub.Connected || n.Sync == "ok" {
			t.Errorf("%s: a node that is cut off is shown as %s, in sync: %s", cut.name, n.Reach, n.Sync)
		}
		heal()
		settled("the new ceiling is in force", func() bool { return concurrent() == fmt.Sprintf("concurrent = %d\n", later) })

		// A drain.
		if err := os.WriteFile(at("long"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		f.must("nodes", "drain", id)
		f.eventually("it drains", func() bool { return f.state(id) == wire.Draining })
		heal = part(cut.name, cut.rules)
		unreachable()
		f.must("nodes", "undrain", id) // waits for it, and comes too late for this drain
		if n := f.node(id); n.Reported.Node != wire.Draining || n.Pending != 2 {
			t.Errorf("%s: a node that is cut off in a drain is shown as %s, %d pending", cut.name, n.Reported.Node, n.Pending)
		}
		r.fault("kill -9 of the node")
		p.restart()
		ends := count("end")
		if err := os.Remove(at("long")); err != nil {
			t.Fatal(err)
		}
		f.eventually("its drain completes without a hub", func() bool { st, err := persisted(h.State); return err == nil && st.Node == wire.Drained })
		if count("end") != ends+1 || count("take") != count("over") {
			t.Errorf("%s: drained, and its runner is not over:\n%s", cut.name, read(at("log")))
		}
		taken := count("take")
		n := f.node(id)
		if n.Reach != hub.Unreachable || n.Reported.Node == wire.Drained {
			t.Errorf("%s: the hub, which cannot know, shows it as %s and %s", cut.name, n.Reach, n.Reported.Node)
		}
		for args, want := range map[string]string{"nodes": "is unreachable; nothing is known of its jobs", "status": "1 unreachable"} {
			if out := f.must(args); !strings.Contains(out, want) {
				t.Errorf("%s: vk-hub %s lacks %q:\n%s", cut.name, args, want, out)
			}
		}
		if now := count("take"); now != taken {
			t.Errorf("%s: %d jobs were taken in the drain", cut.name, now-taken)
		}
		heal()
		settled("it is back to work", func() bool { return f.state(id) == wire.Ready })
		takes("after the drain")
	}
	audit := f.must("audit", "--node", id, "--limit", "1000")
	if d, u := strings.Count(audit, "command done: drain"), strings.Count(audit, "command done: undrain"); d != len(cuts) || u != len(cuts) {
		t.Errorf("%d drains and %d undrains are in the audit log:\n%s", d, u, audit)
	}
}
