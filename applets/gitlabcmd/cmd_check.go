package gitlabcmd

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/relay"
	"virtkit/core/ui"
	"virtkit/core/version"
)

func newCheck(a *app) *cli.Command {
	var offline, asJSON bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:  "check",
		Usage: "check the configuration, the tokens and the way to the hub",
		Description: "Reads the configuration, asks GitLab whether it takes each runner's token, and the\n" +
			"hub how much room there is for each. It asks for no job, and may be used while\n" +
			"vk-gitlab runs. The exit status is that of the first thing that is wrong.",
		Flags: []cli.Flag{
			cliutil.Bool(&offline, "offline", "read the configuration alone"),
			cliutil.Bool(&asJSON, "json", "print one JSON document"),
		},
		Action: func(ctx context.Context, _ *cli.Command) error {
			return a.check(ctx, offline, asJSON)
		},
	}, cliutil.Arity{}),
		cliutil.Status{Code: "10", Means: "it is not enrolled"},
		cliutil.Status{Code: "12", Means: "a token or this relay is refused"},
		cliutil.Status{Code: "13", Means: "GitLab or the hub cannot be reached"})
}

// checkDocument is what --json prints, vk.relay-check/1.
type checkDocument struct {
	Config   string         `json:"config"`
	Findings []checkFinding `json:"findings"`
}

type checkFinding struct {
	What  string `json:"what"`
	OK    bool   `json:"ok"`
	Text  string `json:"text,omitempty"`
	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
}

func (a *app) check(ctx context.Context, offline, asJSON bool) error {
	c, err := a.load()
	if err != nil {
		return err
	}
	found := []relay.Finding{{What: "configuration", Text: fmt.Sprintf("%s, %d runners of %s", c.File, len(c.Runners), c.GitLab.URL)}}
	if !offline {
		found = append(found, relay.Check(ctx, relay.Options{Conf: c, Info: info(), VK: version.Version})...)
	}
	var wrong error
	doc := checkDocument{Config: c.File}
	for _, f := range found {
		if f.Err != nil && wrong == nil {
			wrong = f.Err
		}
		j := checkFinding{What: f.What, OK: f.Err == nil, Text: f.Text, Hint: fault.HintOf(f.Err)}
		if f.Err != nil {
			j.Error = f.Err.Error()
		}
		doc.Findings = append(doc.Findings, j)
	}
	if asJSON {
		if err := cliutil.JSON(a.env.Stdout, "vk.relay-check/1", doc); err != nil {
			return err
		}
		return cliutil.Silent(wrong)
	}
	for _, f := range doc.Findings {
		if f.OK {
			fmt.Fprintf(a.env.Stdout, "ok    %s: %s\n", f.What, ui.CleanLine(f.Text))
			continue
		}
		fmt.Fprintf(a.env.Stdout, "FAIL  %s: %s\n", f.What, ui.CleanLine(f.Error))
		if f.Hint != "" {
			fmt.Fprintf(a.env.Stdout, "      %s\n", f.Hint)
		}
	}
	return cliutil.Silent(wrong)
}
