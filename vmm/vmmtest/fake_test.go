package vmmtest_test

import (
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"virtkit/core/machine"
	"virtkit/vmm/vmmtest"
)

func TestFakePassesTheSuite(t *testing.T) {
	fake := &vmmtest.Fake{Agent: vmmtest.MiniAgent}
	vmmtest.RunSuite(t, vmmtest.Factory{
		Driver: fake,
		Spec:   machine.Spec{CPUs: 1, MemMiB: 64},
		Crash: func(machine.Machine) {
			gs := fake.Guests()
			gs[len(gs)-1].Crash("killed by SIGKILL")
		},
		Many: 32, FloodKiB: 16 << 10, Limit: 10 * time.Second,
	})
}

func TestKnobs(t *testing.T) {
	spec := machine.Spec{Name: "knobs", CPUs: 1, MemMiB: 64}
	for name, c := range map[string]struct {
		fake *vmmtest.Fake
		want machine.Reason
		text string
	}{
		"served": {&vmmtest.Fake{Serve: func(c net.Conn) { io.WriteString(c, "hi") }}, machine.PowerOff, "hi"},
		"panic":  {&vmmtest.Fake{BootPanic: "no init"}, machine.Panic, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := c.fake.Boot(t.Context(), spec)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(m.Control())
			if err != nil || string(got) != c.text {
				t.Errorf("control channel gave %q, %v", got, err)
			}
			if e, err := m.Wait(t.Context()); err != nil || e.Reason != c.want {
				t.Errorf("end is %+v, %v", e, err)
			}
			m.Control().Close()
		})
	}
	_, err := (&vmmtest.Fake{BootErr: io.ErrUnexpectedEOF}).Boot(t.Context(), spec)
	if err == nil || !strings.Contains(err.Error(), "knobs") {
		t.Errorf("boot error is %v", err)
	}
}
