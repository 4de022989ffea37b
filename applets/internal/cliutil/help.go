package cliutil

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v3"
)

// common are the statuses that every command shares.
var common = []Status{
	{"0", "success"},
	{"1", "error"},
	{"2", "wrong usage or configuration"},
	{"130", "interrupted"},
}

// UsageLine is how a command is called, on one line.
func UsageLine(c *cli.Command, path string) string {
	s := path
	if len(c.Commands) > 0 {
		if c.Metadata[metaRuns] == true {
			return s + " [flags] [COMMAND …]"
		}
		return s + " [flags] COMMAND …"
	}
	if len(FlagsOf(c)) > 0 {
		s += " [flags]"
	}
	if c.ArgsUsage != "" {
		s += " " + c.ArgsUsage
	}
	return s
}

// HelpText is a command's help. Globals are the flags of the commands above.
func HelpText(c *cli.Command, path string, globals []*Flag) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n\nUSAGE\n  %s\n", path, c.Usage, UsageLine(c, path))
	if c.Description != "" {
		fmt.Fprintf(&b, "\n%s\n", strings.TrimSpace(c.Description))
	}
	if len(c.Commands) > 0 {
		b.WriteString("\nCOMMANDS\n")
		width := 0
		for _, s := range c.Commands {
			width = max(width, len(s.Name))
		}
		for _, s := range c.Commands {
			if !s.Hidden {
				fmt.Fprintf(&b, "  %-*s  %s\n", width, s.Name, s.Usage)
			}
		}
	}
	writeFlags(&b, "FLAGS", FlagsOf(c))
	writeFlags(&b, "FLAGS OF EVERY COMMAND", globals)
	b.WriteString("\nEXIT STATUS\n")
	for _, st := range statuses(StatusOf(c)) {
		fmt.Fprintf(&b, "  %-5s %s\n", st.Code, st.Means)
	}
	return b.String()
}

// statuses are the common ones with a command's own in their places, in the
// order of their numbers; what is no number comes last.
func statuses(own []Status) []Status {
	out := append([]Status(nil), own...)
	for _, s := range common {
		if !slices.ContainsFunc(own, func(o Status) bool { return o.Code == s.Code }) {
			out = append(out, s)
		}
	}
	number := func(s Status) int {
		n, err := strconv.Atoi(s.Code)
		if err != nil {
			return 1000
		}
		return n
	}
	slices.SortStableFunc(out, func(a, b Status) int { return number(a) - number(b) })
	return out
}

func writeFlags(b *strings.Builder, title string, flags []*Flag) {
	if len(flags) == 0 {
		return
	}
	fmt.Fprintf(b, "\n%s\n", title)
	for _, f := range flags {
		name := "--" + f.name
		if f.short != "" {
			name = "-" + f.short + ", " + name
		}
		if f.value != "" {
			name += " " + f.value
		}
		if f.opt != "" {
			name += "[=" + f.opt + "]"
		}
		var notes []string
		if f.repeat {
			notes = append(notes, "repeatable")
		}
		if f.def != "" && f.def != "0s" {
			notes = append(notes, "default "+f.def)
		}
		if e := f.EnvName(); e != "" {
			notes = append(notes, "$"+e)
		}
		line := f.usage
		if len(notes) > 0 {
			line += " (" + strings.Join(notes, "; ") + ")"
		}
		if len(name) <= 22 {
			fmt.Fprintf(b, "  %-22s %s\n", name, line)
		} else {
			fmt.Fprintf(b, "  %s\n  %-22s %s\n", name, "", line)
		}
	}
}
