package cijob

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"

	"virtkit/core/fleet/job"
)

// moves is a stage that moves files between the job's guest and elsewhere.
type moves struct {
	d         *driver
	v         variables
	env       map[string]string // that the job's commands have
	out, errs io.Writer
}

// moving runs such a stage. As with gitlab-runner, whose helper does it as one
// more command of the job's, it begins with what every stage's script begins
// with: a GITLAB_ENV that no shell takes fails it, and what that sets counts in
// names and paths.
func (d *driver) moving(ctx context.Context, name, heading, status string, do func(ctx context.Context, m *moves) *verdict) *verdict {
	return d.stage(ctx, name, heading, func(ctx context.Context, out, errs io.Writer) *verdict {
		m := &moves{d: d, v: d.vars(status), out: out, errs: errs}
		if v := m.enter(ctx, name); v != nil {
			return v
		}
		return do(ctx, m)
	})
}

// enter reads the environment of the job's commands.
func (m *moves) enter(ctx context.Context, stage string) *verdict {
	s := &script{v: m.v, p: m.d.p}
	s.export()
	s.line("exec cat /proc/self/environ")
	var env bytes.Buffer
	e := m.d.o.Executor.Call(ctx, m.d.callOf(m.v, Call{Kind: CallRun, Stage: stage, Script: s.bytes(), Out: &env, Err: m.errs}))
	if v := judge(e, job.Script); v != nil {
		return v
	}
	m.env = map[string]string{}
	for entry := range strings.SplitSeq(env.String(), "\x00") {
		if k, v, ok := strings.Cut(entry, "="); ok {
			m.env[k] = v
		}
	}
	return nil
}

// transfer is what a transfer is given.
func (m *moves) transfer(ctx context.Context) (Transfer, error) {
	d := m.d
	g, user, err := d.o.Host.Guest(ctx)
	if err != nil {
		return Transfer{}, fmt.Errorf("reaching the job's guest: %w", err)
	}
	return Transfer{Job: d.j, Project: d.p.project, User: user, Work: d.o.Dir.WorkPath(), Guest: g, Out: m.out, Err: m.errs,
		Lookup: m.v.lookup, Env: func(name string) (string, bool) { v, ok := m.env[name]; return v, ok }}, nil
}
