package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/e2e/host"
)

// TestShares: [executor.share] are directories of the host, as they are at each
// moment, that a job can read and not write; one that is not there is the host's
// fault.
func TestShares(t *testing.T) {
	guests(t)
	dir := t.TempDir()
	sdk := filepath.Join(dir, "sdk")
	if err := os.MkdirAll(filepath.Join(sdk, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(sdk, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	put("bin/tool", "#!/bin/sh\necho of the sdk\n")
	h, err := host.New(root, filepath.Join(world.dir, "shares"), config+"[executor.share]\n\"/opt/my sdk\" = \""+sdk+"\"\n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nothingLeft(t, h) })
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	prepared(t, s)
	put("later", "a new file\n")
	res := stage(t, s, "build_script", "\"/opt/my sdk/bin/tool\"; cat \"/opt/my sdk/later\"\necho x > \"/opt/my sdk/later\"; rm \"/opt/my sdk/bin/tool\"; touch \"/opt/my sdk/mine\"; echo done\n")
	if res.Exit != 0 || string(res.Stdout) != "of the sdk\na new file\ndone\n" || strings.Count(string(res.Stderr), "Read-only file system") != 3 {
		t.Errorf("%d %q\n%s", res.Exit, res.Stdout, res.Stderr)
	}
	if b, err := os.ReadFile(filepath.Join(sdk, "later")); err != nil || string(b) != "a new file\n" {
		t.Errorf("the host's file is %q, %v", b, err)
	}

	if err := os.Rename(sdk, sdk+"-gone"); err != nil {
		t.Fatal(err)
	}
	s = plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	cleanedUp(t, s)
	if res, _, err := s.Config(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("config: %d %v", res.Exit, err)
	}
	out, err := s.Prepare(t.Context())
	if err != nil || out.Exit != 2 || !strings.Contains(string(out.Stderr), `virtkit: shares: [executor.share] "/opt/my sdk": stat `+sdk) || !strings.Contains(string(out.Stderr), "take the line out") {
		t.Errorf("prepare: %d %v\n%s%s", out.Exit, err, out.Stdout, out.Stderr)
	}
}
