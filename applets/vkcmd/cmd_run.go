package vkcmd

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/image"
	"virtkit/core/supervise"
)

// runOptions are what the command line says of a guest to run.
type runOptions struct {
	image string
	args  []string

	cpus       int
	mem        int64
	disk       int64 // 0 = the configuration's
	shares     []string
	env        []string
	user       string
	workdir    string
	name       string
	entrypoint *string // nil = the image's; "" = none
	rm, keep   bool
	stdin, tty bool
	detach     bool
	net        string // "" = the configuration's
	publish    []string
	loopback   loopback
	kernel     string
	accel      string
	pull       string
	platform   string
	nested     bool
	egress     egressFlags

	// filled in by validate
	held          *supervise.Egress // nil = nothing is restricted or recorded
	parsedShares  []supervise.Share
	parsedPublish []supervise.Publish
	parsedEnv     []string
}

func newRun(a *app) *cli.Command {
	o := runOptions{cpus: 2, mem: 1 << 30, pull: "missing"}
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "run",
		Usage:     "run a command in a new guest",
		ArgsUsage: "IMAGE [CMD…]",
		Description: "Boots a guest from an image, runs a command in it and removes the guest when the\n" +
			"command ends. Without a command the image's own runs. The exit status is the\n" +
			"command's.\n\n" +
			"IMAGE is local/NAME (local/default is made when first used), virtkit/NAME,\n" +
			"docker/REF, or a reference as other container tools take it.\n\n" +
			"A first Ctrl-C goes to the command, a second one ends the guest. Whatever ends\n" +
			"this process ends the guest too, except with --detach.",
		UseShortOptionHandling: true,
		Flags:                  runFlags(&o),
		Action: func(ctx context.Context, c *cli.Command) error {
			o.image, o.args = c.Args().First(), c.Args().Tail()
			if err := o.validate(a); err != nil {
				return err
			}
			return own125(a.run(ctx, &o))
		},
	}, cliutil.Arity{Min: 1, Max: -1, Tail: 1}),
		cliutil.Status{Code: "N", Means: "what the command exited with; 128+n when signal n ended it"},
		cliutil.Status{Code: "125", Means: "vk could not run the command or lost its guest"},
		cliutil.Status{Code: "126", Means: "the command cannot be executed"},
		cliutil.Status{Code: "127", Means: "the command was not found"})
}

func runFlags(o *runOptions) []cli.Flag {
	return []cli.Flag{
		cliutil.Int(&o.cpus, "cpus", "N", "processors", 1, 255),
		cliutil.Size(&o.mem, "mem", "memory", 64<<20),
		cliutil.Size(&o.disk, "disk", "capacity of the writable layer", 16<<20).Default("[vmm] disk"),
		cliutil.Strings(&o.shares, "share", "SRC:DST[:ro]", "share a directory of this host with the guest"),
		cliutil.Strings(&o.env, "env", "KEY[=VALUE]", "set a variable; without a value, as it is here").Short("e"),
		cliutil.String(&o.user, "user", "USER[:GROUP]", "user that the command runs as").Short("u").Default("the image's"),
		cliutil.String(&o.workdir, "workdir", "DIR", "directory that the command starts in").Short("w").Default("the image's"),
		cliutil.String(&o.name, "name", "NAME", "name of the guest, also its host name"),
		cliutil.Custom("entrypoint", "PROGRAM", "program in place of the image's entrypoint; empty for none", false, func(s string) error {
			o.entrypoint = &s
			return nil
		}),
		cliutil.Bool(&o.rm, "rm", "leave nothing of the guest behind; this is the default"),
		cliutil.Bool(&o.keep, "keep", "keep the guest's directory with its console and state, until vk stop --rm"),
		cliutil.Bool(&o.stdin, "interactive", "pass standard input on").Short("i"),
		cliutil.Bool(&o.tty, "tty", "give the command a terminal").Short("t"),
		cliutil.Bool(&o.detach, "detach", "return when the guest runs; print its id").Short("d"),
		cliutil.Choice(&o.net, "net", "network", "switch", "none").Default("[net] mode"),
		cliutil.Strings(&o.publish, "publish", "[ADDR:]HOST:GUEST[/udp]", "make a port of the guest reachable on this host").Short("p"),
		cliutil.Custom("net-host-loopback", "", "let the guest reach this host's 127.0.0.1 at its gateway; with ports, pass those of the guest's own 127.0.0.1 on",
			true, o.loopback.set).Optional("PORT,…"),
		cliutil.Bool(&o.egress.audit, "audit-egress", "list what the guest contacted when it ends"),
		cliutil.Strings(&o.egress.names, "allow-name", "SUFFIX", "let the guest look up and reach names with this DNS suffix, and else only what --allow-ip lists"),
		cliutil.Strings(&o.egress.ips, "allow-ip", "CIDR[:PORT]", "let the guest reach this IPv4 network, and else only what --allow-name lists"),
		cliutil.Bool(&o.egress.restrict, "egress-restrict", "let the guest reach nothing but what --allow-name and --allow-ip list"),
		cliutil.String(&o.kernel, "kernel", "NAME", "guest kernel, by name or path").Default("[vmm] kernel"),
		cliutil.Choice(&o.accel, "accel", "processor virtualization", "auto", "kvm", "tcg").Default("[vmm] accel"),
		cliutil.Choice(&o.pull, "pull", "when to ask the registry", "always", "missing", "if-not-present", "never"),
		cliutil.String(&o.platform, "platform", "OS/ARCH", "platform of the image").Default("this host's"),
		cliutil.Bool(&o.nested, "nested", "let the guest run guests of its own"),
	}
}

// validate finds what can be found wrong without looking at the host.
func (o *runOptions) validate(a *app) error {
	if o.rm && o.keep {
		return cliutil.BadOption("flags --rm and --keep exclude each other")
	}
	if o.detach && (o.stdin || o.tty) {
		return cliutil.BadOption("flag --detach: a detached guest has no terminal; leave out -i and -t, and use vk exec -it later")
	}
	if o.tty && o.stdin && terminalFD(a.env.Stdin) < 0 {
		return cliutil.BadOption("flag --tty: standard input is not a terminal; leave out -t")
	}
	if o.net == "none" && (len(o.publish) > 0 || o.loopback.all || len(o.loopback.ports) > 0) {
		return cliutil.BadOption("flag --net none: a guest without a network has no ports")
	}
	var err error
	if o.held, err = o.egress.policy(o.net); err != nil {
		return err
	}
	if o.name != "" {
		if err := checkName(o.name); err != nil {
			return cliutil.BadOption("flag --name: %q %v", o.name, err)
		}
	}
	dir, err := a.env.Dir()
	if err != nil {
		return fmt.Errorf("finding the working directory: %w", err)
	}
	for _, s := range o.shares {
		sh, err := parseShare(s, dir)
		if err != nil {
			return cliutil.BadOption("flag --share: %v", err)
		}
		st, err := os.Stat(sh.Source)
		if err != nil {
			return cliutil.BadOption("flag --share: %v", err)
		}
		if !st.IsDir() {
			return cliutil.BadOption("flag --share: %s is not a directory", sh.Source)
		}
		for _, other := range o.parsedShares {
			if path.Clean(other.Target) == path.Clean(sh.Target) {
				return cliutil.BadOption("flag --share: %s and %s are both to be %s in the guest", other.Source, sh.Source, sh.Target)
			}
		}
		o.parsedShares = append(o.parsedShares, sh)
	}
	for _, s := range o.publish {
		p, err := parsePublish(s)
		if err != nil {
			return cliutil.BadOption("flag --publish: %v", err)
		}
		o.parsedPublish = append(o.parsedPublish, p)
	}
	if o.parsedEnv, err = expandEnv(o.env, a.env.LookupEnv); err != nil {
		return cliutil.BadOption("%v", err)
	}
	return nil
}

// policy is the store's word for --pull.
func (o *runOptions) policy() image.Policy { return pullPolicy(o.pull) }

func pullPolicy(word string) image.Policy {
	switch word {
	case "always":
		return image.Always
	case "never":
		return image.Never
	}
	return image.IfNotPresent
}

// argv is what runs in the guest: the entrypoint, ours or the image's, and
// behind it the arguments or the image's command. An entrypoint given here
// makes the image's command meaningless.
func (o *runOptions) argv(c image.Config) ([]string, error) {
	var out []string
	cmd := c.Cmd
	switch {
	case o.entrypoint == nil:
		out = append(out, c.Entrypoint...)
	case *o.entrypoint != "":
		out, cmd = append(out, *o.entrypoint), nil
	default:
		cmd = nil
	}
	if len(o.args) > 0 {
		cmd = o.args
	}
	out = append(out, cmd...)
	if len(out) == 0 {
		return nil, fault.Newf(fault.Usage, "image %s has no command of its own", o.image).
			Hint("say what to run: vk run %s COMMAND", o.image)
	}
	return out, nil
}

// spec is the guest's description for its supervisor.
func (o *runOptions) spec(c *conf.Config, root supervise.Image, ic image.Config, now time.Time) (supervise.Spec, error) {
	id := "run-" + randomHex(4)
	s := supervise.Spec{
		ID: id, Name: first(o.name, id), Hostname: first(o.name, id), Kind: "run", Created: now,
		CPUs: o.cpus, MemMiB: int((o.mem + units.MiB - 1) / units.MiB), Nested: o.nested,
		Image: root, Upper: o.disk, Shares: o.parsedShares,
		Net:  o.netSpec(c),
		Keep: o.keep, Env: ic.Env, Kernel: first(o.kernel, c.VMM.Kernel), Accel: first(o.accel, c.VMM.Accel),
		BootLimit: c.VMM.BootTimeout, HangLimit: c.VMM.HangTimeout,
	}
	if s.Upper == 0 {
		s.Upper = c.VMM.Disk
	}
	if o.held != nil && s.Net.Mode != "switch" {
		return s, fault.Newf(fault.Usage, "[net] mode is %q: only a switch holds a guest to its egress flags", s.Net.Mode).
			Hint("give --net switch, or leave the egress flags out")
	}
	for _, v := range ic.Volumes {
		s.Dirs = append(s.Dirs, supervise.Dir{Path: v}) // as the image has it, if it does
	}
	return s, nil
}

// netSpec is the guest's network.
func (o *runOptions) netSpec(c *conf.Config) supervise.NetSpec {
	n := supervise.NetSpec{Mode: first(o.net, c.Net.Mode), HostLoopback: o.loopback.all, Loopback: o.loopback.ports, Publish: o.parsedPublish, Egress: o.held}
	if n.Mode == "switch" && n.Loopback == nil {
		n.Loopback = c.Net.HostLoopback
	}
	return n
}

func first(words ...string) string {
	for _, w := range words {
		if w != "" {
			return w
		}
	}
	return ""
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// own125 gives errors of vk's own, as against those of the command that it
// ran, the status by which the two are told apart.
func own125(err error) error {
	if err == nil {
		return nil
	}
	if fault.KindOf(err) == fault.Interrupted || cliutil.Settled(err) {
		return err
	}
	e := fault.New(fault.KindOf(err), "").Because(err)
	return e.WithExit(125)
}

// request is the command as the guest's agent takes it.
func (o *runOptions) request(a *app, ic image.Config, argv []string) guestwire.ExecRequest {
	req := guestwire.ExecRequest{
		ID: guestclient.NewExecID(), Argv: argv, Env: o.parsedEnv, TTY: o.tty,
		User: first(o.user, ic.User), Dir: first(o.workdir, ic.WorkingDir), MkDir: true,
	}
	if o.tty {
		req.Env = withTerm(req.Env, a.env.LookupEnv)
	}
	return req
}

// withTerm adds this terminal's kind unless the user set one.
func withTerm(env []string, lookup func(string) (string, bool)) []string {
	for _, e := range env {
		if strings.HasPrefix(e, "TERM=") {
			return env
		}
	}
	if t, ok := lookup("TERM"); ok && t != "" {
		return append(env, "TERM="+t)
	}
	return append(env, "TERM=xterm")
}

// lost explains why a command's guest went away under it.
func lost(err error, boots int, state func() supervise.State) error {
	if !errors.Is(err, guestclient.ErrGuestGone) && !errors.Is(err, supervise.ErrSupervisorGone) {
		return err
	}
	st := state()
	if st.Exit == nil {
		if rebooted(st, boots) {
			return fault.New(fault.System, "the guest rebooted before the command ended").Because(err)
		}
		return err
	}
	text := "the guest ended before the command did: " + st.Exit.Reason
	if st.Exit.Detail != "" {
		text += ": " + st.Exit.Detail
	}
	if len(st.Exit.Console) > 0 {
		text += "; its console ended with\n  " + strings.Join(st.Exit.Console, "\n  ")
	}
	e := fault.New(fault.System, text)
	if st.Exit.Hint != "" {
		e = e.Hint("%s", st.Exit.Hint)
	}
	return e
}
