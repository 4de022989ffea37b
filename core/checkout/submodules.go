package checkout

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"virtkit/core/fsx"
)

// Submodules is how a job wants the repositories within its repository
// (GIT_SUBMODULE_STRATEGY and its like, gitlab-dispatch.txt "Sources").
type Submodules struct {
	Recursive  bool
	Depth      int      // commits; 0 = all
	Paths      []string // pathspecs of git; nil = all
	ForceHTTPS bool     // those of the job's server by ssh are fetched by its http
}

// SubmodulesTold is the line of a trace that tells that there may be some.
const SubmodulesTold = "Updated submodules"

// GuestOnly is the error for sources that the host does not fetch, which the
// guest may: it is under the job's egress rules, and has the job's own keys.
type GuestOnly struct{ Why string }

func (e *GuestOnly) Error() string { return e.Why }

// module is one submodule of a tree.
type module struct {
	name   string
	path   string // from the job's tree
	sha    string
	url    string // as git's configuration has it
	from   string // where it is fetched, without credentials
	gitDir string // from the job's tree: .git/modules/…
	depth  int
	skip   bool // its update is "none"
	mirror *mirror
}

// repo is a repository with a work tree, the job's or a submodule's.
type repo struct {
	gitDir, path string // from the job's tree
	url, from    string
}

func (w *work) top() repo {
	clean, _, _ := w.j.credentials()
	return repo{".git", "", clean, clean}
}

func (m *module) repo() repo { return repo{m.gitDir, m.path, m.url, m.from} }

// inRepo runs git in the work tree of one of the tree's repositories.
func (w *work) inRepo(ctx context.Context, r repo, protocols string, out io.Writer, args ...string) error {
	dir := filepath.Join(w.p.tree, r.path)
	return w.git.run(ctx, dir, protocols, out, append([]string{"--git-dir=" + filepath.Join(w.p.tree, r.gitDir), "--work-tree=" + dir}, args...)...)
}

// submodules does what the runner's script does after its checkout, and tells
// it in the same words. All of them come from the job's own server: what else a
// repository may name is reached by the guest, under the job's rules, or not at
// all. They are borrowed from mirrors as the tree is.
func (w *work) submodules(ctx context.Context, t *Tree) error {
	if w.j.Submodules == nil {
		w.green("Skipping Git submodules setup")
		return nil
	}
	o := w.j.Submodules
	words := ""
	if o.Recursive {
		words = " recursively"
	}
	if o.Depth > 0 {
		words += fmt.Sprintf(" with git depth set to %d", o.Depth)
	}
	w.green("Updating/initializing submodules%s...", words)
	top, err := w.level(ctx, w.top(), o.Paths)
	if err != nil {
		return err
	}
	known := w.rec.Modules
	for _, m := range top {
		if !slices.Contains(known, m.path) {
			w.sayRegistered(m)
		}
	}
	w.saySync(top, known)
	if err := w.settleModules(ctx, top, known); err != nil {
		return err
	}
	done, err := w.populate(ctx, t, top)
	if err != nil {
		return err
	}
	t.modules = done // the same ones
	w.green(SubmodulesTold)
	w.saySync(top, t.modulePaths())
	if err := w.cleanModules(ctx, t.modules); err != nil {
		return err
	}
	w.green("Configuring submodules to use parent git credentials...")
	for _, m := range t.modules {
		w.sayEntering(m.path)
	}
	return w.pruneModules(t.modules)
}

func (t *Tree) modulePaths() []string {
	var paths []string
	for _, m := range t.modules {
		paths = append(paths, m.path)
	}
	return paths
}

func (w *work) sayRegistered(m *module) {
	fmt.Fprintf(&w.trace, "Submodule '%s' (%s) registered for path '%s'\n", m.name, m.url, m.path)
}

func (w *work) sayEntering(p string) { fmt.Fprintf(&w.trace, "Entering '%s'\n", p) }

// saySync is what git submodule sync tells: of each that the repository has,
// and below it of those that are there.
func (w *work) saySync(top []*module, there []string) {
	say := func(p string) { fmt.Fprintf(&w.trace, "Synchronizing submodule url for '%s'\n", p) }
	for _, m := range top {
		say(m.path)
		for _, p := range there {
			if w.j.Submodules.Recursive && strings.HasPrefix(p, m.path+"/") {
				say(p)
			}
		}
	}
}

// askMirror says, before there is any work in a tree, whether the commit has a
// submodule that only the guest fetches. Those within submodules show later.
func (w *work) askMirror(ctx context.Context, m *mirror) error {
	if w.j.Submodules == nil {
		return nil
	}
	inMirror := func(out io.Writer, env string, args ...string) error {
		g := *w.git
		g.env = append(g.env[:len(g.env):len(g.env)], "GIT_INDEX_FILE="+env)
		return g.run(ctx, m.dir, local, out, append([]string{"--git-dir=" + m.dir}, args...)...)
	}
	var out strings.Builder
	if err := inMirror(&out, "", "config", "-z", "--blob", w.j.SHA+":.gitmodules", "--list"); err != nil {
		return nil // there is none, or none that can be read: the work in the tree tells
	}
	conf := parseModules(out.String())
	elsewhere := map[string]error{}
	for _, s := range conf {
		var g *GuestOnly
		if err := w.resolve(w.top(), &module{path: s["path"]}, conf); errors.As(err, &g) {
			elsewhere[s["path"]] = err
		}
	}
	if len(elsewhere) == 0 {
		return nil
	}
	// Is it one that the commit has, and the job wants?
	index := filepath.Join(w.p.slot, ".tmp-index-"+rand.Text()) // a sweep's, when we are killed
	defer os.Remove(index)
	if err := inMirror(io.Discard, index, "read-tree", w.j.SHA); err != nil {
		return noRoom(w.p.slot, unreachable(err))
	}
	out.Reset()
	// A pathspec's magic needs a work tree, whatever is in it.
	if err := inMirror(&out, index, append([]string{"--work-tree=" + w.p.slot, "ls-files", "-s", "-z", "--"}, w.j.Submodules.Paths...)...); err != nil {
		return unreachable(err)
	}
	for _, l := range links(out.String()) {
		if err := elsewhere[l.path]; err != nil {
			return err
		}
	}
	return nil
}

// link is a commit that an index has in the place of a directory.
type link struct{ path, sha string }

// links reads what git ls-files -s -z prints.
func links(s string) (all []link) {
	for e := range strings.SplitSeq(s, "\x00") {
		meta, p, _ := strings.Cut(e, "\t")
		if f := strings.Fields(meta); len(f) == 3 && f[0] == "160000" && f[2] == "0" {
			all = append(all, link{p, f[1]})
		}
	}
	return all
}

// level reads which submodules a repository has: from its index, so that a
// file of the work tree leads nowhere.
func (w *work) level(ctx context.Context, r repo, paths []string) ([]*module, error) {
	var out strings.Builder
	args := []string{"ls-files", "-s", "-z"}
	if len(paths) > 0 {
		args = append(append(args, "--"), paths...)
	}
	if err := w.inRepo(ctx, r, local, &out, args...); err != nil {
		return nil, unreachable(err)
	}
	var all []*module
	for _, l := range links(out.String()) {
		all = append(all, &module{path: path.Join(r.path, l.path), sha: l.sha, depth: w.j.Submodules.Depth})
	}
	if len(all) == 0 {
		return nil, nil
	}
	conf, err := w.moduleConfig(ctx, r)
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		if err := w.resolve(r, m, conf); err != nil {
			return nil, err
		}
	}
	return all, apart(all)
}

// setting is what .gitmodules says of one submodule.
type setting map[string]string

// moduleConfig reads .gitmodules as it is in the index; symlinks have none.
func (w *work) moduleConfig(ctx context.Context, r repo) (map[string]setting, error) {
	var out strings.Builder
	if err := w.inRepo(ctx, r, local, &out, "ls-files", "-s", "-z", "--", ":(literal).gitmodules"); err != nil {
		return nil, unreachable(err)
	}
	if !strings.HasPrefix(out.String(), "100") {
		return nil, nil
	}
	out.Reset()
	if err := w.inRepo(ctx, r, local, &out, "config", "-z", "--blob", ":.gitmodules", "--list"); err != nil {
		return nil, unreachable(err)
	}
	return parseModules(out.String()), nil
}

// parseModules reads what git config -z --list prints of a .gitmodules.
func parseModules(s string) map[string]setting {
	all := map[string]setting{}
	for e := range strings.SplitSeq(s, "\x00") {
		key, value, _ := strings.Cut(e, "\n")
		rest, ok := strings.CutPrefix(key, "submodule.")
		dot := strings.LastIndexByte(rest, '.')
		if !ok || dot < 0 {
			continue
		}
		name := rest[:dot]
		if all[name] == nil {
			all[name] = setting{}
		}
		all[name][rest[dot+1:]] = value
	}
	return all
}

// resolve says where a submodule comes from and where it goes.
func (w *work) resolve(r repo, m *module, conf map[string]setting) error {
	bad := func(format string, a ...any) error { return unreachable(fmt.Errorf(format, a...)) }
	below := strings.TrimPrefix(strings.TrimPrefix(m.path, r.path), "/")
	var set setting
	for name, s := range conf {
		if s["path"] == below && (set == nil || name < m.name) {
			m.name, set = name, s
		}
	}
	url := set["url"]
	switch {
	case set == nil || url == "":
		return bad("no URL for the submodule at %q in .gitmodules", m.path)
	case !moduleName(m.name):
		return bad("the submodule at %q has the name %q, which could lead out of the repository", m.path, m.name)
	case strings.HasPrefix(url, "-"):
		return bad("the submodule %q has the URL %q", m.name, url)
	}
	switch set["update"] {
	case "", "checkout", "merge", "rebase":
	case "none":
		m.skip = true
	default: // a command: git runs none that a repository gives, either
		return bad("the submodule %q has update = %q", m.name, set["update"])
	}
	if m.depth == 0 && set["shallow"] == "true" {
		m.depth = 1
	}
	m.gitDir = path.Join(r.gitDir, "modules", m.name)
	m.url, m.from = url, url
	if strings.HasPrefix(url, "./") || strings.HasPrefix(url, "../") {
		m.url = relative(r.url, url)
		m.from = m.url
	}
	clean, _, _ := w.j.credentials()
	server := origin(clean)
	if w.j.Submodules.ForceHTTPS {
		m.from = byHTTP(server, m.from)
	}
	if m.skip {
		return nil
	}
	from, user, pass, err := splitURL(m.from)
	if err != nil || origin(from) != server || user+pass != "" {
		return &GuestOnly{fmt.Sprintf("the submodule %q comes from elsewhere than the job's server", m.path)}
	}
	m.from = from
	return nil
}

// moduleName says whether a name is one below .git/modules.
func moduleName(name string) bool {
	if name == "" || strings.HasPrefix(name, "-") || strings.ContainsAny(name, "\x00\n\r\\") {
		return false
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." || part == ".." {
			return false
		}
	}
	return true
}

// apart refuses a submodule whose repository would be inside another's.
func apart(all []*module) error {
	for _, a := range all {
		for _, b := range all {
			if a != b && (a.gitDir == b.gitDir || strings.HasPrefix(b.gitDir, a.gitDir+"/")) {
				return unreachable(fmt.Errorf("the submodules %q and %q would have their repositories one in the other", a.path, b.path))
			}
		}
	}
	return nil
}

// relative is url from base, as git submodule reads it: each ../ takes one name
// off. What leads above the server keeps its last part and is told by its
// origin.
func relative(base, url string) string {
	base = strings.TrimSuffix(base, "/")
	for {
		if rest, ok := strings.CutPrefix(url, "./"); ok {
			url = rest
		} else if rest, ok := strings.CutPrefix(url, "../"); ok {
			url = rest
			base = base[:max(strings.LastIndexByte(base, '/'), 0)]
		} else {
			return base + "/" + strings.TrimSuffix(url, "/")
		}
	}
}

// SSHForms are what addresses of a server by ssh begin with, which may take the
// place of server + "/".
func SSHForms(server string) []string {
	_, host, _ := strings.Cut(server, "://")
	host, _, _ = strings.Cut(host, ":")
	return []string{"git@" + host + ":", "ssh://git@" + host + "/"}
}

// byHTTP gives an address of the server by ssh its form by http.
func byHTTP(server, url string) string {
	for _, form := range SSHForms(server) {
		if rest, ok := strings.CutPrefix(url, form); ok {
			return server + "/" + rest
		}
	}
	return url
}

// dropModules empties the places of submodules that an earlier job had there,
// and forgets their repositories.
func (w *work) dropModules() error {
	root, err := os.OpenRoot(w.p.tree)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, p := range w.rec.Modules {
		if err := root.RemoveAll(p); err != nil {
			continue // a symlink on its way: nothing of ours is behind it
		}
		if err := root.MkdirAll(p, 0o755); err != nil {
			continue
		}
	}
	if err := fsx.RemoveTree(filepath.Join(w.gitDir(), "modules")); err != nil {
		return err
	}
	w.rec.Modules = nil
	return nil
}

// settleModules cleans and resets the submodules that are there.
func (w *work) settleModules(ctx context.Context, top []*module, known []string) error {
	var there []*module
	for _, m := range top {
		if !slices.Contains(known, m.path) {
			continue
		}
		there = append(there, m)
		for _, p := range known {
			// Their repositories are where their own level finds them, and
			// that is read when it has been brought up to date.
			if !w.j.Submodules.Recursive || !strings.HasPrefix(p, m.path+"/") {
				continue
			}
			if git, ok := w.linked(p); ok {
				there = append(there, &module{path: p, gitDir: git})
			}
		}
	}
	for _, m := range there {
		if err := w.settleRepo(m.gitDir); err != nil {
			return err
		}
	}
	if err := w.cleanModules(ctx, there); err != nil {
		return err
	}
	for _, m := range there {
		w.sayEntering(m.path)
		if err := w.inRepo(ctx, m.repo(), local, &w.trace, "reset", "--hard"); err != nil {
			return unreachable(err)
		}
	}
	return nil
}

// linked is the repository of a submodule that is there, as its file says.
func (w *work) linked(p string) (gitDir string, ok bool) {
	b, err := os.ReadFile(filepath.Join(w.p.tree, p, ".git"))
	if err != nil {
		return "", false
	}
	to, ok := strings.CutPrefix(strings.TrimSpace(string(b)), "gitdir: ")
	gitDir = path.Join(p, to)
	return gitDir, ok && strings.HasPrefix(gitDir, ".git/modules/")
}

func (w *work) cleanModules(ctx context.Context, all []*module) error {
	if len(w.j.CleanFlags) == 0 {
		return nil
	}
	for _, m := range all {
		w.sayEntering(m.path)
		if err := w.inRepo(ctx, m.repo(), local, &w.trace, append([]string{"clean"}, w.j.CleanFlags...)...); err != nil {
			return unreachable(err)
		}
	}
	return nil
}

// settleRepo removes from a submodule's repository what leads git elsewhere.
func (w *work) settleRepo(gitDir string) error {
	dir := filepath.Join(w.p.tree, gitDir)
	for _, n := range unwanted {
		if n == "objects/info/alternates" {
			continue
		}
		if err := fsx.RemoveTree(filepath.Join(dir, n)); err != nil {
			return err
		}
	}
	return removeLocks(filepath.Join(dir, "refs"))
}

// pruneModules removes the repositories of submodules that are no more.
func (w *work) pruneModules(all []*module) error {
	keep := map[string]bool{}
	for _, m := range all {
		keep[m.gitDir] = true
	}
	// Where the repository has no submodule any more, what is left are files.
	for _, p := range w.rec.Modules {
		if git, ok := w.linked(p); ok && !keep[git] {
			if err := os.Remove(filepath.Join(w.p.tree, p, ".git")); err != nil {
				return err
			}
		}
	}
	var visit func(dir string) error
	visit = func(dir string) error {
		es, err := os.ReadDir(filepath.Join(w.p.tree, dir))
		if os.IsNotExist(err) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, e := range es {
			p := path.Join(dir, e.Name())
			switch {
			case keep[p]:
				err = visit(path.Join(p, "modules"))
			case e.Type() == fs.ModeDir && slices.ContainsFunc(all, func(m *module) bool { return strings.HasPrefix(m.gitDir, p+"/") }):
				err = visit(p)
			default:
				err = fsx.RemoveTree(filepath.Join(w.p.tree, p))
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return visit(".git/modules")
}

// settings are the lines of a repository's configuration that name its
// submodules as taken.
func settings(all []*module, r repo) string {
	var b strings.Builder
	for _, m := range all {
		if path.Join(r.gitDir, "modules", m.name) == m.gitDir {
			fmt.Fprintf(&b, "[submodule %s]\n\tactive = true\n\turl = %s\n", quoteConfig(m.name), quoteConfig(m.url))
		}
	}
	return b.String()
}
