package hubcmd

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/fleet/wire"
	"virtkit/core/ui"
)

var noSuchRelay = cliutil.Status{Code: "10", Means: "there is no such relay"}

func newRelays(a *app) *cli.Command {
	var asJSON bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "relays", Usage: "list the relays: each a vk-gitlab that takes jobs of a GitLab",
		Description: "Lists each enrolled vk-gitlab with the GitLab server that it is bound to, how that server\n" +
			"stands (vk-hub gitlabs), its runners and when it was last heard of. RELAY is an ID, 8\n" +
			"digits of one or more, or a hostname that one relay has.",
		Flags: []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-relays/1)")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			r, err := c.Relays(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-relays/1", r)
			}
			return printRelays(a.env.Stdout, r.Relays, a.now())
		}),
		Commands: []*cli.Command{newRelayShow(a), newRelayRemove(a)},
	}, cliutil.Arity{}))
}

func newRelayShow(a *app) *cli.Command {
	var asJSON bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "show", Usage: "show one relay with its server and runners", ArgsUsage: "RELAY",
		Description: "Shows a relay's record, and of each runner its placement, what it does and GitLab's last\nanswer.",
		Flags:       []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-relay/1)")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			r, err := c.Relay(ctx, args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-relay/1", r)
			}
			return printRelay(a.env.Stdout, r, a.now())
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchRelay)
}

func newRelayRemove(a *app) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: "remove", Usage: "revoke a relay", ArgsUsage: "RELAY",
		Description: "Unpins the relay's key and ends its session. Its jobs that run go on to their end, but\n" +
			"nobody tells GitLab of it. The host can join again only with vk-gitlab join --replace.",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			r, err := c.RemoveRelay(ctx, args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.env.Stdout, "%s: removed\n", r.ID)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchRelay)
}

func reachText(connected bool, seen int64) string {
	switch {
	case connected:
		return "connected"
	case seen == 0:
		return "never"
	}
	return "away"
}

func statusText(s dispatch.ServerStatus) string {
	if s.Status == dispatch.Approved {
		return "approved as " + s.Name
	}
	return string(s.Status)
}

func printRelays(w io.Writer, list []hubadmin.Relay, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tNAME\tREACH\tVERSION\tSERVER\tSTATUS\tRUNNERS\tJOBS\tLAST SEEN")
	for _, r := range list {
		version, runners, jobs := "-", "-", 0
		if v := r.Inventory; v != nil {
			version, runners = hubtext.Dash(v.Version), strconv.Itoa(len(v.Runners))
		}
		if r.Heartbeat != nil {
			for _, b := range r.Heartbeat.Runners {
				jobs += b.Jobs
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", r.ID, ui.CleanLine(hubtext.Dash(r.Name)), reachText(r.Connected, r.LastSeen), ui.CleanLine(version),
			hubtext.Dash(r.Server), statusText(r.Status), runners, jobs, hubtext.Ago(r.LastSeen, now))
	}
	return t.Flush()
}

func printRelay(w io.Writer, r *hubadmin.Relay, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(k, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", k, ui.CleanLine(fmt.Sprintf(format, args...)))
	}
	row("relay", "%s", r.ID)
	row("name", "%s", hubtext.Dash(r.Name))
	row("reach", "%s, last seen %s", reachText(r.Connected, r.LastSeen), hubtext.Ago(r.LastSeen, now))
	row("enrolled", "%s", hubtext.Stamp(r.Enrolled))
	row("server", "%s", hubtext.Dash(r.Server))
	row("status", "%s", statusText(r.Status))
	if r.Status.Message != "" {
		row("note", "%s", r.Status.Message)
	}
	if v := r.Inventory; v != nil {
		row("versions", "vk-gitlab %s, GitLab %s", hubtext.Dash(v.Version), hubtext.Dash(v.ServerVersion))
		row("server key", "sha256 %s", hubtext.Dash(v.ServerKey))
		row("system ID", "%s", hubtext.Dash(v.SystemID))
		row("concurrent", "%s", hubtext.Ceiling(v.Concurrent))
		for _, u := range v.Runners {
			state := "no state reported"
			for _, s := range r.States {
				if s.Runner == u.Name {
					state = strings.TrimSpace(string(s.State) + " " + s.Message)
				}
			}
			token := "token taken"
			if !u.Verified {
				token = "token not verified"
			}
			row("runner", "%s (ID %d, %s): %s, limit %s; %s", u.Name, u.ID, token, hubtext.Placement(&u.Placement), hubtext.Ceiling(u.Limit), state)
		}
	}
	if r.Heartbeat != nil {
		for _, b := range r.Heartbeat.Runners {
			last := "no answer of GitLab's yet"
			if b.LastAt > 0 {
				last = fmt.Sprintf("GitLab's last answer %d, %s", b.LastStatus, hubtext.Ago(b.LastAt, now))
			}
			row("now", "%s: %d job requests, %d jobs, %s", b.Name, b.Requests, b.Jobs, last)
		}
	}
	return t.Flush()
}

var noInstance = cliutil.Status{Code: "10", Means: "there is no such instance or project"}

func newGitLabs(a *app) *cli.Command {
	var asJSON bool
	list := a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
		r, err := c.GitLabs(ctx)
		if err != nil {
			return err
		}
		if asJSON {
			return cliutil.JSON(a.env.Stdout, "vk.hub-gitlabs/1", r)
		}
		return printGitLabs(a.env.Stdout, r)
	})
	var name string
	named := func(use string) *cli.Command {
		return statuses(cliutil.Takes(&cli.Command{
			Name: use, Usage: "take jobs of a GitLab server", ArgsUsage: "URL",
			Description: "Makes the server an instance under --name: its relays hear it at once, and jobs of its\n" +
				"approved projects are placed. Compare the digest that vk-hub gitlabs pending shows with\n" +
				"the server's own certificate first.",
			Flags: []cli.Flag{cliutil.String(&name, "name", "NAME", "what the hub calls it: a-z, 0-9, dot, dash, underscore")},
			Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
				if name == "" {
					return cliutil.BadOption("--name is needed")
				}
				return a.gitlab(ctx, c, hubadmin.GitLabRequest{Action: "approve", URL: args[0], Name: name}, "approved as "+name)
			}),
		}, cliutil.Arity{Min: 1, Max: 1}))
	}
	plain := func(use, usage, text string, arg, done string) *cli.Command {
		return statuses(cliutil.Takes(&cli.Command{
			Name: use, Usage: usage, Description: text, ArgsUsage: arg,
			Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
				q := hubadmin.GitLabRequest{Action: use, URL: args[0]}
				if use == "remove" {
					q = hubadmin.GitLabRequest{Action: use, Name: args[0]}
				}
				return a.gitlab(ctx, c, q, done)
			}),
		}, cliutil.Arity{Min: 1, Max: 1}), noInstance)
	}
	return statuses(cliutil.Takes(&cli.Command{
		Name: "gitlabs", Usage: "the GitLab servers whose jobs the hub takes",
		Description: "Lists the servers that were approved or rejected, and what waits for a decision: servers\n" +
			"that relays report, and projects of which a job was refused.",
		Flags:  []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-gitlabs/1)")},
		Action: list,
		Commands: []*cli.Command{
			newGitLabPending(a), named("approve"), named("add"),
			plain("reject", "refuse a GitLab server", "It is no longer pending, and its relays are told. approve approves it all the same later.", "URL", "rejected"),
			plain("forget", "drop a rejection", "A server that a relay reports is pending again.", "URL", "forgotten"),
			plain("remove", "take no more jobs of a GitLab server", "Refused while a relay is bound to it. What was decided on its projects is forgotten.", "NAME", "removed"),
			newProjects(a),
		},
	}, cliutil.Arity{}))
}

func (a *app) gitlab(ctx context.Context, c *hubadmin.Client, q hubadmin.GitLabRequest, done string) error {
	if err := c.SetGitLab(ctx, q); err != nil {
		return err
	}
	_, err := fmt.Fprintf(a.env.Stdout, "%s: %s\n", cmp.Or(q.URL, q.Name), done)
	return err
}

func newGitLabPending(a *app) *cli.Command {
	return statuses(cliutil.Takes(&cli.Command{
		Name: "pending", Usage: "list what waits for a decision",
		Description: "Lists the servers that relays report and nobody decided on, with the digest of their\n" +
			"certificates' public keys, and under them the pending projects of all instances.",
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			r, err := c.GitLabs(ctx)
			if err != nil {
				return err
			}
			r.Instances, r.Rejected = nil, nil
			return printGitLabs(a.env.Stdout, r)
		}),
	}, cliutil.Arity{}))
}

func printGitLabs(w io.Writer, r *hubadmin.GitLabList) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tURL\tSTATUS\tRELAYS\tSINCE\tBY")
	for _, v := range append(r.Instances, r.Rejected...) {
		status := "approved"
		if v.Name == "" {
			status = "rejected"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\n", hubtext.Dash(v.Name), v.URL, status, v.Relays, hubtext.Stamp(v.At), ui.CleanLine(v.Actor))
	}
	for _, p := range r.Pending {
		fmt.Fprintf(t, "-\t%s\tpending\t%d\t-\t-\n", p.URL, len(p.Relays))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, p := range r.Pending {
		fmt.Fprintf(w, "%s: certificate key sha256 %s, reported by relay %s\n", p.URL, hubtext.Dash(p.Key), strings.Join(p.Relays, ", "))
	}
	for _, p := range r.Projects {
		fmt.Fprintf(w, "%s: project %d %s is pending: %d jobs refused, the first was job %d (%s)\n", p.Instance, p.ID, ui.CleanLine(p.Path), p.Refused, p.FirstJob, ui.CleanLine(p.FirstRef))
	}
	return nil
}

func newProjects(a *app) *cli.Command {
	var pending, asJSON bool
	flags := func() []cli.Flag {
		return []cli.Flag{cliutil.Bool(&pending, "pending", "those that wait for a decision alone"), cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-projects/1)")}
	}
	action := a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
		instance := ""
		if len(args) > 0 {
			instance = args[0]
		}
		r, err := c.Projects(ctx, instance, pending)
		if err != nil {
			return err
		}
		if asJSON {
			return cliutil.JSON(a.env.Stdout, "vk.hub-projects/1", r)
		}
		return printProjects(a.env.Stdout, r.Projects)
	})
	text := "Lists projects by instance: state, path, the first job that was refused, and how many\nwere."
	list := statuses(cliutil.Takes(&cli.Command{Name: "list", Usage: "list projects", ArgsUsage: "[INSTANCE]", Description: text, Flags: flags(), Action: action}, cliutil.Arity{Max: 1}), noInstance)
	decide := func(use, usage, more, done string) *cli.Command {
		return statuses(cliutil.Takes(&cli.Command{
			Name: use, Usage: usage, ArgsUsage: "INSTANCE ID[:PATH]…",
			Description: more + "\nID is GitLab's number of the project; PATH is for people, and replaced by the one of its\nnext job.",
			Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
				refs, err := projectRefs(args[1:])
				if err != nil {
					return err
				}
				if err := c.SetProjects(ctx, use, args[0], refs); err != nil {
					return err
				}
				for _, r := range refs {
					fmt.Fprintf(a.env.Stdout, "%s %d: %s\n", args[0], r.ID, done)
				}
				return nil
			}),
		}, cliutil.Arity{Min: 2, Max: -1}), noInstance)
	}
	return statuses(cliutil.Takes(&cli.Command{
		Name: "projects", Usage: "the projects whose jobs the hub takes", ArgsUsage: "[INSTANCE]", Description: text, Flags: flags(), Action: action,
		Commands: []*cli.Command{
			list,
			decide("approve", "take jobs of projects", "Approves projects, whether jobs of them were seen or not.", "approved"),
			decide("reject", "refuse jobs of projects", "Rejects projects. Jobs that were taken go on.", "rejected"),
			decide("forget", "drop what was decided on projects", "The next job of such a project makes it pending.", "forgotten"),
		},
	}, cliutil.Arity{Max: 1}), noInstance)
}

func projectRefs(args []string) (refs []hub.ProjectRef, err error) {
	for _, s := range args {
		id, path, _ := strings.Cut(s, ":")
		n, err := strconv.ParseInt(id, 10, 64)
		if err != nil || n < 1 {
			return nil, fault.Newf(fault.Usage, "%q is no project: ID or ID:PATH is expected", wire.Clean(s, 80))
		}
		refs = append(refs, hub.ProjectRef{ID: n, Path: path})
	}
	return refs, nil
}

func printProjects(w io.Writer, list []hubadmin.Project) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "INSTANCE\tID\tPATH\tSTATE\tREFUSED\tFIRST JOB\tSINCE\tBY")
	for _, p := range list {
		first := "-"
		if p.FirstJob > 0 {
			first = strings.TrimSpace(fmt.Sprintf("%d %s", p.FirstJob, p.FirstRef))
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%d\t%s\t%s\t%s\n", p.Instance, p.ID, ui.CleanLine(hubtext.Dash(p.Path)), p.State, p.Refused, ui.CleanLine(first), hubtext.Stamp(p.At), ui.CleanLine(p.Actor))
	}
	return t.Flush()
}
