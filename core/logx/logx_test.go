package logx_test

import (
	"testing"

	"virtkit/core/logx"
)

// ending is a test that ends when it is told to.
type ending struct {
	testing.TB
	cleanup func()
	said    int
}

func (e *ending) Cleanup(f func()) { e.cleanup = f }
func (e *ending) Log(...any)       { e.said++ }

// What logs when its test is over says nothing: t.Log would panic.
func TestForTestOutlivesItsTest(t *testing.T) {
	e := &ending{TB: t}
	l := logx.ForTest(e)
	if l.Info("within"); e.said != 1 {
		t.Errorf("%d lines of one", e.said)
	}
	e.cleanup()
	if l.Info("after it"); e.said != 1 {
		t.Error("a line came after the end")
	}
}
