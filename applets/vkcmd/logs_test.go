package vkcmd

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"virtkit/core/supervise"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestLogsArePlainUnlessExact(t *testing.T) {
	dir := t.TempDir()
	raw := "\x1b[2J\x1b[31mred\x1b[0m\r\nnext\rover\n\x1b]0;title\x07x\x00\ty\x1b(Bz\n"
	write(t, filepath.Join(dir, "console.log.1"), "old\n")
	write(t, filepath.Join(dir, "console.log"), raw)
	write(t, filepath.Join(dir, supervise.CommandFile), "said\n")
	over := func() bool { return true }
	for _, tc := range []struct {
		o    logsOptions
		want string
	}{
		{logsOptions{}, "old\nred\nnext\nover\nx\tyz\n"},
		{logsOptions{exact: true}, "old\n" + raw},
		{logsOptions{command: true}, "said\n"},
	} {
		var b bytes.Buffer
		if err := printLogs(t.Context(), &b, dir, tc.o, over); err != nil || b.String() != tc.want {
			t.Errorf("%+v: %q, %v; want %q", tc.o, b.String(), err, tc.want)
		}
	}
}

// onWrite calls f with all that was written so far.
type onWrite struct {
	all []byte
	f   func(string)
}

func (w *onWrite) Write(p []byte) (int, error) {
	w.all = append(w.all, p...)
	w.f(string(w.all))
	return len(p), nil
}

func TestLogsFollowThroughARotationToTheEnd(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "console.log")
	write(t, log, "one\n")
	over, stage := false, 0
	w := &onWrite{}
	w.f = func(all string) {
		switch {
		case stage == 0 && all == "one\n":
			stage = 1
			f, err := os.OpenFile(log, os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			f.WriteString("two\n")
			if err := os.Rename(log, log+".1"); err != nil {
				t.Error(err)
			}
			write(t, log, "three\n")
		case stage == 1 && all == "one\ntwo\nthree\n":
			stage, over = 2, true
		}
	}
	done := make(chan error, 1)
	go func() {
		done <- printLogs(t.Context(), w, dir, logsOptions{follow: true, exact: true}, func() bool { return over })
	}()
	select {
	case err := <-done:
		if err != nil || stage != 2 {
			t.Errorf("stage %d, %v, %q", stage, err, w.all)
		}
	case <-time.After(time.Minute):
		t.Fatal("printLogs does not end")
	}
}

func TestEscapeSequencesCutAnywhere(t *testing.T) {
	raw := "a\x1b[31mb\x1b]0;t\x1b\\c\r\nd"
	for i := range len(raw) {
		var b bytes.Buffer
		p := &plainWriter{w: &b}
		p.Write([]byte(raw[:i]))
		p.Write([]byte(raw[i:]))
		if b.String() != "abc\nd" {
			t.Errorf("cut at %d: %q", i, b.String())
		}
	}
}
