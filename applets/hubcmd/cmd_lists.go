package hubcmd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/hubdb"
)

func newWorkloads(a *app) *cli.Command {
	var node string
	var asJSON bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "workloads", Usage: "list the VMs that run on the nodes",
		Description: "Lists each node's VMs as it reported them last: CI jobs, development environments and\n" +
			"pinned runs. A node that is away is marked; its list is as it was last seen.",
		Flags: []cli.Flag{
			cliutil.String(&node, "node", "NODE", "of one node: an ID, 8 digits of one, or a hostname"),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-workloads/1)"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			r, err := c.Workloads(ctx, node)
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-workloads/1", r)
			}
			return printWorkloads(a.env.Stdout, r.Nodes)
		}),
	}, cliutil.Arity{}), noSuchNode)
}

func newAudit(a *app) *cli.Command {
	var node string
	var asJSON bool
	limit := 50
	return statuses(cliutil.Takes(&cli.Command{
		Name: "audit", Usage: "print the latest audit lines",
		Description: "Prints what operators did and what nodes reported of it, oldest first: time, node,\n" +
			"actor, event. Each line was stored with the change that it records. The newest 100,000\n" +
			"are kept.",
		Flags: []cli.Flag{
			cliutil.String(&node, "node", "NODE", "of one node; a removed one by its whole ID"),
			cliutil.Int(&limit, "limit", "N", "how many lines at most", 1, hub.AuditKept),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-audit/1)"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			r, err := c.Audit(ctx, node, limit)
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-audit/1", r)
			}
			return printAudit(a.env.Stdout, r.Lines)
		}),
	}, cliutil.Arity{}), noSuchNode)
}

func newStatus(a *app) *cli.Command {
	var asJSON bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "status", Usage: "the hub and its fleet on one screen",
		Description: "Prints how the hub is, how many nodes are in which state, and what needs a look.",
		Flags:       []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-status/1)")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			s, err := c.Status(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-status/1", s)
			}
			return printStatus(a.env.Stdout, s, a.now())
		}),
	}, cliutil.Arity{}))
}

func newBackup(a *app) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: "backup", Usage: "copy the hub's database while it runs", ArgsUsage: "FILE",
		Description: "Has the hub write a copy of its database, as of one moment, and check that it is\n" +
			"whole. FILE must not exist. To restore one: stop the hub, put the copy in the place of\n" +
			"<data_dir>/hub.sqlite, remove hub.sqlite-wal and hub.sqlite-shm, and start it; nodes\n" +
			"that know of later changes are shown as recovery conflicts (vk-hub nodes recover).",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			file, err := a.absolute(args[0])
			if err != nil {
				return err
			}
			if err := c.Backup(ctx, file); err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, file)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 1}))
}

func newCheck(a *app) *cli.Command {
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name: "check", Usage: "check a hub's database", ArgsUsage: "[FILE]",
		Description: "Looks at FILE, such as a backup, or at this hub's own database, which may be in use:\n" +
			"SQLite's own checks, the schema, that every document can be read, and that audit lines\n" +
			"number without gaps. Changes nothing.",
		Action: func(ctx context.Context, c *cli.Command) error {
			file := c.Args().First()
			if file == "" {
				conf, err := a.load()
				if err != nil {
					return err
				}
				file = conf.Database()
			}
			file, err := a.absolute(file)
			if err != nil {
				return err
			}
			if _, err := os.Stat(file); err != nil {
				return fault.New(fault.NotFound, "looking at the database").Because(err)
			}
			if err := hubdb.Check(ctx, file); err != nil {
				return fmt.Errorf("%s: %w", filepath.Base(file), err)
			}
			_, err = fmt.Fprintf(a.env.Stdout, "%s: ok\n", file)
			return err
		},
	}, cliutil.Arity{Max: 1}), cliutil.Status{Code: "10", Means: "there is no such file"})
}

func newConfig(a *app) *cli.Command {
	check := cliutil.Takes(&cli.Command{
		Name: "check", Usage: "check hub.toml and nothing else",
		Description: "Reads hub.toml as serve would, and says everything that is wrong with it. Opens no\ndatabase and changes nothing.",
		Action: func(context.Context, *cli.Command) error {
			c, err := a.load()
			if err != nil {
				return err
			}
			from := c.File
			if from == "" {
				from = "no hub.toml: the defaults"
			}
			_, err = fmt.Fprintf(a.env.Stdout, "%s: ok (addr %s, data_dir %s)\n", from, c.Addr, c.DataDir)
			return err
		},
	}, cliutil.Arity{})
	return &cli.Command{Name: "config", Usage: "the hub's configuration", Description: "hub.toml: docs/hub.md lists its keys.", Commands: []*cli.Command{check}}
}
