package vkcmd

import (
	"context"
	"io"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/conf"
	"virtkit/core/policy"
)

// newEgress is `vk egress`.
func newEgress(a *app) *cli.Command {
	return &cli.Command{
		Name:  "egress",
		Usage: "write egress rules from what jobs did",
		Description: "docs/egress.md has the rules. `vk egress-report` shows what a job reached and was\n" +
			"refused.",
		Commands: []*cli.Command{newEgressSuggest(a)},
	}
}

type suggestOptions struct {
	vars bool
	json bool
}

func newEgressSuggest(a *app) *cli.Command {
	var o suggestOptions
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "suggest",
		Usage:     "print allow lists that cover what a job reached",
		ArgsUsage: "JOB",
		Description: "Prints [egress] lists, ready to paste into the configuration, that allow what the\n" +
			"job reached in this run and looked up in earlier ones, with the evidence behind\n" +
			"each entry and what the job's present policy would still refuse. Names are\n" +
			"proposed as they were looked up, never widened. What was only ever blocked is\n" +
			"listed as a comment and not proposed.\n\n" +
			"JOB is the id or name of a guest that runs, or of one that is over, or GitLab's\n" +
			"number of a job; vk egress-report lists them.",
		Flags: []cli.Flag{
			cliutil.Bool(&o.vars, "vars", "print MICROVM_EGRESS_* variables for .gitlab-ci.yml instead"),
			cliutil.Bool(&o.json, "json", "print one JSON document (vk.egress-suggest/1)"),
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			return a.suggestEgress(ctx, c.Args().First(), o)
		},
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "nothing is recorded of such a job"})
}

func (a *app) suggestEgress(ctx context.Context, job string, o suggestOptions) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	r, live, err := egressRecord(ctx, h, job)
	if err != nil {
		return err
	}
	var names []string
	if site := r.Egress.Site; site != "" {
		list, err := h.Egress.Standing(site)
		if err != nil {
			a.warn("earlier runs are left out: %v", err)
		} else {
			names = list.Names(r.Egress.Policy.Fingerprint())
		}
	}
	if live {
		a.say("%s still runs: there may be more to come", r.Name)
	} else if !r.Ended {
		a.warn("the supervisor of %s was killed: its last seconds are not recorded", r.Name)
	}
	if r.Record.Uncounted != (policy.Counts{}) {
		a.warn("the log of %s was full: some of what it reached is not in the list", r.Name)
	}
	s := policy.Suggest(r.Record, names, &r.Egress.Policy)
	if err := printSuggestion(a.env.Stdout, r.ID, s, o); err != nil || o.json {
		return err
	}
	return a.tellWhere(o.vars)
}

// tellWhere says where a suggestion is to be pasted, and how to try it.
func (a *app) tellWhere(vars bool) error {
	if vars {
		a.say(`for the job in .gitlab-ci.yml; %s: "1" beside it tries it and blocks nothing`, policy.DryRunVariable)
		return nil
	}
	file, err := conf.Find(a.overrides().Getenv(a.env), wire.Home(a.env))
	if err != nil {
		return err
	}
	if file == "" {
		file = conf.SystemFile
	}
	a.say("for %s, in place of the lists of an [egress] that is there; dry_run = true beside them tries them and blocks nothing", file)
	return nil
}

func printSuggestion(w io.Writer, id string, s policy.Suggestion, o suggestOptions) error {
	if o.json {
		return cliutil.JSON(w, "vk.egress-suggest/1", suggestionJSON(id, s))
	}
	text := s.TOML()
	if o.vars {
		text = s.YAML()
	}
	_, err := io.WriteString(w, text)
	return err
}

// suggestedEntry is a policy.Suggested for programs.
type suggestedEntry struct {
	Entry    string         `json:"entry"`
	Count    uint64         `json:"count"`
	Protos   []policy.Proto `json:"protocols"`
	Services []string       `json:"services"` // that wanted it; "" = the job's own guest
	Standing bool           `json:"earlier_run,omitempty"`
	Refused  string         `json:"refused_now,omitempty"` // why the present policy would refuse it
	Layer    string         `json:"layer,omitempty"`
}

func suggestionJSON(id string, s policy.Suggestion) any {
	list := func(in []policy.Suggested) []suggestedEntry {
		out := []suggestedEntry{}
		for _, x := range in {
			out = append(out, suggestedEntry{x.Entry, x.Count, append([]policy.Proto{}, x.Proto...), append([]string{}, x.VMs...), x.Standing, x.Still, x.Layer})
		}
		return out
	}
	return struct {
		ID        string           `json:"id"`
		Phase     policy.Phase     `json:"phase"`
		AllowName []suggestedEntry `json:"allow_name"`
		AllowIP   []suggestedEntry `json:"allow_ip"`
		LeftOut   []suggestedEntry `json:"left_out"`
		Blocked   []suggestedEntry `json:"blocked"`
	}{id, s.Phase, list(s.Names), list(s.IPs), list(s.Left), list(s.Refused)}
}
