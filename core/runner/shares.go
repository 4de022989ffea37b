package runner

import (
	"fmt"
	"os"

	"virtkit/core/fault"
)

// checkShares looks at the directories of [executor.share]. They are shared as
// they are and at their own time: what changes in one, jobs see.
func (r *Runner) checkShares() error {
	for _, sh := range r.Set.Shares {
		st, err := os.Stat(sh.Source)
		if err == nil && !st.IsDir() {
			err = fmt.Errorf("%s is no directory", sh.Source)
		}
		if err != nil {
			return fault.Newf(fault.System, "[executor.share] %q", sh.Target).Because(err).
				Hint("make the directory %s, or take the line out", sh.Source)
		}
	}
	return nil
}
