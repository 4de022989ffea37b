package hubcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/policy"
	"virtkit/core/ui"
)

var noSuchRule = cliutil.Status{Code: "10", Means: "there is no such rule"}

func newEgress(a *app) *cli.Command {
	var asJSON bool
	list := a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
		r, err := c.EgressRules(ctx)
		if err != nil {
			return err
		}
		for _, w := range r.Warnings {
			fmt.Fprintln(a.env.Stderr, "vk-hub: "+w)
		}
		if asJSON {
			return cliutil.JSON(a.env.Stdout, "vk.hub-egress/1", r)
		}
		for _, rule := range r.Rules {
			printRule(a.env.Stdout, &rule)
		}
		return nil
	})
	flag := func() []cli.Flag {
		return []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-egress/1)")}
	}
	const text = "Lists the egress rules, each with the jobs that it selects, its mode, its version and what\neach phase may reach. They hold placed jobs, and the rule default those of nodes' own\ngitlab-runners, when [jobs] egress_rules is true in hub.toml."
	return statuses(cliutil.Takes(&cli.Command{
		Name: "egress", Usage: "what the jobs of a project may reach", Description: text, Flags: flag(), Action: list,
		Commands: []*cli.Command{
			statuses(cliutil.Takes(&cli.Command{Name: "list", Usage: "list the rules", Description: text, Flags: flag(), Action: list}, cliutil.Arity{})),
			statuses(cliutil.Takes(&cli.Command{
				Name: "show", Usage: "show one rule", ArgsUsage: "RULE", Description: "Shows one rule as the list does.",
				Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
					r, err := c.EgressRules(ctx)
					if err != nil {
						return err
					}
					for _, rule := range r.Rules {
						if rule.Name == args[0] {
							printRule(a.env.Stdout, &rule)
							fmt.Fprintf(a.env.Stdout, "  set %s by %s\n", hubtext.Stamp(rule.At), ui.CleanLine(rule.Actor))
							return nil
						}
					}
					return fault.Newf(fault.NotFound, "no egress rule %q", args[0]).Hint("vk-hub egress lists them")
				}),
			}, cliutil.Arity{Min: 1, Max: 1}), noSuchRule),
			newEgressSet(a),
			statuses(cliutil.Takes(&cli.Command{
				Name: "mode", Usage: "enforce a rule, or have it report alone", ArgsUsage: "RULE enforce|dry-run", Description: "Changes the mode of a rule and nothing else of it.",
				Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
					return a.setRule(ctx, c, hubadmin.EgressRequest{Action: "mode", Name: args[0], Mode: args[1]})
				}),
			}, cliutil.Arity{Min: 2, Max: 2}), noSuchRule),
			statuses(cliutil.Takes(&cli.Command{
				Name: "delete", Usage: "remove a rule", ArgsUsage: "RULE", Description: "Removes a rule. Jobs that are placed already keep what it allowed them.",
				Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
					if _, err := c.SetEgress(ctx, hubadmin.EgressRequest{Action: "delete", Name: args[0]}); err != nil {
						return err
					}
					_, err := fmt.Fprintf(a.env.Stdout, "%s: deleted\n", args[0])
					return err
				}),
			}, cliutil.Arity{Min: 1, Max: 1}), noSuchRule),
			newEgressResolve(a),
		},
	}, cliutil.Arity{}))
}

func (a *app) setRule(ctx context.Context, c *hubadmin.Client, q hubadmin.EgressRequest) error {
	r, err := c.SetEgress(ctx, q)
	if err != nil {
		return err
	}
	printRule(a.env.Stdout, r)
	return nil
}

// phaseFlags are what --run and --build, with their destinations, say.
type phaseFlags struct {
	whole      string // unrestricted, none; "" = by the lists
	names, ips []string
}

func (f *phaseFlags) flags(p string) []cli.Flag {
	return []cli.Flag{
		cliutil.String(&f.whole, p, "unrestricted|none", "what the "+p+" phase may reach"),
		cliutil.Strings(&f.names, p+"-name", "SUFFIX", "a DNS suffix that it may, and all hosts below it"),
		cliutil.Strings(&f.ips, p+"-ip", "CIDR", "an IPv4 network that it may, CIDR:PORT for one port"),
	}
}

// lists are the phase's; nil = it stays as it is.
func (f *phaseFlags) lists(p string) (*policy.Lists, error) {
	listed := len(f.names)+len(f.ips) > 0
	switch {
	case f.whole == "" && !listed:
		return nil, nil
	case f.whole != "" && listed:
		return nil, cliutil.BadOption("--%s %s and destinations exclude each other", p, f.whole)
	case f.whole == "unrestricted":
		return &policy.Lists{}, nil
	case f.whole != "" && f.whole != "none":
		return nil, cliutil.BadOption("--%s is %q, expected unrestricted or none", p, f.whole)
	}
	names, bad := policy.ParseNames(policy.Source{Key: "--" + p + "-name"}, append([]string{}, f.names...))
	ips, more := policy.ParseIPs(policy.Source{Key: "--" + p + "-ip"}, append([]string{}, f.ips...))
	return &policy.Lists{Names: names, IPs: ips}, policy.Refuse(append(bad, more...))
}

func newEgressSet(a *app) *cli.Command {
	var subject, mode string
	var run, build phaseFlags
	flags := []cli.Flag{
		cliutil.String(&subject, "subject", "TERMS", `the jobs that it selects, such as "gitlab gl, projects wab/**, protected"`),
		cliutil.String(&mode, "mode", "enforce|dry-run", "enforce it, or report what it would refuse; a new rule starts in dry-run"),
	}
	return statuses(cliutil.Takes(&cli.Command{
		Name: "set", Usage: "add a rule, or change one", ArgsUsage: "RULE",
		Description: "Keeps what it is not given. Terms of a subject are *, gitlab NAME, projects GLOB,\n" +
			"project-id N, ref GLOB, protected and unprotected; projects and project-id need gitlab,\n" +
			"ref needs protected. A phase is unrestricted, none, or the destinations listed. Rules\n" +
			"that select a job add up. The rule default is the Fallback, for the jobs that no\n" +
			"enforced rule selects; without it they reach nothing.",
		Flags: append(append(flags, run.flags("run")...), build.flags("build")...),
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			q := hub.RuleChange{Name: args[0]}
			if subject != "" {
				q.Subject = &subject
			}
			if mode != "" {
				q.Mode = &mode
			}
			var err error
			if q.Run, err = run.lists("run"); err != nil {
				return err
			}
			if q.Build, err = build.lists("build"); err != nil {
				return err
			}
			return a.setRule(ctx, c, hubadmin.EgressRequest{Action: "set", Add: &q})
		}),
	}, cliutil.Arity{Min: 1, Max: 1}))
}

func newEgressResolve(a *app) *cli.Command {
	var q hub.Claims
	var id int
	return statuses(cliutil.Takes(&cli.Command{
		Name: "resolve", Usage: "print what a job gets from the rules",
		Description: "Prints, as JSON, the layer that a placed job gets from the rules as they are now, in the\nform in which its start carries it. Without --gitlab that is the Fallback's.",
		Flags: []cli.Flag{
			cliutil.String(&q.Instance, "gitlab", "NAME", "the job's GitLab instance"),
			cliutil.String(&q.Path, "project", "PATH", "its project"),
			cliutil.Int(&id, "project-id", "N", "its project's ID", 1, 1<<40),
			cliutil.String(&q.Ref, "ref", "REF", "its branch or tag"),
			cliutil.Bool(&q.Protected, "protected", "of a protected ref"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			if q.Instance != "" && (q.Path == "" || id == 0) {
				return cliutil.BadOption("--gitlab needs --project and --project-id")
			}
			q.Project = int64(id)
			r, err := c.ResolveEgress(ctx, q)
			if err != nil {
				return err
			}
			e := json.NewEncoder(a.env.Stdout)
			e.SetIndent("", "  ")
			return e.Encode(r)
		}),
	}, cliutil.Arity{}))
}

func printRule(w io.Writer, r *hub.EgressRule) {
	sub := r.Subject
	if sub == "" {
		sub = "(the Fallback)"
	}
	fmt.Fprintf(w, "egress %s %s (%s, version %d)\n  run %s\n  build %s\n", r.Name, ui.CleanLine(sub), r.Mode, r.Version, hub.ListsWords(r.Run), hub.ListsWords(r.Build))
}
