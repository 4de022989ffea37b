// Package archtest checks the shape of the repository itself: which folder
// may import which, where heavy dependencies may be used, and a few house
// rules that reviews would forget. Its test runs them over all Go files.
//
// It parses the files instead of asking the go command: that sees every build
// tag, takes milliseconds, and is not answered from a cache that did not look
// at the file in question.
package archtest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// MaxFile and MaxFunc are the longest file and function, in lines. Functions
// longer than WarnFunc are only mentioned.
const (
	MaxFile  = 600
	MaxFunc  = 120
	WarnFunc = 80
)

// Problem is one broken rule.
type Problem struct {
	Path string // relative to the root, with slashes; a file or a folder
	Line int    // 0 = of the whole
	Rule string // layer, heavy, reach, top, doc, name, length, exit, init
	Text string
}

// Error is PATH:LINE: TEXT (RULE).
func (p Problem) Error() string {
	if p.Line > 0 {
		return fmt.Sprintf("%s:%d: %s (%s)", p.Path, p.Line, p.Text, p.Rule)
	}
	return fmt.Sprintf("%s: %s (%s)", p.Path, p.Text, p.Rule)
}

// Tree is all Go files of a module.
type Tree struct {
	Module string
	Dirs   []string // top-level folders, hidden ones left out
	Files  []*File
}

// File is one parsed Go file.
type File struct {
	Path    string // relative to the root, with slashes
	Package string
	Doc     string // comment of the package clause
	Lines   int
	Test    bool // *_test.go
	Gen     bool // made by a program
	Imports []Import
	Exits   []int // lines with os.Exit, log.Fatal and the like
	Inits   []int // lines of func init
	Funcs   []Func
}

// Import is one imported path.
type Import struct {
	Path string
	Line int
}

// Func is one function with its length in lines.
type Func struct {
	Name        string
	Line, Lines int
}

// Folder is the file's folder, "." for the root.
func (f *File) Folder() string { return path.Dir(f.Path) }

func (f *File) top() string {
	top, _, ok := strings.Cut(f.Path, "/")
	if !ok {
		return "main"
	}
	return top
}

// Root is the nearest folder at or above dir with a go.mod.
func Root(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	for err == nil {
		if _, e := os.Stat(filepath.Join(dir, "go.mod")); e == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			err = errors.New("no go.mod here or above")
		}
		dir = up
	}
	return "", err
}

// Load parses every Go file below root, whatever its build tags. Hidden
// folders, testdata, vendor and other modules are left out.
func Load(root string) (*Tree, error) {
	t := &Tree{}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return nil, err
	}
	if f := bytes.Fields(mod); len(f) > 1 && string(f[0]) == "module" {
		t.Module = string(f[1])
	}
	err = filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			return t.enter(name, rel)
		}
		if !strings.HasSuffix(rel, ".go") || strings.HasPrefix(d.Name(), ".") || strings.HasPrefix(d.Name(), "_") {
			return nil
		}
		src, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		f, err := Parse(rel, src)
		if err != nil {
			return err
		}
		t.Files = append(t.Files, f)
		return nil
	})
	return t, err
}

func (t *Tree) enter(name, rel string) error {
	base := path.Base(rel)
	if rel == "." {
		return nil
	}
	if strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
		return fs.SkipDir
	}
	if !strings.Contains(rel, "/") {
		t.Dirs = append(t.Dirs, rel)
	}
	if base == "testdata" || base == "vendor" || rel == "bin" {
		return fs.SkipDir
	}
	if _, err := os.Stat(filepath.Join(name, "go.mod")); err == nil {
		return fs.SkipDir
	}
	return nil
}

// Parse reads one file.
func Parse(rel string, src []byte) (*File, error) {
	set := token.NewFileSet()
	a, err := parser.ParseFile(set, rel, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	line := func(p token.Pos) int { return set.Position(p).Line }
	f := &File{Path: rel, Package: a.Name.Name, Doc: strings.TrimSpace(a.Doc.Text()),
		Lines: bytes.Count(src, []byte("\n")), Test: strings.HasSuffix(rel, "_test.go"), Gen: ast.IsGenerated(a)}
	names := map[string]string{} // local name → path, for exits
	for _, im := range a.Imports {
		p, err := strconv.Unquote(im.Path.Value)
		if err != nil {
			return nil, err
		}
		f.Imports = append(f.Imports, Import{p, line(im.Pos())})
		local := path.Base(p)
		if im.Name != nil {
			local = im.Name.Name
		}
		names[local] = p
	}
	for _, d := range a.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		if fn.Name.Name == "init" && fn.Recv == nil {
			f.Inits = append(f.Inits, line(fn.Pos()))
		}
		f.Funcs = append(f.Funcs, Func{fn.Name.Name, line(fn.Pos()), line(fn.End()) - line(fn.Pos()) + 1})
	}
	ast.Inspect(a, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := s.X.(*ast.Ident); ok && exits(names[x.Name], s.Sel.Name) {
				f.Exits = append(f.Exits, line(s.Pos()))
			}
		}
		return true
	})
	return f, nil
}

func exits(pkg, name string) bool {
	switch pkg {
	case "os":
		return name == "Exit"
	case "log":
		return strings.HasPrefix(name, "Fatal")
	case "syscall", "golang.org/x/sys/unix":
		return name == "Exit" || name == "ExitGroup"
	}
	return false
}

// Check applies all rules.
func (t *Tree) Check() []Problem {
	var ps []Problem
	for _, rule := range []func(*Tree) []Problem{layers, heavy, reach, tops, docs, names, lengths, habits} {
		ps = append(ps, rule(t)...)
	}
	slices.SortFunc(ps, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), cmp.Compare(a.Line, b.Line), strings.Compare(a.Rule, b.Rule))
	})
	return ps
}

// Long lists functions longer than WarnFunc that are still allowed.
func (t *Tree) Long() []Problem {
	var ps []Problem
	for _, f := range t.Files {
		for _, fn := range f.Funcs {
			if fn.Lines > WarnFunc && !f.Gen {
				ps = append(ps, Problem{f.Path, fn.Line, "length", fmt.Sprintf("%s has %d lines, better at most %d", fn.Name, fn.Lines, WarnFunc)})
			}
		}
	}
	return ps
}
