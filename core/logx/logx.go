// Package logx sets up log/slog for every applet and holds the keys of its
// attributes. Loggers are passed in as fields; nothing here is global.
package logx

import (
	"io"
	"log/slog"
	"sync"
	"testing"
)

// Keys of attributes that several packages log.
const (
	Comp = "comp" // component, such as "netsw"
	Job  = "job"  // job id
	Node = "node" // node id
	VM   = "vm"   // name of a guest
	Err  = "err"  // error
	Path = "path" // file concerned
)

// New makes a logger writing to w: JSON when asJSON, else text.
func New(w io.Writer, level slog.Level, asJSON bool) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if asJSON {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// Discard drops everything.
func Discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// ForTest logs everything to t.Log until t's cleanups begin that were there
// before this call. What comes later is dropped: t.Log of a test that is over
// would panic, and take the other tests of its package along.
func ForTest(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.t = nil
	})
	return New(w, slog.LevelDebug, false)
}

type testWriter struct {
	mu sync.Mutex
	t  testing.TB // nil once the test ends
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Log(string(p))
	}
	return len(p), nil
}
