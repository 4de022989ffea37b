package runner

import (
	"context"
	"slices"
	"strings"

	"virtkit/core/supervise"
)

// readyTools makes the host's tools a disk of the job's guest. Services have
// none.
func (r *Runner) readyTools(ctx context.Context, j *job) error {
	if r.Tools == nil {
		return nil
	}
	img, names, err := r.Tools.Ready(ctx, func(line string) { r.say("%s", line) })
	if err != nil {
		return err
	}
	j.tools, j.toolNames = &supervise.Disk{Image: img, Target: supervise.ToolsTarget, Tools: true}, names
	return nil
}

// sayTools tells which programs are the host's and which the image's: a job
// that finds an old git wants to know whose it is.
func (r *Runner) sayTools(j *job) {
	if j.tools == nil {
		return
	}
	var own []string
	for _, n := range j.toolNames {
		if !slices.Contains(j.state.Linked, n) {
			own = append(own, n)
		}
	}
	var parts []string
	if len(j.state.Linked) > 0 {
		parts = append(parts, strings.Join(j.state.Linked, ", ")+" of this runner")
	}
	if len(own) > 0 {
		parts = append(parts, strings.Join(own, ", ")+" of the image")
	}
	r.say("tools: %s", strings.Join(parts, "; "))
}
