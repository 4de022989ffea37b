package cijob_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"virtkit/core/cijob"
)

func commands(t *testing.T, script string) *cijob.Commands {
	work := t.TempDir()
	path := filepath.Join(work, "driver.sh")
	if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	return &cijob.Commands{Argv: []string{"/bin/sh", path}, Env: []string{"PATH=" + os.Getenv("PATH")}, Work: work}
}

// TestCommands: what a call is given, and how its end is read.
func TestCommands(t *testing.T) {
	c := commands(t, `
echo "$1 $3 $CUSTOM_ENV_A"
cat "$JOB_RESPONSE_FILE"
stat -c %a "$JOB_RESPONSE_FILE" >&2
if [ "$1" = run ]; then cat "$2"; echo 42 > "$BUILD_EXIT_CODE_FILE"; echo '{"signal":9}' > "$VIRTKIT_OUTCOME_FILE"; exit "$BUILD_FAILURE_EXIT_CODE"; fi
exit "$SYSTEM_FAILURE_EXIT_CODE"
`)
	var out, errs bytes.Buffer
	e := c.Call(t.Context(), cijob.Call{Kind: cijob.CallRun, Stage: "step_script", Script: []byte("the script\n"), Env: []string{"CUSTOM_ENV_A=b"}, Response: []byte("response\n"), Out: &out, Err: &errs})
	if e.Err != nil || e.Exit != 1 || e.FileCode != "42" || e.Outcome.Signal != 9 {
		t.Errorf("%+v", e)
	}
	if out.String() != "run step_script b\nresponse\nthe script\n" || errs.String() != "600\n" {
		t.Errorf("stdout %q, stderr %q", out.String(), errs.String())
	}
	if left, _ := filepath.Glob(filepath.Join(c.Work, "script*")); len(left) != 0 {
		t.Errorf("the script is left: %v", left)
	}
	// A call that tells nothing is not judged by an earlier one's words.
	e = c.Call(t.Context(), cijob.Call{Kind: cijob.CallPrepare, Out: &out, Err: &errs})
	if e.Exit != 2 || e.FileCode != "" || e.Outcome.Signal != 0 {
		t.Errorf("%+v", e)
	}
}

// TestCommandsEnd: a call that does not heed SIGTERM is killed with all that it
// started, at once when it is told so.
func TestCommandsEnd(t *testing.T) {
	c := commands(t, `trap 'echo TERM' TERM; echo up; while :; do sleep 0.1; done`)
	ctx, cancel := context.WithCancelCause(t.Context())
	now := make(chan struct{})
	out := &upWriter{up: make(chan struct{})}
	go func() {
		<-out.up
		cancel(cijob.Stop())
		close(now)
	}()
	done := make(chan cijob.Ended, 1)
	go func() {
		done <- c.Call(ctx, cijob.Call{Kind: cijob.CallRun, Stage: "x", Out: out, Err: &bytes.Buffer{}, Now: now})
	}()
	select {
	case e := <-done:
		if e.Err == nil || !strings.Contains(e.Err.Error(), "signal 9") {
			t.Errorf("%+v", e)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("the call goes on")
	}
}

// upWriter closes up with the first write.
type upWriter struct {
	up   chan struct{}
	seen bool
}

func (w *upWriter) Write(p []byte) (int, error) {
	if !w.seen {
		w.seen = true
		close(w.up)
	}
	return len(p), nil
}

// TestClaim: the first prepare gets the claim's descriptor, and nobody else.
func TestClaim(t *testing.T) {
	c := commands(t, `if [ -n "$VIRTKIT_JOB_CLAIM_FD" ]; then cat <&"$VIRTKIT_JOB_CLAIM_FD"; else echo none; fi`)
	f, err := os.Open(filepath.Join(c.Work, "driver.sh"))
	if err != nil {
		t.Fatal(err)
	}
	c.Claim = f
	for _, k := range []struct {
		kind cijob.CallKind
		got  bool
	}{{cijob.CallConfig, false}, {cijob.CallPrepare, true}, {cijob.CallPrepare, false}, {cijob.CallCleanup, false}} {
		var out bytes.Buffer
		if e := c.Call(t.Context(), cijob.Call{Kind: k.kind, Out: &out, Err: &out}); e.Err != nil || e.Exit != 0 {
			t.Fatalf("%+v %s", e, out.String())
		}
		if got := strings.TrimSpace(out.String()) != "none"; got != k.got {
			t.Errorf("%s got the claim: %v, want %v", k.kind, got, k.got)
		}
	}
	if err := f.Close(); err == nil {
		t.Error("the driver kept the claim")
	}
}
