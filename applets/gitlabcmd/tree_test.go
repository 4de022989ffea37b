package gitlabcmd

import (
	"strings"
	"testing"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
)

// TestEveryCommandIsWhole walks all commands: what a user needs to know of one
// must be there.
func TestEveryCommandIsWhole(t *testing.T) {
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
			if len(line) > 90 {
				t.Errorf("%s: a line of the description is %d long", path, len(line))
			}
		}
		if ar := cliutil.ArityOf(c); (ar.Max != 0) != (c.ArgsUsage != "") {
			t.Errorf("%s: takes up to %d arguments, but ArgsUsage is %q", path, ar.Max, c.ArgsUsage)
		}
		if len(c.Commands) == 0 && c.Action == nil {
			t.Errorf("%s: neither action nor commands", path)
		}
		for _, s := range c.Commands {
			walk(s, path+" "+s.Name)
		}
	}
	walk(Command(appenv.Env{}), "vk-gitlab")
	if seen != 5 {
		t.Errorf("walked %d commands, expected 5", seen)
	}
}
