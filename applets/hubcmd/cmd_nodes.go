package hubcmd

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/fleet/wire"
)

func newNodes(a *app) *cli.Command {
	var asJSON bool
	return statuses(cliutil.Takes(&cli.Command{
		Name:  "nodes",
		Usage: "list the nodes, and steer them",
		Description: "Lists what the hub asks of each node beside what the node reports. STATE is the\n" +
			"node's own, with the number of commands that it has not finished. ACQUIRE and CEILING\n" +
			"are the hub's, with the node's in brackets where they differ. SYNC compares the desired\n" +
			"state: ok, behind, ahead, differs, unknown, conflict, or - while nothing is asked. Of an\n" +
			"unreachable node nothing is known but what it said last.\n\n" +
			"NODE is an ID, 8 digits of one or more, or a hostname that one node has.",
		Flags:  []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-nodes/1)")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error { return a.list(ctx, c, asJSON) }),
		Commands: []*cli.Command{
			newShow(a), newCeiling(a), newStop(a, "stop", true), newStop(a, "resume", false), newDrain(a),
			newOp(a, wire.OpUndrain, "take a node out of drain", "Returns a draining or drained node to ready. A quarantined node refuses."),
			newOp(a, wire.OpQuarantine, "stop a node until it is released", "Stops the node's acquisition from any state. Only release lifts it."),
			newOp(a, wire.OpRelease, "lift a node's quarantine", "Returns the node to drained if that is where it was quarantined, else to ready."),
			newPools(a), newRemove(a), newRecover(a),
		},
	}, cliutil.Arity{}))
}

func (a *app) list(ctx context.Context, c *hubadmin.Client, asJSON bool) error {
	r, err := c.Nodes(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		return cliutil.JSON(a.env.Stdout, "vk.hub-nodes/1", r)
	}
	return printNodes(a.env.Stdout, r.Nodes, a.now())
}

func newShow(a *app) *cli.Command {
	var asJSON bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "show", Usage: "show one node in full", ArgsUsage: "NODE",
		Description: "Shows a node's record: what it is, what is asked of it, what it reports, its readings\n" +
			"and its latest commands.",
		Flags: []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-node/1)")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			n, err := c.Node(ctx, args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-node/1", n)
			}
			return printNode(a.env.Stdout, n, a.now())
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchNode)
}

// ceiling reads N or none; 0 is refused.
func ceiling(s string) (int, error) {
	if s == "none" {
		return 0, nil
	}
	n, err := strconv.Atoi(s)
	switch {
	case err != nil || n < 0 || n > 1<<20:
		return 0, fault.Newf(fault.Usage, "ceiling %q is neither none nor a number from 1 to %d", wire.Clean(s, 40), 1<<20)
	case n == 0:
		return 0, fault.New(fault.Usage, "a ceiling of 0 is refused: gitlab-runner has none").Hint("vk-hub nodes stop NODE stops its acquisition")
	}
	return n, nil
}

func (a *app) asked(n *hubadmin.Node) error {
	_, err := fmt.Fprintf(a.env.Stdout, "%s: generation %d, %s\n", n.ID, n.Desired.Generation, hubtext.Policy(n.Desired.Policy))
	return err
}

func newCeiling(a *app) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: "ceiling", Usage: "cap how many jobs a node takes", ArgsUsage: "NODE N|none",
		Description: "Caps the node's runner concurrency; the node takes the least of this, its own\n" +
			"max_concurrency and its estimate. It stays in force when the hub cannot be reached.",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			n, err := ceiling(args[1])
			if err != nil {
				return err
			}
			r, err := c.SetPolicy(ctx, args[0], hubadmin.PolicyRequest{Ceiling: &n})
			if err != nil {
				return err
			}
			return a.asked(r)
		}),
	}, cliutil.Arity{Min: 2, Max: 2}), noSuchNode)
}

func newStop(a *app, name string, stop bool) *cli.Command {
	usage, text := "have a node take no new jobs", "Running jobs finish. gitlab-runner has no way back from this: a resume starts a new\none once the old one has gone."
	if !stop {
		usage, text = "have a node take jobs again", "Lifts vk-hub nodes stop. A drain or a quarantine stays."
	}
	return statuses(cliutil.Takes(&cli.Command{
		Name: name, Usage: usage, Description: text, ArgsUsage: "NODE",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			r, err := c.SetPolicy(ctx, args[0], hubadmin.PolicyRequest{Stop: &stop})
			if err != nil {
				return err
			}
			return a.asked(r)
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchNode)
}

func (a *app) issue(ctx context.Context, c *hubadmin.Client, node string, op wire.Op) (*hubadmin.Command, error) {
	cmd, err := c.Issue(ctx, node, op)
	if err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(a.env.Stdout, "%s: %s issued, command %s\n", cmd.Node, op, cmd.ID)
	return cmd, err
}

func newOp(a *app, op wire.Op, usage, text string) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: string(op), Usage: usage, ArgsUsage: "NODE",
		Description: text + "\n\nThe command waits a day for a node that is away. vk-hub nodes show NODE tells what\nbecame of it.",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			_, err := a.issue(ctx, c, args[0], op)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchNode)
}

func newDrain(a *app) *cli.Command {
	var wait bool
	var timeout time.Duration
	return statuses(cliutil.Takes(&cli.Command{
		Name: "drain", Usage: "let a node finish its jobs and take no more", ArgsUsage: "NODE",
		Description: "The node stops acquisition, and is drained once its runner has exited, admission is\n" +
			"empty and no job is left. --wait returns when it is, and fails when an undrain, a\n" +
			"quarantine or the timeout comes first. The drain stays when this command is interrupted.",
		Flags: []cli.Flag{
			cliutil.Bool(&wait, "wait", "wait until it is drained"),
			cliutil.Duration(&timeout, "timeout", "wait no longer than this").Default("for ever"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			if timeout > 0 && !wait {
				return cliutil.BadOption("--timeout is of use with --wait alone")
			}
			cmd, err := a.issue(ctx, c, args[0], wire.OpDrain)
			if err != nil || !wait {
				return err
			}
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeoutCause(ctx, timeout, fault.Newf(fault.Busy, "the node is not drained after %v; the drain goes on", timeout))
				defer cancel()
			}
			return a.await(ctx, c, cmd)
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchNode, cliutil.Status{Code: "11", Means: "it is not drained within --timeout"})
}

// await polls until a command has a final outcome, telling what changes.
func (a *app) await(ctx context.Context, c *hubadmin.Client, cmd *hubadmin.Command) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := ""
	for {
		n, err := c.Node(ctx, cmd.Node)
		switch {
		case context.Cause(ctx) != nil:
			return context.Cause(ctx)
		case fault.KindOf(err) == fault.Unavailable: // the hub may be restarting
			n = &hubadmin.Node{}
		case err != nil:
			return err
		}
		for _, x := range n.Commands {
			if x.ID != cmd.ID || !x.Outcome.Final() {
				continue
			}
			if x.Outcome != wire.Done {
				return fault.Newf(fault.Conflict, "the %s ended as %s: %s", x.Op, x.Outcome, x.Message)
			}
			_, err := fmt.Fprintf(a.env.Stdout, "%s: %s\n", cmd.Node, wire.Drained)
			return err
		}
		if now := hubtext.Drain(n); now != last {
			last = now
			fmt.Fprintf(a.env.Stderr, "vk-hub: %s\n", now)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pools reads what is given of them: with commas, as arguments, or none.
func pools(args []string) []string {
	list := strings.FieldsFunc(strings.Join(args, ","), func(r rune) bool { return r == ',' })
	if len(list) == 1 && list[0] == "none" {
		return nil
	}
	return list
}

func newPools(a *app) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: "pools", Usage: "set the pools that a node is in", ArgsUsage: "NODE POOL[,POOL…]|none",
		Description: "Replaces the node's pools by those named, with commas between them or as arguments of\n" +
			"their own. A placed job runs on the nodes of its runner's pool alone.",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			n, err := c.SetPools(ctx, args[0], pools(args[1:]))
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.env.Stdout, "%s: %s\n", n.ID, hubtext.None(strings.Join(n.Pools, " ")))
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: -1}), noSuchNode)
}

func newRemove(a *app) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: "remove", Usage: "revoke a node", ArgsUsage: "NODE",
		Description: "Revokes the node's key, ends its session and forgets its record; its audit lines\n" +
			"stay. The host can join again only as a new node, with vk node join --replace.",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			n, err := c.Remove(ctx, args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.env.Stdout, "%s: removed\n", n.ID)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchNode)
}

func newRecover(a *app) *cli.Command {
	var adopt, replace, stop, resume bool
	var ceil string
	return statuses(cliutil.Takes(&cli.Command{
		Name: "recover", Usage: "resolve a recovery conflict", ArgsUsage: "NODE",
		Description: "A node that holds what this hub has no record of, as after a restore of the hub's\n" +
			"database, is in a recovery conflict: it keeps what it applied, and is sent nothing.\n" +
			"Without a flag this shows both states. --adopt makes the node's the hub's own.\n" +
			"--replace sends the hub's policy, changed by --ceiling, --stop and --resume, after you\n" +
			"have looked at both. Both states go to the audit log first. A drain or quarantine of\n" +
			"the node stays, and an undrain or release that it has not taken is withdrawn.",
		Flags: []cli.Flag{
			cliutil.Bool(&adopt, "adopt", "keep what the node applied"),
			cliutil.Bool(&replace, "replace", "send the hub's policy instead"),
			cliutil.String(&ceil, "ceiling", "N|none", "with --replace: another ceiling"),
			cliutil.Bool(&stop, "stop", "with --replace: acquisition stopped"),
			cliutil.Bool(&resume, "resume", "with --replace: acquisition on"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			q := hubadmin.RecoverRequest{Adopt: adopt}
			switch {
			case adopt && replace:
				return cliutil.BadOption("--adopt and --replace exclude each other")
			case !replace && (ceil != "" || stop || resume):
				return cliutil.BadOption("--ceiling, --stop and --resume go with --replace")
			case stop && resume:
				return cliutil.BadOption("--stop and --resume exclude each other")
			}
			if ceil != "" {
				n, err := ceiling(ceil)
				if err != nil {
					return err
				}
				q.Ceiling = &n
			}
			if stop || resume {
				q.Stop = &stop
			}
			if !adopt && !replace {
				n, err := c.Node(ctx, args[0])
				if err != nil {
					return err
				}
				return printConflict(a.env.Stdout, n)
			}
			n, err := c.Recover(ctx, args[0], q)
			if err != nil {
				return err
			}
			return a.asked(n)
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchNode)
}
