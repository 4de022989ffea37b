package vkcmd

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/policy"
	"virtkit/core/supervise"
)

func newEgressReport(a *app) *cli.Command {
	var asJSON bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "egress-report",
		Usage:     "show what a job reached and was refused",
		ArgsUsage: "[JOB]",
		Description: "Shows each destination that the job's guests were refused, would be refused by a\n" +
			"dry-run, and reached, with the layer that decided. The job may be running or over.\n" +
			"Without JOB it lists the jobs that are recorded, the latest first. Records are kept\n" +
			"for 14 days, at most 1000.\n\n" +
			"JOB is the id or name of a guest, or GitLab's number of a job.",
		Flags: []cli.Flag{
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.egress-report/1; the list is vk.egress-reports/1)"),
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			if c.Args().Len() == 0 {
				return a.listEgress(ctx, h, asJSON)
			}
			r, live, err := egressRecord(ctx, h, c.Args().First())
			if err != nil {
				return err
			}
			return printEgress(a.env.Stdout, r, live, asJSON)
		},
	}, cliutil.Arity{Max: 1}), cliutil.Status{Code: "10", Means: "nothing is recorded of such a job"})
}

// egressDocument is `vk egress-report JOB --json`.
type egressDocument struct {
	ID          string        `json:"id"`
	Name        string        `json:"name"`
	Kind        string        `json:"kind"`
	Created     time.Time     `json:"created"`
	Updated     time.Time     `json:"updated"`
	Live        bool          `json:"live"`   // more may come
	Policy      string        `json:"policy"` // policy.Policy.Fingerprint; "" = unrestricted
	StrictNames bool          `json:"strict_names"`
	DryRun      bool          `json:"dry_run"`
	Report      policy.Report `json:"report"`
}

func egressDocumentOf(r supervise.EgressRecord, live bool) egressDocument {
	return egressDocument{r.ID, r.Name, r.Kind, r.Created, r.Updated, live, r.Egress.Policy.Fingerprint(),
		r.Egress.StrictNames, r.Egress.Policy.DryRun, egressReportOf(r, live)}
}

// listed is a line of the list.
type listedEgress struct {
	ID         string    `json:"id"`
	Kind       string    `json:"kind"`
	Updated    time.Time `json:"updated"`
	Live       bool      `json:"live"`
	Blocked    uint64    `json:"blocked"` // events
	WouldBlock uint64    `json:"would_block"`
	Observed   uint64    `json:"observed"`
}

func listedOf(r supervise.EgressRecord, live bool) listedEgress {
	l := listedEgress{ID: r.ID, Kind: r.Kind, Updated: r.Updated, Live: live,
		Blocked: r.Record.Uncounted.Blocked, WouldBlock: r.Record.Uncounted.WouldBlock, Observed: r.Record.Uncounted.Observed}
	for _, e := range r.Record.Entries {
		switch e.Outcome {
		case policy.Blocked:
			l.Blocked += e.Count
		case policy.WouldBlock:
			l.WouldBlock += e.Count
		default:
			l.Observed += e.Count
		}
	}
	return l
}

func (a *app) listEgress(ctx context.Context, h *wire.Host, asJSON bool) error {
	all := []listedEgress{}
	jobs, problems, err := h.Jobs.List(ctx)
	if err != nil {
		return err
	}
	for i := len(jobs) - 1; i >= 0; i-- {
		if r, err := supervise.ReadEgress(jobs[i].Dir); err == nil {
			all = append(all, listedOf(r, jobs[i].Live()))
		}
	}
	kept, more, err := h.Egress.Kept(ctx)
	if err != nil {
		return err
	}
	for _, p := range append(problems, more...) {
		a.warn("%v", p)
	}
	for _, r := range kept {
		all = append(all, listedOf(r, false))
	}
	if asJSON {
		return cliutil.JSON(a.env.Stdout, "vk.egress-reports/1", struct {
			Jobs []listedEgress `json:"jobs"`
		}{all})
	}
	t := tabwriter.NewWriter(a.env.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "JOB\tKIND\tRECORDED\tBLOCKED\tWOULD BLOCK\tREACHED")
	for _, l := range all {
		when := units.HumanDuration(time.Since(l.Updated)) + " ago"
		if l.Live {
			when = "running"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%d\n", l.ID, l.Kind, when, l.Blocked, l.WouldBlock, l.Observed)
	}
	return t.Flush()
}

// printEgress shows a whole record, not what of it a report to a hub has room
// for.
func printEgress(w io.Writer, r supervise.EgressRecord, live, asJSON bool) error {
	if asJSON {
		return cliutil.JSON(w, "vk.egress-report/1", egressDocumentOf(r, live))
	}
	state := "complete"
	switch u := r.Record.Uncounted; {
	case live:
		state = "so far"
	case !r.Ended:
		state = "partial: the supervisor was killed, the last seconds are missing"
	case u != (policy.Counts{}):
		state = fmt.Sprintf("partial: the log was full, %d more were only counted", u.Blocked+u.WouldBlock+u.Observed)
	}
	fmt.Fprintf(w, "%s, %s\n", r.ID, state)
	fmt.Fprintf(w, "policy: %s\n", r.Egress.Policy.Words())
	fmt.Fprintf(w, "sent %s, received %s\n", units.BytesSize(float64(r.Sent)), units.BytesSize(float64(r.Received)))
	for _, f := range r.Egress.Refusals {
		from := ""
		if f.Service != "" {
			from = "service " + f.Service + ": "
		}
		fmt.Fprintf(w, "unreachable: %s%s %s (%s)\n", from, f.Variable, f.Entry, f.Layer)
	}
	for _, o := range []struct {
		outcome policy.Outcome
		head    string
	}{{policy.Blocked, "BLOCKED"}, {policy.WouldBlock, "WOULD BLOCK"}, {policy.Observed, "REACHED"}} {
		if err := printOutcome(w, r, o.outcome, o.head); err != nil {
			return err
		}
	}
	return nil
}

func printOutcome(w io.Writer, r supervise.EgressRecord, outcome policy.Outcome, head string) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	any := false
	for _, e := range r.Record.Entries {
		if e.Outcome != outcome {
			continue
		}
		if !any {
			fmt.Fprintf(t, "\n%s\tPROTO\tCOUNT\tVM\tSTAGE\tFIRST\tLAST\tLAYER\tWHY\n", head)
			any = true
		}
		layer := e.Layer
		if e.Rule != "" {
			layer += " (" + e.Rule + ")"
		}
		why := e.Reason
		if why == "" && e.Asked != "" {
			why = "asked for " + e.Asked
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n", e.Dest, e.Proto, e.Count, first(e.Service, "job"), first(e.Stage, "-"),
			e.First.Format(time.TimeOnly), e.Last.Format(time.TimeOnly), first(layer, "-"), first(why, "-"))
	}
	return t.Flush()
}
