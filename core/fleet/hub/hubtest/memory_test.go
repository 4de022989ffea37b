package hubtest_test

import (
	"testing"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
)

func TestMemory(t *testing.T) {
	hubtest.RunSuite(t, func(*testing.T) (hub.Store, func() hub.Store) {
		m := hubtest.NewMemory()
		return m, func() hub.Store { return m.Copy() }
	})
}
