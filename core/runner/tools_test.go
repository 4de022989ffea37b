package runner_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/supervise"
)

type fakeTools struct {
	names []string
	err   error
}

func (f fakeTools) Ready(_ context.Context, progress func(string)) (supervise.Image, []string, error) {
	progress("packing tools")
	return supervise.Image{Ref: "tools_dir:/opt/tools", Path: "/tools.img", FSType: "ext4", Lock: "/tools.lock"}, f.names, f.err
}

func TestToolsOfTheHost(t *testing.T) {
	for _, tc := range []struct {
		linked []string
		want   string
	}{
		{[]string{"git-lfs", "gitlab-runner"}, "virtkit: tools: git-lfs, gitlab-runner of this runner; git of the image\n"},
		{nil, "virtkit: tools: git, git-lfs, gitlab-runner of the image\n"},
		{[]string{"git", "git-lfs", "gitlab-runner"}, "virtkit: tools: git, git-lfs, gitlab-runner of this runner\n"},
	} {
		w := newWorld(t)
		w.run.Tools = fakeTools{names: []string{"git", "git-lfs", "gitlab-runner"}}
		w.host.State = func(st *supervise.State) { st.Linked = tc.linked }
		w.prepare()
		w.wantTrace(tc.want, "virtkit: packing tools\n")
		want := []supervise.Disk{{
			Image:  supervise.Image{Ref: "tools_dir:/opt/tools", Path: "/tools.img", FSType: "ext4", Lock: "/tools.lock"},
			Target: "/run/vk/tools", Tools: true,
		}}
		if got := w.host.Launched[0].Disks; !slices.Equal(got, want) {
			t.Errorf("disks %+v, want %+v", got, want)
		}
	}
}

func TestNoToolsWithoutADirectory(t *testing.T) {
	w := newWorld(t)
	w.prepare()
	if got := w.host.Launched[0].Disks; len(got) != 0 || strings.Contains(w.trace.String(), "tools") {
		t.Errorf("disks %+v, trace\n%s", got, w.trace.String())
	}
}

func TestToolsThatAreNotThereFailTheJobAsTheHosts(t *testing.T) {
	w := newWorld(t)
	w.run.Tools = fakeTools{err: fault.New(fault.System, "tools_dir /opt/tools").Hint("make it")}
	err := w.run.Prepare(t.Context(), w.call())
	if err == nil || !strings.HasPrefix(err.Error(), "tools: tools_dir /opt/tools") || fault.KindOf(err) != fault.System {
		t.Errorf("Prepare = %v (%v)", err, fault.KindOf(err))
	}
	if len(w.host.Launched) != 0 {
		t.Error("a guest was started")
	}
}
