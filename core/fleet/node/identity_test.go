package node_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/node/nodetest"
	"virtkit/core/fsx"
)

func shared(stateDir string) (*fsx.Lock, error) {
	return fsx.TryLock(filepath.Join(stateDir, node.Dir, node.LockFile), true)
}

// TestOwn: the directory and the key belong to the node's user and are closed
// to everyone else, or the node does not start.
func TestOwn(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(dir string) error
		words string
	}{
		"open to the group": {func(d string) error { return os.Chmod(d, 0o750) }, "closed to group and others"},
		"open to others":    {func(d string) error { return os.Chmod(d, 0o701) }, "closed to group and others"},
		"a link":            {func(d string) error { os.Rename(d, d+"2"); return os.Symlink(d+"2", d) }, "is not a directory"},
		"a file":            {func(d string) error { os.RemoveAll(d); return os.WriteFile(d, nil, 0o600) }, "is not a directory"},
		"another's":         {func(d string) error { return os.Chown(d, 4711, -1) }, "belongs to user 4711"},
		"missing":           {os.RemoveAll, "not enrolled"},
		"key for all":       {func(d string) error { return os.Chmod(filepath.Join(d, node.KeyFile), 0o644) }, "closed to group and others"},
		"another's key":     {func(d string) error { return os.Chown(filepath.Join(d, node.KeyFile), 4711, -1) }, "belongs to user 4711"},
		"a link for a key": {func(d string) error {
			k := filepath.Join(d, node.KeyFile)
			os.Rename(k, k+"2")
			return os.Symlink(k+"2", k)
		}, ""},
		"a pipe for a key": {func(d string) error {
			k := filepath.Join(d, node.KeyFile)
			os.Remove(k)
			return syscall.Mkfifo(k, 0o600)
		}, "is not a file"},
		"no key":        {func(d string) error { return os.Remove(filepath.Join(d, node.KeyFile)) }, ""},
		"a short key":   {func(d string) error { return os.WriteFile(filepath.Join(d, node.KeyFile), []byte("5ec2e7"), 0o600) }, "64 hex digits"},
		"no enrollment": {func(d string) error { return os.Remove(filepath.Join(d, node.EnrollmentFile)) }, "not enrolled"},
		"half an enrollment": {func(d string) error {
			return os.WriteFile(filepath.Join(d, node.EnrollmentFile), []byte(`{"hub`), 0o600)
		}, "not an enrollment"},
		"no ids": {func(d string) error { return os.WriteFile(filepath.Join(d, node.EnrollmentFile), []byte(`{}`), 0o600) }, "ids"},
		"http elsewhere": {func(d string) error {
			return os.WriteFile(filepath.Join(d, node.EnrollmentFile), []byte(`{"hub_url":"http://hub.example.com","hub":"`+nodetest.HubID+`","node":"`+nodetest.NodeID+`"}`), 0o600)
		}, "loopback"},
	} {
		state := t.TempDir()
		nodetest.Enroll(t, state)
		if strings.Contains(name, "another") && os.Geteuid() != 0 {
			continue // giving a file away needs root
		}
		if err := c.spoil(filepath.Join(state, node.Dir)); err != nil {
			t.Fatal(err)
		}
		n, err := node.Open(t.Context(), node.Config{StateDir: state})
		if err == nil {
			n.Close()
			t.Errorf("%s: the node opened", name)
			continue
		}
		if !strings.Contains(err.Error(), c.words) || !strings.Contains(err.Error(), state) || strings.Contains(err.Error(), "5ec2e7") {
			t.Errorf("%s: %v", name, err)
		}
		if c.words == "closed to group and others" && fault.KindOf(err) != fault.Denied {
			t.Errorf("%s: kind %s", name, fault.KindOf(err))
		}
	}
	state := t.TempDir()
	nodetest.Enroll(t, state)
	n, err := node.Open(t.Context(), node.Config{StateDir: state})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if n.Enrollment().Node != nodetest.NodeID || !n.Enrollment().Key.Equal(nodetest.Key()) {
		t.Errorf("%+v", n.Enrollment().Node)
	}
}
