package vkcmd

import (
	"testing"

	"virtkit/applets/internal/clitest"
)

func TestEveryCommandIsWhole(t *testing.T) {
	a, _, _ := testApp(t, nil)
	clitest.Whole(t, Command(a.env), 25)
}
