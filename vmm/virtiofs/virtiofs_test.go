package virtiofs_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/vmm/virtiofs"
)

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	comma := filepath.Join(dir, "a,b")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(comma, 0o700); err != nil {
		t.Fatal(err)
	}
	for src, want := range map[string]fault.Kind{
		filepath.Join(dir, "none"): fault.NotFound, file: fault.Usage, comma: fault.Usage,
	} {
		_, _, err := virtiofs.Serve(t.Context(), virtiofs.Config{Source: src, Dir: t.TempDir()})
		if err == nil || fault.KindOf(err) != want || !strings.Contains(err.Error(), src) {
			t.Errorf("%s: error %v of kind %s, want %s", src, err, fault.KindOf(err), want)
		}
	}
}

func TestServeAndKill(t *testing.T) {
	if _, err := virtiofs.Binary(); err != nil {
		t.Skipf("needs virtiofsd: %v", err)
	}
	for _, ro := range []bool{false, true} {
		dir := t.TempDir()
		d, conn, err := virtiofs.Serve(t.Context(), virtiofs.Config{Source: t.TempDir(), Dir: dir, ReadOnly: ro, Log: os.Stderr})
		if err != nil {
			t.Skipf("needs to run virtiofsd: %v", err)
		}
		for range 2 {
			d.Kill()
		}
		<-d.Done()
		if err := conn.Close(); err != nil {
			t.Errorf("closing the socket: %v", err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("left %v", left)
		}
	}
}
