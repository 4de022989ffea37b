package hubcmd

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/ui"
)

func newUI(a *app) *cli.Command {
	return &cli.Command{
		Name: "ui", Usage: "sign-in links and sessions of the web UI",
		Description: "The web UI is served at ui_addr of hub.toml. People sign in through the provider of\n[oidc], see vk-hub accounts, or by a link.",
		Commands:    []*cli.Command{newUILogin(a), newUISessions(a), newUILogout(a)},
	}
}

func newUILogin(a *app) *cli.Command {
	role, ttl, asJSON := string(hub.Viewer), 10*time.Minute, false
	return statuses(cliutil.Takes(&cli.Command{
		Name: "login", Usage: "print a link that signs one browser in",
		Description: "Prints a URL of the web UI. Opening it shows a button; pressing that spends the link and\n" +
			"opens a session of 12 hours, so that a mail scanner or a chat's preview of the link uses\n" +
			"nothing up. The hub keeps only its hash. Whoever has it may sign in: pass it on as you\n" +
			"would a password.",
		Flags: []cli.Flag{
			cliutil.Choice(&role, "role", "what the session may do", string(hub.Viewer), string(hub.Operator)),
			cliutil.Duration(&ttl, "ttl", "how long the link is valid, at most 24h").Default("10m"),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-ui-link/1)"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			r, err := c.Link(ctx, hub.Role(role), ttl)
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-ui-link/1", r)
			}
			_, err = fmt.Fprintln(a.env.Stdout, r.URL)
			return err
		}),
	}, cliutil.Arity{}), cliutil.Status{Code: "11", Means: "the hub serves no web UI, or too many links wait to be used"})
}

func newUISessions(a *app) *cli.Command {
	var asJSON bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "sessions", Usage: "list who is signed in",
		Description: "Lists the sessions of the web UI, newest first: ID, role, whom the provider signed in or\nwho issued the link, since when and until when.",
		Flags:       []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-ui-sessions/1)")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			r, err := c.UISessions(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-ui-sessions/1", r)
			}
			return printUISessions(a.env.Stdout, r.Sessions)
		}),
	}, cliutil.Arity{}))
}

func newUILogout(a *app) *cli.Command {
	var all bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "logout", Usage: "end sessions", ArgsUsage: "[ID]",
		Description: "Ends the session of that ID, 12 hex digits as vk-hub ui sessions lists them, or with --all\nevery one. What such a browser asks for next is refused.",
		Flags:       []cli.Flag{cliutil.Bool(&all, "all", "all sessions")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			if all == (len(args) == 1) {
				return cliutil.BadOption("name one session, or give --all")
			}
			id := ""
			if !all {
				id = args[0]
				if id == "" { // which would be all of them
					return cliutil.BadOption("the ID is empty")
				}
			}
			r, err := c.UILogout(ctx, id)
			if err != nil {
				return err
			}
			for _, s := range r.Sessions {
				if _, err := fmt.Fprintf(a.env.Stdout, "%s: ended (%s)\n", s.ID, ui.CleanLine(of(&s))); err != nil {
					return err
				}
			}
			return nil
		}),
	}, cliutil.Arity{Max: 1}), cliutil.Status{Code: "10", Means: "there is no such session"})
}

// of is whose session it is.
func of(s *hubadmin.UISession) string {
	if s.Identity != "" {
		return s.Identity + " through " + s.From
	}
	return "link from " + s.From
}

func printUISessions(w io.Writer, list []hubadmin.UISession) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tROLE\tOF\tSINCE\tUNTIL")
	for i := range list {
		s := &list[i]
		fmt.Fprintln(t, line([]string{s.ID, string(s.Role), of(s), hubtext.Stamp(s.Created), hubtext.Stamp(s.Expires)}))
	}
	return t.Flush()
}
