// Package clitest holds tests that every applet's commands must pass.
package clitest

import (
	"regexp"
	"strings"
	"testing"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
)

// descriptionWidth is the most of a line of a description, in bytes: help
// stays within a terminal of 90 columns.
const descriptionWidth = 90

var flagName = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)

// Whole walks all commands below root: what a user needs to know of one must
// be there. At least so many commands are to be found.
func Whole(t *testing.T, root *cli.Command, atLeast int) {
	t.Helper()
	seen := 0
	var walk func(c *cli.Command, path string)
	walk = func(c *cli.Command, path string) {
		seen++
		command(t, c, path)
		for _, s := range c.Commands {
			walk(s, path+" "+s.Name)
		}
	}
	walk(root, root.Name)
	if seen < atLeast {
		t.Errorf("walked %d commands only, %d are to be there", seen, atLeast)
	}
}

func command(t *testing.T, c *cli.Command, path string) {
	t.Helper()
	if c.Usage == "" || strings.HasSuffix(c.Usage, ".") || c.Usage[0] >= 'A' && c.Usage[0] <= 'Z' {
		t.Errorf("%s: usage %q is not a lower-case line without a final period", path, c.Usage)
	}
	if c.Description == "" {
		t.Errorf("%s: no description", path)
	}
	for line := range strings.SplitSeq(c.Description, "\n") {
		if len(line) > descriptionWidth {
			t.Errorf("%s: a line of the description is %d long", path, len(line))
		}
	}
	if len(c.Commands) == 0 && c.Action == nil {
		t.Errorf("%s: neither action nor commands", path)
	}
	if ar := cliutil.ArityOf(c); (ar.Max != 0) != (c.ArgsUsage != "") {
		t.Errorf("%s: takes up to %d arguments, but ArgsUsage is %q", path, ar.Max, c.ArgsUsage)
	}
	for _, f := range c.Flags {
		f, ok := f.(*cliutil.Flag)
		if !ok {
			t.Errorf("%s: flag %v is not made by cliutil", path, f)
			continue
		}
		name := f.Names()[0]
		if !flagName.MatchString(name) || f.GetUsage() == "" {
			t.Errorf("%s: flag %q, usage %q", path, name, f.GetUsage())
		}
		if want := "VK_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_")); f.EnvName() != want {
			t.Errorf("%s: flag %q has the variable %q, want %s", path, name, f.EnvName(), want)
		}
	}
	if help := cliutil.HelpText(c, path, nil); !strings.Contains(help, "\nEXIT STATUS\n") {
		t.Errorf("%s: help without EXIT STATUS", path)
	}
}
