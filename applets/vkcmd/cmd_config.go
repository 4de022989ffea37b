package vkcmd

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/conf"
)

func newConfig(a *app) *cli.Command {
	return &cli.Command{
		Name:  "config",
		Usage: "show and check the configuration",
		Description: "The configuration is the first file of $VIRTKIT_CONFIG,\n" +
			"~/.config/virtkit/config.toml and /etc/virtkit/config.toml. Without any, defaults\n" +
			"hold.",
		Commands: []*cli.Command{newConfigShow(a), newConfigCheck(a), newConfigPath(a)},
	}
}

func newConfigShow(a *app) *cli.Command {
	var origin, asJSON bool
	return &cli.Command{
		Name:        "show",
		Usage:       "print every key with its value in force",
		Description: "Prints the configuration in force as TOML. With --origin a table that tells where\neach value comes from: a file's line, a variable, a flag or the default.",
		Flags: []cli.Flag{
			cliutil.Bool(&origin, "origin", "tell where each value comes from"),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.config/1), with origins"),
		},
		Action: func(context.Context, *cli.Command) error {
			c, err := wire.LoadConf(a.env, a.overrides())
			if err != nil {
				return err
			}
			for _, w := range c.Warnings {
				a.warn("%s", w)
			}
			switch {
			case asJSON:
				return showJSON(a.env.Stdout, c)
			case origin:
				return showOrigins(a.env.Stdout, c)
			}
			return showTOML(a.env.Stdout, c)
		},
	}
}

type shownKey struct {
	Key    string      `json:"key"`
	Value  string      `json:"value"` // TOML; "" = not set
	Origin conf.Origin `json:"origin"`
	Acted  bool        `json:"acted"`
}

func showJSON(w io.Writer, c *conf.Config) error {
	keys := []shownKey{}
	for _, k := range conf.Keys() {
		keys = append(keys, shownKey{k.Name, c.Value(k.Name), c.Origin(k.Name), k.Acted})
	}
	warnings := c.Warnings
	if warnings == nil {
		warnings = []string{}
	}
	return cliutil.JSON(w, "vk.config/1", struct {
		File     string     `json:"file"`
		Warnings []string   `json:"warnings"`
		Keys     []shownKey `json:"keys"`
	}{c.File, warnings, keys})
}

func showOrigins(w io.Writer, c *conf.Config) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "KEY\tVALUE\tORIGIN")
	for _, k := range conf.Keys() {
		v := c.Value(k.Name)
		if v == "" {
			v = "-"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", k.Name, v, c.Origin(k.Name))
	}
	return t.Flush()
}

// showTOML prints a file that sets what is set now; keys that are not set are
// comments.
func showTOML(w io.Writer, c *conf.Config) error {
	section := ""
	for _, k := range conf.Keys() {
		s, last := "", k.Name
		if i := strings.LastIndexByte(k.Name, '.'); i >= 0 {
			s, last = k.Name[:i], k.Name[i+1:]
		}
		v := c.Value(k.Name)
		if k.Type == "table" {
			if v != "" {
				fmt.Fprintf(w, "\n[%s]\n%s\n", k.Name, v)
			}
			continue
		}
		if s != section {
			section = s
			fmt.Fprintf(w, "\n[%s]\n", s)
		}
		if v == "" {
			fmt.Fprintf(w, "# %s is not set\n", last)
		} else {
			fmt.Fprintf(w, "%s = %s\n", last, v)
		}
	}
	return nil
}

func newConfigCheck(a *app) *cli.Command {
	var asJSON bool
	return cliutil.Takes(&cli.Command{
		Name:        "check",
		Usage:       "check a configuration file and nothing else",
		ArgsUsage:   "[FILE]",
		Description: "Checks FILE, or the file in force. All mistakes are reported, each with its line.\nNothing is made or changed.",
		Flags:       []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.config-check/1)")},
		Action: func(_ context.Context, c *cli.Command) error {
			file := c.Args().First()
			if file == "" {
				var err error
				if file, err = conf.Find(a.overrides().Getenv(a.env), wire.Home(a.env)); err != nil {
					return err
				}
			}
			warnings := []string{}
			var err error
			if file != "" {
				var ws []string
				ws, err = conf.Check(file)
				warnings = append(warnings, ws...)
			}
			if asJSON {
				doc := struct {
					File     string   `json:"file"`
					OK       bool     `json:"ok"`
					Warnings []string `json:"warnings"`
					Error    string   `json:"error,omitempty"`
				}{File: file, OK: err == nil, Warnings: warnings}
				if err != nil {
					doc.Error = err.Error()
				}
				if werr := cliutil.JSON(a.env.Stdout, "vk.config-check/1", doc); werr != nil {
					return werr
				}
				return cliutil.Silent(err)
			}
			for _, w := range warnings {
				a.warn("%s", w)
			}
			if err != nil {
				return err
			}
			if file == "" {
				_, err = fmt.Fprintln(a.env.Stdout, "no configuration file: defaults hold")
			} else {
				_, err = fmt.Fprintf(a.env.Stdout, "%s: well-formed, %d warnings\n", file, len(warnings))
			}
			return err
		},
	}, cliutil.Arity{Max: 1})
}

func newConfigPath(a *app) *cli.Command {
	return cliutil.Exits(&cli.Command{
		Name:        "path",
		Usage:       "print which file is read",
		Description: "Prints the path of the configuration file in force.",
		Action: func(context.Context, *cli.Command) error {
			file, err := conf.Find(a.overrides().Getenv(a.env), wire.Home(a.env))
			if err != nil {
				return err
			}
			if file == "" {
				a.say("no configuration file: defaults hold")
				return cliutil.Exit(10)
			}
			_, err = fmt.Fprintln(a.env.Stdout, file)
			return err
		},
	}, cliutil.Status{Code: "10", Means: "there is no configuration file"})
}
