package relay_test

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
)

// lines are a log that a test reads.
type lines struct {
	mu      sync.Mutex
	text    strings.Builder
	changed chan struct{}
}

func newLines() *lines { return &lines{changed: make(chan struct{})} }

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *lines) until(t *testing.T, want string) {
	t.Helper()
	ctx := within(t)
	for {
		l.mu.Lock()
		text, changed := l.text.String(), l.changed
		l.mu.Unlock()
		if strings.Contains(text, want) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("the log lacks %q:\n%s", want, text)
		}
	}
}
