package gitlabcmd

import (
	"testing"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/clitest"
)

func TestEveryCommandIsWhole(t *testing.T) { clitest.Whole(t, Command(appenv.Env{}), 5) }
