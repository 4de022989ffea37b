package logx_test

import (
	"log/slog"
	"testing"

	"virtkit/core/logx"
)

// What logs when its test is over neither panics nor fails another test.
func TestForTestOutlivesItsTest(t *testing.T) {
	var l *slog.Logger
	said := make(chan struct{})
	t.Run("part", func(t *testing.T) {
		t.Cleanup(func() { l.Info("while it ends") })
		l = logx.ForTest(t)
		l.Info("within")
		go func() {
			defer close(said)
			<-t.Context().Done()
			l.Info("as it ends")
		}()
	})
	<-said
	l.Info("after it")
}
