package runner_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/guestwire"
	"virtkit/core/supervise"
)

// recordings is what a test's guests recorded.
type recordings struct {
	lines    []string
	err      error
	finished []string
}

func (r *recordings) Account(_ context.Context, dir string) ([]string, error) {
	if r.err != nil {
		return nil, r.err
	}
	return append([]string{"virtkit: " + dir + " — what its guest did:"}, r.lines...), nil
}

func (r *recordings) Finish(dir string) error { r.finished = append(r.finished, dir); return r.err }

func recording(t *testing.T) (*world, *recordings) {
	w := newWorld(t)
	rec := &recordings{lines: []string{"  cpu              1.7s of cpu time"}}
	w.run.Recordings, w.run.Set.RecordInterval = rec, 10*time.Second
	w.host.State = func(s *supervise.State) { s.Recording = "/atop/day/77-acme-web-test_unit" }
	return w, rec
}

const section = "\x1b[0Ksection_start:1800000000:vk_atop[collapsed=true]\r\x1b[0Kwhat the job's guest did (vk atop 77)\n" +
	"virtkit: /atop/day/77-acme-web-test_unit — what its guest did:\n" +
	"  cpu              1.7s of cpu time\n" +
	"\x1b[0Ksection_end:1800000000:vk_atop\r\x1b[0K\n"

func TestAccountEndsTheTrace(t *testing.T) {
	w, rec := recording(t)
	w.prepare()
	if r := w.host.Launched[0].Record; r == nil || r.Name != "77-acme-web-test_unit" || r.Interval != 10*time.Second {
		t.Errorf("record %+v", r)
	}
	w.stage("build_script", "x", nil)
	if strings.Contains(w.trace.String(), "vk_atop") || w.host.Samples != 0 {
		t.Errorf("too early:\n%s", &w.trace)
	}
	w.stage("cleanup_file_variables", "x", nil)
	if !strings.HasSuffix(w.trace.String(), section) || w.host.Samples != 1 {
		t.Errorf("%d samples, trace %q", w.host.Samples, &w.trace)
	}
	if len(rec.finished) != 0 {
		t.Errorf("finished %q while the guest runs", rec.finished)
	}
	// The supervisor's last word tells cleanup where it is.
	if err := os.WriteFile(w.host.Dir(w.id())+"/"+supervise.StateFile, []byte(`{"recording":"/atop/x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.run.Cleanup(context.Background(), w.call()); err != nil {
			t.Fatal(err)
		}
	}
	if d := cmp.Diff([]string{"/atop/x"}, rec.finished); d != "" {
		t.Error(d)
	}
}

// TestAccountOfALostGuest: the trace ends with the stage that lost the guest.
func TestAccountOfALostGuest(t *testing.T) {
	w, _ := recording(t)
	w.host.EndWith = &supervise.Exit{Reason: "panic"}
	w.prepare()
	w.host.Shell = func(context.Context, guestwire.ExecRequest, string, io.Writer, io.Writer, <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		w.host.KillGuest(w.id())
		select {}
	}
	if _, _, err := w.stage("build_script", "x", nil); err == nil {
		t.Fatal("the guest is not lost")
	}
	if !strings.HasSuffix(w.trace.String(), section) {
		t.Errorf("trace %q", &w.trace)
	}
}

// TestAccountOnce: of two stages that could end the trace the first has the
// account. The runner calls for after_script when a guest was lost, too.
func TestAccountOnce(t *testing.T) {
	w, _ := recording(t)
	w.prepare()
	for range 2 {
		w.stage("cleanup_file_variables", "x", nil)
	}
	if n := strings.Count(w.trace.String(), "section_start"); n != 1 {
		t.Errorf("%d accounts, want 1: trace %q", n, &w.trace)
	}
}

// TestNoAccount: no section without a recording, and the job does not mind.
func TestNoAccount(t *testing.T) {
	for name, change := range map[string]func(*world, *recordings){
		"off":     func(w *world, _ *recordings) { w.run.Set.RecordInterval, w.host.State = 0, nil },
		"none":    func(w *world, _ *recordings) { w.run.Recordings, w.host.State = nil, nil },
		"gone":    func(w *world, r *recordings) { r.err = fs.ErrNotExist },
		"damaged": func(w *world, r *recordings) { r.err = errors.New("bits are missing") },
	} {
		w, rec := recording(t)
		change(w, rec)
		w.prepare()
		code, _, err := w.stage("cleanup_file_variables", "x", nil)
		if code != 0 || err != nil || strings.Contains(w.trace.String(), "vk_atop") {
			t.Errorf("%s: %d, %v, trace %q", name, code, err, &w.trace)
		}
		if told := strings.Contains(w.trace.String(), "bits are missing"); told != (name == "damaged") {
			t.Errorf("%s: trace %q", name, &w.trace)
		}
		if name == "off" && w.host.Launched[0].Record != nil {
			t.Error("a guest is recorded that is not to be")
		}
	}
	w, _ := recording(t)
	w.host.State = func(s *supervise.State) { s.RecordErr = "no room" }
	w.prepare()
	w.wantTrace("virtkit: warning: the job's guest is not recorded: no room\n")
}
