package vkcmd

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/usage"
)

func TestGitlabUsageReport(t *testing.T) {
	dir := t.TempDir()
	conf := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(conf, []byte("[executor.schedule]\nmem_budget = \"16G\"\nfrom_history = true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	a := &app{env: appenv.Env{Stdout: &out, Stderr: &errs, Getenv: func(k string) string { return map[string]string{"HOME": dir}[k] }}}
	h, err := wire.Open(a.env, wire.Overrides{StateDir: filepath.Join(dir, "state"), ConfigFile: conf})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.usage(h, "", false); fault.KindOf(err) != fault.NotFound || fault.HintOf(err) == "" {
		t.Errorf("nothing remembered: %v", err)
	}
	add := func(key, name string, mib, ceiling int64) {
		t.Helper()
		r := usage.Run{ID: name, Ended: time.Now(), CeilingMiB: ceiling, Figures: usage.Figures{Memory: mib << 20}}
		if err := h.History.Add(key, name, r); err != nil {
			t.Fatal(err)
		}
	}
	add("42-acme/build-1", "build", 4000, 8192)
	add("42-acme/test_unit-1", "test:unit", 500, 2048)
	add("7-other/x-1", "x", 100, 1024)
	if err := a.usage(h, "acme", false); err != nil {
		t.Fatal(err)
	}
	want := `virtkit: 42-acme — what its jobs have been using lately:
  job         memory  overlay  job dir  ceiling  reserves  runs  read  written  sent  received
  build      3.9 GiB        -        -  8.0 GiB   4.9 GiB     1     -        -     -         -
  test:unit  500 MiB        -        -  2.0 GiB   625 MiB     1     -        -     -         -
virtkit: 2 jobs; all at once they would reserve 5.5 GiB, against a budget of 16.0 GiB
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Error(d)
	}
	out.Reset()
	if err := a.usage(h, "", true); err != nil {
		t.Fatal(err)
	}
	var doc usageDocument
	if err := json.Unmarshal(out.Bytes(), &doc); err != nil || len(doc.Projects) != 2 || doc.BudgetMiB != 16384 || !doc.FromHistory || doc.Projects[0].ReservesMiB != 5625 {
		t.Errorf("%v\n%s", err, out.String())
	}
	if err := os.WriteFile(filepath.Join(h.StateDir, "history/42-acme/notes"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := a.usage(h, "42-", false); fault.KindOf(err) != fault.Partial || !strings.Contains(errs.String(), "history/42-acme/notes") {
		t.Errorf("%v\n%s", err, errs.String())
	}
	if err := a.usage(h, "nosuch", false); fault.KindOf(err) != fault.NotFound {
		t.Errorf("%v", err)
	}
}
