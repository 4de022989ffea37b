package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is one line of `go test -json` (go doc test2json).
type event struct {
	Time                          time.Time
	Action, Package, Test, Output string
	FailedBuild                   string
}

// test names one test; Test is "" for its package as a whole.
type test struct{ Package, Test string }

func (t test) String() string { return strings.TrimSpace(t.Package + " " + t.Test) }

func compare(a, b test) int {
	return cmp.Or(strings.Compare(a.Package, b.Package), strings.Compare(a.Test, b.Test))
}

// provided are the reasons to skip that cannot be true after what `make test`
// does first: they name a Debian package or a make target as the remedy, or
// what those make. A test that tells no reason may hide one.
var provided = regexp.MustCompile(`apt-get install|\bmake (build|setup|kernel|test)\b|guest kernel|Debian's kernel|a state directory that can be written|` + noReason)

const noReason = "no reason given"

// counts are of one package. It came to its end when it said the verdict over
// all of its tests: one that panicked or was killed does not, and nobody knows
// what those after it would have said.
type counts struct {
	passed, failed, skipped int
	ended                   bool
	lately                  []string // what the test wrote that ended last
}

type summary struct {
	out     io.Writer
	output  map[test][]string
	running map[test]time.Time
	skips   map[test]string // reason
	pkgs    map[string]*counts
	broken  []string     // packages that failed with no failed test, or did not end
	unbuilt []string     // of these, those without a program
	failed  map[test]int // top-level tests that failed, with their parts
	later   []test       // what failed and passed alone: tests, and whole packages
}

func newSummary(out io.Writer) *summary {
	return &summary{out: out, output: map[test][]string{}, running: map[test]time.Time{}, skips: map[test]string{}, pkgs: map[string]*counts{}, failed: map[test]int{}}
}

// failures are what may be run again: the top-level tests that failed, and as a
// whole the packages that did not come to their end.
func (s *summary) failures() []test {
	var all []test
	for t := range s.failed {
		if !slices.Contains(s.broken, t.Package) {
			all = append(all, t)
		}
	}
	for _, p := range s.broken {
		all = append(all, test{Package: p})
	}
	slices.SortFunc(all, compare)
	return all
}

// passedLater notes that what had failed passed alone, in the run that one sums up.
func (s *summary) passedLater(t test, one *summary) {
	if t.Test == "" {
		s.pkgs[t.Package] = one.pkgs[t.Package]
		maps.DeleteFunc(s.skips, func(k test, _ string) bool { return k.Package == t.Package })
		maps.Copy(s.skips, one.skips)
		s.broken = slices.DeleteFunc(s.broken, func(p string) bool { return p == t.Package })
	} else {
		s.pkgs[t.Package].failed -= s.failed[t]
		s.pkgs[t.Package].passed += s.failed[t]
	}
	s.later = append(s.later, t)
}

// take counts an event and prints what is to be seen of it; true = something.
func (s *summary) take(e event) (printed bool) {
	show := func(text string) {
		fmt.Fprint(s.out, text)
		printed = printed || text != ""
	}
	t := test{e.Package, e.Test}
	pkg := s.pkgs[e.Package]
	if pkg == nil {
		pkg = &counts{}
		s.pkgs[e.Package] = pkg
	}
	switch e.Action {
	case "build-output":
		show(e.Output)
	case "start", "run":
		s.running[t] = e.Time
	case "output":
		switch {
		case e.Test != "":
			s.output[t] = append(s.output[t], e.Output)
		case e.Output != "PASS\n":
			// The closing line of a package, or what it printed outside of tests.
			pkg.ended = pkg.ended || e.Output == "FAIL\n"
			show(e.Output)
		}
	case "pass", "fail", "skip":
		delete(s.running, t)
		if e.Test == "" {
			if e.Action == "fail" {
				if !pkg.ended { // a panic may come under the name of a test that ended
					show(strings.Join(pkg.lately, ""))
				}
				show(s.unfinished(e.Package))
				if pkg.failed == 0 || !pkg.ended {
					s.broken = append(s.broken, e.Package)
				}
				if e.FailedBuild != "" {
					s.unbuilt = append(s.unbuilt, e.Package)
				}
			}
			return printed
		}
		lines := s.output[t]
		delete(s.output, t)
		pkg.lately = nil
		if e.Action != "fail" {
			pkg.lately = lines
		}
		switch e.Action {
		case "pass":
			pkg.passed++
		case "fail":
			pkg.failed++
			top, _, _ := strings.Cut(e.Test, "/")
			s.failed[test{e.Package, top}]++
			show(strings.Join(lines, ""))
		case "skip":
			pkg.skipped++
			s.skips[t] = reason(lines)
		}
	}
	return printed
}

// unfinished is what tests of a package wrote that never ended, because the
// package panicked or ran out of time. They count as failed.
func (s *summary) unfinished(pkg string) string {
	var text strings.Builder
	for _, t := range slices.SortedFunc(maps.Keys(s.running), compare) {
		if t.Package != pkg {
			continue
		}
		s.pkgs[pkg].failed++
		text.WriteString(strings.Join(s.output[t], "") + "--- NOT ENDED: " + t.Test + "\n")
		delete(s.output, t)
		delete(s.running, t)
	}
	return text.String()
}

// atWork names what runs, the longest first.
func (s *summary) atWork(now time.Time) string {
	var ts []test
	for t := range s.running {
		// A package or test whose part runs says nothing new.
		if !slices.ContainsFunc(slices.Collect(maps.Keys(s.running)), func(u test) bool {
			return u.Package == t.Package && (t.Test == "" && u.Test != "" || strings.HasPrefix(u.Test, t.Test+"/"))
		}) {
			ts = append(ts, t)
		}
	}
	if len(ts) == 0 {
		return "… building tests"
	}
	slices.SortFunc(ts, func(a, b test) int { return cmp.Or(s.running[a].Compare(s.running[b]), compare(a, b)) })
	var words []string
	for _, t := range ts[:min(3, len(ts))] {
		words = append(words, fmt.Sprintf("%s (%d s)", t, now.Sub(s.running[t])/time.Second))
	}
	if n := len(ts) - len(words); n > 0 {
		words = append(words, fmt.Sprintf("%d more", n))
	}
	return "… at work: " + strings.Join(words, ", ")
}

// end prints the skips and the counts. It is false when something failed; with
// strict that is also a skip for want of what is provided.
func (s *summary) end(strict bool) bool {
	var all counts
	for _, name := range slices.Sorted(maps.Keys(s.pkgs)) {
		c := s.pkgs[name]
		all.passed, all.failed, all.skipped = all.passed+c.passed, all.failed+c.failed, all.skipped+c.skipped
		if c.skipped > 0 && c.passed+c.failed == 0 {
			fmt.Fprintf(s.out, "nothing was tested in %s: it skipped all\n", name)
		}
	}
	var wrong []test
	for _, t := range slices.SortedFunc(maps.Keys(s.skips), compare) {
		fmt.Fprintf(s.out, "skipped: %s: %s\n", t, s.skips[t])
		if strict && provided.MatchString(s.skips[t]) {
			wrong = append(wrong, t)
		}
	}
	for _, t := range wrong {
		fmt.Fprintf(s.out, "FAIL: %s was skipped, and make test sees to what it needs: %s\n", t, s.skips[t])
	}
	for _, t := range s.later {
		did := "failed, its output is above, and passed alone"
		if t.Test == "" {
			did = "did not come to its end, its output is above, and did so alone"
		}
		fmt.Fprintf(s.out, "UNSTEADY: %s %s: a defect to be looked into\n", t, did)
	}
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped", all.passed, all.failed, all.skipped)
	if len(s.later) > 0 {
		fmt.Fprintf(s.out, ", %d unsteady", len(s.later))
	}
	if len(wrong) > 0 {
		fmt.Fprintf(s.out, " (%d of them must not be)", len(wrong))
	}
	if len(s.broken) > 0 {
		fmt.Fprintf(s.out, "; not built, not ended, or failed outside of tests: %s", strings.Join(s.broken, ", "))
	}
	fmt.Fprintln(s.out)
	return all.failed+len(wrong)+len(s.broken) == 0
}

// logged is the place that begins a line of a test's log.
var logged = regexp.MustCompile(`^\s*[^\s:]+\.go:\d+: (.*)`)

// reason is what a test said last before it was skipped, with its place.
func reason(lines []string) string {
	var out []string
	for l := range strings.Lines(strings.Join(lines, "")) {
		trimmed := strings.TrimSpace(l)
		switch m := logged.FindStringSubmatch(l); {
		case trimmed == "" || strings.HasPrefix(l, "=== ") || strings.HasPrefix(trimmed, "--- "):
		case m != nil && strings.TrimSpace(m[1]) == "":
			out = nil
		case m != nil:
			out = []string{trimmed}
		case len(out) > 0:
			out = append(out, trimmed) // of the same call
		}
	}
	if len(out) == 0 {
		return noReason
	}
	return strings.Join(out, " ")
}
