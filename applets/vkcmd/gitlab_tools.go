package vkcmd

import (
	"context"

	"virtkit/applets/internal/wire"
	"virtkit/core/image"
	"virtkit/core/runner"
	"virtkit/core/supervise"
)

// hostTools is [executor] tools_dir for runner; nil when there is none.
func hostTools(h *wire.Host) runner.Tools {
	if h.Conf.Executor.ToolsDir == "" {
		return nil
	}
	return &jobTools{h: h}
}

type jobTools struct {
	h    *wire.Host
	held *image.Image // until this process ends, when the supervisor has its own hold
}

func (t *jobTools) Ready(ctx context.Context, progress func(string)) (supervise.Image, []string, error) {
	s, err := t.h.Store()
	if err != nil {
		return supervise.Image{}, nil, err
	}
	dir := t.h.Conf.Executor.ToolsDir
	_, tools, err := image.ToolsIn(dir)
	if err != nil {
		return supervise.Image{}, nil, err
	}
	img, err := s.Tools(ctx, dir, image.ResolveOptions{Progress: func(p image.Progress) {
		if p.Text != "" && p.Stage != "done" {
			progress(p.Text)
		}
	}})
	if err != nil {
		return supervise.Image{}, nil, err
	}
	t.held = img
	return wire.RootOf(img), image.ToolNames(tools), nil
}
