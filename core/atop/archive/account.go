package archive

import (
	"context"
	"fmt"

	"virtkit/core/atop"
	"virtkit/core/atop/account"
)

// Account is what a recording adds up to, for people; no lines when it holds
// no sample. Damage and what ctx's end left out are told in its last line.
func Account(ctx context.Context, r Run) ([]string, error) {
	a := account.New()
	early := false
	st, err := Samples(r.Path, true, func(s *atop.Sample) bool {
		a.Add(s)
		early = ctx.Err() != nil
		return !early
	})
	if a.Empty() {
		return nil, err
	}
	lines := a.Lines(r.Name)
	note := func(text string) { lines = append(lines, "", "  not all of it: "+text) }
	switch d := st.Describe(); {
	case err != nil:
		note(err.Error())
	case early:
		note(fmt.Sprintf("it is too long to be summed up here; vk atop %s --summary takes its time", r.Name))
	case st.Skipped > 0:
		note(d)
	}
	return lines, nil
}
