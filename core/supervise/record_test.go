package supervise_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/atop"
	"virtkit/core/atop/archive"
	"virtkit/core/fault"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// place is where a test's recordings are.
type place struct {
	dir string
	err error
}

func (p place) Begin(name string) (string, error) {
	dir := filepath.Join(p.dir, name)
	if p.err != nil {
		return "", p.err
	}
	return dir, os.Mkdir(dir, 0o700)
}

func recorded(p place) func(*supervise.Spec, *supervise.Deps) {
	return func(s *supervise.Spec, d *supervise.Deps) {
		s.Record = &supervise.Record{Name: "1-job", Interval: time.Hour}
		d.Recordings = p
	}
}

func sampled(n int) []byte {
	return atop.AppendSample(nil, &atop.Sample{Reset: n == 1, Host: "h", Epoch: int64(n), Interval: 10, Has: atop.HasCPL})
}

func samplesIn(t *testing.T, path string) (n int) {
	t.Helper()
	st, err := archive.Samples(path, false, func(*atop.Sample) bool { n++; return true })
	if err != nil && !errors.Is(err, os.ErrNotExist) || st.Skipped+st.Torn > 0 {
		t.Fatalf("%+v, %v", st, err)
	}
	return n
}

// TestRecording: the first sample comes by itself, the last one before the
// guest is asked to end, and the log is held meanwhile.
func TestRecording(t *testing.T) {
	p := place{dir: t.TempDir()}
	d := &supervisetest.Driver{Sample: sampled, Process: true}
	w := run(t, d, keep, recorded(p))
	log := filepath.Join(p.dir, "1-job", atop.LogFile)
	eventually(t, "the first sample", func() bool { return samplesIn(t, log) == 1 })
	st, err := w.client.State(ctxFor(t))
	if err != nil || st.Recording != filepath.Dir(log) || st.RecordErr != "" {
		t.Errorf("%q, %q, %v", st.Recording, st.RecordErr, err)
	}
	if s := d.Last().Setups(); len(s) != 1 || !s[0].Record {
		t.Error("the guest was not told that it is recorded")
	}
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		t.Error("the log is not held while it is written")
	}
	if st, _ := f.Stat(); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
	// Asked for at once, it is the one that there is; later it is a new one.
	if err := w.client.Sample(ctxFor(t)); err != nil {
		t.Error(err)
	}
	eventually(t, "a second sample", func() bool {
		if err := w.client.Sample(ctxFor(t)); err != nil {
			t.Fatal(err)
		}
		return samplesIn(t, log) == 2
	})
	if _, err := w.client.Stop(ctxFor(t), 0); err != nil {
		t.Fatal(err)
	}
	w.wait()
	if n := samplesIn(t, log); n < 2 || n > 3 {
		t.Errorf("%d samples", n)
	}
	// A process that another test starts has every descriptor for a moment.
	eventually(t, "the log's lock is free after the end", func() bool {
		return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
	})
	b, err := os.ReadFile(filepath.Join(p.dir, "1-job", atop.ThreadsFile))
	if err != nil || !strings.HasPrefix(string(b), "# threads of the VMM, process ") || strings.Count(string(b), "\n") < 2 {
		t.Errorf("threads: %q, %v", b, err)
	}
	if st, err := supervise.ReadState(w.dir); err != nil || st.Recording != filepath.Dir(log) {
		t.Errorf("after the end: %+v, %v", st, err)
	}
}

// TestNoRecording: a guest that cannot be recorded runs, and says why.
func TestNoRecording(t *testing.T) {
	w := run(t, &supervisetest.Driver{Sample: sampled}, recorded(place{err: errors.New("no room")}))
	st, err := w.client.State(ctxFor(t))
	if err != nil || st.Phase != supervise.Running || st.Recording != "" || st.RecordErr != "no room" {
		t.Errorf("%+v, %v", st, err)
	}
	if err := w.client.Sample(ctxFor(t)); fault.KindOf(err) != fault.NotFound {
		t.Errorf("a sample: %v", err)
	}
	// And one that is not to be is not asked.
	d := &supervisetest.Driver{Sample: sampled}
	w = run(t, d)
	if err := w.client.Sample(ctxFor(t)); fault.KindOf(err) != fault.NotFound || d.Last().Samples() != 0 || d.Last().Setups()[0].Record {
		t.Errorf("%v, %d samples", err, d.Last().Samples())
	}
}

// TestRecordingKeepsWholeSamples: what the guest sends instead of a sample is
// not written, and the guest goes on.
func TestRecordingKeepsWholeSamples(t *testing.T) {
	p := place{dir: t.TempDir()}
	d := &supervisetest.Driver{Sample: func(n int) []byte {
		b := sampled(n)
		switch n {
		case 1:
			return nil
		case 2:
			return b[:len(b)-5]
		}
		return b
	}}
	run(t, d, recorded(p), func(s *supervise.Spec, _ *supervise.Deps) { s.Record.Interval = time.Second })
	log := filepath.Join(p.dir, "1-job", atop.LogFile)
	eventually(t, "the third sample", func() bool { return samplesIn(t, log) > 0 })
	if n := d.Last().Samples(); n < 3 {
		t.Errorf("asked %d times", n)
	}
}

// TestRecordingOverReboots: one log holds all boots.
func TestRecordingOverReboots(t *testing.T) {
	p := place{dir: t.TempDir()}
	w := run(t, &supervisetest.Driver{Sample: sampled}, recorded(p))
	log := filepath.Join(p.dir, "1-job", atop.LogFile)
	eventually(t, "the first sample", func() bool { return samplesIn(t, log) == 1 })
	if _, err := w.client.Reboot(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	boots := func() (n int) {
		archive.Samples(log, false, func(s *atop.Sample) bool {
			if s.Reset {
				n++
			}
			return true
		})
		return n
	}
	eventually(t, "a sample of the second boot", func() bool { return boots() == 2 })
}

// TestThreadsOf: of this very process, which is known to have threads that
// wait.
func TestThreadsOf(t *testing.T) {
	var p [2]int
	if err := unix.Pipe(p[:]); err != nil {
		t.Fatal(err)
	}
	fd := p[0]
	go unix.Read(fd, make([]byte, 1))
	want := fmt.Sprintf("read(%d → \"pipe:[", fd)
	eventually(t, "a thread in a read of a pipe", func() bool {
		return strings.Contains(supervise.ThreadsOf(os.Getpid()), want)
	})
	if text := supervise.ThreadsOf(os.Getpid()); !strings.Contains(text, "futex") && !strings.Contains(text, "epoll_pwait") {
		t.Errorf("%s", text)
	}
	if text := supervise.ThreadsOf(1 << 30); text != "" {
		t.Errorf("of nobody: %q", text)
	}
}
