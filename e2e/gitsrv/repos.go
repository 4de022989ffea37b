package gitsrv

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// File is one file of a commit. Mode is git's: 100644, 100755, 120000 for a
// link (Data is its target), 160000 for a submodule (Data is its commit).
type File struct {
	Path, Mode, Data string
}

// Commit is a whole tree with what stands around it.
type Commit struct {
	Message string
	Date    string // as in GIT_AUTHOR_DATE
	Files   []File // all files of the tree
	Parent  string // "" = a first commit
}

// Repo is a bare repository being made with git's plumbing alone, so that its
// hashes depend on nothing but what is written here.
type Repo struct{ dir string }

// InitBare makes root/name.
func InitBare(root, name string) (*Repo, error) {
	r := &Repo{filepath.Join(root, name)}
	if err := os.MkdirAll(filepath.Dir(r.dir), 0o755); err != nil {
		return nil, err
	}
	cmd := exec.Command("git", "init", "-q", "--bare", "-b", "main", r.dir)
	cmd.Env = r.env("")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("git init: %w: %s", err, out)
	}
	return r, nil
}

func (r *Repo) env(date string) []string {
	return []string{"PATH=" + os.Getenv("PATH"), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "HOME=/nonexistent",
		"GIT_AUTHOR_NAME=Peer", "GIT_AUTHOR_EMAIL=peer@example.com", "GIT_COMMITTER_NAME=Peer", "GIT_COMMITTER_EMAIL=peer@example.com",
		"GIT_AUTHOR_DATE=" + date, "GIT_COMMITTER_DATE=" + date, "TZ=UTC"}
}

func (r *Repo) git(date, stdin string, extra []string, args ...string) (string, error) {
	cmd := exec.Command("git", append([]string{"--git-dir=" + r.dir}, args...)...)
	cmd.Env = append(r.env(date), extra...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errb bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errb
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, errb.String())
	}
	return strings.TrimSpace(out.String()), nil
}

// Commit writes a commit and returns its hash.
func (r *Repo) Commit(c Commit) (string, error) {
	index := []string{"GIT_INDEX_FILE=" + filepath.Join(r.dir, "making.index")}
	defer os.Remove(filepath.Join(r.dir, "making.index"))
	if _, err := r.git("", "", index, "read-tree", "--empty"); err != nil {
		return "", err
	}
	var info strings.Builder
	for _, f := range c.Files {
		hash := f.Data
		if f.Mode != "160000" {
			var err error
			if hash, err = r.git("", f.Data, nil, "hash-object", "-w", "--stdin"); err != nil {
				return "", err
			}
		}
		fmt.Fprintf(&info, "%s %s\t%s\n", f.Mode, hash, f.Path)
	}
	if _, err := r.git("", info.String(), index, "update-index", "--add", "--index-info"); err != nil {
		return "", err
	}
	tree, err := r.git("", "", index, "write-tree")
	if err != nil {
		return "", err
	}
	args := []string{"commit-tree", tree, "-m", c.Message}
	if c.Parent != "" {
		args = append(args, "-p", c.Parent)
	}
	return r.git(c.Date, "", nil, args...)
}

// Ref points a reference at a commit.
func (r *Repo) Ref(name, hash string) error {
	_, err := r.git("", "", nil, "update-ref", name, hash)
	return err
}

// Hashes of the recorded jobs' repositories.
const (
	MainSHA    = "f400d9d34482185362e87552bcc47c5e5a468e2c"
	FeatureSHA = "8678fc309bd8d47eda415dd2b7b770265e75071f"
)

const plain, script, link, submodule = "100644", "100755", "120000", "160000"

// Recorded makes below root what the recorded jobs cloned: group/project.git,
// whose submodule is group/sub.git, whose submodule is group/nested.git.
func Recorded(root string) error {
	day := func(n int) string { return fmt.Sprintf("2024-01-0%dT00:00:00Z", n) }
	repos := map[string]*Repo{}
	for _, n := range []string{"nested", "sub", "project"} {
		r, err := InitBare(root, "group/"+n+".git")
		if err != nil {
			return err
		}
		repos[n] = r
	}
	var err error
	commit := func(repo string, c Commit) (hash string) {
		if err == nil {
			hash, err = repos[repo].Commit(c)
		}
		return hash
	}
	ref := func(repo, name, hash string) {
		if err == nil {
			err = repos[repo].Ref(name, hash)
		}
	}
	module := func(name string) File {
		return File{".gitmodules", plain, fmt.Sprintf("[submodule %q]\n\tpath = %s\n\turl = ../%s.git\n", name, name, name)}
	}
	nested := commit("nested", Commit{Message: "nested one", Date: day(1), Files: []File{{"nested.txt", plain, "nested\n"}}})
	ref("nested", "refs/heads/main", nested)
	sub := commit("sub", Commit{Message: "sub one", Date: day(2), Files: []File{{"sub.txt", plain, "sub\n"}, module("nested"), {"nested", submodule, nested}}})
	ref("sub", "refs/heads/main", sub)

	tree := []File{{"README.md", plain, "# project\n"}, {"a/b/c.txt", plain, "deep\n"}, {"package.lock", plain, "lock v1\n"},
		{"tool.sh", script, "#!/bin/sh\necho tool\n"}, {"link.md", link, "README.md"}, {".gitignore", plain, "*.tmp\nignored/\n"}}
	one := commit("project", Commit{Message: "one", Date: day(3), Files: tree})
	tree = append(tree, module("sub"), File{"sub", submodule, sub})
	two := commit("project", Commit{Message: "two, with submodule", Date: day(4), Files: tree, Parent: one})
	more := append([]File{{"README.md", plain, "# project\nmore\n"}}, tree[1:]...)
	three := commit("project", Commit{Message: "three", Date: day(5), Files: more, Parent: two})
	feature := commit("project", Commit{Message: "feature", Date: day(6), Files: append([]File{{"feat.txt", plain, "feat\n"}}, tree...), Parent: two})
	for name, hash := range map[string]string{"refs/heads/main": three, "refs/tags/v1.0": three, "refs/pipelines/500": three, "refs/heads/feature": feature} {
		ref("project", name, hash)
	}
	if err == nil && (three != MainSHA || feature != FeatureSHA) {
		err = fmt.Errorf("group/project.git came out as %s and %s, expected %s and %s", three, feature, MainSHA, FeatureSHA)
	}
	return err
}
