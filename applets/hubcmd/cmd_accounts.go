package hubcmd

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/ui"
)

func newAccounts(a *app) *cli.Command {
	var asJSON bool
	list := a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
		r, err := c.Accounts(ctx)
		if err != nil {
			return err
		}
		if asJSON {
			return cliutil.JSON(a.env.Stdout, "vk.hub-accounts/1", r)
		}
		return printAccounts(a.env.Stdout, r)
	})
	flag := func() []cli.Flag {
		return []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-accounts/1)")}
	}
	const text = "Lists the addresses that may sign in to the web UI through the provider of [oidc]: role,\n" +
		"by whom it was granted and when, then the role of all others (default)."
	return statuses(cliutil.Takes(&cli.Command{
		Name: "accounts", Usage: "who may sign in to the web UI through the provider", Description: text, Flags: flag(), Action: list,
		Commands: []*cli.Command{
			statuses(cliutil.Takes(&cli.Command{Name: "list", Usage: "list the grants", Description: text, Flags: flag(), Action: list}, cliutil.Arity{})),
			newAccountGrant(a), newAccountRevoke(a),
		},
	}, cliutil.Arity{}))
}

func newAccountGrant(a *app) *cli.Command {
	var role string
	return statuses(cliutil.Takes(&cli.Command{
		Name: "grant", Usage: "let an address sign in", ArgsUsage: "ADDRESS",
		Description: "Gives an email address a role, at once; a grant that it had is replaced. * admits everyone\n" +
			"whom the provider signs in and no grant names, as a viewer. Sessions of the address above\n" +
			"its new role end. Grant by address only with a provider whose users cannot choose theirs.",
		Flags: []cli.Flag{cliutil.Choice(&role, "role", "what the address may do", string(hub.Viewer), string(hub.Operator))},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			if role == "" {
				return cliutil.BadOption("--role is needed: %s or %s", hub.Viewer, hub.Operator)
			}
			r, err := c.Grant(ctx, args[0], hub.Role(role))
			if err != nil {
				return err
			}
			return granted(a.env.Stdout, r)
		}),
	}, cliutil.Arity{Min: 1, Max: 1}))
}

func newAccountRevoke(a *app) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: "revoke", Usage: "take an address's grant", ArgsUsage: "ADDRESS",
		Description: "Takes the grant and ends the sessions above what * and default_role still allow.",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			r, err := c.Revoke(ctx, args[0])
			if err != nil {
				return err
			}
			return granted(a.env.Stdout, r)
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "the address has no grant"})
}

func granted(w io.Writer, r *hubadmin.AccountReply) error {
	ended := ""
	if r.Ended > 0 {
		ended = fmt.Sprintf(", %d sessions ended", r.Ended)
	}
	_, err := fmt.Fprintf(w, "%s: %s%s\n", ui.CleanLine(r.Address), r.Role, ended)
	return err
}

func printAccounts(w io.Writer, r *hubadmin.AccountList) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "ADDRESS\tROLE\tBY\tAT")
	for _, g := range r.Grants {
		fmt.Fprintln(t, line([]string{g.Address, string(g.Role), g.Actor, hubtext.Stamp(g.At)}))
	}
	fmt.Fprintf(t, "(default)\t%s\t-\t-\n", r.Default)
	if err := t.Flush(); err != nil {
		return err
	}
	if !r.OIDC {
		_, err := fmt.Fprintln(w, "hub.toml has no [oidc]: grants take effect once it has")
		return err
	}
	return nil
}
