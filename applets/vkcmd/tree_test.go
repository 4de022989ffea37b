package vkcmd

import (
	"regexp"
	"strings"
	"testing"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
)

// TestEveryCommandIsWhole walks all commands: what a user needs to know of one
// must be there.
func TestEveryCommandIsWhole(t *testing.T) {
	a, _, _ := testApp(t, nil)
	root := Command(a.env)
	flagName := regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
	seen := 0
	var walk func(c *cli.Command, path string)
	walk = func(c *cli.Command, path string) {
		seen++
		if c.Usage == "" || strings.HasSuffix(c.Usage, ".") || c.Usage[0] >= 'A' && c.Usage[0] <= 'Z' {
			t.Errorf("%s: usage %q is not a lower-case line without a final period", path, c.Usage)
		}
		if c.Description == "" {
			t.Errorf("%s: no description", path)
		}
		for line := range strings.SplitSeq(c.Description, "\n") {
			if len(line) > 84 {
				t.Errorf("%s: a line of the description is %d long", path, len(line))
			}
		}
		if len(c.Commands) == 0 && c.Action == nil {
			t.Errorf("%s: neither action nor commands", path)
		}
		ar := cliutil.ArityOf(c)
		if (ar.Max != 0) != (c.ArgsUsage != "") {
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
		for _, s := range c.Commands {
			walk(s, path+" "+s.Name)
		}
	}
	walk(root, "vk")
	if seen < 25 {
		t.Errorf("walked %d commands only", seen)
	}
}
