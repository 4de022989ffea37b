package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// packages make go test say all that it can.
var packages = map[string]string{
	"ok/a_test.go":    "import \"testing\"\nfunc TestGood(t *testing.T) {}\n",
	"empty/empty.go":  "",
	"empty/x_test.go": "",
	"none/none.go":    "",
	"skips/a_test.go": `import ("fmt"; "testing")
func TestPart(t *testing.T) {
	t.Run("one", func(t *testing.T) { t.Log("some words"); t.Skip("needs one: apt-get install one") })
	t.Run("two words", func(t *testing.T) { t.Skipf("needs two\nlines: %d", 2) })
	t.Run("three", func(t *testing.T) {})
}
func TestSilent(t *testing.T) { fmt.Println("not a reason"); t.SkipNow() }
func TestEmpty(t *testing.T) { t.Skip() }
func TestFar(t *testing.T) { t.Parallel(); t.Run("in", func(t *testing.T) { t.Parallel(); t.Skip("needs root") }) }
`,
	"all/a_test.go":    "import \"testing\"\nfunc TestA(t *testing.T) { t.Skip(\"needs a guest kernel: none\") }\nfunc TestB(t *testing.T) { t.Skip(\"needs root\") }\n",
	"broken/a_test.go": "import \"testing\"\nfunc TestA(t *testing.T) { var x int = \"s\" }\n",
	"main/a_test.go":   "import (\"os\"; \"testing\")\nfunc TestMain(m *testing.M) { os.Exit(3) }\nfunc TestA(t *testing.T) {}\n",
	"fails/a_test.go":  "import \"testing\"\nfunc TestA(t *testing.T) { t.Error(\"it is wrong\") }\nfunc TestB(t *testing.T) { t.Log(\"not to be seen\") }\n",
	"unsteady/a_test.go": `import ("os"; "testing")
func TestA(t *testing.T) {
	t.Run("part", func(t *testing.T) {
		if _, err := os.Stat("been"); err != nil {
			os.WriteFile("been", nil, 0o644)
			t.Error("the first time")
		}
	})
}
`,
	"half/a_test.go": `import "testing"
func TestA(t *testing.T) { t.Run("good", func(t *testing.T) {}); t.Run("bad", func(t *testing.T) { t.Error("always") }) }
`,
	"panics/a_test.go": "import \"testing\"\nfunc TestA(t *testing.T) {}\nfunc TestB(t *testing.T) { panic(\"boom\") }\nfunc TestC(t *testing.T) {}\n",
	"once/a_test.go": `import ("os"; "testing")
func TestA(t *testing.T) {}
func TestB(t *testing.T) {
	if _, err := os.Stat("been"); err != nil {
		os.WriteFile("been", nil, 0o644)
		go panic("the first time")
		select {} // it must not have passed before
	}
}
func TestC(t *testing.T) { t.Skip("needs root") }
`,
	"slow/a_test.go": "import \"testing\"\nfunc TestA(t *testing.T) {}\nfunc TestB(t *testing.T) { t.Log(\"stuck\"); select {} }\n",
}

func module(t *testing.T, only ...string) {
	t.Helper()
	root := t.TempDir()
	write := func(name, text string) {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module m\n\ngo 1.26\n")
	for name, text := range packages {
		pkg := filepath.Dir(name)
		if len(only) == 0 || strings.Contains(strings.Join(only, " "), pkg) {
			write(name, "package "+pkg+"\n"+text)
		}
	}
	t.Chdir(root)
	t.Setenv("GOFLAGS", "")
	t.Setenv("GOWORK", "off")
}

// TestRealRun has go test itself run packages of every kind.
func TestRealRun(t *testing.T) {
	module(t)
	var out, errs bytes.Buffer
	ok, err := run(t.Context(), &out, &errs, true, 9, []string{"-trimpath", "-vet=off", "-timeout", "3s", "./..."})
	if ok || err != nil {
		t.Errorf("%v, %v of a run that failed", ok, err)
	}
	text := out.String()
	_, end, _ := strings.Cut(text, "nothing was tested")
	want := ` in m/all: it skipped all
skipped: m/all TestA: a_test.go:3: needs a guest kernel: none
skipped: m/all TestB: a_test.go:4: needs root
skipped: m/skips TestEmpty: no reason given
skipped: m/skips TestFar/in: a_test.go:10: needs root
skipped: m/skips TestPart/one: a_test.go:4: needs one: apt-get install one
skipped: m/skips TestPart/two_words: a_test.go:5: needs two lines: 2
skipped: m/skips TestSilent: no reason given
FAIL: m/all TestA was skipped, and make test sees to what it needs: a_test.go:3: needs a guest kernel: none
FAIL: m/skips TestEmpty was skipped, and make test sees to what it needs: no reason given
FAIL: m/skips TestPart/one was skipped, and make test sees to what it needs: a_test.go:4: needs one: apt-get install one
FAIL: m/skips TestSilent was skipped, and make test sees to what it needs: no reason given
9 passed, 8 failed, 7 skipped (4 of them must not be); not built, not ended, or failed outside of tests: m/broken, m/main, m/once, m/panics, m/slow
`
	if d := cmp.Diff(want, end); d != "" {
		t.Errorf("the end (-want +got)\n%s", d)
	}
	for _, want := range []string{
		"it is wrong", "panic: boom", "panic: test timed out", "stuck\n", "--- NOT ENDED: TestB\n", "cannot use \"s\"",
		"ok  \tm/ok\t", "m/none\t[no test files]", "FAIL\tm/broken [build failed]",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not to be seen", want)
		}
	}
	for _, not := range []string{"not to be seen", "not a reason", "PASS\n"} {
		if strings.Contains(text, not) {
			t.Errorf("%q is to be seen", not)
		}
	}
	if t.Failed() {
		t.Logf("all of it:\n%s%s", text, errs.String())
	}
}

func TestGoodRun(t *testing.T) {
	module(t, "ok", "none", "skips")
	var out bytes.Buffer
	ok, err := run(t.Context(), &out, io.Discard, false, 0, []string{"-trimpath", "-vet=off", "./..."})
	if !ok || err != nil || !strings.HasSuffix(out.String(), "\n4 passed, 0 failed, 5 skipped\n") {
		t.Errorf("%v, %v\n%s", ok, err, &out)
	}
	out.Reset()
	if ok, _ := run(t.Context(), &out, io.Discard, false, 0, []string{"./absent"}); ok {
		t.Errorf("packages that are not there are well\n%s", &out)
	}
}

// TestOnceMore runs again what failed, if that is little, and says so.
func TestOnceMore(t *testing.T) {
	module(t, "ok", "fails", "unsteady", "half")
	args := []string{"-trimpath", "-vet=off", "./..."}
	var out bytes.Buffer
	ok, err := run(t.Context(), &out, io.Discard, false, 3, args)
	if ok || err != nil {
		t.Errorf("%v, %v of a run with a test that always fails", ok, err)
	}
	for _, want := range []string{
		"once more, alone: m/fails TestA\n", "once more, alone: m/unsteady TestA\n",
		"UNSTEADY: m/unsteady TestA failed, its output is above, and passed alone: a defect to be looked into\n5 passed, 3 failed, 0 skipped, 1 unsteady\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "UNSTEADY: m/fails") || strings.Contains(out.String(), "UNSTEADY: m/half") {
		t.Errorf("a test that failed twice is called unsteady\n%s", &out)
	}
	for again, want := range []bool{false, true} {
		os.Remove("unsteady/been")
		out.Reset()
		if ok, err := run(t.Context(), &out, io.Discard, false, again, []string{"-trimpath", "-vet=off", "./ok", "./unsteady"}); ok != want || err != nil {
			t.Errorf("-again %d: %v, %v, want %v\n%s", again, ok, err, want, &out)
		}
	}
}

// A package that did not come to its end is run again as a whole: else those of
// its tests that had not begun would count as well.
func TestOnceMoreWhole(t *testing.T) {
	module(t, "ok", "once", "panics")
	args := []string{"-trimpath", "-vet=off", "./ok", "./once"}
	var out bytes.Buffer
	if ok, err := run(t.Context(), &out, io.Discard, false, 0, args); ok || err != nil {
		t.Errorf("%v, %v of a package that panicked\n%s", ok, err, &out)
	}
	os.Remove("once/been")
	out.Reset()
	ok, err := run(t.Context(), &out, io.Discard, false, 1, args)
	end := "skipped: m/once TestC: a_test.go:11: needs root\n" +
		"UNSTEADY: m/once did not come to its end, its output is above, and did so alone: a defect to be looked into\n" +
		"3 passed, 0 failed, 1 skipped, 1 unsteady\n"
	if !ok || err != nil || !strings.HasSuffix(out.String(), end) || !strings.Contains(out.String(), "once more, alone: m/once\n") ||
		!strings.Contains(out.String(), "panic: the first time") {
		t.Errorf("%v, %v\n%s", ok, err, &out)
	}
	out.Reset()
	if ok, err := run(t.Context(), &out, io.Discard, false, 1, []string{"-trimpath", "-vet=off", "./ok", "./panics"}); ok || err != nil ||
		!strings.Contains(out.String(), "failed outside of tests: m/panics\n") {
		t.Errorf("%v, %v of a package that always panics\n%s", ok, err, &out)
	}
}

func TestAtWork(t *testing.T) {
	start := time.Unix(1e9, 0)
	s := newSummary(&bytes.Buffer{})
	if got := s.atWork(start); got != "… building tests" {
		t.Errorf("nothing at work: %q", got)
	}
	at := func(after time.Duration, action, pkg, name string) {
		s.take(event{Time: start.Add(after), Action: action, Package: pkg, Test: name})
	}
	at(0, "start", "a", "")
	at(1*time.Second, "run", "a", "T1")
	at(2*time.Second, "run", "a", "T1/x")
	at(3*time.Second, "start", "b", "")
	at(4*time.Second, "run", "a", "T1x")
	at(5*time.Second, "pass", "a", "T1x")
	if got, want := s.atWork(start.Add(62*time.Second)), "… at work: a T1/x (60 s), b (59 s)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	at(4*time.Second, "run", "b", "T3")
	at(5*time.Second, "run", "b", "T1")
	at(5*time.Second, "run", "b", "T2")
	if got, want := s.atWork(start.Add(62*time.Second)), "… at work: a T1/x (60 s), b T3 (58 s), b T1 (57 s), 1 more"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
