package wire

import (
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/applets/internal/appenv"
	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/supervise"
	"virtkit/netsw"
	"virtkit/vmm/boot"
)

func TestResolvers(t *testing.T) {
	c := conf.Default()
	if got, err := resolvers(c); err != nil || got != nil {
		t.Errorf("none configured: %v, %v; want nil, so that netsw chooses", got, err)
	}
	c.Net.DNS = []string{"192.0.2.1", "192.0.2.2:5353"}
	got, err := resolvers(c)
	want := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53"), netip.MustParseAddrPort("192.0.2.2:5353")}
	if err != nil || !cmp.Equal(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	c.Net.DNS = []string{"name"}
	if got, err := resolvers(c); err == nil {
		t.Errorf("a name was accepted: %v", got)
	}
}

func TestPluggedPortHandsItsLinkOutOnce(t *testing.T) {
	sw, err := netsw.New(netsw.Config{})
	if err != nil {
		t.Fatal(err)
	}
	n := &network{sw: sw}
	defer n.Close()
	p, err := n.Plug(t.Context(), "guest", supervise.NetSpec{})
	if err != nil {
		t.Fatal(err)
	}
	f := p.File()
	if f == nil {
		t.Fatal("no link")
	}
	defer f.Close()
	if again := p.File(); again != nil {
		t.Error("the link was handed out twice")
	}
	g, err := p.Replug()
	if err != nil {
		t.Fatal(err)
	}
	g.Close()
	if net := p.Guest(); net.Addr == "" || net.Gateway == "" || net.MAC == "" || net.MTU == 0 {
		t.Errorf("%+v", net)
	}
}

func TestPublishAndBack(t *testing.T) {
	sw, err := netsw.New(netsw.Config{})
	if err != nil {
		t.Fatal(err)
	}
	n := &network{sw: sw}
	defer n.Close()
	p, err := n.Plug(t.Context(), "guest", supervise.NetSpec{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := p.Publish(t.Context(), supervise.Publish{GuestPort: 80})
	if err != nil || got.HostPort == 0 || got.HostAddr != "127.0.0.1" || got.Proto != "tcp" {
		t.Fatalf("%+v, %v", got, err)
	}
	if err := p.Unpublish(got); err != nil {
		t.Fatal(err)
	}
	if err := p.Unpublish(got); fault.KindOf(err) != fault.NotFound {
		t.Errorf("a second time: %v, want not found", err)
	}
	// The port is free again.
	if _, err := p.Publish(t.Context(), got); err != nil {
		t.Error(err)
	}
}

func TestFlagsComeBeforeTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	vars := map[string]string{"VIRTKIT_STATE_DIR": "/nonexistent", "VIRTKIT_CONFIG": "/nonexistent"}
	env := appenv.Env{Getenv: func(k string) string { return vars[k] }, Exe: "/x"}
	file := dir + "/c.toml"
	if err := os.WriteFile(file, []byte("[net]\nmode = \"none\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := Open(env, Overrides{StateDir: dir + "/state", ConfigFile: file})
	if err != nil {
		t.Fatal(err)
	}
	if h.StateDir != dir+"/state" || h.Conf.Net.Mode != "none" {
		t.Errorf("state %s, mode %s", h.StateDir, h.Conf.Net.Mode)
	}
	// A supervisor reads the same.
	want := []string{"VIRTKIT_STATE_DIR=" + dir + "/state", "VIRTKIT_CONFIG=" + file}
	if d := cmp.Diff(want, h.supervisorEnv()); d != "" {
		t.Error(d)
	}
}

// BenchmarkKernel is what each guest's start waits for before its VMM can run.
func BenchmarkKernel(b *testing.B) {
	if _, err := boot.Agent(); err != nil {
		b.Skip("needs the embedded agent: make build")
	}
	h := &Host{StateDir: os.Getenv("VIRTKIT_STATE_DIR")}
	if h.StateDir == "" {
		b.Skip("needs a state directory with a kernel: set VIRTKIT_STATE_DIR")
	}
	if _, err := h.machineKernel(b.Context(), supervise.Spec{}); err != nil {
		b.Skipf("needs a guest kernel: %v", err)
	}
	for b.Loop() {
		if _, err := h.machineKernel(b.Context(), supervise.Spec{}); err != nil {
			b.Fatal(err)
		}
	}
}
