// Package archive is how the files of a job leave its guest and come into it:
// which files a list of paths means, and a tar stream of them.
//
// It runs in the guest, as `vk-agent archive` and `vk-agent extract`; formats
// that compress are the host's (core/archive/pack), which has the cycles.
//
// Vocabulary: the tree is the directory that everything is relative to, the
// job's project directory. A pattern is a path of the tree, or a glob of
// doublestar's syntax; a match that is a directory stands for all below it. An
// entry is a file, a directory or a symbolic link; nothing else is archived.
//
// What a pattern matches, and the words that are said of it, are those of
// gitlab-runner's artifacts-uploader: a matched symbolic link is archived as
// one, an excluded directory does not take what is below it along, a path
// outside of the tree is a warning and not an error. Names are bytes: newlines
// and what is not UTF-8 are kept.
//
// The stream is PAX tar in the order of Entries: directories and links by name,
// then files by name, with whole seconds of time. Extract takes such a stream
// from anyone: nothing of it is made outside of the tree, whatever links the
// tree or the stream has.
package archive

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
)

// Level is how a Note is meant.
type Level string

// The levels.
const (
	Info    Level = "info"
	Warning Level = "warning"
	Fatal   Level = "fatal" // the last: nothing more comes
)

// Note is one line for the job's trace. On the agent's standard error each is
// one line of JSON; lines that are not are another program's.
type Note struct {
	Level Level  `json:"level"`
	Text  string `json:"text"`
}

// Selection says which files are meant.
type Selection struct {
	Tree      string // absolute
	Paths     []string
	Exclude   []string
	Untracked bool // and what git does not track
	// Stderr is git's; nil = os.Stderr.
	Stderr io.Writer
}

// Entry is one name of the tree.
type Entry struct {
	Name string // relative to the tree, with slashes; directories without one at the end
	Info fs.FileInfo
}

// tree is a file system without the rule of io/fs that names are UTF-8.
type tree string

func (t tree) path(name string) string { return filepath.Join(string(t), name) }

// Open implements fs.FS.
func (t tree) Open(name string) (fs.File, error) { return os.Open(t.path(name)) }

// ReadDir implements fs.ReadDirFS.
func (t tree) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(t.path(name)) }

// Stat implements fs.StatFS.
func (t tree) Stat(name string) (fs.FileInfo, error) { return os.Stat(t.path(name)) }

type selector struct {
	Selection
	say      func(Note)
	found    map[string]fs.FileInfo
	excluded map[string]int
}

// Select finds what s means. say hears what a job's trace tells of it.
func Select(s Selection, say func(Note)) ([]Entry, error) {
	if !filepath.IsAbs(s.Tree) {
		return nil, fmt.Errorf("%q is not absolute", s.Tree)
	}
	if _, err := os.Stat(s.Tree); err != nil {
		return nil, err
	}
	c := &selector{Selection: s, say: say, found: map[string]fs.FileInfo{}, excluded: map[string]int{}}
	for _, p := range s.Paths {
		c.path(p)
	}
	if s.Untracked {
		c.untracked()
	}
	for _, p := range s.Exclude {
		if n := c.excluded[p]; n > 0 {
			c.note(Info, "%s: excluded %d files", p, n)
			delete(c.excluded, p) // a rule given twice
		}
	}
	out := make([]Entry, 0, len(c.found))
	for name, fi := range c.found {
		out = append(out, Entry{Name: name, Info: fi})
	}
	slices.SortFunc(out, func(a, b Entry) int {
		if af, bf := a.Info.Mode().IsRegular(), b.Info.Mode().IsRegular(); af != bf {
			if bf {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Name, b.Name)
	})
	return out, nil
}

func (c *selector) note(l Level, format string, a ...any) {
	c.say(Note{Level: l, Text: fmt.Sprintf(format, a...)})
}

// path takes one pattern.
func (c *selector) path(p string) {
	if p == "" {
		c.note(Warning, "No matching files. Path is empty.")
		return
	}
	pattern, err := c.relative(p)
	if err != nil {
		c.note(Warning, "processPath: %v", err)
		return
	}
	matches, err := doublestar.Glob(tree(c.Tree), pattern, doublestar.WithNoFollow())
	if err != nil {
		c.note(Warning, "%s: %v", p, err)
		return
	}
	n := 0
	for _, m := range matches {
		filepath.WalkDir(tree(c.Tree).path(m), func(path string, _ fs.DirEntry, _ error) error {
			if c.take(path) {
				n++
			}
			return nil // what cannot be read is not there
		})
	}
	if n == 0 {
		c.note(Warning, "%s: no matching files. Ensure that the artifact path is relative to the working directory (%s)", p, c.Tree)
		return
	}
	c.note(Info, "%s: found %d matching artifact files and directories", p, n)
}

// relative makes a pattern one of the tree: only what comes before its first
// glob is a path that can be resolved.
func (c *selector) relative(p string) (string, error) {
	base, glob := doublestar.SplitPattern(p)
	if !filepath.IsAbs(base) {
		base = filepath.Join(c.Tree, base)
	}
	rel, err := filepath.Rel(c.Tree, base)
	if err != nil {
		return "", fmt.Errorf("could not resolve artifact relative path %s: %w", p, err)
	}
	if outside(rel) {
		return "", fmt.Errorf("artifact path is not a subpath of project directory: %s", p)
	}
	return filepath.Join(rel, glob), nil
}

func outside(rel string) bool { return rel == ".." || strings.HasPrefix(rel, "../") }

// take adds one absolute path, and says whether it did.
func (c *selector) take(path string) bool {
	rel, err := filepath.Rel(c.Tree, path)
	if err == nil && outside(rel) {
		err = errors.New("not supported: outside build directory")
	}
	var fi fs.FileInfo
	if err == nil {
		if rule, yes := c.isExcluded(rel); yes {
			c.excluded[rule]++
			return false
		}
		fi, err = os.Lstat(path)
	}
	if err == nil {
		c.found[rel] = fi
		return true
	}
	if !errors.Is(err, fs.ErrNotExist) {
		c.note(Warning, "%s: %v", path, err)
	}
	return false
}

func (c *selector) isExcluded(rel string) (rule string, yes bool) {
	for _, p := range c.Exclude {
		pattern := p
		if r, err := c.relative(p); filepath.IsAbs(p) && err == nil {
			pattern = r
		}
		if rel == pattern || doublestar.MatchUnvalidated(pattern, rel) {
			return p, true
		}
	}
	return "", false
}

// untracked takes what git does not track. The tree may be another user's:
// without its fsmonitor there is nothing that git would run for a list.
func (c *selector) untracked() {
	cmd := exec.Command("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "ls-files", "-o", "-z")
	cmd.Dir = c.Tree
	cmd.Stderr = os.Stderr
	if c.Stderr != nil {
		cmd.Stderr = c.Stderr
	}
	out, err := cmd.Output()
	if err != nil {
		c.note(Warning, "untracked: %v", err)
		return
	}
	n := 0
	for name := range strings.SplitSeq(string(out), "\x00") {
		if name != "" && c.take(filepath.Join(c.Tree, name)) {
			n++
		}
	}
	if n == 0 {
		c.note(Warning, "untracked: no files")
		return
	}
	c.note(Info, "untracked: found %d files", n)
}
