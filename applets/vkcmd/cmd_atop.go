package vkcmd

import (
	"bufio"
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/atop"
	"virtkit/core/atop/account"
	"virtkit/core/atop/archive"
	"virtkit/core/fault"
)

// atopOptions are what `vk atop` is to do with a recording; none: print its
// path.
type atopOptions struct {
	summary, view, follow, json bool
}

func (o atopOptions) validate() error {
	n := 0
	for _, v := range []bool{o.summary, o.view, o.follow, o.json} {
		if v {
			n++
		}
	}
	if n > 1 {
		return cliutil.BadOption("--summary, --view, --follow and --json exclude each other: give one of them")
	}
	return nil
}

func newAtop(a *app) *cli.Command {
	var o atopOptions
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "atop",
		Usage:     "show what a job's guest recorded of itself",
		ArgsUsage: "NAME",
		Description: "Finds the recording of a job and prints the path of its log, which is what\n" +
			"`atop -P` of atop 2.8 prints: zstdless \"$(vk atop test_unit)\" reads it.\n\n" +
			"NAME is GitLab's number of a job, or any part of a recorded job's name, as its\n" +
			"directory has it: what is outside of [A-Za-z0-9._-] is _ there. The newest\n" +
			"recording answers. docs/atop.md tells what is recorded, and how long it is kept.",
		Flags: []cli.Flag{
			cliutil.Bool(&o.summary, "summary", "print what the whole job did: the lines that end its trace"),
			cliutil.Bool(&o.view, "view", "walk through the recording, a sample at a time"),
			cliutil.Bool(&o.follow, "follow", "the same of a job that still runs, moving on as it does"),
			cliutil.Bool(&o.json, "json", "print the samples, one JSON object a line"),
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			if err := o.validate(); err != nil {
				return err
			}
			h, err := a.host()
			if err != nil {
				return err
			}
			run, err := h.Archive().Find(c.Args().First())
			if err != nil {
				return err
			}
			switch {
			case o.summary:
				return a.atopSummary(ctx, run)
			case o.json:
				return a.atopJSON(ctx, run)
			case o.view, o.follow:
				return a.atopPanel(ctx, run, o.follow)
			}
			_, err = fmt.Fprintln(a.env.Stdout, run.Path)
			return err
		},
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "no recording matches, or it has no sample yet"})
}

func (a *app) atopSummary(ctx context.Context, run archive.Run) error {
	lines, err := archive.Account(ctx, run)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(lines) == 0 {
		return fault.Newf(fault.NotFound, "%s has no complete sample: there is nothing to account yet", run.Path).
			Hint("a guest's first sample comes a moment after it has booted, the next ones every [executor] atop_interval_secs")
	}
	w := bufio.NewWriter(a.env.Stdout)
	for _, l := range lines {
		fmt.Fprintln(w, l)
	}
	return w.Flush()
}

func (a *app) atopJSON(ctx context.Context, run archive.Run) error {
	w := bufio.NewWriterSize(a.env.Stdout, 1<<16)
	x := account.NewExporter()
	var werr error
	st, err := archive.Samples(run.Path, false, func(s *atop.Sample) bool {
		var b []byte
		if b, werr = x.Line(s); werr == nil {
			_, werr = w.Write(b)
		}
		return werr == nil && ctx.Err() == nil
	})
	if werr == nil {
		werr = w.Flush()
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case werr != nil:
		return werr
	case err != nil:
		return err
	}
	if st.Skipped > 0 {
		a.warn("%s: %s", run.Path, st.Describe())
	}
	return nil
}
