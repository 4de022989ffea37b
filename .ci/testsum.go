//go:build ignore

// Testsum runs `go test` on the packages it is given and prints what go test
// itself would: a line for each package, and the output of what failed. At the
// end come the skipped tests with their reasons and one line of counts. Its
// exit status is that of go test.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

type event struct {
	Action, Package, Test, Output, ImportPath string
}

func main() {
	args := append([]string{"test", "-json", "-timeout", "40m"}, os.Args[1:]...)
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
	s := summary{output: map[string][]string{}}
	in := bufio.NewScanner(pipe)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		var e event
		if json.Unmarshal(in.Bytes(), &e) != nil {
			fmt.Println(in.Text())
			continue
		}
		s.take(e)
	}
	if err := in.Err(); err != nil {
		fmt.Fprintln(os.Stderr, "testsum: reading go test:", err)
		s.failed++
	}
	err = cmd.Wait()
	s.end()
	if err != nil || s.failed > 0 {
		os.Exit(1)
	}
}

type summary struct {
	passed, failed, skipped int
	output                  map[string][]string // by package and test
	skips                   []string
}

func (s *summary) take(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		fmt.Print(e.Output)
	case "output":
		if e.Test == "" {
			// The closing line of a package, or what it printed outside of tests.
			if e.Output != "PASS\n" {
				fmt.Print(e.Output)
			}
			return
		}
		s.output[key] = append(s.output[key], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			if e.Action == "fail" {
				s.unfinished(e.Package)
			}
			return
		}
		lines := s.output[key]
		delete(s.output, key)
		switch e.Action {
		case "pass":
			s.passed++
		case "fail":
			s.failed++
			fmt.Print(strings.Join(lines, ""))
		case "skip":
			s.skipped++
			s.skips = append(s.skips, key+": "+reason(lines))
		}
	}
}

// unfinished prints what tests of a package wrote that never ended, because
// the package panicked or ran out of time.
func (s *summary) unfinished(pkg string) {
	for key, lines := range s.output {
		if strings.HasPrefix(key, pkg+" ") {
			s.failed++
			fmt.Print(strings.Join(lines, ""))
			delete(s.output, key)
		}
	}
}

func (s *summary) end() {
	slices.Sort(s.skips)
	for _, l := range s.skips {
		fmt.Println("skipped:", l)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
}

// reason is what a test said when it skipped itself.
func reason(lines []string) string {
	var out []string
	for _, l := range lines {
		l = strings.TrimSpace(l)
		if l == "" || strings.HasPrefix(l, "===") || strings.HasPrefix(l, "---") {
			continue
		}
		out = append(out, l)
	}
	if len(out) == 0 {
		return "no reason given"
	}
	return out[len(out)-1]
}
