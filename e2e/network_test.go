package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"virtkit/e2e/host"
)

// The two ends of the link between this host and "the outside", a network
// namespace that is not the host's. TEST-NET-2, which nobody has.
const (
	nearIP = "198.51.100.1"
	farIP  = "198.51.100.2"
)

// bigSize is what is moved each way, in bytes: many windows, and many frames of
// the largest size.
const bigSize = 48 << 20

// outside makes a machine that is not this host, reachable from it, with
// services for guests. It is gone with the test: its namespace lives by the
// sockets and the thread that made them.
func outside(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to make a network beside the host's")
	}
	ip, err := exec.LookPath("ip")
	if err != nil {
		t.Skip("needs ip: apt-get install iproute2")
	}
	done, ready := make(chan struct{}), make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		old, err := os.Open("/proc/thread-self/ns/net")
		if err == nil {
			defer old.Close()
			err = unix.Unshare(unix.CLONE_NEWNET)
		}
		if err != nil {
			ready <- fmt.Errorf("making a network namespace: %w", err)
			return
		}
		near := fmt.Sprintf("vke2e%d", os.Getpid()%1000000)
		here := func(args ...string) error { return command(ip, args...) } // children inherit this thread's namespace
		hosts := func(args ...string) error {
			return command("nsenter", append([]string{fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), old.Fd()), ip}, args...)...)
		}
		end, err := serveOutside(
			func() error { return here("link", "set", "lo", "up") },
			func() error {
				return hosts("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", strconv.Itoa(unix.Gettid()))
			},
			func() error { return hosts("addr", "add", nearIP+"/30", "dev", near) },
			func() error { return hosts("link", "set", near, "up") },
			func() error { return here("addr", "add", farIP+"/30", "dev", "eth0") },
			func() error { return here("link", "set", "eth0", "up") },
		)
		ready <- err
		if err == nil {
			<-done
			end()
			// Now, not when the kernel gets to it: the next test makes its own.
			_ = hosts("link", "del", near)
		}
	}()
	if err := <-ready; err != nil {
		t.Skipf("needs a network beside the host's: %v", err)
	}
	t.Cleanup(func() {
		close(done)
		<-ended
	})
}

func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// serveOutside runs steps, then listens in this thread's namespace.
func serveOutside(steps ...func() error) (end func(), err error) {
	for _, s := range steps {
		if err := s(); err != nil {
			return nil, err
		}
	}
	var closers []io.Closer
	end = func() {
		for _, c := range closers {
			c.Close()
		}
	}
	fail := func(err error) (func(), error) { end(); return nil, err }
	web, err := net.Listen("tcp4", farIP+":80")
	if err != nil {
		return fail(err)
	}
	closers = append(closers, web)
	echo, err := net.ListenPacket("udp4", farIP+":7")
	if err != nil {
		return fail(err)
	}
	closers = append(closers, echo)
	questions, err := net.ListenPacket("udp4", farIP+":53")
	if err != nil {
		return fail(err)
	}
	closers = append(closers, questions)
	streams, err := net.Listen("tcp4", farIP+":53")
	if err != nil {
		return fail(err)
	}
	closers = append(closers, streams)
	go func() { _ = http.Serve(web, http.HandlerFunc(serveWeb)) }()
	go func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := echo.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = echo.WriteTo(b[:n], from)
		}
	}()
	for _, s := range []*dns.Server{{PacketConn: questions}, {Listener: streams}} {
		tcp := s.Listener != nil
		s.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { resolve(w, q, tcp) })
		go func() { _ = s.ActivateAndServe() }()
	}
	return end, nil
}

func serveWeb(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/big":
		_, _ = w.Write(bigBytes())
	case "/up":
		h := sha256.New()
		n, _ := io.Copy(h, r.Body)
		fmt.Fprintf(w, "%d %s from %s", n, hex.EncodeToString(h.Sum(nil)), r.RemoteAddr)
	default:
		http.NotFound(w, r)
	}
}

func bigBytes() []byte {
	b := make([]byte, bigSize)
	for i := range b {
		b[i] = byte(i ^ i>>8 ^ i>>16*7)
	}
	return b
}

// atFar are names of the outside's own address.
var atFar = map[string]bool{"web.test.": true, "deb.web.test.": true, "shared.test.": true}

// resolve knows one.test, and many.test whose answer UDP is too small for, and
// the names of the outside itself.
func resolve(w dns.ResponseWriter, q *dns.Msg, tcp bool) {
	r := new(dns.Msg).SetReply(q)
	r.RecursionAvailable = true // the C library passes over a resolver that does not recurse
	name := q.Question[0].Name
	count := map[string]int{"one.test.": 1, "many.test.": 100}[strings.ToLower(name)]
	if atFar[strings.ToLower(name)] {
		if q.Question[0].Qtype == dns.TypeA {
			r.Answer = append(r.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(farIP).To4()})
		}
		_ = w.WriteMsg(r)
		return
	}
	if count == 0 {
		r.Rcode = dns.RcodeNameError
	}
	if q.Question[0].Qtype == dns.TypeA {
		for i := range count {
			if i > 0 && !tcp {
				r.Truncated, r.Answer = true, nil
				break
			}
			r.Answer = append(r.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(203, 0, 113, byte(i+1))})
		}
	}
	_ = w.WriteMsg(r)
}

// netHost is a virtkit whose resolver is the outside's.
func netHost(t *testing.T) *host.Host {
	t.Helper()
	guests(t)
	dir := filepath.Join(world.dir, "net-"+t.Name())
	h, err := host.New(root, dir, "[net]\ndns = [\""+farIP+"\"]\n[vmm]\ndisk = \"2G\"\n")
	if err != nil {
		t.Fatal(err)
	}
	once(t, "default in "+dir, func() error {
		_, err := h.Run(context.Background(), "pull", "--policy", "missing", "local/default")
		return err
	})
	return h
}

// guestServers echo what comes, on TCP 8080 (a line of how much, at its end)
// and UDP 5353.
const guestServers = `
use IO::Socket::INET;
$SIG{CHLD} = "IGNORE";
my $u = IO::Socket::INET->new(LocalPort => 5353, Proto => "udp") or die;
if (!fork) { while ($u->recv(my $b, 65536)) { $u->send("re:$b") } exit }
my $t = IO::Socket::INET->new(LocalPort => 8080, Listen => 64, ReuseAddr => 1) or die;
$| = 1; print "listening\n";
while (my $c = $t->accept) {
  next if fork;
  my $n = 0; while (sysread($c, my $b, 65536)) { $n += length $b }
  print $c "$n from " . $c->peerhost; exit;
}`

// TestNetworkOfARealGuest is docs/network.md, from within a guest.
func TestNetworkOfARealGuest(t *testing.T) {
	h := netHost(t)
	outside(t)
	traps := newTraps(t)
	name := fmt.Sprintf("net-%d", os.Getpid())
	if _, err := h.Run(t.Context(), "run", "-d", "--name", name, "--publish", "0:8080", "--publish", "0:5353/udp",
		"local/default", "perl", "-e", guestServers); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := h.Run(context.Background(), "stop", "--kill", name); err != nil {
			t.Error(err)
		}
		nothingLeft(t, h)
	})
	in := func(t *testing.T, script string) string {
		t.Helper()
		out, err := h.Run(t.Context(), "exec", name, "bash", "-c", script)
		if err != nil {
			t.Errorf("%s: %v", script, err)
		}
		return strings.TrimSpace(out)
	}
	t.Run("large transfers", func(t *testing.T) { transfers(t, in) })
	t.Run("UDP out", func(t *testing.T) {
		for _, n := range []int{1, 1472, 9000, 60000} {
			script := fmt.Sprintf(`perl -MIO::Socket::INET -e '
				$s = IO::Socket::INET->new(PeerAddr => "%s:7", Proto => "udp") or die; alarm 20;
				$w = join "", map { chr($_ %% 251) } 1..%d; $s->send($w); $s->recv($b, 65536); print $b eq $w ? "same" : "differs"'`, farIP, n)
			if got := in(t, script); got != "same" {
				t.Errorf("a datagram of %d bytes: %q", n, got)
			}
		}
	})
	t.Run("DNS", func(t *testing.T) {
		for _, c := range []struct{ script, want string }{
			{"getent ahostsv4 one.test | grep -c STREAM", "1"},
			{"RES_OPTIONS=use-vc getent ahostsv4 one.test | grep -c STREAM", "1"},
			{"getent ahostsv4 many.test | grep -c STREAM", "100"},
			{"getent ahostsv4 nosuch.test || echo none", "none"},
			{"getent hosts " + name + " | wc -l", "1"},
			{"sed -n 's/^nameserver //p' /etc/resolv.conf", "10.200.0.1"},
		} {
			if got := in(t, c.script); got != c.want {
				t.Errorf("%s: %q, want %q", c.script, got, c.want)
			}
		}
	})
	t.Run("refusals outside are refusals inside", func(t *testing.T) {
		if got := in(t, "(exec 3<>/dev/tcp/"+farIP+"/81) 2>&1 || true"); !strings.Contains(got, "refused") {
			t.Errorf("a closed port: %q", got)
		}
	})
	t.Run("the host is not reachable", func(t *testing.T) { traps.try(t, in) })
	t.Run("published ports", func(t *testing.T) { published(t, h, name) })
}

func transfers(t *testing.T, in func(*testing.T, string) string) {
	sum := sha256.Sum256(bigBytes())
	want := hex.EncodeToString(sum[:])
	if got := in(t, "curl -sSf http://"+farIP+"/big | sha256sum"); got != want+"  -" {
		t.Errorf("download: %q, want %s", got, want)
	}
	got := in(t, "cd /tmp && curl -sSf -o big http://"+farIP+"/big && curl -sSf -H 'Expect:' -T big http://"+farIP+"/up")
	if !strings.HasPrefix(got, fmt.Sprintf("%d %s from %s:", bigSize, want, nearIP)) {
		t.Errorf("upload: %q, want %d %s from %s", got, bigSize, want, nearIP)
	}
	if got := in(t, "cat /sys/class/net/eth0/mtu"); got != "65520" {
		t.Errorf("MTU %s, want 65520", got)
	}
}

// traps are services of this host that no guest may reach.
type traps struct {
	loopback, everywhere int // ports
	sprung               atomic.Int32
}

func newTraps(t *testing.T) *traps {
	t.Helper()
	tr := &traps{}
	listen := func(addr string) int {
		l, err := net.Listen("tcp4", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				tr.sprung.Add(1)
				fmt.Fprint(c, "secret")
				c.Close()
			}
		}()
		return l.Addr().(*net.TCPAddr).Port
	}
	tr.loopback, tr.everywhere = listen("127.0.0.1:0"), listen("0.0.0.0:0")
	return tr
}

func (tr *traps) try(t *testing.T, in func(*testing.T, string) string) {
	gateway := in(t, "sed -n 's/^nameserver //p' /etc/resolv.conf")
	to := []string{
		fmt.Sprintf("%s/%d", gateway, tr.loopback), fmt.Sprintf("%s/%d", gateway, tr.everywhere),
		fmt.Sprintf("127.0.0.1/%d", tr.loopback), "169.254.169.254/80",
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			to = append(to, fmt.Sprintf("%s/%d", p.Addr(), tr.everywhere))
		}
	}
	for _, d := range to {
		if got := in(t, "(exec 3<>/dev/tcp/"+d+" && cat <&3) 2>&1 || true"); !strings.Contains(got, "refused") {
			t.Errorf("/dev/tcp/%s: %q, want refused", d, got)
		}
	}
	if n := tr.sprung.Load(); n != 0 {
		t.Errorf("%d connections of the guest reached the host", n)
	}
}

// portsOf are a guest's published ports by "8080/tcp", as vk list has them.
func portsOf(t *testing.T, h *host.Host, name string) map[string]int {
	t.Helper()
	out, err := h.Run(t.Context(), "list", "--json")
	if err != nil {
		t.Fatal(err)
	}
	var l struct {
		Guests []struct {
			Name    string `json:"name"`
			Publish []struct {
				HostPort  int    `json:"host_port"`
				GuestPort int    `json:"guest_port"`
				Proto     string `json:"proto"`
			} `json:"publish"`
		} `json:"guests"`
	}
	if err := json.Unmarshal([]byte(out), &l); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ports := map[string]int{}
	for _, g := range l.Guests {
		if g.Name == name {
			for _, p := range g.Publish {
				ports[fmt.Sprintf("%d/%s", p.GuestPort, p.Proto)] = p.HostPort
			}
		}
	}
	return ports
}

func published(t *testing.T, h *host.Host, name string) {
	ports := portsOf(t, h, name)
	if ports["8080/tcp"] == 0 || ports["5353/udp"] == 0 {
		t.Fatalf("vk list --json: ports %v, want 8080/tcp and 5353/udp", ports)
	}
	talk := func() {
		t.Helper()
		if got, err := send(ports["8080/tcp"], bigBytes()); err != nil || got != fmt.Sprintf("%d from 10.200.0.1", bigSize) {
			t.Errorf("TCP through a published port: %q, %v", got, err)
		}
		if got, err := datagram(ports["5353/udp"], "ping"); err != nil || got != "re:ping" {
			t.Errorf("UDP through a published port: %q, %v", got, err)
		}
	}
	talk()

	// A port that is taken is refused, with who has it, and nothing is left.
	taken := fmt.Sprintf("%d:80", ports["8080/tcp"])
	_, err := h.Run(t.Context(), "run", "--publish", taken, "local/default", "true")
	if err == nil || !strings.Contains(err.Error(), "exit status 125") || !strings.Contains(err.Error(), fmt.Sprintf("127.0.0.1:%d/tcp: the port is in use", ports["8080/tcp"])) ||
		!strings.Contains(err.Error(), "it is held by pid ") {
		t.Errorf("publishing a taken port: %v", err)
	}
	if dirs := h.JobDirs(); len(dirs) != 1 {
		t.Errorf("job directories after it: %q, want one", dirs)
	}
	if _, err := h.Run(t.Context(), "publish", name, taken); err == nil || !strings.Contains(err.Error(), "the port is in use") {
		t.Errorf("vk publish of a taken port: %v", err)
	}

	// Another one while the guest runs, and away again.
	out, err := h.Run(t.Context(), "publish", name, "0:8080")
	if err != nil {
		t.Fatal(err)
	}
	spec := strings.TrimSpace(out)
	more, err := strconv.Atoi(strings.Split(spec, ":")[1])
	if err != nil {
		t.Fatalf("vk publish printed %q", out)
	}
	if got, err := send(more, []byte("abc")); err != nil || got != "3 from 10.200.0.1" {
		t.Errorf("a port published later: %q, %v", got, err)
	}
	if _, err := h.Run(t.Context(), "publish", "--remove", name, spec); err != nil {
		t.Error(err)
	}
	if _, err := send(more, nil); err == nil {
		t.Errorf("port %d is open after --remove", more)
	}

	if _, err := h.Run(t.Context(), "reboot", name); err != nil {
		t.Fatal(err)
	}
	if again := portsOf(t, h, name); fmt.Sprint(again) != fmt.Sprint(ports) {
		t.Errorf("ports after a reboot: %v, want %v", again, ports)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) { // the command starts again
		got, err := send(ports["8080/tcp"], nil)
		if err == nil && got == "0 from 10.200.0.1" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the published port after a reboot: %q, %v", got, err)
		}
	}
	talk()
}

// send sends all, ends its direction and returns the answer.
func send(port int, all []byte) (string, error) {
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return "", err
	}
	go func() {
		_, _ = io.Copy(c, bytes.NewReader(all))
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	b, err := io.ReadAll(c)
	return string(b), err
}

// datagram sends until there is an answer, as datagrams may be lost.
func datagram(port int, text string) (string, error) {
	c, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return "", err
	}
	defer c.Close()
	b := make([]byte, 64<<10)
	for range 60 {
		if _, err = io.WriteString(c, text); err != nil {
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		var n int
		if n, err = c.Read(b); err == nil {
			return string(b[:n]), nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			time.Sleep(50 * time.Millisecond)
		}
	}
	return "", err
}

// --net-host-loopback opens what it says and no more.
func TestHostLoopbackIsOpenedOnRequest(t *testing.T) {
	h := guests(t)
	defaultImage(t, h)
	a, b := newTraps(t).loopback, newTraps(t).loopback
	get := func(host string, port int) string {
		return fmt.Sprintf("(exec 3<>/dev/tcp/%s/%d && cat <&3 && echo) 2>&1 | grep -o 'secret\\|refused' | head -1; ", host, port)
	}
	const gw = "$(sed -n 's/^nameserver //p' /etc/resolv.conf)"
	for _, c := range []struct{ flag, script, want string }{
		{"--net-host-loopback", get(gw, a) + get(gw, b) + get("127.0.0.1", a), "secret\nsecret\nrefused\n"},
		{"--net-host-loopback=" + strconv.Itoa(a), get("127.0.0.1", a) + get("127.0.0.1", b) + get(gw, b), "secret\nrefused\nrefused\n"},
	} {
		out, err := h.Run(t.Context(), "run", c.flag, "local/default", "bash", "-c", c.script)
		if err != nil || out != c.want {
			t.Errorf("%s: %q, %v; want %q", c.flag, out, err, c.want)
		}
	}
	nothingLeft(t, h)
}

// Public case S34: --net none has no network device but the loopback, and no resolver.
func TestNoNetwork(t *testing.T) {
	h := guests(t)
	defaultImage(t, h)
	out, err := h.Run(t.Context(), "run", "--net", "none", "local/default", "bash", "-c",
		"ls /sys/class/net; tail -n +2 /proc/net/route; "+
			"(exec 3<>/dev/tcp/"+farIP+"/80) 2>&1 | grep -o 'unreachable' | head -1")
	if err != nil || out != "lo\nunreachable\n" {
		t.Errorf("%q, %v; want no device but lo, no route, and \"unreachable\"", out, err)
	}
}
