package supervise_test

import (
	"strconv"
	"strings"
	"testing"

	"virtkit/core/supervise"
)

func ownerOf(t *testing.T, pid string) supervise.Owner {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(pid))
	if err != nil {
		t.Fatalf("pid %q: %v", pid, err)
	}
	o, err := supervise.ProcessOwner(n)
	if err != nil {
		t.Fatal(err)
	}
	return o
}
