package e2e_test

import (
	"context"
	"strings"
	"testing"

	"virtkit/core/execdrv"
)

// S09: a variable that points at a file variable. The runner's scripts write the
// file and export its path; the runner gives its driver the contents as well,
// which must not come between.
func TestFileVariables(t *testing.T) {
	h := guests(t)
	const file = "/builds/group/e2e.tmp/CFG"
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h), "CFG": "hello", "MY": "hello", "ARGS": "-f hello"},
		map[string]any{"variables": []any{
			map[string]any{"key": "CFG", "value": "hello", "file": true}, map[string]any{"key": "MY", "value": "$CFG"}, map[string]any{"key": "ARGS", "value": "-f $CFG"},
		}})
	prepared(t, s)
	const export = "export CFG=" + file + "\nexport MY=" + file + "\nexport ARGS='-f " + file + "'\n"
	if res := stage(t, s, execdrv.StagePrepare, "mkdir -p /builds/group/e2e.tmp && printf hello > "+file+"\n"); res.Exit != 0 {
		t.Fatalf("prepare_script: %d %s", res.Exit, res.Stderr)
	}
	want := file + "|" + file + "|-f " + file + "|hello|hello\n"
	for _, name := range []string{execdrv.StageBuild, execdrv.StageAfter} {
		res := stage(t, s, name, export+"cd /tmp\nprintf '%s|%s|%s|%s|%s\\n' \"$CFG\" \"$MY\" \"$ARGS\" \"$(cat $CFG)\" \"$(cat $MY)\"\n")
		if res.Exit != 0 || string(res.Stdout) != want {
			t.Errorf("%s: %d %q %s, want %q", name, res.Exit, res.Stdout, res.Stderr, want)
		}
	}
	// Without the runner's exports a script has none of them from elsewhere.
	if res := stage(t, s, execdrv.StageBuild, "echo \"${CFG-none} ${MY-none}\"; env | grep -c CUSTOM_ENV_\n"); string(res.Stdout) != "none none\n0\n" {
		t.Errorf("the environment of a script: %q", res.Stdout)
	}
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Errorf("cleanup: %+v, %v", res, err)
	}
	nothingLeft(t, h) // the file went with its guest
}

// S12: lock files of submodules left by a cancelled job. Each job's guest begins
// from its image and a checkout of its own, so that none can be there.
func TestLocksOfACancelledJob(t *testing.T) {
	h := guests(t)
	vars := map[string]string{"MICROVM_IMAGE": "local/default", "GIT_STRATEGY": "fetch", "GIT_SUBMODULE_STRATEGY": "recursive", "CI_CONCURRENT_ID": "0"}
	const locks = "/builds/group/e2e/.git/index.lock /builds/group/e2e/.git/modules/lib/index.lock"
	first := plainJob(t, h.Driver(), vars, nil)
	prepared(t, first)
	if res := stage(t, first, execdrv.StageSources, "mkdir -p /builds/group/e2e && cd /builds/group/e2e && git init -q . && mkdir -p .git/modules/lib && touch "+locks+"\n"); res.Exit != 0 {
		t.Fatalf("get_sources: %d %s", res.Exit, res.Stderr)
	}
	if res, err := first.Cleanup(context.Background()); err != nil || res.Exit != 0 {
		t.Fatalf("cleanup: %+v, %v", res, err)
	}
	second := plainJob(t, h.Driver(), vars, nil)
	prepared(t, second)
	res := stage(t, second, execdrv.StageSources, "for f in "+locks+"; do test ! -e $f || echo there: $f; done\nmkdir -p /builds/group/e2e && cd /builds/group/e2e && git init -q . && git add -A && echo clean\n")
	if res.Exit != 0 || strings.TrimSpace(string(res.Stdout)) != "clean" {
		t.Errorf("the next job of the slot: %d %q %s", res.Exit, res.Stdout, res.Stderr)
	}
}
