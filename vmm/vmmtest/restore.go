package vmmtest

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"virtkit/core/machine"
)

var (
	_ machine.Restorer = (*Fake)(nil)
	_ machine.Saver    = (*fakeMachine)(nil)
)

const savedFake = "fake guest with "

// StateKey implements machine.Restorer.
func (f *Fake) StateKey(_ context.Context, s machine.Spec) (key, why string, err error) {
	if len(s.Shares) > 0 {
		return "", "shares are in no state", nil
	}
	return fmt.Sprintf("%d CPUs %d MiB", s.CPUs, s.MemMiB), "", nil
}

// TimerKHz implements machine.Saver.
func (m *fakeMachine) TimerKHz() int { return 0 }

// Save implements machine.Saver.
func (m *fakeMachine) Save(_ context.Context, f *os.File) error {
	_, err := f.WriteString(savedFake + m.g.word() + ".")
	return err
}

// restore takes the guest's memory from a state.
func (g *Guest) restore() error {
	defer g.Spec.Restore.Close()
	b, err := io.ReadAll(g.Spec.Restore)
	if err != nil {
		return err
	}
	word, ok := strings.CutPrefix(string(b), savedFake)
	word, whole := strings.CutSuffix(word, ".")
	if !ok || !whole {
		return fmt.Errorf("the state is of no fake: %.20q", b)
	}
	g.setWord(word)
	return nil
}
