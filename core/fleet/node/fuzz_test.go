package node_test

import (
	"os"
	"path/filepath"
	"testing"

	"virtkit/core/fleet/node"
	"virtkit/core/fleet/node/nodetest"
	"virtkit/core/fleet/wire"
)

// FuzzState opens any state.json: it is refused, or taken and then of use.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{}`))
	dir := f.TempDir()
	s, err := node.OpenStore(dir, &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID})
	if err != nil {
		f.Fatal(err)
	}
	for _, op := range []wire.Op{wire.OpDrain, wire.OpQuarantine} {
		if _, err := s.Receive(&wire.Command{ID: wire.NewID(), Op: op, Expires: 1 << 40}, 1); err != nil {
			f.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, node.StateFile))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, node.StateFile), data, 0o600); err != nil {
			t.Fatal(err)
		}
		e := &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID}
		s, err := node.OpenStore(dir, e)
		if err != nil {
			return
		}
		if _, err := s.Receive(&wire.Command{ID: wire.NewID(), Op: wire.OpQuarantine, Expires: 1 << 40}, 1); err != nil {
			t.Errorf("it takes no command: %v", err)
		}
		if _, err := node.OpenStore(dir, e); err != nil {
			t.Errorf("what it wrote is refused: %v", err)
		}
	})
}

// FuzzEnrollment reads any identity.
func FuzzEnrollment(f *testing.F) {
	f.Add([]byte(`{"url":"https://hub.example.com:8443","node":"`+nodetest.NodeID+`","hub":"`+nodetest.HubID+`"}`), []byte("ab\n"), []byte("-----BEGIN CERTIFICATE-----"))
	f.Fuzz(func(t *testing.T, enrollment, key, ca []byte) {
		dir := t.TempDir()
		for name, b := range map[string][]byte{node.EnrollmentFile: enrollment, node.KeyFile: key, node.CAFile: ca} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		e, err := node.LoadEnrollment(dir)
		if err == nil && (!wire.IsHex(e.Node, wire.IDLen) || len(e.Key) == 0) {
			t.Errorf("taken: %+v", e)
		}
	})
}
