package wire_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"virtkit/core/fleet/wire"
)

func id(n int) string { return fmt.Sprintf("%016x", n) }

func TestBoundWorkloads(t *testing.T) {
	var list []wire.Workload
	for i := range 300 {
		list = append(list, wire.Workload{ID: id(i), Kind: wire.KindRun, Started: int64(i)})
	}
	for i := range 10 {
		list = append(list, wire.Workload{ID: id(1000 + i), Kind: wire.KindJob, Started: int64(i)})
	}
	kept, omitted := wire.BoundWorkloads(list)
	if len(kept) != 256 || omitted != 54 {
		t.Fatalf("%d kept, %d omitted", len(kept), omitted)
	}
	// Jobs first, the newest before; then the newest of the rest.
	if kept[0].ID != id(1009) || kept[9].ID != id(1000) || kept[10].ID != id(299) || kept[255].ID != id(54) {
		t.Errorf("%s %s %s %s", kept[0].ID, kept[9].ID, kept[10].ID, kept[255].ID)
	}
	if list[0].ID != id(0) {
		t.Error("the argument was sorted")
	}
	again, more := wire.BoundWorkloads(kept)
	if len(again) != 256 || more != 0 || again[255] != kept[255] {
		t.Errorf("bounding twice: %d, %d", len(again), more)
	}

	// 256 KiB: entries of 2 KiB each, the first that does not fit ends it.
	list = nil
	for i := range 200 {
		list = append(list, wire.Workload{ID: id(i), Kind: wire.KindJob, Project: strings.Repeat("p", 300), Job: strings.Repeat("é", 300), Image: strings.Repeat("i", 300), Dir: strings.Repeat("d", 300), StateDir: strings.Repeat("s", 300), Space: strings.Repeat("w", 300), Env: strings.Repeat("e", 300), JobID: strings.Repeat("7", 300)})
	}
	kept, omitted = wire.BoundWorkloads(list)
	b, err := json.Marshal(kept)
	if err != nil || len(b) > wire.MaxWorkloadBytes || len(b) < wire.MaxWorkloadBytes-4096 || omitted != 200-len(kept) {
		t.Errorf("%d kept in %d bytes, %d omitted, %v", len(kept), len(b), omitted, err)
	}
	if n := len([]rune(kept[0].Job)); n != 256 {
		t.Errorf("a name of %d characters", n)
	}
}

func TestBoundOne(t *testing.T) {
	w := wire.Workload{ID: id(1), Kind: "job\x00", Project: "a\x1b[2Jb\u202e", JobURL: "javascript:alert(1)", SSHAlias: "w\x1be", GuestDir: "/wo\nrk", PID: -1, CPUs: -2, Reserved: -3, Started: -4}
	kept, _ := wire.BoundWorkloads([]wire.Workload{w, {ID: "XYZ"}, {ID: strings.ToUpper("00000000000000ab")}})
	if len(kept) != 1 {
		t.Fatalf("%d kept: an id that is not 16 lowercase hex digits drops the entry", len(kept))
	}
	if want := (wire.Workload{ID: id(1), Kind: "job", Project: "a[2Jb"}); kept[0] != want {
		t.Errorf("%+v", kept[0])
	}
}

func TestPlainURL(t *testing.T) {
	for s, want := range map[string]bool{
		"https://gitlab.example.com/acme/web/-/jobs/7":    true,
		"http://[2001:db8::1]:8080/x":                     true,
		"":                                                false,
		"ftp://example.com/":                              false,
		"HTTPS://example.com/":                            false,
		"https:///x":                                      false,
		"https://user@example.com/":                       false,
		"https://example.com/a b":                         false,
		"https://example.com/\"":                          false,
		"https://example.com/<x>":                         false,
		"https://example.com/`":                           false,
		"https://example.com\\@evil.example/":             false,
		"https://example.com/é":                           false,
		"https://example.com/" + strings.Repeat("a", 236): true,
		"https://example.com/" + strings.Repeat("a", 237): false,
		"javascript:alert(1)":                             false,
	} {
		if wire.PlainURL(s) != want {
			t.Errorf("PlainURL(%q) is not %v", s, want)
		}
	}
}

func FuzzBoundWorkloads(f *testing.F) {
	f.Add("0123456789abcdef", "p", "https://example.com/", "alias")
	f.Fuzz(func(t *testing.T, id, text, url, alias string) {
		kept, omitted := wire.BoundWorkloads([]wire.Workload{{ID: id, Project: text, JobURL: url, SSHAlias: alias}})
		if len(kept)+omitted != 1 {
			t.Fatal("entries were lost")
		}
		for _, w := range kept {
			for _, s := range []string{w.Project, w.JobURL, w.SSHAlias} {
				if strings.ContainsAny(s, "\x00\x1b\n\r\u202e\u200b") || len([]rune(s)) > 256 {
					t.Errorf("%q got through", s)
				}
			}
		}
	})
}
