package e2e_test

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
)

// onOutput calls f once the stage has printed text.
func onOutput(s *runnerside.Session, stage, text string, f func()) {
	var once sync.Once
	var seen bytes.Buffer
	s.On = func(call string, _ runnerside.Stream, p []byte) {
		if call != stage {
			return
		}
		seen.Write(p)
		if strings.Contains(seen.String(), text) {
			once.Do(f)
		}
	}
}

// The recorded cancellation: SIGTERM ends the script, after_script and the
// stages after it run in the same guest.
func TestReplayCanceling(t *testing.T) {
	h := guests(t)
	r := recording(t, "custom-canceling")
	for kind, image := range images(t, h) {
		t.Run(kind, func(t *testing.T) {
			j := &r.Jobs[0]
			d := h.Driver()
			d.Grace = time.Minute
			s := session(t, d, r, j, image)
			cancel, now := context.WithCancel(t.Context())
			onOutput(s, execdrv.StageBuild, "tick 2\n", now)
			job, err := s.RunJob(t.Context(), j.Stages, cancel)
			if err != nil {
				t.Fatal(err)
			}
			if v := job.Verdict; v.Reason != "job_canceled" {
				t.Errorf("verdict %+v", v)
			}
			want := []string{"config", "prepare", "prepare_script", "get_sources", "build_script", "after_script", "cleanup_file_variables", "cleanup"}
			if !slices.Equal(job.Names(), want) {
				t.Errorf("calls %q, recorded %q", job.Names(), want)
			}
			b, _ := job.Find(execdrv.StageBuild)
			if b.Killed || b.Signal != 0 || b.Exit != 1 || strings.Contains(string(b.Stdout), "tick 30") {
				t.Errorf("build_script: exit %d, signal %v, killed %v\n%s", b.Exit, b.Signal, b.Killed, b.Stdout)
			}
			a, _ := job.Find(execdrv.StageAfter)
			same(t, j, a, j.Want[execdrv.StageAfter])
		})
	}
	nothingLeft(t, h)
}

// A job whose time is over: the stage gets SIGTERM, then cleanup alone.
func TestReplayTimeout(t *testing.T) {
	h := guests(t)
	r := recording(t, "custom-timeout")
	j := &r.Jobs[0]
	d := h.Driver()
	d.Grace = time.Minute
	s := session(t, d, r, j, busyboxGit(t, h))
	ready(t, s, j)
	ctx, now := context.WithCancel(t.Context())
	onOutput(s, execdrv.StageBuild, "sleep 50", now)
	for _, st := range j.Stages {
		sctx := t.Context()
		if st.Name == execdrv.StageBuild {
			sctx = ctx
		}
		res, err := s.Stage(sctx, st.Name, st.Script)
		if err != nil {
			t.Fatal(err)
		}
		if st.Name != execdrv.StageBuild {
			same(t, j, res, j.Want[st.Name])
			continue
		}
		if res.Killed || res.Exit != 1 || !slices.Equal(j.Normalise(res.Stdout), j.Want[st.Name].Stdout) {
			t.Errorf("build_script: exit %d, killed %v\n%s%s", res.Exit, res.Killed, res.Stdout, res.Stderr)
		}
	}
}

// A script that ignores SIGTERM is killed with the driver's process, and so is
// all that it started; the guest lives on for after_script.
func TestScriptIgnoresTerm(t *testing.T) {
	h := guests(t)
	for _, how := range []string{"SIGKILL of vk", "second SIGTERM"} {
		t.Run(how, func(t *testing.T) {
			d := h.Driver()
			d.Grace = time.Hour
			if how == "SIGKILL of vk" {
				d.Grace = time.Second
			}
			s := plainJob(t, d, map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
			prepared(t, s)
			ctx, now := context.WithCancel(t.Context())
			script := "trap '' TERM INT; sleep 4321 & echo started; while :; do sleep 1; done\n"
			if how == "SIGKILL of vk" {
				onOutput(s, execdrv.StageBuild, "started", now)
				res, err := s.Stage(ctx, execdrv.StageBuild, []byte(script))
				if err != nil || !res.Killed || res.Signal != syscall.SIGKILL {
					t.Errorf("%+v %v", res, err)
				}
			} else {
				defer now()
				res := twoSignals(t, s, script)
				if res != 1 {
					t.Errorf("exit %d", res)
				}
			}
			// What the script started is gone from the guest.
			gone := `n=0; while ps | grep -q '[s]leep 4321'; do n=$((n+1)); [ $n -gt 100 ] && { ps; exit 9; }; sleep 0.1; done; echo guest lives`
			if res := stage(t, s, execdrv.StageAfter, gone+"\n"); res.Exit != 0 || string(res.Stdout) != "guest lives\n" {
				t.Errorf("after_script: %d\n%s%s", res.Exit, res.Stdout, res.Stderr)
			}
		})
	}
	nothingLeft(t, h)
}

// twoSignals runs a stage and sends SIGTERM twice once it has started, and more,
// until it has ended: signals that come at once merge into one.
func twoSignals(t *testing.T, s *runnerside.Session, script string) int {
	t.Helper()
	path, err := s.WriteScript([]byte(script))
	if err != nil {
		t.Fatal(err)
	}
	cmd := s.Command([]string{guests(t).VK, "gitlab", "run", path, execdrv.StageBuild})
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	n, err := out.Read(buf)
	if err != nil || !strings.Contains(string(buf[:n]), "started") {
		t.Errorf("read %q %v", buf[:n], err)
	}
	ended := make(chan struct{})
	var sent sync.WaitGroup
	sent.Go(func() {
		for {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			select {
			case <-ended:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	_ = cmd.Wait()
	close(ended)
	sent.Wait()
	return cmd.ProcessState.ExitCode()
}
