package wire

import (
	"context"
	"path/filepath"

	"virtkit/core/atop/archive"
	"virtkit/core/logx"
)

// Archive is where recordings of guests are kept.
func (h *Host) Archive() *archive.Archive {
	return &archive.Archive{Root: filepath.Join(h.StateDir, "atop"), Days: h.Conf.Executor.AtopRetentionDays,
		Warn: func(line string) { h.Log.Warn(line, logx.Comp, "atop") }}
}

// Recordings is the archive as runner and supervise know it.
func (h *Host) Recordings() *Recordings { return &Recordings{h.Archive()} }

// Recordings keeps what guests record of themselves.
type Recordings struct{ a *archive.Archive }

// Begin implements supervise.Recordings. What is old in the archive is looked
// after beside the guest: that may take a while.
func (r *Recordings) Begin(name string) (string, error) {
	dir, err := r.a.Begin(name)
	if err == nil {
		go r.a.Sweep()
	}
	return dir, err
}

// Account implements runner.Recordings.
func (r *Recordings) Account(ctx context.Context, dir string) ([]string, error) {
	run, err := archive.At(dir)
	if err != nil {
		return nil, err
	}
	return archive.Account(ctx, run)
}

// Finish implements runner.Recordings.
func (r *Recordings) Finish(dir string) error { return r.a.Finish(dir) }
