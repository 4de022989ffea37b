package ui_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/ui"
)

func terminal(tty bool, o ui.Options, kv ...string) (*ui.Terminal, *bytes.Buffer, *bytes.Buffer) {
	var out, err bytes.Buffer
	o.TTY = &tty
	o.Getenv = func(k string) string {
		for i := 0; i < len(kv); i += 2 {
			if kv[i] == k {
				return kv[i+1]
			}
		}
		return ""
	}
	return ui.New(&out, &err, o), &out, &err
}

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"plain é 漢 \n\tx":     "plain é 漢 \n\tx",
		"\x1b[2Jx\r\a\x7f":    `\x1b[2Jx\x0d\x07\x7f`,
		"\u009b31m":           `\u009b31m`,
		"a\u202eb\ufeff":      `a\u202eb\ufeff`,
		"\xff\xc3":            `\xff\xc3`,
		"real \ufffd stays":   "real \ufffd stays",
		"zero\u200bwidth\x00": `zero\u200bwidth\x00`,
	} {
		if got := ui.Clean(in); got != want {
			t.Errorf("Clean(%q) = %q, want %q", in, got, want)
		}
	}
	if got, want := ui.CleanLine("a\nb\tc"), `a\nb\tc`; got != want {
		t.Errorf("CleanLine = %q, want %q", got, want)
	}
	if got := ui.Truncate("häuser", 4); got != "häu…" {
		t.Errorf("Truncate = %q", got)
	}
}

func TestMessagesAndColor(t *testing.T) {
	e := fault.New(fault.NotFound, "no image \x1b[31mx").Hint("try %s", "vk images")
	for _, c := range []struct {
		name  string
		tty   bool
		color string
		env   []string
		want  string
	}{
		{"pipe", false, "", nil, "vk: warning: w\nvk: no image \\x1b[31mx\nvk: hint: try vk images\n"},
		{"tty", true, "auto", nil, "vk: \x1b[33mwarning:\x1b[0m w\nvk: no image \\x1b[31mx\nvk: \x1b[1mhint:\x1b[0m try vk images\n"},
		{"NO_COLOR", true, "", []string{"NO_COLOR", "1"}, "vk: warning: w\nvk: no image \\x1b[31mx\nvk: hint: try vk images\n"},
		{"dumb", true, "", []string{"TERM", "dumb"}, "vk: warning: w\nvk: no image \\x1b[31mx\nvk: hint: try vk images\n"},
		{"never", true, "never", nil, "vk: warning: w\nvk: no image \\x1b[31mx\nvk: hint: try vk images\n"},
		{"always", false, "always", []string{"NO_COLOR", "1"}, "vk: \x1b[33mwarning:\x1b[0m w\nvk: no image \\x1b[31mx\nvk: \x1b[1mhint:\x1b[0m try vk images\n"},
	} {
		tm, out, err := terminal(c.tty, ui.Options{Color: c.color}, c.env...)
		tm.Warnf("%s", "w")
		tm.Error(e)
		tm.Error(nil)
		tm.Error(fault.New(fault.JobFailed, "").WithExit(3))
		if d := cmp.Diff(c.want, err.String()); d != "" {
			t.Errorf("%s (-want +got)\n%s", c.name, d)
		}
		if out.Len() > 0 {
			t.Errorf("%s: messages on stdout: %q", c.name, out)
		}
	}
	if ui.CheckColor("auto") != nil || fault.KindOf(ui.CheckColor("alway")) != fault.Usage {
		t.Error("CheckColor")
	}
}

func TestDocuments(t *testing.T) {
	tm, out, _ := terminal(false, ui.Options{JSON: true})
	for _, v := range []any{struct {
		Name string `json:"name"`
	}{"<a>"}, []int{1, 2}, struct{}{}, map[string]int(nil)} {
		if err := tm.Event("x", v); err != nil {
			t.Fatal(err)
		}
	}
	if err := tm.Event("x", 3); err == nil {
		t.Error("a number was accepted as an event")
	}
	if err := tm.ErrorEvent(fault.New(fault.Busy, "full").Hint("wait")); err != nil {
		t.Fatal(err)
	}
	want := `{"type":"x","name":"<a>"}
{"type":"x","items":[1,2]}
{"type":"x"}
{"type":"x"}
{"type":"error","kind":"busy","code":11,"message":"full","hint":"wait"}
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	out.Reset()
	if err := tm.Document("images", []string{"a"}); err != nil {
		t.Fatal(err)
	}
	if want := "{\n  \"schema\": \"vk.images/1\",\n  \"items\": [\n    \"a\"\n  ]\n}\n"; out.String() != want {
		t.Errorf("got %s", out)
	}
}

func TestTable(t *testing.T) {
	tm, out, _ := terminal(true, ui.Options{})
	tb := tm.Table("NAME", "SIZE")
	tb.Row("a\tb\x1b", ui.Size(1536<<20))
	tb.Row("long name", 7)
	if err := tb.Print(); err != nil {
		t.Fatal(err)
	}
	want := "NAME       SIZE\na\\tb\\x1b   1.5GiB\nlong name  7\n"
	if d := cmp.Diff(want, out.String()); d != "" || tb.Len() != 2 {
		t.Errorf("%d rows (-want +got)\n%s", tb.Len(), d)
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-1: "0.0s", 450 * time.Millisecond: "0.5s", 12 * time.Second: "12s", 185 * time.Second: "3m05s", 7450 * time.Second: "2h04m",
	} {
		if got := ui.Duration(d); got != want {
			t.Errorf("Duration(%v) = %q, want %q", d, got, want)
		}
	}
}

// work is one task of 7 s with a step in between and a message.
func work(tm *ui.Terminal) {
	k := tm.Progress("pull \x1bx")
	k.Step("layers")
	k.Bytes(512<<20, 1<<30)
	time.Sleep(5500 * time.Millisecond)
	tm.Notef("hello")
	time.Sleep(1500 * time.Millisecond)
	k.Done(nil)
	k.Done(errors.New("twice"))
	k.Step("after the end")
	synctest.Wait() // the ticker has ended, else synctest reports it
	quick := tm.Progress("quick")
	quick.Done(nil)
	var none *ui.Task
	none.Step("x")
	none.Bytes(1, 2)
	none.Done(nil)
}

func TestProgressLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm, _, err := terminal(false, ui.Options{})
		work(tm)
		want := "vk: pull \\x1bx: layers 512MiB of 1GiB (50%) 5.0s\nvk: hello\nvk: pull \\x1bx: done in 7.0s\n"
		if d := cmp.Diff(want, err.String()); d != "" {
			t.Errorf("(-want +got)\n%s", d)
		}
	})
}

func TestProgressLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm, out, err := terminal(true, ui.Options{Color: "never"}, "COLUMNS", "30")
		work(tm)
		s := err.String()
		if !strings.Contains(s, "\r\x1b[Kvk: pull \\x1bx: layers 512Mi…") {
			t.Errorf("no live line of 29 columns in %q", s)
		}
		// The message comes after the live line was taken away.
		if !strings.Contains(s, "\r\x1b[Kvk: hello\n") || !strings.HasSuffix(s, "\r\x1b[Kvk: pull \\x1bx: done in 7.0s\n") {
			t.Errorf("message and ending are mixed up with the live line: %q", s)
		}
		if strings.Contains(s, "quick") || out.Len() > 0 {
			t.Errorf("too much: %q %q", s, out)
		}
	})
}

func TestProgressJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm, out, _ := terminal(true, ui.Options{JSON: true})
		k := tm.Progress("build")
		k.Step("one")
		time.Sleep(5500 * time.Millisecond)
		k.Done(errors.New("broke"))
		synctest.Wait()
		var got []string
		for line := range strings.Lines(out.String()) {
			var e struct{ Type, Title, State, Step, Error string }
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			got = append(got, fmt.Sprintf("%s %s %s %q %q", e.Type, e.Title, e.State, e.Step, e.Error))
		}
		want := []string{`progress build running "" ""`, `progress build running "one" ""`, `progress build running "one" ""`, `progress build failed "one" "broke"`}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("(-want +got)\n%s", d)
		}
	})
}

func TestQuietAndConcurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm, _, err := terminal(true, ui.Options{Quiet: true})
		tm.Progress("x").Done(nil)
		if err.Len() > 0 {
			t.Errorf("quiet prints %q", err)
		}
		tm, out, _ := terminal(true, ui.Options{})
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				k := tm.Progress(fmt.Sprint("task", i))
				for n := range int64(50) {
					k.Bytes(n, 50)
					time.Sleep(50 * time.Millisecond)
				}
				fmt.Fprintln(tm.Out(), "line")
				k.Done(nil)
			})
		}
		wg.Wait()
		synctest.Wait()
		if out.String() != strings.Repeat("line\n", 8) {
			t.Errorf("stdout = %q", out)
		}
	})
}
