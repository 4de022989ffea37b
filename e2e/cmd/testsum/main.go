// Command testsum runs `go test` with the arguments it is given and prints what
// go test itself would: a line for each package, and the output of what failed.
// At the end come the skipped tests with their reasons and one line of counts.
// When nothing was printed for a minute, it says which tests are at work. Its
// exit status is 1 when go test's is not 0.
//
// With -strict as the first argument, a test that was skipped for want of
// something that `make test` sees to (a Debian package, bin/vk, a guest kernel)
// fails the run: else a host on which no guest runs would look well.
//
// With -again N, up to N tests that failed are run once more, alone, and what
// passes then does not fail the run; each is named at the end as unsteady, with
// its first output above, because it is a defect all the same: of a test that
// counts on a quiet host, or of what it tests. A package that panicked or was
// killed is run again as a whole and counts as one of the N: its other tests
// said nothing. Nothing is run again where more failed, or a package does not
// build.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// silence is how long nothing may be printed.
const silence = time.Minute

func main() {
	args, strict, again := os.Args[1:], false, 0
	if len(args) > 0 && args[0] == "-strict" {
		args, strict = args[1:], true
	}
	if len(args) > 1 && args[0] == "-again" {
		n, err := strconv.Atoi(args[1])
		if err != nil || n < 0 {
			fmt.Fprintf(os.Stderr, "testsum: -again %s: expected a number of tests\n", args[1])
			os.Exit(2)
		}
		args, again = args[2:], n
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := run(ctx, os.Stdout, os.Stderr, strict, again, args)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run is go test with these arguments. It is false when something failed.
func run(ctx context.Context, out, errs io.Writer, strict bool, again int, args []string) (bool, error) {
	s := newSummary(out)
	if err := goTest(ctx, s, errs, args); err != nil {
		return false, err
	}
	if failed := s.failures(); len(failed) > 0 && len(failed) <= again && len(s.unbuilt) == 0 && ctx.Err() == nil {
		flags := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return !strings.HasPrefix(a, "-") })
		for _, t := range failed {
			fmt.Fprintf(out, "once more, alone: %s\n", t)
			more := append(slices.Clone(flags), "-count=1")
			if t.Test != "" {
				more = append(more, "-run", "^"+t.Test+"$")
			}
			one := newSummary(out)
			if err := goTest(ctx, one, errs, append(more, t.Package)); err != nil {
				return false, err
			}
			if c := one.pkgs[t.Package]; c != nil && c.passed > 0 && c.failed == 0 && len(one.broken) == 0 {
				s.passedLater(t, one)
			}
		}
	}
	return s.end(strict) && ctx.Err() == nil, context.Cause(ctx)
}

// goTest feeds s with a run of go test.
func goTest(ctx context.Context, s *summary, errs io.Writer, args []string) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json", "-timeout", "40m"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it ends its tests
	cmd.WaitDelay = 10 * time.Second
	cmd.Stderr = errs
	pipe, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("running go test: %w", err)
	}
	lines, failed := make(chan []byte), make(chan error, 1)
	go func() {
		defer close(lines)
		in := bufio.NewReader(pipe) // a line may be as long as a test likes
		for {
			l, err := in.ReadBytes('\n')
			if len(l) > 0 {
				lines <- l
			}
			if err != nil {
				if err != io.EOF {
					failed <- err
				}
				return
			}
		}
	}()
	quiet := time.NewTicker(silence)
	defer quiet.Stop()
	for open := true; open; {
		select {
		case l, ok := <-lines:
			if open = ok; !ok {
				break
			}
			var e event
			if json.Unmarshal(l, &e) != nil {
				e = event{Action: "build-output", Output: string(l)}
			}
			if s.take(e) {
				quiet.Reset(silence)
			}
		case <-quiet.C:
			fmt.Fprintln(s.out, s.atWork(time.Now()))
		}
	}
	werr := cmd.Wait()
	select {
	case err := <-failed:
		return fmt.Errorf("reading from go test: %w", err)
	default:
	}
	if werr != nil && len(s.failures()) == 0 {
		s.broken = append(s.broken, "go test itself ("+werr.Error()+")")
		s.unbuilt = s.broken
	}
	return nil
}
