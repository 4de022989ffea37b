package archtest

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// allowed is the rule on one line: main → applets → {web, vmm, netsw, ledger,
// hubdb, agent} → core. A folder may always import itself.
var allowed = map[string][]string{
	"main":    {"applets", "core"},
	"applets": {"web", "vmm", "netsw", "ledger", "hubdb", "agent", "core"},
	"web":     {"core"},
	"vmm":     {"core"},
	"netsw":   {"core"},
	"ledger":  {"core"},
	"hubdb":   {"core"},
	"agent":   {"core"},
	"core":    {},
	"e2e":     {"main", "applets", "web", "vmm", "netsw", "ledger", "hubdb", "agent", "core"},
	// Programs that build kernels and packages stand outside of vk.
	"packaging": {"core"},
}

// others are top-level folders without Go code of vk.
var others = []string{"bin", "docs", "testdata"}

// heavyAt says which folders may import what is big, has cgo, or must stay
// behind one wrapper. e2e is not exempt: it uses vk's own interfaces.
var heavyAt = map[string][]string{
	"modernc.org/sqlite":                     {"hubdb", "ledger"},
	"github.com/mattn/go-sqlite3":            {"hubdb", "ledger"},
	"gvisor.dev/gvisor":                      {"netsw"},
	"github.com/urfave/cli":                  {"applets"},
	"github.com/coder/websocket":             {"core/wsx"},
	"github.com/gorilla/websocket":           {"core/wsx"},
	"nhooyr.io/websocket":                    {"core/wsx"},
	"github.com/DataDog/zstd":                {"core/zst"},
	"github.com/prometheus/client_golang":    {"core/fleet", "web", "applets"},
	"github.com/vishvananda/netlink":         {"vmm", "netsw", "agent"},
	"github.com/coreos/go-oidc":              {"web/auth"},
	"golang.org/x/oauth2":                    {"web/auth"},
	"github.com/Microsoft/hcsshim":           {"core/image", "vmm"},
	"github.com/google/go-containerregistry": {"core/image", "e2e"},
}

// guest is what is linked into a guest: start-up time and memory of every
// guest pay for each package there, and it is built without cgo.
var guest = []string{"agent", "core/guestwire"}

// notInGuest may not be reached from guest, through whatever packages.
var notInGuest = []string{"github.com/DataDog/zstd", "github.com/google/go-containerregistry", "github.com/Microsoft/hcsshim",
	"github.com/urfave/cli", "gvisor.dev/gvisor", "modernc.org/sqlite", "net/http"}

// longFiles may be longer than MaxFile. Each needs its reason beside it.
var longFiles = map[string]string{}

// within says whether p is prefix or below it.
func within(p, prefix string) bool { return p == prefix || strings.HasPrefix(p, prefix+"/") }

func layers(t *Tree) []Problem {
	var ps []Problem
	for _, f := range t.Files {
		from := f.top()
		if strings.HasSuffix(f.Path, "_e2e_test.go") {
			from = "e2e"
		}
		for _, im := range f.Imports {
			if !within(im.Path, t.Module) {
				continue
			}
			to := "main"
			if rest, ok := strings.CutPrefix(im.Path, t.Module+"/"); ok {
				to, _, _ = strings.Cut(rest, "/")
			}
			if to != from && !slices.Contains(allowed[from], to) {
				ps = append(ps, Problem{f.Path, im.Line, "layer", fmt.Sprintf("%s must not import %s: declare an interface in core and wire it in applets", from, im.Path)})
			}
		}
	}
	return ps
}

func heavy(t *Tree) []Problem {
	var ps []Problem
	for _, f := range t.Files {
		for _, im := range f.Imports {
			for dep, at := range heavyAt {
				if within(im.Path, dep) && !slices.ContainsFunc(at, func(d string) bool { return within(f.Folder(), d) }) {
					ps = append(ps, Problem{f.Path, im.Line, "heavy", fmt.Sprintf("%s may be used in %s alone", dep, strings.Join(at, ", "))})
				}
			}
		}
	}
	return ps
}

// reach follows the imports of what runs in a guest, tests left out.
func reach(t *Tree) []Problem {
	byFolder := map[string][]*File{}
	for _, f := range t.Files {
		if !f.Test {
			byFolder[f.Folder()] = append(byFolder[f.Folder()], f)
		}
	}
	var ps []Problem
	seen := map[string]bool{}
	var visit func(folder string, via []string)
	visit = func(folder string, via []string) {
		if seen[folder] {
			return
		}
		seen[folder] = true
		via = append(slices.Clip(via), folder)
		for _, f := range byFolder[folder] {
			for _, im := range f.Imports {
				if rest, ok := strings.CutPrefix(im.Path, t.Module+"/"); ok {
					visit(rest, via)
				}
				for _, dep := range notInGuest {
					if within(im.Path, dep) {
						ps = append(ps, Problem{f.Path, im.Line, "reach", fmt.Sprintf("%s would be linked into guests, through %s", im.Path, strings.Join(via, " → "))})
					}
				}
			}
		}
	}
	for _, folder := range slices.Sorted(maps.Keys(byFolder)) {
		if slices.ContainsFunc(guest, func(g string) bool { return within(folder, g) }) && !isTestFolder(folder) {
			visit(folder, nil)
		}
	}
	return ps
}

// isTestFolder says whether a folder holds fakes and suites: <pkg>test.
func isTestFolder(folder string) bool {
	return slices.ContainsFunc(strings.Split(folder, "/"), func(s string) bool { return strings.HasSuffix(s, "test") })
}

func tops(t *Tree) []Problem {
	var ps []Problem
	for _, d := range t.Dirs {
		if _, ok := allowed[d]; !ok && !slices.Contains(others, d) || d == "main" {
			ps = append(ps, Problem{d, 0, "top", "is not one of the top-level folders; DESIGN.md section 1 and AGENTS.md have the map"})
		}
	}
	for _, f := range t.Files {
		if f.top() == "main" && f.Package != "main" {
			ps = append(ps, Problem{f.Path, 0, "top", "the root holds package main alone"})
		}
	}
	return ps
}

// docs wants exactly one package comment in each package, outside of tests.
func docs(t *Tree) []Problem {
	type pkg struct{ folder, name string }
	have, files := map[pkg][]string{}, map[pkg]string{}
	var ps []Problem
	for _, f := range t.Files {
		p := pkg{f.Folder(), f.Package}
		if f.Test {
			continue
		}
		if files[p] == "" {
			files[p] = f.Path
		}
		if f.Doc != "" {
			have[p] = append(have[p], f.Path)
			if want := "Package " + f.Package + " "; f.Package != "main" && !strings.HasPrefix(f.Doc, want) {
				ps = append(ps, Problem{f.Path, 0, "doc", "the package comment does not begin with " + want})
			}
		}
	}
	for p, first := range files {
		if n := len(have[p]); n != 1 {
			text := "has no package comment"
			if n > 1 {
				first, text = p.folder, "has package comments in "+strings.Join(have[p], ", ")
			}
			ps = append(ps, Problem{first, 0, "doc", "package " + p.name + " " + text + ", exactly one is wanted"})
		}
	}
	return ps
}

// empty names say nothing about what is inside.
var empty = []string{"util", "common", "helper", "manager", "misc"}

func names(t *Tree) []Problem {
	var ps []Problem
	seen := map[string]bool{}
	for _, f := range t.Files {
		for _, n := range []string{path.Base(f.Folder()), strings.TrimSuffix(f.Package, "_test")} {
			if slices.Contains(empty, strings.TrimSuffix(strings.ToLower(n), "s")) && !seen[f.Folder()] {
				seen[f.Folder()] = true
				ps = append(ps, Problem{f.Folder(), 0, "name", fmt.Sprintf("%q says nothing; name the package for what it holds", n)})
			}
		}
	}
	return ps
}

func lengths(t *Tree) []Problem {
	var ps []Problem
	for _, f := range t.Files {
		if f.Gen {
			continue
		}
		if f.Lines > MaxFile && longFiles[f.Path] == "" {
			ps = append(ps, Problem{f.Path, 0, "length", fmt.Sprintf("has %d lines, at most %d are allowed", f.Lines, MaxFile)})
		}
		for _, fn := range f.Funcs {
			if fn.Lines > MaxFunc && !f.Test { // a test's table may be long
				ps = append(ps, Problem{f.Path, fn.Line, "length", fmt.Sprintf("%s has %d lines, at most %d are allowed", fn.Name, fn.Lines, MaxFunc)})
			}
		}
	}
	for p := range longFiles {
		if !slices.ContainsFunc(t.Files, func(f *File) bool { return f.Path == p && f.Lines > MaxFile }) {
			ps = append(ps, Problem{p, 0, "length", "is listed as a long file and is not one"})
		}
	}
	return ps
}

// habits: who may end the process, and who may not have init functions.
func habits(t *Tree) []Problem {
	var ps []Problem
	for _, f := range t.Files {
		isMain := f.Package == "main" && path.Base(f.Path) == "main.go"
		for _, l := range f.Exits {
			if !isMain && !f.Test && !isTestFolder(f.Folder()) {
				ps = append(ps, Problem{f.Path, l, "exit", "only main.go ends the process: return an error instead, or what was deferred never runs"})
			}
		}
		for _, l := range f.Inits {
			if f.top() == "applets" {
				ps = append(ps, Problem{f.Path, l, "init", "applets have no init functions: they would run for every name of the binary"})
			}
		}
	}
	return ps
}
