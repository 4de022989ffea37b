package tapnet_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/netsw/tapnet"
)

const (
	helperWord = "VK_TAPNET_HELPER" // what the process is to do
	helperKill = "VK_TAPNET_KILL"   // the step at which it dies; "" = none
)

// TestMain lets the test's program be a process that makes a port and dies.
func TestMain(m *testing.M) {
	if word := os.Getenv(helperWord); word != "" {
		if err := helper(word); err != nil {
			fmt.Printf("%v\nhint: %s\n", err, fault.HintOf(err))
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// helper makes, or leases, a port and closes it again. It says each step.
func helper(word string) error {
	cfg := tapnet.Config{
		Job: "helper", Home: "fe00-1", PoolSize: 2, Resolvers: []netip.AddrPort{netip.MustParseAddrPort(worldIP + ":53")},
		Hook: func(step string) {
			fmt.Println("step " + step)
			if step == os.Getenv(helperKill) {
				unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		},
	}
	get := tapnet.Make
	if name, ok := strings.CutPrefix(word, "lease "); ok {
		get = tapnet.Lease
		for n := range strings.FieldsSeq(name) {
			cfg.Devices = append(cfg.Devices, tapnet.Device{Name: n})
		}
	}
	p, err := get(context.Background(), cfg)
	if err != nil {
		return err
	}
	fmt.Printf("got %s %s\n", p.Name(), p.Guest().Addr)
	cfg.Hook("have")
	return p.Close()
}

// runHelper runs it in this namespace until its end; killed tells how.
func runHelper(t *testing.T, uid uint32, word, kill string) (out string, killed bool) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{helperWord + "=" + word, helperKill + "=" + kill, "PATH=" + os.Getenv("PATH")}
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	b, _ := cmd.CombinedOutput()
	ws, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	return string(b), ws.Signaled() && ws.Signal() == unix.SIGKILL
}

// helperAs runs it as another user, without any right.
func helperAs(t *testing.T, uid uint32, word string) string {
	t.Helper()
	out, _ := runHelper(t, uid, word, "")
	return out
}

func steps(out string) []string {
	var s []string
	for l := range strings.Lines(out) {
		if w, ok := strings.CutPrefix(strings.TrimSpace(l), "step "); ok && !slices.Contains(s, w) {
			s = append(s, w)
		}
	}
	return s
}

func TestKilledAtEachStep(t *testing.T) {
	if !inside(t) {
		return
	}
	newWorld(t)
	sweep := func(keep bool) []string {
		t.Helper()
		gone, err := tapnet.Sweep(t.Context(), tapnet.SweepOptions{Home: "fe00-1", Alive: func(string) bool { return false }, KeepPool: keep})
		must(t, err)
		return gone
	}
	for _, word := range []string{"make", "lease "} {
		out, _ := runHelper(t, 0, word, "")
		all := steps(out)
		if len(all) < 10 || !strings.Contains(out, "got ") {
			t.Fatalf("%s: the steps are %v\n%s", word, all, out)
		}
		sweep(false)
		for _, step := range all {
			out, killed := runHelper(t, 0, word, step)
			if !killed {
				t.Fatalf("%s was not killed at %q:\n%s", word, step, out)
			}
			for _, l := range left(t) {
				if l != "rules" && !strings.HasPrefix(l, "vktap-p") {
					t.Errorf("%s killed at %q leaves device %s", word, step, l)
				}
			}
			// Whoever comes next finds nothing in his way.
			if out, _ := runHelper(t, 0, word, ""); !strings.Contains(out, "got vktap") || !strings.Contains(out, "10.201.96.2/30") {
				t.Errorf("after %s killed at %q:\n%s", word, step, out)
			}
			runHelper(t, 0, word, step)
			sweep(false)
			if l := left(t); len(l) > 0 {
				t.Errorf("%s killed at %q: left after a sweep: %v", word, step, l)
			}
		}
	}
}

func TestSweepKeepsWhatIsWanted(t *testing.T) {
	if !inside(t) {
		return
	}
	newWorld(t)
	mine, theirs := config(t, "mine"), config(t, "theirs")
	theirs.Home = "fe00-2"
	p, q := makePort(t, mine), makePort(t, theirs)
	own, err := tapnet.Lease(t.Context(), config(t, "pooled"))
	must(t, err)
	defer own.Close()
	sweep := func(alive, dry bool) []string {
		t.Helper()
		gone, err := tapnet.Sweep(t.Context(), tapnet.SweepOptions{Home: "fe00-1", Alive: func(job string) bool { return alive || job != "mine" }, DryRun: dry})
		must(t, err)
		return gone
	}
	if gone := sweep(true, false); gone != nil {
		t.Errorf("of living jobs it removed %v", gone)
	}
	if gone := sweep(false, true); !cmp.Equal(gone, []string{"device " + p.Name()}) || len(left(t)) != 4 {
		t.Errorf("a dry run tells %v and leaves %v", gone, left(t))
	}
	if gone := sweep(false, false); !cmp.Equal(gone, []string{"device " + p.Name()}) {
		t.Errorf("it removed %v, want the dead job's device that somebody holds", gone)
	}
	if d := cmp.Diff([]string{"vktap1", "vktap-p0", "rules"}, left(t)); d != "" {
		t.Errorf("left (-want +got)\n%s", d)
	}
	must(t, p.Close())
	must(t, q.Close())
	must(t, own.Close())
	if gone := sweep(false, false); !cmp.Equal(gone, []string{"device vktap-p0", "nftables table inet virtkit"}) {
		t.Errorf("at the end it removed %v", gone)
	}
}

func TestOwnPool(t *testing.T) {
	if !inside(t) {
		return
	}
	world := newWorld(t)
	world.serve(t, worldIP+":80")
	lease := func(job string) (*tapnet.Port, error) { return tapnet.Lease(t.Context(), config(t, job)) }
	one, err := lease("one")
	must(t, err)
	two, err := lease("two")
	must(t, err)
	if one.Name() != "vktap-p0" || two.Name() != "vktap-p1" || one.Guest().Addr == two.Guest().Addr {
		t.Errorf("%s %v, %s %v", one.Name(), one.Guest(), two.Name(), two.Guest())
	}
	_, err = lease("three")
	if fault.KindOf(err) != fault.Busy || err.Error() != "all 2 devices of [net] pool are in use: one, two" {
		t.Errorf("the third: %v", err)
	}
	addr := one.Guest().Addr
	must(t, one.Close())
	again, err := lease("three")
	must(t, err)
	if again.Name() != "vktap-p0" || again.Guest().Addr != addr || again.Guest().MTU != uplink {
		t.Errorf("leased again: %s %+v", again.Name(), again.Guest())
	}
	if from, err := newGuest(t, again).asked(worldIP + ":80"); err != nil || from != hostIP {
		t.Errorf("from a pool's device the world saw %q, %v", from, err)
	}
	must(t, again.Close())
	must(t, two.Close())
}

func TestAdministratorsPool(t *testing.T) {
	if !inside(t) {
		return
	}
	newWorld(t)
	const uid = 12345
	mk := func(name, more string) string {
		return "ip tuntap add dev " + name + " mode tap user 12345 " + more + "\n"
	}
	sh(t, mk("ci0", "")+"ip addr add 10.77.0.1/30 dev ci0; ip link set ci0 mtu 1350 up\n"+
		mk("ci1", "")+"ip addr add 10.77.0.6/30 dev ci1; ip link set ci1 up\n"+
		mk("down0", "")+mk("bare0", "")+"ip link set bare0 up\n"+
		mk("mq0", "multi_queue")+"ip addr add 10.77.1.1/30 dev mq0; ip link set mq0 up\n"+
		"ip tuntap add dev tun0 mode tun user 12345; ip link set tun0 up\n"+
		"ip tuntap add dev root0 mode tap user 1; ip addr add 10.77.2.1/30 dev root0; ip link set root0 up\n"+
		"ip link add br0 type bridge; ip addr add 10.78.0.1/24 dev br0; ip link set br0 up\n"+mk("port0", "")+"ip link set port0 master br0 up")
	if out := helperAs(t, uid, "lease ci0"); !strings.Contains(out, "got ci0 10.77.0.2/30") {
		t.Errorf("a plain user's lease: %s", out)
	}
	if out := helperAs(t, uid, "lease ci1"); !strings.Contains(out, "got ci1 10.77.0.5/30") {
		t.Errorf("the other address: %s", out)
	}
	for name, want := range map[string]string{
		"down0": "ip link set down0 up", "bare0": "ip addr add", "mq0": "no tap device of a single queue", "tun0": "is no tap device",
		"root0": "is another user's", "port0": "port of a bridge", "none0": "ip tuntap add dev none0 mode tap user",
	} {
		if out := helperAs(t, uid, "lease "+name); !strings.Contains(out, want) {
			t.Errorf("lease of %s: %s\nwant %q", name, out, want)
		}
	}
	// Root takes them too; the ones that are broken are passed over.
	cfg := config(t, "job")
	cfg.Devices = []tapnet.Device{{Name: "none0"}, {Name: "ci0"}}
	p, err := tapnet.Lease(t.Context(), cfg)
	must(t, err)
	if p.Name() != "ci0" || p.Guest().MTU != 1350 || p.Guest().Gateway != "10.77.0.1" {
		t.Errorf("%s %+v", p.Name(), p.Guest())
	}
	cfg.Devices = cfg.Devices[1:]
	if _, err = tapnet.Lease(t.Context(), cfg); fault.KindOf(err) != fault.Busy || !strings.Contains(err.Error(), "all 1 devices of [net] pool are in use") {
		t.Errorf("all leased: %v", err)
	}
	free, used, errs := tapnet.PoolReady(tapnet.Config{Resolvers: cfg.Resolvers, Devices: []tapnet.Device{{Name: "ci0"}, {Name: "ci1"}, {Name: "none0"}}})
	if free != 1 || used != 1 || len(errs) != 1 {
		t.Errorf("readiness: %d free, %d used, %v", free, used, errs)
	}
	must(t, p.Close())
	// Killed while it has one.
	if out, killed := runHelper(t, uid, "lease ci0", "have"); !killed {
		t.Errorf("not killed: %s", out)
	}
	if out := helperAs(t, uid, "lease ci0"); !strings.Contains(out, "got ci0") {
		t.Errorf("after a kill: %s", out)
	}
	// On a bridge, where the configuration says who the guest is.
	cfg.Devices = []tapnet.Device{{Name: "port0", Guest: netip.MustParsePrefix("10.78.0.9/24"), Gateway: netip.MustParseAddr("10.78.0.1")}}
	p, err = tapnet.Lease(t.Context(), cfg)
	must(t, err)
	if err := newGuest(t, p).echo(t, "10.78.0.1"); err != nil {
		t.Errorf("echo over the bridge: %v", err)
	}
	if p.Guest().MAC == "02:76:6b:01:00:02" {
		t.Error("guests of one bridge have one hardware address")
	}
	must(t, p.Close())
	if l := left(t); len(l) > 0 {
		t.Errorf("an administrator's pool left %v", l)
	}
}
