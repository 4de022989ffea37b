package cijob

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
)

// cloneFile is there while get_sources clones. Its hooks are the job's own
// commands, and what they end with is not the clone's failure.
func (p place) cloneFile() string { return p.tmp() + "/vk_cloning" }

// tokenHelper is git's way to the job's token: out of the environment, so that
// it is in no URL and no file. A job's own git commands use it as well.
const tokenHelper = `!f() { test "$1" = get || exit 0; echo username=gitlab-ci-token; echo "password=$CI_JOB_TOKEN"; }; f`

// sources is how one job gets them.
type sources struct {
	execdrv.Sources
	j     *job.CiJob
	depth int    // GitLab has made it of GIT_DEPTH; 0 = everything
	agent string // git's User-Agent
}

// stageSources is get_sources.
func stageSources(s *script, src sources, o scriptOptions) {
	s.line("rm -f %s", q(s.p.cloneFile()))
	s.export()
	s.line("export GIT_TERMINAL_PROMPT=0 GCM_INTERACTIVE=Never")
	if !s.v.noLFS() {
		s.line("export GIT_LFS_SKIP_SMUDGE=1") // all at once, behind the checkout
	}
	s.hooks(src, job.PreGetSources, o)
	s.line("touch %s", q(s.p.cloneFile()))
	switch src.Strategy {
	case execdrv.StrategyNone:
		s.notice("Skipping Git repository setup")
		s.line("mkdir -p %s", q(s.p.project))
	case execdrv.StrategyEmpty:
		s.notice("Skipping Git repository setup and creating an empty build directory")
		s.removeProject()
		s.line("mkdir -p %s", q(s.p.project))
	default:
		s.fetch(src)
	}
	if src.Strategy == execdrv.StrategyNone || src.Strategy == execdrv.StrategyEmpty || !src.Checkout {
		s.notice("Skipping Git checkout")
		s.line("cd %s", q(s.p.project))
	} else {
		s.checkout(src)
	}
	if src.Submodules && src.Strategy != execdrv.StrategyNone && src.Strategy != execdrv.StrategyEmpty {
		s.submodules(src)
	} else {
		s.notice("Skipping Git submodules setup")
	}
	s.line("rm -f %s", q(s.p.cloneFile()))
	s.hooks(src, job.PostGetSources, o)
}

func (s *script) hooks(src sources, name job.HookName, o scriptOptions) {
	if src.Strategy == execdrv.StrategyNone || src.Strategy == execdrv.StrategyEmpty {
		return
	}
	for _, h := range src.j.Hooks {
		if h.Name != name || len(h.Script) == 0 {
			continue
		}
		s.commands(h.Script, string(name), o)
	}
}

// git is git with what its requests are to say of themselves.
func (src sources) git() string { return "git -c http.userAgent=" + q(src.agent) }

func (s *script) fetch(src sources) {
	if id := src.j.Job.CorrelationID; id != "" && flagOn(src.j.Variables, flagCorrelationID) {
		s.notice("Gitaly correlation ID: %s", id)
	}
	deep := ""
	if src.depth > 0 {
		deep = fmt.Sprintf(" with git depth set to %d", src.depth)
	}
	s.notice("Fetching changes%s...", deep)
	if src.Strategy == execdrv.StrategyClone {
		s.removeProject()
	}
	s.gitLocks()
	template := s.p.tmp() + "/git-template"
	s.line("rm -rf %s", q(template))
	s.line("mkdir -p %s", q(template))
	s.file(template+"/config", templateConfig(s.p))
	s.file(s.p.gitConfig(), s.jobConfig(src))
	format := ""
	if f := src.j.Sources.ObjectFormat; f != "" && f != "sha1" {
		format = " --object-format=" + q(f)
	}
	s.line("git init%s --template %s %s", format, q(template), q(s.p.project))
	s.line("cd %s", q(s.p.project))
	s.line("if git remote add origin %s 2>/dev/null; then", q(src.j.Sources.RepoURL))
	s.notice("Created fresh repository.")
	s.line("else git remote set-url origin %s; fi", q(src.j.Sources.RepoURL))
	var args []string
	for _, r := range src.j.Sources.Refspecs {
		args = append(args, q(r))
	}
	if src.depth > 0 {
		args = append(args, fmt.Sprintf("--depth %d", src.depth))
	}
	for _, f := range src.FetchFlags {
		args = append(args, q(f))
	}
	fetch := strings.Join(append([]string{src.git(), "fetch origin --no-recurse-submodules"}, args...), " ")
	if src.depth == 0 {
		// A repository that an earlier job left shallow is to have everything.
		s.line("if [ -f .git/shallow ]; then %s --unshallow; else %s; fi", fetch, fetch)
		return
	}
	s.line("%s", fetch)
}

// removeProject removes the tree, also where a job made directories of it that
// cannot be written.
func (s *script) removeProject() {
	s.line("if [ -d %s ]; then chmod -R u+rwX %s; rm -rf %s; fi", q(s.p.project), q(s.p.project), q(s.p.project))
}

// file writes a file whose content is known: one process of the guest's, where
// git config would be one for each line.
func (s *script) file(path, content string) {
	s.line("rm -f %s", q(path))
	s.line("printf '%%s' %s > %s", q(content), q(path))
}

// gitSection writes a section of a git configuration; sub is "" for none.
func gitSection(name, sub string, pairs ...string) string {
	var b strings.Builder
	if sub != "" {
		name += " " + gitQuote(sub)
	}
	fmt.Fprintf(&b, "[%s]\n", name)
	for i := 0; i+1 < len(pairs); i += 2 {
		fmt.Fprintf(&b, "\t%s = %s\n", pairs[i], gitQuote(pairs[i+1]))
	}
	return b.String()
}

func gitQuote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}

// templateConfig is what every repository of the job's begins with.
func templateConfig(p place) string {
	return gitSection("init", "", "defaultBranch", "none") +
		gitSection("fetch", "", "recurseSubmodules", "false") +
		gitSection("credential", "", "interactive", "never") +
		gitSection("gc", "", "autoDetach", "false") +
		gitSection("include", "", "path", p.gitConfig())
}

// jobConfig is the file that the repositories' configuration includes.
func (s *script) jobConfig(src sources) string {
	var b strings.Builder
	if id := src.j.Job.CorrelationID; id != "" && flagOn(src.j.Variables, flagCorrelationID) {
		b.WriteString(gitSection("http", "", "extraHeader", "X-Gitaly-Correlation-ID: "+id))
	}
	if flagOn(src.j.Variables, flagBundleURIs) {
		b.WriteString(gitSection("transfer", "", "bundleURI", "true"))
	}
	server := serverOf(src.j.Sources.RepoURL)
	if server == "" {
		return b.String()
	}
	// The empty helper takes the image's away: one of them could keep the token.
	b.WriteString(gitSection("credential", server, "username", "gitlab-ci-token", "helper", "", "helper", tokenHelper))
	if src.j.ServerCAPEM != "" {
		b.WriteString(gitSection("http", server, "sslCAInfo", s.v.path("CI_SERVER_TLS_CA_FILE")))
	}
	if src.ForceHTTPS {
		host := server[strings.Index(server, "//")+2:]
		name, _, _ := strings.Cut(host, ":")
		b.WriteString(gitSection("url", server+"/", "insteadOf", "git@"+name+":", "insteadOf", "ssh://git@"+name+"/"))
	}
	return b.String()
}

// serverOf is the scheme and host of a URL.
func serverOf(repo string) string {
	u, err := url.Parse(repo)
	if err != nil || u.Host == "" {
		return ""
	}
	return u.Scheme + "://" + u.Host
}

// noLFS says whether the job wants none of its LFS files.
func (v variables) noLFS() bool {
	no, _ := strconv.ParseBool(v.value("GIT_LFS_SKIP_SMUDGE"))
	return no
}

func (s *script) checkout(src sources) {
	sha := src.j.Sources.SHA
	s.notice("Checking out %.8s as detached HEAD (ref is %s)...", sha, src.j.Sources.Ref)
	s.line("git -c submodule.recurse=false checkout -f -q %s", q(sha))
	if c := src.clean(); c != "" {
		s.line("%s", c)
	}
	if !s.v.noLFS() {
		s.line("if git lfs version >/dev/null 2>&1; then git lfs pull; echo; fi") // where the image or the node's tools have it
	}
}

// clean is the command that removes what is not the repository's; "" = none.
func (src sources) clean() string {
	if src.CleanFlags == nil {
		return ""
	}
	words := []string{"git clean"}
	for _, f := range src.CleanFlags {
		words = append(words, q(f))
	}
	return strings.Join(words, " ")
}

// submodules updates them to what the checkout wants: cleaned and reset before
// and after, since an earlier job may have left anything there.
func (s *script) submodules(src sources) {
	deep, depthFlag, deepWords := "", "", ""
	if src.Recursive {
		deep, deepWords = " --recursive", " recursively"
	}
	n := src.depth
	if src.SubmoduleDepth >= 0 {
		n = src.SubmoduleDepth
	}
	if n > 0 {
		depthFlag = fmt.Sprintf(" --depth %d", n)
		deepWords += fmt.Sprintf(" with git depth set to %d", n)
	}
	var paths, flags strings.Builder
	for _, w := range src.SubmodulePaths {
		paths.WriteString(" " + q(w))
	}
	for _, w := range src.SubmoduleFlags {
		flags.WriteString(" " + q(w))
	}
	also := paths.String()
	if also != "" {
		also = " --" + also
	}
	sync := "git submodule sync" + deep + also
	each := func(command string) { s.line("git submodule foreach%s %s", deep, q(command)) }
	clean := func() {
		if c := src.clean(); c != "" {
			each(c)
		}
	}
	s.notice("Updating/initializing submodules%s...", deepWords)
	s.line("git submodule init")
	s.line("%s", sync)
	clean()
	each("git reset --hard")
	update := func(depth string) string {
		return fmt.Sprintf("%s -c include.path=%s submodule update --init%s%s%s%s", src.git(), q(s.p.gitConfig()), deep, depth, flags.String(), also)
	}
	s.line("if %s; then", update(depthFlag))
	s.notice("Updated submodules")
	s.line("else")
	s.warning("Updating submodules failed. Retrying...")
	s.line("%s", sync)
	s.line("%s", update("")) // a commit that a shallow fetch does not reach
	each("git reset --hard")
	s.line("fi")
	s.line("%s", sync)
	clean()
	s.notice("Configuring submodules to use parent git credentials...")
	s.line("git submodule foreach --recursive %s", q("git config --replace-all include.path "+q(s.p.gitConfig())))
	if s.v.noLFS() {
		return
	}
	s.line("if git lfs version >/dev/null 2>&1; then")
	s.notice("Pulling LFS files...")
	s.line("git -c include.path=%s submodule foreach%s 'git lfs pull'", q(s.p.gitConfig()), deep)
	s.line("fi")
}

// gitLocks removes what a git that was killed leaves, and the hook that a job
// could have left for the next one: of the project and of its submodules.
func (s *script) gitLocks() {
	dir := s.p.project + "/.git"
	list := ""
	for _, f := range []string{"index.lock", "shallow.lock", "HEAD.lock", "config.lock", "hooks/post-checkout"} {
		list += " " + q(dir+"/"+f)
	}
	s.line("if [ -d %s ]; then", q(dir))
	s.line("rm -f%s", list)
	s.line("if [ -d %s ]; then find %s -name '*.lock' -type f -exec rm -f {} \\; ; fi", q(dir+"/refs"), q(dir+"/refs"))
	s.line(`if [ -d %s ]; then find %s -type f \( -name '*.lock' -o -path '*/hooks/post-checkout' \) -exec rm -f {} \; ; fi`, q(dir+"/modules"), q(dir+"/modules"))
	s.line("fi")
}

// stageClear is clear_worktree, between two attempts of get_sources.
func stageClear(s *script) {
	s.notice("Deleting tracked and untracked files...")
	s.line("if [ -d %s ]; then find %s -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} \\; ; fi", q(s.p.project), q(s.p.project))
}
