package cijob

import (
	"context"

	"virtkit/core/execdrv"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/runner"
)

// Identify is the name that the executor gives the job of a directory on this
// host, made of what every call of it is given.
func Identify(dir *jobdir.Dir) (runner.Identity, error) {
	d, err := open(Options{Dir: dir})
	if err != nil {
		return runner.Identity{}, err
	}
	c := execdrv.ReadCall(append(d.vars("running").environ(d.j), execdrv.EnvTmpDir+"="+dir.WorkPath()))
	return runner.Identify(&c)
}

// CleanUp runs the executor's cleanup for a job whose driver is gone. Dir,
// Executor and Log are needed. The result is the caller's to write.
func CleanUp(ctx context.Context, o Options) error {
	d, err := open(o)
	if err != nil {
		return err
	}
	d.hard = ctx
	if err := d.cleanup(); err != nil {
		return err
	}
	return o.Dir.RemoveWork()
}
