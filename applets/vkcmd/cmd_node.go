package vkcmd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	fleet "virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/version"
)

func newNode(a *app) *cli.Command {
	return &cli.Command{
		Name:  "node",
		Usage: "make this host a node of a fleet, and be one",
		Description: "A node keeps a session with its hub, applies what the hub asks within what this\n" +
			"host's configuration allows, and reports what it sees. docs/fleet.md tells more.",
		Commands: []*cli.Command{newNodeJoin(a), newNodeRun(a), newNodeService(a), newNodeRunnerExec(a), newNodeJob(a)},
	}
}

// joinOptions are the flags of vk node join.
type joinOptions struct {
	hub       string
	token     string
	tokenFile string
	ca        string
	replace   bool
	user      string
	service   bool
	ignoreCI  bool
}

func newNodeJoin(a *app) *cli.Command {
	var o joinOptions
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "join",
		Usage:     "enroll this host with a hub",
		ArgsUsage: "HUB",
		Description: "Makes this host's key, signs the token with it, and keeps the id that the hub\n" +
			"answers: the hub pins the key, which never leaves this host. HUB is https://HOST,\n" +
			"or http to a hub on loopback. The connection is TLS 1.3, through no proxy and to no\n" +
			"other address. A host that vk check finds unfit is refused.\n\n" +
			"  vk-hub token create | ssh ci-7 vk node join https://hub.example.com --token -",
		Flags: []cli.Flag{
			cliutil.String(&o.token, "token", "TOKEN", "a token of the hub's; - reads it from standard input"),
			cliutil.String(&o.tokenFile, "token-file", "FILE", "read the token from a file"),
			cliutil.String(&o.ca, "ca", "FILE", "verify the hub against these certificates (PEM) alone"),
			cliutil.Bool(&o.replace, "replace", "enroll a host that is enrolled already, as a new node"),
			cliutil.String(&o.user, "user", "NAME", "as root: set the host up for this user, created when missing, and enroll as it"),
			cliutil.Bool(&o.service, "service", "stop a running vk-node.service first; once enrolled, install and start it"),
			cliutil.Bool(&o.ignoreCI, "ignore-ci-user", "go on when the host's CI jobs run as another user"),
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			o.hub = c.Args().First()
			return a.nodeJoin(ctx, o)
		},
	}, cliutil.Arity{Min: 1, Max: 1}),
		cliutil.Status{Code: "11", Means: "a running vk node holds the state directory"},
		cliutil.Status{Code: "12", Means: "the hub refuses the enrollment"},
		cliutil.Status{Code: "13", Means: "the hub cannot be reached"})
}

func (a *app) nodeJoin(ctx context.Context, o joinOptions) error {
	if _, err := node.ParseHub(o.hub); err != nil {
		return err
	}
	token, err := a.readToken(o)
	if err != nil {
		return err
	}
	var ca []byte
	if o.ca != "" {
		if ca, err = os.ReadFile(o.ca); err != nil {
			return fault.New(fault.Usage, "reading --ca").Because(err)
		}
		if _, err := node.TLSConfig(ca); err != nil {
			return fmt.Errorf("%s: %w", o.ca, err)
		}
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	if err := a.gateFails(ctx, h); err != nil {
		return err
	}
	j := a.hostJoinOf(o.user, o.service, o.ignoreCI)
	j.enroll = func(ctx context.Context) error { return a.enroll(ctx, h, o, token, ca) }
	j.token, j.as = token, []string{"node", "join", o.hub, "--token", "-"}
	if o.ca != "" {
		file, err := filepath.Abs(o.ca)
		if err != nil {
			return err
		}
		j.as = append(j.as, "--ca", file)
	}
	if o.replace {
		j.as = append(j.as, "--replace")
	}
	if o.ignoreCI {
		j.as = append(j.as, "--ignore-ci-user")
	}
	return a.joinHost(ctx, h, j)
}

// enroll enrolls this host as who asks.
func (a *app) enroll(ctx context.Context, h *wire.Host, o joinOptions, token string, ca []byte) error {
	name, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("asking for the hostname: %w", err)
	}
	j, err := node.Join(ctx, node.JoinOptions{StateDir: h.StateDir, Hub: o.hub, Token: token, CA: ca, Replace: o.replace, Hostname: name, VK: version.Version})
	if err != nil {
		return err
	}
	if j.OldNode != "" {
		a.say("this host was node %s: remove it with vk-hub nodes remove %s, on its hub", j.OldNode, j.OldNode)
	}
	if j.Replaced != "" {
		a.say("the old identity is kept in %s", j.Replaced)
	}
	if j.Again {
		a.say("the hub knows this key: the node has its id back")
	}
	a.say("enrolled with %s; vk node run begins its session", j.URL)
	fmt.Fprintln(a.env.Stdout, j.Node)
	return nil
}

// readToken is the token of the flags. It is a secret: no error holds it.
func (a *app) readToken(o joinOptions) (string, error) {
	t := cliutil.Token{Value: o.token, File: o.tokenFile, Stdin: a.env.Stdin, Warn: a.warn,
		Hint: "vk-hub token create, on the hub's host, prints one; --token - reads it from standard input"}
	return t.Read()
}

// gateChecks are the findings of vk check that a node must not fail.
func (a *app) gateChecks(ctx context.Context, h *wire.Host) []finding {
	k, kernel := checkKernel(h)
	return []finding{checkQEMU(ctx, h), kernel, checkAccel(ctx, h, k)}
}

func (a *app) gateFails(ctx context.Context, h *wire.Host) error {
	var bad []string
	for _, f := range a.gateChecks(ctx, h) {
		if f.Verdict == checkFail {
			bad = append(bad, f.Name+": "+f.Text)
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return fault.Newf(fault.System, "guests cannot run on this host: %s", strings.Join(bad, "; ")).
		Hint("vk check says what to do; a host enrolls once it passes")
}

func newNodeRun(a *app) *cli.Command {
	var metrics string
	return cliutil.Exits(&cli.Command{
		Name:  "run",
		Usage: "be a node, in the foreground",
		Description: "Keeps a session with the hub that this host was enrolled with, for as long as it\n" +
			"runs; a hub that cannot be reached is dialed again, and changes nothing meanwhile.\n" +
			"A first SIGTERM or SIGINT ends the session and waits for the jobs of a runner that\n" +
			"the node runs; a second one ends that runner with its jobs; a third ends at once.",
		Flags: []cli.Flag{
			cliutil.String(&metrics, "metrics", "ADDR", "serve metrics for Prometheus at http://ADDR/metrics, such as 127.0.0.1:9469"),
		},
		Action: func(ctx context.Context, _ *cli.Command) error {
			return a.nodeRun(ctx, metrics)
		},
	}, cliutil.Status{Code: "75", Means: "another vk node holds the state directory"})
}

func (a *app) nodeRun(ctx context.Context, metrics string) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	log := a.daemonLog()
	parts, err := a.nodeParts(ctx, h, log, metrics)
	if err != nil {
		return err
	}
	n, err := node.Open(ctx, node.Config{StateDir: h.StateDir, Host: parts.host, Runner: parts.runner, VK: version.Version, Log: log})
	if err != nil {
		return err
	}
	defer n.Close()
	if n.Jobs, err = parts.jobs(); err != nil {
		return err
	}
	log.Info("node", "hub", n.Enrollment().URL, "state_dir", h.StateDir, "runner", string(parts.runner.Mode()), "vk", version.String())
	for _, w := range parts.warnings {
		log.Warn(w)
	}
	sigs := make(chan os.Signal, 3)
	signal.Notify(sigs, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer signal.Stop(sigs)
	return runNode(ctx, n, parts.runner, sigs, log)
}

// runNode is a node's run under signals: the first ends it in order, a second
// abandons what it waits for, a third waits for nothing.
func runNode(ctx context.Context, n interface{ Run(context.Context) error }, r node.Runner, sigs <-chan os.Signal, log *slog.Logger) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	for got := 0; ; {
		select {
		case err := <-done:
			if node.RefusalOf(err).Final() {
				// A refusal is a failure like a local one: what supervises the
				// node tries it again, within its limits.
				return fault.New(fault.KindOf(err), "").Because(err).WithExit(1)
			}
			return err
		case s := <-sigs:
			got++
			managed := r.Mode() == fleet.RunnerManaged
			switch {
			case got == 1:
				log.Info("stopping", "signal", s.String())
				stop()
			case got == 2 && managed:
				log.Warn("stopping the runner without waiting for its jobs", "signal", s.String())
				r.Abandon()
			default:
				return fault.Newf(fault.Interrupted, "ended by %s, waiting for nothing", s)
			}
		}
	}
}

// daemonLog is the log of a command that runs for long: JSON for a journal,
// text for people.
func (a *app) daemonLog() *slog.Logger {
	level := slog.LevelInfo
	if a.g.verbose {
		level = slog.LevelDebug
	}
	return logx.New(a.env.Stderr, level, a.env.Getenv("JOURNAL_STREAM") != "")
}

// nodeParts is what nodeRun needs of its host.
type nodeParts struct {
	host     node.Host
	runner   node.Runner
	jobs     func() (node.Jobs, error) // called once the node holds the state directory
	warnings []string
}
