package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/checkout"
	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/lazyre"
	"virtkit/core/supervise"
	"virtkit/core/usage"
)

// sourcesFile is what the host's git told, in the job's directory.
const sourcesFile = "sources.log"

// readSources learns how the job wants its sources; on a host without
// checkouts that is between the runner and the guest.
func (r *Runner) readSources(c *execdrv.Call, resp execdrv.Response) execdrv.Sources {
	if r.Checkouts == nil {
		return execdrv.Sources{}
	}
	return execdrv.ReadSources(c, resp)
}

// takeSources gets the job's sources on this host. Where it cannot, the job
// gets them in its guest as ever, and the trace says so.
func (r *Runner) takeSources(ctx context.Context, j *job) error {
	if r.Checkouts == nil {
		return nil
	}
	inGuest := func(why string) error {
		r.say("the sources are cloned in the guest: %s", why)
		return nil
	}
	git := j.resp.GitInfo
	switch {
	case j.call.ResponseFile == "":
		return inGuest(execdrv.EnvJobResponse + " is not set, so the host does not know what to fetch")
	case j.sources.Strategy == execdrv.StrategyNone || j.sources.Strategy == execdrv.StrategyEmpty:
		return nil // the runner's script clones nothing
	case j.sources.Submodules && guestFlag(j.sources.SubmoduleFlags) != "":
		return inGuest("the host does not take " + guestFlag(j.sources.SubmoduleFlags) + " of GIT_SUBMODULE_UPDATE_FLAGS")
	case git.RepoURL == "" || git.SHA == "" || !path.IsAbs(j.call.Var("CI_PROJECT_DIR")):
		return inGuest("the job does not say what to fetch and where to")
	}
	if _, err := r.Checkouts.Sweep(ctx, checkout.SweepOptions{Idle: -1, TreesOnly: true}); err != nil {
		r.warn("looking for unused checkouts: " + err.Error())
	}
	start := r.now()
	tree, err := r.Checkouts.Take(ctx, r.sourcesJob(j), func(line string) { r.say("%s", line) })
	var guest *checkout.GuestOnly
	if errors.As(err, &guest) {
		return inGuest(guest.Why)
	}
	if err != nil {
		return err
	}
	j.tree = tree
	how := "cloned"
	if tree.Reused {
		how = "fetched"
	}
	why := ""
	if tree.Mended != "" && tree.Mended != "there was none" {
		why = " (the slot's earlier tree: " + strings.ReplaceAll(tree.Mended, "\n", "; ") + ")"
	}
	r.say("sources of %.8s %s on the host in %s%s", git.SHA, how, seconds(r.now().Sub(start)), why)
	return nil
}

func (r *Runner) sourcesJob(j *job) checkout.Job {
	c, git, s := j.call, j.resp.GitInfo, j.sources
	token := j.resp.Token
	if token == "" {
		token = c.Var("CI_JOB_TOKEN")
	}
	insecure, _ := strconv.ParseBool(c.Var("GIT_SSL_NO_VERIFY"))
	agent := ""
	if v := c.Var("CI_RUNNER_VERSION"); v != "" {
		agent = "gitlab-runner " + v + " linux/" + c.Var("CI_RUNNER_EXECUTABLE_ARCH")
		if strings.Contains(c.Var("CI_RUNNER_EXECUTABLE_ARCH"), "/") {
			agent = "gitlab-runner " + v + " " + c.Var("CI_RUNNER_EXECUTABLE_ARCH")
		}
	}
	var sub *checkout.Submodules
	if s.Submodules {
		sub = &checkout.Submodules{Recursive: s.Recursive, Depth: s.SubmoduleDepth, Paths: s.SubmodulePaths, ForceHTTPS: s.ForceHTTPS}
		if sub.Depth < 0 {
			sub.Depth = git.Depth
		}
	}
	slot := slotName(c.Var("CI_RUNNER_SHORT_TOKEN"), c.Var("CI_CONCURRENT_PROJECT_ID"))
	return checkout.Job{
		Slot: slot, Project: projectName(j), URL: git.RepoURL, User: "gitlab-ci-token", Token: token,
		CA: c.Var("CI_SERVER_TLS_CA_FILE"), Insecure: insecure,
		SHA: git.SHA, Ref: git.Ref, Refspecs: git.Refspecs, Depth: git.Depth, Format: git.Format,
		Fresh: s.Strategy == execdrv.StrategyClone, NoCheckout: !s.Checkout, CleanFlags: s.CleanFlags, FetchFlags: s.FetchFlags,
		Dir: c.Var("CI_PROJECT_DIR"), UserAgent: agent, Attempts: s.Attempts, Submodules: sub,
	}
}

// guestFlag is the first flag of git submodule update that changes what is
// fetched, which is left to the guest's git; "" = there is none.
func guestFlag(flags []string) string {
	for i := 0; i < len(flags); i++ {
		f := flags[i]
		switch {
		case f == "--jobs" || f == "-j":
			i++ // how many at once, in the next word
		case strings.HasPrefix(f, "--jobs=") || strings.HasPrefix(f, "-j"):
		case slices.Contains([]string{"--progress", "--quiet", "-q", "--force", "-f", "--checkout", "--init", "--recommend-shallow"}, f):
		default:
			return f
		}
	}
	return ""
}

// slotName is a directory for one concurrent place of one runner.
func slotName(token, id string) string {
	name := strings.Trim(slugOf(token)+"-"+slugOf(id), "-.")
	if name == "" {
		return "slot"
	}
	return name
}

// projectName is a directory for one project.
func projectName(j *job) string {
	id := strconv.FormatInt(j.resp.JobInfo.ProjectID, 10)
	if slug := slugOf(j.call.Var("CI_PROJECT_PATH")); slug != "" {
		return id + "-" + slug
	}
	return id
}

func (j *job) closeTree() error {
	if j.tree == nil {
		return nil
	}
	t := j.tree
	j.tree = nil
	return t.Close()
}

// packSources makes the tree a disk of the guest, in the job's directory, and
// lets it go.
func (r *Runner) packSources(ctx context.Context, j *job) error {
	if j.tree == nil {
		return nil
	}
	dir := r.Machines.Dir(j.id.ID)
	if err := os.WriteFile(filepath.Join(dir, sourcesFile), j.tree.Trace, 0o600); err != nil {
		return err
	}
	p, err := j.tree.Pack(ctx, filepath.Join(dir, supervise.CheckoutFile), gitConfigOf(j.call.Var("CI_PROJECT_DIR")))
	if err != nil {
		return err
	}
	r.say("checkout packed for the guest: %d files, %s in %s", p.Files, usage.Size(p.Bytes), seconds(p.Took))
	return j.closeTree()
}

// checkoutOf is the tree as the guest's spec has it.
func (r *Runner) checkoutOf(j *job) *supervise.Checkout {
	if j.tree == nil {
		return nil
	}
	c := &supervise.Checkout{FSType: checkout.FSType, Target: path.Clean(j.call.Var("CI_PROJECT_DIR")), User: r.userOfJob(j)}
	if r.Set.CheckoutLayer != nil {
		c.Memory = r.Set.CheckoutLayer(j.wanted.MemMiB)
	}
	return c
}

// gitConfigOf is where the job's credentials are in the guest. The runner's
// own script has them there too, and its last stage removes the file.
func gitConfigOf(project string) string {
	return path.Clean(project) + ".tmp/.gitlab-runner.ext.conf"
}

var identifier = lazyre.New(`^[A-Za-z_][A-Za-z0-9_]*$`)

// runnersHook is how the runner's script announces a command of a hook, in
// the quoting of that script.
const runnersHook = `[32;1m$ `

// sourcesScript is what get_sources runs in the guest of a job whose sources
// are there already: it tells what the host's git told, leaves the job's
// credentials for git as the runner's script does, and runs the job's hooks.
func (r *Runner) sourcesScript(c *execdrv.Call, rec Record, script io.Reader) (io.Reader, error) {
	told, err := os.ReadFile(filepath.Join(r.Machines.Dir(rec.ID), sourcesFile))
	if err != nil {
		return nil, fault.New(fault.System, "reading what the host's git told").Because(err)
	}
	resp, err := readResponse(c)
	if err != nil {
		return nil, err
	}
	before, after := resp.Lines(execdrv.HookBefore), resp.Lines(execdrv.HookAfter)
	if b, err := io.ReadAll(io.LimitReader(script, 64<<20)); err == nil && strings.Count(string(b), runnersHook) > len(before)+len(after) {
		r.warn("pre_get_sources_script and post_get_sources_script of the runner's own configuration do not run with [executor] host_checkout: put them into the job's hooks:")
	}
	project := path.Clean(c.Var("CI_PROJECT_DIR"))
	q := execdrv.Quote
	var b strings.Builder
	b.WriteString("set -e\n")
	fmt.Fprintf(&b, "mkdir -p %s\n", q(project+".tmp"))
	writeVariables(&b, c, resp, project+".tmp", len(before)+len(after) > 0)
	fmt.Fprintf(&b, "cd %s\n", q(project))
	writeLines(&b, before)
	fmt.Fprintf(&b, "printf '%%s' %s\n", q(string(told)))
	if url, user, token, ok := credentials(resp, c); ok {
		conf := fmt.Sprintf("[url %s]\n\tinsteadOf = %s\n", configQuote(strings.Replace(url, "://", "://"+user+":"+token+"@", 1)), configQuote(url))
		if v, _ := strconv.ParseBool(c.Var("GIT_SUBMODULE_FORCE_HTTPS")); v {
			conf += fmt.Sprintf("[url %s]\n", configQuote(strings.Replace(url, "://", "://"+user+":"+token+"@", 1)+"/"))
			for _, form := range checkout.SSHForms(url) {
				conf += fmt.Sprintf("\tinsteadOf = %s\n", configQuote(form))
			}
		}
		fmt.Fprintf(&b, "(umask 077; printf '%%s' %s > %s)\n", q(conf), q(gitConfigOf(project)))
	}
	without, _ := strconv.ParseBool(c.Var("GIT_LFS_SKIP_SMUDGE"))
	if on, err := strconv.ParseBool(c.Var("GIT_CHECKOUT")); !without && (on || err != nil) {
		b.WriteString("if git lfs version >/dev/null 2>&1; then git lfs pull; echo; fi\n")
	}
	if !without && strings.Contains(string(told), checkout.SubmodulesTold) {
		fmt.Fprintf(&b, "if git lfs version >/dev/null 2>&1; then printf '%%s\\n' %s; git submodule foreach --recursive 'git lfs pull'; fi\n", q("\x1b[32;1mPulling LFS files...\x1b[0;m"))
	}
	writeLines(&b, after)
	b.WriteString("exit 0\n")
	return strings.NewReader(b.String()), nil
}

func writeLines(b *strings.Builder, lines []string) {
	for _, l := range lines {
		b.WriteString(execdrv.Echo(l))
		b.WriteString(strings.TrimRight(l, "\n") + "\n")
	}
}

// writeVariables makes the job's file variables files, as every stage of the
// runner's does, and exports all variables when somebody is there to read them.
func writeVariables(b *strings.Builder, c *execdrv.Call, resp execdrv.Response, tmp string, export bool) {
	if !export {
		return
	}
	var files []string
	for _, v := range resp.Variables {
		if v.File {
			files = append(files, v.Key)
		}
	}
	for _, name := range c.VarNames("") {
		if !identifier.MatchString(name) {
			continue
		}
		value, _ := c.LookupVar(name)
		if slices.Contains(files, name) {
			p := tmp + "/" + name
			fmt.Fprintf(b, "printf '%%s' %s > %s\n", execdrv.Quote(value), execdrv.Quote(p))
			value = p
		}
		fmt.Fprintf(b, "export %s=%s\n", name, execdrv.Quote(value))
	}
}

// credentials are those of the job's repository, by its server.
func credentials(resp execdrv.Response, c *execdrv.Call) (server, user, token string, ok bool) {
	server, user, token = checkout.Credentials(resp.GitInfo.RepoURL)
	if token == "" {
		user, token = "gitlab-ci-token", resp.Token
	}
	if token == "" {
		token = c.Var("CI_JOB_TOKEN")
	}
	return server, user, token, server != "" && token != ""
}

func configQuote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}
