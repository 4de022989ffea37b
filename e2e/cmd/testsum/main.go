// Command testsum runs `go test` with the arguments it is given and prints what
// go test itself would: a line for each package, and the output of what failed.
// At the end come the skipped tests with their reasons and one line of counts.
// When nothing was printed for a minute, it says which tests are at work. Its
// exit status is 1 when go test's is not 0.
//
// With -strict as the first argument, a test that was skipped for want of
// something that `make test` sees to (a Debian package, bin/vk, a guest kernel)
// fails the run: else a host on which no guest runs would look well.
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
	"syscall"
	"time"
)

// silence is how long nothing may be printed.
const silence = time.Minute

func main() {
	args, strict := os.Args[1:], false
	if len(args) > 0 && args[0] == "-strict" {
		args, strict = args[1:], true
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := run(ctx, os.Stdout, os.Stderr, strict, args)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run is go test with these arguments. It is false when something failed.
func run(ctx context.Context, out, errs io.Writer, strict bool, args []string) (bool, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json", "-timeout", "40m"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it ends its tests
	cmd.WaitDelay = 10 * time.Second
	cmd.Stderr = errs
	pipe, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return false, fmt.Errorf("running go test: %w", err)
	}
	s := newSummary(out)
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
			fmt.Fprintln(out, s.atWork(time.Now()))
		}
	}
	werr := cmd.Wait()
	ok := s.end(strict) && werr == nil
	select {
	case err := <-failed:
		return false, fmt.Errorf("reading from go test: %w", err)
	default:
		return ok, context.Cause(ctx)
	}
}
