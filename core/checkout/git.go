package checkout

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"virtkit/core/fault"
	"virtkit/core/leash"
)

// git runs git for one job. Everything that git would look up elsewhere is
// decided here.
type git struct {
	bin    string
	env    []string
	secret string
}

// inherited are the variables of this process that git gets: how to find its
// programs and how to get out.
var inherited = []string{"PATH", "TMPDIR", "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"}

// helper answers git's question for credentials from its environment, where
// no other user sees them and no file keeps them.
const helper = `!f() { test "$1" = get && printf 'username=%s\npassword=%s\n' "$VK_GIT_USER" "$VK_GIT_TOKEN"; }; f`

// newGit makes the environment. caFile is a file of certificates, or "".
func newGit(bin string, j *Job, caFile string) *git {
	clean, user, token := j.credentials()
	g := &git{bin: bin, secret: token}
	for _, k := range inherited {
		if v, ok := os.LookupEnv(k); ok {
			g.env = append(g.env, k+"="+v)
		}
	}
	g.env = append(g.env, "HOME=/nonexistent", "LC_ALL=C.UTF-8", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_ATTR_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0", "GIT_ASKPASS=/bin/false", "SSH_ASKPASS=/bin/false",
		"GIT_NO_REPLACE_OBJECTS=1", "GIT_OPTIONAL_LOCKS=0", "GIT_PROTOCOL_FROM_USER=0", "VK_GIT_USER="+user, "VK_GIT_TOKEN="+token)
	conf := [][2]string{
		{"core.hooksPath", "/dev/null"}, {"core.fsmonitor", "false"}, {"core.attributesFile", "/dev/null"}, {"core.excludesFile", "/dev/null"},
		{"core.sshCommand", "/bin/false"}, {"core.autocrlf", "false"}, {"core.fsync", "none"}, {"core.untrackedCache", "false"}, {"core.pager", "cat"},
		{"credential.helper", ""}, {"credential." + origin(clean) + ".helper", helper}, {"credential.interactive", "never"},
		{"fetch.recurseSubmodules", "false"}, {"submodule.recurse", "false"}, {"fetch.writeCommitGraph", "false"}, {"transfer.bundleURI", "false"},
		{"gc.auto", "0"}, {"gc.autoDetach", "false"}, {"maintenance.auto", "false"}, {"init.defaultBranch", "none"},
		{"advice.detachedHead", "false"}, {"http.followRedirects", "initial"}, {"protocol.version", "2"}, {"protocol.ext.allow", "never"},
	}
	if j.UserAgent != "" {
		conf = append(conf, [2]string{"http.userAgent", j.UserAgent})
	}
	if caFile != "" {
		conf = append(conf, [2]string{"http.sslCAInfo", caFile})
	}
	if j.Insecure {
		conf = append(conf, [2]string{"http.sslVerify", "false"})
	}
	g.env = append(g.env, fmt.Sprintf("GIT_CONFIG_COUNT=%d", len(conf)))
	for i, c := range conf {
		g.env = append(g.env, fmt.Sprintf("GIT_CONFIG_KEY_%d=%s", i, c[0]), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", i, c[1]))
	}
	return g
}

// remote and local are the protocols of a command.
const (
	remote = "GIT_ALLOW_PROTOCOL=http:https"
	local  = "GIT_ALLOW_PROTOCOL=file"
)

// run runs git in dir with its standard output to out, and returns an error
// with what git said on its standard error, credentials taken out.
func (g *git) run(ctx context.Context, dir, protocols string, out io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, g.bin, args...)
	cmd.Dir = dir
	cmd.Env = append(g.env[:len(g.env):len(g.env)], protocols)
	var errb edges
	cmd.Stdout, cmd.Stderr = out, &errb
	err := g.start(cmd, args)
	if err == nil {
		return nil
	}
	if c := context.Cause(ctx); c != nil {
		return c
	}
	words := strings.TrimSpace(g.hide(errb.String()))
	if words == "" {
		words = err.Error()
	}
	return fmt.Errorf("git %s: %s", verb(args), words)
}

// start runs a command that does not outlive this process. Most of what git
// starts ends with git, when its pipes break; a collection does not, and has a
// watcher, which costs as much as a small git itself.
func (g *git) start(cmd *exec.Cmd, args []string) error {
	if verb(args) == "gc" {
		return leash.Run(cmd)
	}
	// The signal is sent when the thread ends that started the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = leash.Grace
	return cmd.Run()
}

// verb is the word of a command line that says what is done.
func verb(args []string) string {
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == "-c" || args[i] == "-C":
			i++
		case !strings.HasPrefix(args[i], "-"):
			return args[i]
		}
	}
	return ""
}

func (g *git) hide(s string) string {
	if g.secret == "" {
		return s
	}
	return strings.ReplaceAll(s, g.secret, "[MASKED]")
}

// edgeLines is how many of the first and of the last lines of git's words are
// kept, lineMax how long one may be, in bytes: on a full disk git has a line for
// each file.
const (
	edgeLines = 6
	lineMax   = 4 << 10
)

// edges keeps the first and the last lines of what is written to it. A line is
// whole, or it is not kept: half of a credential would not be known as one.
type edges struct {
	first, last []string
	n           int // lines
	part        []byte
}

// Write implements io.Writer.
func (e *edges) Write(p []byte) (int, error) {
	n := len(p)
	for {
		line, rest, ok := bytes.Cut(p, []byte("\n"))
		if len(e.part) <= lineMax {
			e.part = append(e.part, line[:min(len(line), lineMax+1)]...)
		}
		if !ok {
			return n, nil
		}
		e.add()
		p = rest
	}
}

// add takes the line that has ended.
func (e *edges) add() {
	line := string(e.part)
	if len(e.part) > lineMax {
		line = fmt.Sprintf("(a line of more than %d bytes)", lineMax)
	}
	e.part = e.part[:0]
	e.n++
	if len(e.first) < edgeLines {
		e.first = append(e.first, line)
		return
	}
	if e.last = append(e.last, line); len(e.last) > edgeLines {
		e.last = e.last[1:]
	}
}

// String is what there was, and of how many lines the middle is missing.
func (e *edges) String() string {
	if len(e.part) > 0 {
		e.add()
	}
	lines := slices.Clone(e.first)
	if left := e.n - len(e.first) - len(e.last); left > 0 {
		lines = append(lines, fmt.Sprintf("(%d more lines)", left))
	}
	return strings.Join(append(lines, e.last...), "\n")
}

func findGit() (string, error) {
	p, err := exec.LookPath("git")
	if err != nil {
		return "", fault.New(fault.System, "there is no git on this host, which host checkouts are made with").Hint("apt-get install git")
	}
	return filepath.Abs(p)
}
