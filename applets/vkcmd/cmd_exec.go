package vkcmd

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
)

type execOptions struct {
	name     string
	service  string
	argv     []string
	env      []string
	clearEnv bool
	user     string
	workdir  string
	stdin    bool
	tty      bool
	detach   bool

	parsedEnv []string
}

func newExec(a *app) *cli.Command {
	var o execOptions
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "exec",
		Usage:     "run a command in a running guest",
		ArgsUsage: "NAME CMD…",
		Description: "Runs a command in a guest that runs, beside what runs in it. The exit status is\n" +
			"the command's. A first Ctrl-C goes to the command, a second one kills it; the\n" +
			"guest runs on. With --service, runs it in a service of a GitLab job.",
		UseShortOptionHandling: true,
		Flags: []cli.Flag{
			cliutil.String(&o.service, "service", "NAME", "run it in this service of the guest's job instead"),
			cliutil.Strings(&o.env, "env", "KEY[=VALUE]", "set a variable; without a value, as it is here").Short("e"),
			cliutil.Bool(&o.clearEnv, "clear-env", "start from an empty environment instead of the image's"),
			cliutil.String(&o.user, "user", "USER[:GROUP]", "user that the command runs as").Short("u").Default("root"),
			cliutil.String(&o.workdir, "workdir", "DIR", "directory that the command starts in").Short("w").Default("the user's home"),
			cliutil.Bool(&o.stdin, "interactive", "pass standard input on").Short("i"),
			cliutil.Bool(&o.tty, "tty", "give the command a terminal").Short("t"),
			cliutil.Bool(&o.detach, "detach", "start the command and return; its output is dropped").Short("d"),
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			o.name, o.argv = c.Args().First(), c.Args().Tail()
			if err := o.validate(a); err != nil {
				return err
			}
			return own125(a.exec(ctx, &o))
		},
	}, cliutil.Arity{Min: 2, Max: -1, Tail: 1}),
		cliutil.Status{Code: "N", Means: "what the command exited with; 128+n when signal n ended it"},
		cliutil.Status{Code: "125", Means: "vk could not run the command or lost its guest"},
		cliutil.Status{Code: "126", Means: "the command cannot be executed"},
		cliutil.Status{Code: "127", Means: "the command was not found"})
}

func (o *execOptions) validate(a *app) error {
	if o.detach && (o.stdin || o.tty) {
		return cliutil.BadOption("flag --detach: a detached command has no terminal; leave out -i and -t")
	}
	if o.tty && o.stdin && terminalFD(a.env.Stdin) < 0 {
		return cliutil.BadOption("flag --tty: standard input is not a terminal; leave out -t")
	}
	if o.argv[0] == "" {
		return cliutil.BadOption("the command is an empty word")
	}
	var err error
	if o.parsedEnv, err = expandEnv(o.env, a.env.LookupEnv); err != nil {
		return cliutil.BadOption("%v", err)
	}
	return nil
}

func (o *execOptions) request(a *app) guestwire.ExecRequest {
	req := guestwire.ExecRequest{
		ID: guestclient.NewExecID(), Argv: o.argv, Env: o.parsedEnv, Clear: o.clearEnv,
		User: o.user, Dir: o.workdir, TTY: o.tty, Detach: o.detach,
	}
	if o.tty {
		req.Env = withTerm(req.Env, a.env.LookupEnv)
	}
	return req
}

func (a *app) exec(ctx context.Context, o *execOptions) error {
	client, _, err := a.guest(ctx, o.name)
	if err == nil && o.service != "" {
		client, err = client.Service(o.service)
	}
	if err != nil {
		return err
	}
	gc := guestclient.FromOpener(client.Opener())
	if o.detach {
		return detached(ctx, gc, o.request(a))
	}
	before, err := client.State(ctx)
	if err != nil {
		return err
	}
	signals, stop := watch()
	defer stop()
	s := &session{exec: gc.Exec, stdout: a.env.Stdout, stderr: a.env.Stderr, signals: signals, say: a.say}
	if o.stdin {
		s.stdin = a.env.Stdin
	}
	res, err := s.run(ctx, o.request(a))
	if err != nil {
		return lost(err, before.Boots, func() supervise.State { return endOf(ctx, client, before.Boots) })
	}
	return cliutil.Exit(ended(res, a.say))
}

// detached starts a program and returns once it runs, or with why it does not.
// It speaks to the agent itself, because a program that goes on is no result
// of guestclient's Exec.
func detached(ctx context.Context, c *guestclient.Client, req guestwire.ExecRequest) error {
	conn, err := c.Open(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := guestwire.Open(conn, guestwire.OpExec, req); err != nil {
		return fmt.Errorf("starting %s: %w", req.Argv[0], err)
	}
	var ev guestwire.ExecEvent
	if err := guestwire.Recv(conn, &ev); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return fmt.Errorf("starting %s: %w", req.Argv[0], err)
	}
	if ev.Err != "" {
		return fault.New(fault.JobFailed, ev.Err).WithExit(ev.Code)
	}
	return nil
}
