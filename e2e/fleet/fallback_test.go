package fleet_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"virtkit/core/fleet/node"
	"virtkit/core/policy"
)

// TestFallbackOnANode: the hub's rules for a node's own gitlab-runner are on the
// node's disk, in the form that its executors read, as they change, while the hub
// is away and after kill -9 of either; with the rules off they are lifted.
func TestFallbackOnANode(t *testing.T) {
	f := newFleet(t)
	off, err := os.ReadFile(f.conf)
	if err != nil {
		t.Fatal(err)
	}
	serve := func(conf string) {
		t.Helper()
		f.hub.kill(syscall.SIGKILL)
		if err := os.WriteFile(f.conf, []byte(conf), 0o600); err != nil {
			t.Fatal(err)
		}
		f.hub.start()
		f.up()
	}
	serve(string(off) + "[jobs]\negress_rules = true\n")
	n, id := f.join("ci-1", f.addr)
	file := filepath.Join(f.dir, "ci-1", "node", node.FallbackFile)
	held := func() string {
		b, err := os.ReadFile(file)
		if err != nil {
			return ""
		}
		if _, err := policy.ParseHubEgress(b); err != nil {
			t.Errorf("%s: %v", b, err)
		}
		return string(b)
	}
	const none = `{"rules":[],"run":{"names":[],"ips":[]},"build":{"names":[],"ips":[]}}`
	f.eventually("without a Fallback they reach nothing", func() bool { return held() == none })
	f.must("egress", "set", "default", "--run-name", "corp.example.com", "--build", "unrestricted", "--mode", "enforce")
	const set = `{"rules":["default"],"run":{"names":["corp.example.com"],"ips":[]},"build":{}}`
	f.eventually("the Fallback", func() bool { return held() == set && f.node(id).Sync == "ok" })
	f.hub.kill(syscall.SIGKILL)
	n.restart()
	f.eventually("the node is there again", func() bool {
		st, err := persisted(filepath.Join(f.dir, "ci-1"))
		return err == nil && st.Applied != nil
	})
	if held() != set {
		t.Errorf("without a hub the node holds %q", held())
	}
	serve(string(off))
	f.eventually("it is lifted", func() bool { _, err := os.Stat(file); return os.IsNotExist(err) && f.node(id).Sync == "ok" })
}
