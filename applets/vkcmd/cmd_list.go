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
	"virtkit/core/supervise"
	"virtkit/ledger"
)

type listOptions struct {
	json bool
	all  bool
}

func newList(a *app) *cli.Command {
	var o listOptions
	return &cli.Command{
		Name:  "list",
		Usage: "list guests",
		Description: "Lists the guests that run on this host below the state directory, those of CI\n" +
			"jobs included. With --all also those that have ended and whose directories are\n" +
			"still there.",
		Flags: []cli.Flag{
			cliutil.Bool(&o.json, "json", "print one JSON document (vk.list/1)"),
			cliutil.Bool(&o.all, "all", "also guests that have ended").Short("a"),
		},
		Action: func(ctx context.Context, _ *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			jobs, problems, err := h.Jobs.List(ctx)
			if err != nil {
				return err
			}
			for _, p := range problems {
				a.warn("%v", p)
			}
			return printList(a.env.Stdout, jobs, o, time.Now())
		},
	}
}

func printList(w io.Writer, jobs []ledger.Job, o listOptions, now time.Time) error {
	shown := []ledger.Job{}
	for _, j := range jobs {
		if o.all || live(j) {
			shown = append(shown, j)
		}
	}
	if o.json {
		return cliutil.JSON(w, "vk.list/1", struct {
			Guests []ledger.Job `json:"guests"`
		}{shown})
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tNAME\tKIND\tSTATUS\tAGE\tCPUS\tMEMORY\tIMAGE\tPORTS")
	for _, j := range shown {
		ports := ""
		for i, p := range j.Publish {
			if i > 0 {
				ports += " "
			}
			ports += formatPublish(p)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", j.ID, j.Name, j.Kind, statusText(j),
			units.HumanDuration(now.Sub(j.Created)), j.CPUs, units.BytesSize(float64(j.MemMiB)*units.MiB), j.Image, ports)
	}
	return t.Flush()
}

func live(j ledger.Job) bool {
	return j.Status != string(supervise.Ended) && j.Status != "dead"
}

// statusText is a job's status with the reason of its end, or how far its
// start has come.
func statusText(j ledger.Job) string {
	switch {
	case j.Exit != nil && j.Exit.Code != nil:
		return fmt.Sprintf("%s (%s, exit %d)", j.Status, j.Exit.Reason, *j.Exit.Code)
	case j.Exit != nil:
		return fmt.Sprintf("%s (%s)", j.Status, j.Exit.Reason)
	case j.Stage != "" && (j.Status == string(supervise.Starting) || j.Status == string(supervise.Booting)):
		return fmt.Sprintf("%s (%s)", j.Status, j.Stage)
	}
	return j.Status
}
