package agent

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"virtkit/core/archive"
)

// repeated is a flag that may be given many times.
type repeated []string

// String implements flag.Value.
func (r *repeated) String() string { return fmt.Sprint(*r) }

// Set implements flag.Value.
func (r *repeated) Set(s string) error { *r = append(*r, s); return nil }

// notes writes each note as a line of JSON. What is no UTF-8 in a name is told
// as U+FFFD; the stream has it as it is.
func notes(w io.Writer) func(archive.Note) {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return func(n archive.Note) { e.Encode(n) }
}

// runArchive writes what is selected of the working directory to stdout. Its
// status is 1 after a Fatal note, 2 for wrong arguments.
func runArchive(args []string, stdout, stderr io.Writer) int {
	var s archive.Selection
	f := flag.NewFlagSet("vk-agent archive", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {}
	f.Var((*repeated)(&s.Paths), "path", "")
	f.Var((*repeated)(&s.Exclude), "exclude", "")
	f.BoolVar(&s.Untracked, "untracked", false, "")
	if f.Parse(args) != nil {
		fmt.Fprint(stderr, usage)
		return 2
	}
	if f.NArg() > 0 {
		return badUsage(stderr, fmt.Sprintf("archive: unexpected argument %q", f.Arg(0)))
	}
	say := notes(stderr)
	err := func() (err error) {
		if s.Tree, err = os.Getwd(); err != nil {
			return err
		}
		entries, err := archive.Select(s, say)
		if err != nil {
			return err
		}
		w := bufio.NewWriterSize(stdout, 256<<10)
		return errors.Join(archive.Write(w, s.Tree, entries, say), w.Flush())
	}()
	return fatal(err, say)
}

// runExtract makes files in the working directory from the stream on stdin.
func runExtract(args []string, stdin io.Reader, stderr io.Writer) int {
	var l archive.Limits
	f := flag.NewFlagSet("vk-agent extract", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {}
	f.Int64Var(&l.Bytes, "max-bytes", 0, "")
	if f.Parse(args) != nil {
		fmt.Fprint(stderr, usage)
		return 2
	}
	if f.NArg() > 0 {
		return badUsage(stderr, fmt.Sprintf("extract: unexpected argument %q", f.Arg(0)))
	}
	say := notes(stderr)
	return fatal(archive.Extract(bufio.NewReaderSize(stdin, 256<<10), ".", l, say), say)
}

func fatal(err error, say func(archive.Note)) int {
	if err == nil {
		return 0
	}
	say(archive.Note{Level: archive.Fatal, Text: err.Error()})
	return 1
}
