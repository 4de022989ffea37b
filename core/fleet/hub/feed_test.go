package hub_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// TestEventKinds: the kinds that --kind takes are those that there are.
func TestEventKinds(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var used []string
	of := regexp.MustCompile(`(?:t\.event\([^,]+, |Event\{.*Kind: )"([a-z]+)"`)
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range of.FindAllStringSubmatch(string(b), -1) {
			used = append(used, m[1])
		}
	}
	slices.Sort(used)
	if used = slices.Compact(used); !slices.Equal(used, hub.EventKinds) {
		t.Errorf("used %q, listed %q", used, hub.EventKinds)
	}
}

// TestJobEvents: each change to a job's record is told, with how far it is.
func TestJobEvents(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		at := f.Feed().Last()
		id := f.mustSubmit("")
		n := f.node("a", 4)
		f.want(id, dispatch.Running, "")
		if list := f.Unsettled(); len(list) != 1 || list[0].ID != id {
			t.Errorf("not settled: %+v", list)
		}
		if _, e := f.Cancel(t.Context(), f.relay, id, wire.CancelGraceful); e != nil {
			t.Fatal(e)
		}
		f.want(id, dispatch.Finished, "canceled")
		if e := f.Settle(t.Context(), f.relay, id); e != nil {
			t.Fatal(e)
		}
		synctest.Wait() // what happened is published once it is stored, maybe after Settle's answer
		list, _, err := f.Feed().After(at, 1000)
		if err != nil {
			t.Fatal(err)
		}
		var told []string
		for _, e := range list {
			if e.Kind == "job" && e.Job == id && (len(told) == 0 || told[len(told)-1] != e.Text) {
				told = append(told, e.Text)
				if e.Node != "" && e.Node != n.ID || e.Node == "" && e.Text != "queued" {
					t.Errorf("%q is of node %q", e.Text, e.Node)
				}
			}
		}
		want := []string{"queued", "starting", "running", "running, cancel graceful", "finished: canceled", "finished, settled"}
		if !slices.Equal(told, want) {
			t.Errorf("told %q, want %q", told, want)
		}
		if list := f.Unsettled(); len(list) != 0 {
			t.Errorf("after it was settled: %+v", list)
		}
	})
}
