package hubcmd

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/fleet/wire"
	"virtkit/core/ui"
)

var noSuchJob = cliutil.Status{Code: "10", Means: "there is no such job, or nothing is kept of it"}

func newJobs(a *app) *cli.Command {
	var asJSON, events bool
	var since time.Duration
	limit := 50
	filter := map[string]*string{}
	text := func(name, usage string) cli.Flag {
		filter[name] = new(string)
		return cliutil.String(filter[name], name, strings.ToUpper(name), usage)
	}
	list := a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
		q := url.Values{"limit": {strconv.Itoa(limit)}}
		for name, v := range filter {
			if *v != "" {
				q.Set(name, *v)
			}
		}
		if events {
			q.Set("events", "true")
		}
		if since > 0 {
			q.Set("since", strconv.FormatInt(a.now().Add(-since).Unix(), 10))
		}
		r, err := c.Jobs(ctx, q)
		if err != nil {
			return err
		}
		if asJSON {
			return cliutil.JSON(a.env.Stdout, "vk.hub-jobs/1", r)
		}
		return printJobs(a.env.Stdout, r.Jobs, a.now())
	})
	return statuses(cliutil.Takes(&cli.Command{
		Name: "jobs", Usage: "list placed jobs",
		Description: "Lists the latest placed jobs, newest first: ID, whose it is, pool, state or how it ended,\n" +
			"node, length of its output, age, how long it ran, its VM's peak memory, what its node\n" +
			"saw go wrong on the machine while it ran, and what it is.\n" +
			"JOB is an ID or 8 digits of one or more.",
		Flags: []cli.Flag{
			cliutil.Int(&limit, "limit", "N", "how many at most", 1, 10_000),
			text("gitlab", "of one instance"), text("project", "of one project's path; group/** for all below"), text("ref", "of one branch or tag"), text("name", "of one job's name"),
			text("state", "queued, starting, running or finished"), text("outcome", "success, or a failure such as script or lost"), text("node", "on one node"), text("pool", "of one pool"),
			cliutil.Duration(&since, "since", "submitted no longer ago than this").Default("any time"),
			cliutil.Bool(&events, "events", "only those whose node saw something go wrong on the machine"),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-jobs/1)"),
		},
		Action:   list,
		Commands: []*cli.Command{newJobShow(a), newJobOutput(a), newJobCancel(a)},
	}, cliutil.Arity{}))
}

func newJobShow(a *app) *cli.Command {
	var asJSON, spec bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "show", Usage: "show one job's record", ArgsUsage: "JOB",
		Description: "Shows a job's record, one field a line, and the end of a finished job's output as the hub\nhas it, without its escape sequences.",
		Flags: []cli.Flag{
			cliutil.Bool(&spec, "spec", "print its redacted spec too, as JSON"),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-job/1)"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			j, err := c.Job(ctx, args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.hub-job/1", j)
			}
			return printJob(a.env.Stdout, j, spec, a.now())
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchJob)
}

func newJobOutput(a *app) *cli.Command {
	var follow, raw bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "output", Usage: "print a job's output", ArgsUsage: "JOB",
		Description: "Prints a job's output as its node masked it: all of it until the job is settled, then the\n" +
			"end that is kept. What could steer a terminal is taken out unless --raw is given.",
		Flags: []cli.Flag{
			cliutil.Bool(&follow, "follow", "wait for more until the job has ended").Short("f"),
			cliutil.Bool(&raw, "raw", "byte for byte"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			wait := 0
			if follow {
				wait = dispatch.MaxWaitSecs / 2
			}
			for at, first := int64(0), true; ; first = false {
				p, err := c.Output(ctx, args[0], at, wait)
				if err != nil {
					return err
				}
				if first && p.Offset > 0 {
					fmt.Fprintf(a.env.Stderr, "vk-hub: %d bytes are left of %d\n", p.Length-p.Offset, p.Length)
				}
				out := p.Data
				if !raw {
					out = []byte(ui.Clean(string(p.Data)))
				}
				if _, err := a.env.Stdout.Write(out); err != nil {
					return err
				}
				at = p.Offset + int64(len(p.Data))
				if p.Complete || !follow && at >= p.Length {
					return nil
				}
			}
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchJob)
}

func newJobCancel(a *app) *cli.Command {
	var now, force bool
	return statuses(cliutil.Takes(&cli.Command{
		Name: "cancel", Usage: "stop a job", ArgsUsage: "JOB",
		Description: "Cancels a job gracefully, so that its after_script runs, or with --now at once. GitLab is\n" +
			"told that it failed. A node that is away hears of it when it comes back; with --force the\n" +
			"job ends here and for GitLab without waiting for that.",
		Flags: []cli.Flag{cliutil.Bool(&now, "now", "at once"), cliutil.Bool(&force, "force", "end it on the hub, whatever its node does")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
			mode := wire.CancelGraceful
			if now {
				mode = wire.CancelImmediate
			}
			var j *hubadmin.Job
			var err error
			if force {
				j, err = c.EndJob(ctx, args[0])
			} else {
				j, err = c.Cancel(ctx, args[0], mode)
			}
			if err != nil {
				return err
			}
			if force {
				_, err = fmt.Fprintf(a.env.Stdout, "%s: %s, %s\n", j.ID, j.State, j.Outcome)
				return err
			}
			_, err = fmt.Fprintf(a.env.Stdout, "%s: %s, cancel %s\n", j.ID, j.State, j.Cancel)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), noSuchJob)
}

func printJobs(w io.Writer, jobs []hubadmin.Job, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(hubtext.JobHeads, "\t"))
	for i := range jobs {
		fmt.Fprintln(t, line(hubtext.JobRow(&jobs[i], now)))
	}
	return t.Flush()
}

func printJob(w io.Writer, j *hubadmin.Job, spec bool, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, f := range hubtext.JobFields(j, now) {
		fmt.Fprintf(t, "%s\t%s\n", f.Key, ui.CleanLine(f.Text))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if spec {
		if j.Spec == nil {
			fmt.Fprintln(w, "the spec is not kept any more")
		} else {
			fmt.Fprintf(w, "%s\n", j.Spec)
		}
	}
	if e := j.End; e != nil && len(e.Data) > 0 {
		fmt.Fprintf(w, "--- output from byte %d of %d\n%s\n", e.Start, e.Size, strings.TrimRight(ui.Clean(string(e.Data)), "\n"))
	}
	return nil
}
