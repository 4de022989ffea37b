package archtest_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/archtest"
)

func TestRepository(t *testing.T) {
	root, err := archtest.Root(".")
	if err != nil {
		t.Fatal(err)
	}
	tree, err := archtest.Load(root)
	if err != nil {
		t.Fatal(err)
	}
	if tree.Module != "virtkit" || !slices.ContainsFunc(tree.Files, func(f *archtest.File) bool { return f.Path == "core/archtest/archtest.go" }) {
		t.Fatalf("module %q with %d files: that is not this repository", tree.Module, len(tree.Files))
	}
	for _, p := range tree.Check() {
		t.Error(p)
	}
	for _, p := range tree.Long() {
		t.Log(p)
	}
}

const doc = "// Package x is.\n"

// TestRules tries each rule on a repository made for it: the clean file
// passes, the bad one is caught, at its line.
func TestRules(t *testing.T) {
	long := strings.Repeat("\n", 601)
	body := func(n int) string { return "func f() {\n" + strings.Repeat("\tg()\n", n-2) + "}\nfunc g() {}\n" }
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []string // PATH:LINE RULE
	}{
		{"clean", map[string]string{
			"main.go":                "// Vk is.\npackage main\nimport (\n\"os\"\n\"m/applets\"\n)\nfunc main() { os.Exit(applets.X) }",
			"applets/a.go":           doc + "package x\nimport (\n_ \"m/vmm\"\n_ \"m/core/b\"\n_ \"github.com/urfave/cli/v3\"\n)",
			"vmm/v.go":               doc + "package x\nimport _ \"m/core/b\"",
			"vmm/vmmtest/v.go":       doc + "package x\nimport _ \"m/vmm\"",
			"core/b/b.go":            doc + "package x",
			"core/b/c.go":            "package x",
			"core/b/b_test.go":       "package x_test\nimport \"os\"\nfunc TestMain() { os.Exit(0) }",
			"e2e/e_test.go":          "package e2e_test\nimport _ \"m/netsw\"",
			"vmm/a_e2e_test.go":      "package x_test\nimport _ \"m/netsw\"",
			"netsw/n.go":             doc + "package x\nimport _ \"gvisor.dev/gvisor/pkg/tcpip\"",
			"core/zst/z.go":          doc + "package x\nimport _ \"github.com/DataDog/zstd\"",
			"docs/d.go.txt":          "x",
			"testdata/t.go":          "not go at all",
			"core/b/testdata/x.go":   "nor this",
			".git/x.go":              "no",
			"packaging/tools/go.mod": "module other",
			"packaging/tools/t.go":   "no",
		}, nil},
		{"core imports an engine", map[string]string{"core/a/a.go": doc + "package x\nimport _ \"m/vmm\""}, []string{"core/a/a.go:3 layer"}},
		{"behind a build tag", map[string]string{"core/a/a.go": "//go:build windows\n\n" + doc + "package x\nimport _ \"m/netsw/frame\""}, []string{"core/a/a.go:5 layer"}},
		{"in a test", map[string]string{"core/a/a_test.go": "package x\nimport _ \"m/vmm/vmmtest\""}, []string{"core/a/a_test.go:2 layer"}},
		{"between engines", map[string]string{"vmm/a.go": doc + "package x\nimport _ \"m/netsw\""}, []string{"vmm/a.go:3 layer"}},
		{"engine imports applets", map[string]string{"ledger/a.go": doc + "package x\nimport _ \"m/applets/vkcmd\""}, []string{"ledger/a.go:3 layer"}},
		{"main skips applets", map[string]string{"main.go": "// Vk is.\npackage main\nimport _ \"m/vmm\""}, []string{"main.go:3 layer"}},
		{"the root imported", map[string]string{"applets/a.go": doc + "package x\nimport _ \"m\""}, []string{"applets/a.go:3 layer"}},
		{"folder with a like name", map[string]string{"core/a/a.go": doc + "package x\nimport _ \"m/corefoo\""}, []string{"core/a/a.go:3 layer"}},
		{"heavy", map[string]string{
			"core/zst/ok.go":     doc + "package x\nimport _ \"github.com/DataDog/zstd\"",
			"core/image/a.go":    doc + "package x\nimport (\n_ \"github.com/DataDog/zstd\"\n_ \"github.com/Microsoft/hcsshim/ext4/tar2ext4\"\n)",
			"core/imagex/a.go":   doc + "package x\nimport _ \"github.com/Microsoft/hcsshim/ext4\"",
			"vmm/a.go":           doc + "package x\nimport _ \"gvisor.dev/gvisor/pkg/tcpip\"",
			"web/a.go":           doc + "package x\nimport _ \"modernc.org/sqlite\"",
			"core/ui/ui_test.go": "package x\nimport _ \"github.com/urfave/cli/v3\"",
		}, []string{"core/image/a.go:4 heavy", "core/imagex/a.go:3 heavy", "core/ui/ui_test.go:2 heavy", "vmm/a.go:3 heavy", "web/a.go:3 heavy"}},
		{"linked into guests", map[string]string{
			"agent/a.go":           doc + "package x\nimport _ \"m/core/a\"",
			"core/a/a.go":          doc + "package x\nimport _ \"m/core/b\"",
			"core/b/b.go":          doc + "package x\nimport _ \"net/http\"",
			"core/b/b_test.go":     "package x\nimport _ \"net/http/httptest\"",
			"agent/agenttest/a.go": doc + "package x\nimport _ \"net/http\"",
		}, []string{"core/b/b.go:3 reach"}},
		{"top-level folder", map[string]string{"pkg/a.go": doc + "package x"}, []string{"pkg:0 top"}},
		{"package in the root", map[string]string{"x.go": doc + "package x"}, []string{"x.go:0 top"}},
		{"no comment", map[string]string{"core/a/a.go": "package x", "core/a/a_test.go": doc + "package x"}, []string{"core/a/a.go:0 doc"}},
		{"two comments", map[string]string{"core/a/a.go": doc + "package x", "core/a/b.go": doc + "package x"}, []string{"core/a:0 doc"}},
		{"another comment", map[string]string{"core/a/a.go": "// This is.\npackage x"}, []string{"core/a/a.go:0 doc"}},
		{"empty name", map[string]string{"core/utils/a.go": doc + "package x", "core/a/a.go": "// Package helper is.\npackage helper", "core/utilities/a.go": doc + "package x"},
			[]string{"core/a:0 name", "core/utils:0 name"}},
		{"long file", map[string]string{"core/a/a.go": doc + "package x" + long, "core/b/b.go": "// Code generated by a test. DO NOT EDIT.\n\n" + doc + "package x" + long}, []string{"core/a/a.go:0 length"}},
		{"long function", map[string]string{"core/a/a.go": doc + "package x\n" + body(121), "core/b/b.go": doc + "package x\n" + body(120), "core/b/b_test.go": "package x\n" + body(200)},
			[]string{"core/a/a.go:3 length"}},
		{"exit", map[string]string{"core/a/a.go": doc + "package x\nimport (\n\"log\"\nunixy \"os\"\n)\nfunc f() { log.Fatalf(\"\") }\nfunc g() { unixy.Exit(1) }\n",
			"vmm/vmmtest/v.go": doc + "package x\nimport \"os\"\nfunc Main() { os.Exit(1) }",
			"core/b/main.go":   "// Package x is.\npackage x\nimport \"os\"\nfunc f() { os.Exit(1) }"}, []string{"core/a/a.go:7 exit", "core/a/a.go:8 exit", "core/b/main.go:4 exit"}},
		{"init", map[string]string{"applets/a.go": doc + "package x\nfunc init() {}", "vmm/a.go": doc + "package x\nfunc init() {}\ntype t int\nfunc (t) init() {}"}, []string{"applets/a.go:3 init"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			c.files["go.mod"] = "module m\n"
			for name, text := range c.files {
				name = filepath.Join(root, name)
				if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			tree, err := archtest.Load(root)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, p := range tree.Check() {
				got = append(got, fmt.Sprintf("%s:%d %s", p.Path, p.Line, p.Rule))
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("(-want +got)\n%s\n%v", d, tree.Check())
			}
		})
	}
}

func TestLoadRefusesWhatIsNotGo(t *testing.T) {
	root := t.TempDir()
	os.WriteFile(filepath.Join(root, "go.mod"), []byte("module m\n"), 0o644)
	os.WriteFile(filepath.Join(root, "a.go"), []byte("package"), 0o644)
	if _, err := archtest.Load(root); err == nil || !strings.Contains(err.Error(), "a.go") {
		t.Errorf("got %v, want an error that names a.go", err)
	}
}
