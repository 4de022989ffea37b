package vkcmd

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/usage"
)

// newGitlabUsage is `vk gitlab usage`.
func newGitlabUsage(a *app) *cli.Command {
	var asJSON bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "usage",
		Usage:     "show what the jobs of a project have been using",
		ArgsUsage: "[PROJECT]",
		Description: "Shows every job that this host remembers, heaviest first: the most that it has used\n" +
			"lately, what its next run would reserve, and what all of them would reserve at once,\n" +
			"which is what [executor.schedule] mem_budget has to cover. Lately is the last 14\n" +
			"days, or the last five runs. - is a figure that no run could measure.\n\n" +
			"PROJECT is any part of a project's <id>-<slug>. Without it all are shown.",
		Flags: []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.usage/1)")},
		Action: func(_ context.Context, c *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			return a.usage(h, c.Args().First(), asJSON)
		},
	}, cliutil.Arity{Max: 1}), cliutil.Status{Code: "3", Means: "some of it could not be read"},
		cliutil.Status{Code: "10", Means: "nothing is remembered of such a project"})
}

// usageDocument is `vk gitlab usage --json`.
type usageDocument struct {
	Projects    []usage.Report `json:"projects"`
	FromHistory bool           `json:"from_history"` // memory is reserved by history
	BudgetMiB   int64          `json:"budget_mib"`   // 0 = none
	Problems    []string       `json:"problems"`
}

func (a *app) usage(h *wire.Host, part string, asJSON bool) error {
	budget, err := h.Budget()
	if err != nil {
		return err
	}
	names, err := h.History.Projects(part)
	if err != nil {
		return err
	}
	d := usageDocument{Projects: []usage.Report{}, FromHistory: h.Conf.Executor.Schedule.FromHistory, BudgetMiB: budget, Problems: []string{}}
	for _, n := range names {
		p, problems, err := h.History.Project(n)
		if err != nil {
			problems = append(problems, err)
		}
		for _, e := range problems {
			d.Problems = append(d.Problems, strings.Split(e.Error(), "\n")...)
		}
		if len(p.Jobs) > 0 {
			d.Projects = append(d.Projects, p.Report(time.Now(), d.FromHistory, budget))
		}
	}
	for _, p := range d.Problems {
		a.warn("%s", p)
	}
	switch {
	case len(d.Projects) > 0 || asJSON && part == "":
	case part == "":
		return fault.New(fault.NotFound, "no job is remembered on this host").Hint("a run is remembered at the end of its job")
	default:
		return fault.Newf(fault.NotFound, "nothing is remembered of a project with %q in its name", part).
			Hint("`vk gitlab usage` shows all of them")
	}
	if asJSON {
		err = cliutil.JSON(a.env.Stdout, "vk.usage/1", d)
	} else {
		err = writeUsage(a.env.Stdout, d)
	}
	if err == nil && len(d.Problems) > 0 {
		return fault.Newf(fault.Partial, "%d things could not be read", len(d.Problems)).
			Hint("the lines above name them; a file below history may be removed at any time")
	}
	return err
}

func writeUsage(w io.Writer, d usageDocument) error {
	for _, r := range d.Projects {
		first, table, last := r.Lines()
		if _, err := fmt.Fprintf(w, "virtkit: %s\n%s\nvirtkit: %s\n", first, strings.Join(table, "\n"), last); err != nil {
			return err
		}
	}
	return nil
}
