// Package ui is how commands talk to people and to programs: results on
// stdout, everything else on stderr, live progress where there is a terminal,
// and JSON where a program reads.
//
// Vocabulary: a document is one JSON object with "schema":"vk.<thing>/1"; an
// event is one line of a JSON stream with "type". Text that comes from
// outside (names of images, error texts of registries, lines of a console)
// goes through Clean before it reaches a terminal, so that it cannot move the
// cursor or rewrite what stands above; messages and tables do that by
// themselves, Out and Err do not, since a guest's own output is the user's.
package ui

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	units "github.com/docker/go-units"
	"golang.org/x/term"

	"virtkit/core/fault"
)

// Options say how to print. The zero value is text with everything found out
// from the writers.
type Options struct {
	Name   string              // prefix of messages; "" = "vk"
	Getenv func(string) string // nil = os.Getenv; NO_COLOR, TERM, COLUMNS
	Color  string              // "always", "never"; "" and "auto" = on a terminal
	JSON   bool                // progress as events on stdout
	Quiet  bool                // no progress at all
	TTY    *bool               // for tests: whether both writers are terminals
}

// CheckColor refuses what --color does not know.
func CheckColor(s string) error {
	switch s {
	case "", "auto", "always", "never":
		return nil
	}
	return fault.Newf(fault.Usage, "--color %q: expected auto, always or never", s)
}

// Terminal prints. It is safe for concurrent use.
type Terminal struct {
	opts           Options
	stdout, stderr io.Writer
	outTTY, errTTY bool
	dumb           bool

	mu       sync.Mutex
	progress Progress
	tasks    []*Task
	stop     chan struct{} // ends the ticker; nil when there is no task
}

// New makes a Terminal. It starts nothing.
func New(stdout, stderr io.Writer, opts Options) *Terminal {
	if opts.Name == "" {
		opts.Name = "vk"
	}
	if opts.Getenv == nil {
		opts.Getenv = os.Getenv
	}
	t := &Terminal{opts: opts, stdout: stdout, stderr: stderr, outTTY: isTTY(stdout), errTTY: isTTY(stderr)}
	if opts.TTY != nil {
		t.outTTY, t.errTTY = *opts.TTY, *opts.TTY
	}
	t.dumb = opts.Getenv("TERM") == "dumb"
	switch {
	case opts.Quiet:
		t.progress = silent{}
	case opts.JSON:
		t.progress = &jsonProgress{t: t}
	case t.errTTY && !t.dumb:
		t.progress = &liveProgress{t: t}
	default:
		t.progress = &lineProgress{t: t}
	}
	return t
}

func isTTY(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// StdoutTTY and StderrTTY say whether a person is likely to be looking.
func (t *Terminal) StdoutTTY() bool { return t.outTTY }

// StderrTTY is StdoutTTY of stderr.
func (t *Terminal) StderrTTY() bool { return t.errTTY }

// JSONMode says whether the user asked for JSON.
func (t *Terminal) JSONMode() bool { return t.opts.JSON }

// Width is the terminal's width in columns, 80 when it cannot be told.
func (t *Terminal) Width() int {
	for _, w := range []io.Writer{t.stderr, t.stdout} {
		if f, ok := w.(*os.File); ok {
			if n, _, err := term.GetSize(int(f.Fd())); err == nil && n > 0 {
				return n
			}
		}
	}
	if n, err := strconv.Atoi(t.opts.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	return 80
}

// Style is how a piece of text looks.
type Style string

// The styles.
const (
	Bold   Style = "1"
	Dim    Style = "2"
	Red    Style = "31"
	Green  Style = "32"
	Yellow Style = "33"
)

// Paint is s in a style where colour is on for stderr, else s itself. It does
// not clean s.
func (t *Terminal) Paint(st Style, s string) string { return t.paint(t.errTTY, st, s) }

// PaintOut is Paint for text that goes to stdout.
func (t *Terminal) PaintOut(st Style, s string) string { return t.paint(t.outTTY, st, s) }

func (t *Terminal) paint(tty bool, st Style, s string) string {
	on := t.opts.Color == "always"
	if t.opts.Color == "" || t.opts.Color == "auto" {
		on = tty && !t.dumb && t.opts.Getenv("NO_COLOR") == ""
	}
	if !on {
		return s
	}
	return "\x1b[" + string(st) + "m" + s + "\x1b[0m"
}

// Out is stdout for a command's result, byte for byte.
func (t *Terminal) Out() io.Writer { return stream{t, t.stdout} }

// Err is stderr, byte for byte.
func (t *Terminal) Err() io.Writer { return stream{t, t.stderr} }

// stream takes the live line away before it writes.
type stream struct {
	t *Terminal
	w io.Writer
}

func (s stream) Write(p []byte) (int, error) {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.t.progress.Hide()
	return s.w.Write(p)
}

// Printf prints to stdout, its operands not cleaned.
func (t *Terminal) Printf(format string, a ...any) { fmt.Fprintf(t.Out(), format, a...) }

// Notef prints a message to stderr: "vk: …".
func (t *Terminal) Notef(format string, a ...any) { t.message("", fmt.Sprintf(format, a...)) }

// Warnf prints a warning to stderr: "vk: warning: …".
func (t *Terminal) Warnf(format string, a ...any) {
	t.message(t.Paint(Yellow, "warning:")+" ", fmt.Sprintf(format, a...))
}

// Error prints err and its hint to stderr; nothing for nil and for an error
// without text (a guest's own exit status).
func (t *Terminal) Error(err error) {
	if err == nil || err.Error() == "" {
		return
	}
	t.message("", err.Error())
	if h := fault.HintOf(err); h != "" {
		t.message(t.Paint(Bold, "hint:")+" ", h)
	}
}

func (t *Terminal) message(mark, text string) {
	fmt.Fprintf(t.Err(), "%s: %s%s\n", t.opts.Name, mark, Clean(text))
}

// Document prints v as one JSON document of a schema: Document("images", v)
// starts with "schema":"vk.images/1". v must encode as an object; a list is
// put under "items".
func (t *Terminal) Document(thing string, v any) error {
	return t.object(true, "schema", "vk."+thing+"/1", v)
}

// Event prints v as one line of a JSON stream: {"type":typ, …}.
func (t *Terminal) Event(typ string, v any) error { return t.object(false, "type", typ, v) }

// ErrorEvent is the last line of a stream that failed.
func (t *Terminal) ErrorEvent(err error) error {
	return t.Event("error", struct {
		Kind    fault.Kind `json:"kind"`
		Code    int        `json:"code"`
		Message string     `json:"message"`
		Hint    string     `json:"hint,omitempty"`
	}{fault.KindOf(err), fault.ExitCode(err), err.Error(), fault.HintOf(err)})
}

func (t *Terminal) object(indent bool, name, value string, v any) error {
	b, err := encodeObject(name, value, v)
	if err != nil {
		return err
	}
	if indent {
		var out bytes.Buffer
		if err := json.Indent(&out, b, "", "  "); err != nil {
			return err
		}
		b = out.Bytes()
	}
	_, err = t.Out().Write(append(b, '\n'))
	return err
}

// encodeObject puts a member before those of v.
func encodeObject(name, value string, v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encoding %s: %w", value, err)
	}
	b := bytes.TrimSpace(buf.Bytes())
	head := "{" + strconv.Quote(name) + ":" + strconv.Quote(value)
	switch {
	case bytes.Equal(b, []byte("{}")), bytes.Equal(b, []byte("null")):
		return []byte(head + "}"), nil
	case b[0] == '{':
		return append([]byte(head+","), b[1:]...), nil
	case b[0] == '[':
		return []byte(head + `,"items":` + string(b) + "}"), nil
	}
	return nil, errors.New("encoding " + value + ": neither an object nor a list")
}

// Table is rows of aligned columns for stdout.
type Table struct {
	t    *Terminal
	rows [][]string
}

// Table starts a table with these headings.
func (t *Terminal) Table(headings ...string) *Table {
	return &Table{t: t, rows: [][]string{headings}}
}

// Row adds a row; cells are printed with %v and cleaned.
func (tb *Table) Row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = CleanLine(fmt.Sprint(c))
	}
	tb.rows = append(tb.rows, row)
}

// Len is the number of rows without the headings.
func (tb *Table) Len() int { return len(tb.rows) - 1 }

// Print writes the table.
func (tb *Table) Print() error {
	var buf bytes.Buffer
	w := tabwriter.NewWriter(&buf, 0, 0, 2, ' ', 0)
	for _, r := range tb.rows {
		fmt.Fprintln(w, strings.Join(r, "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := tb.t.Out().Write(buf.Bytes())
	return err
}

// Size is bytes for people: "1.5GiB".
func Size(n int64) string { return units.BytesSize(float64(n)) }

// Duration is a time for people: "0.4s", "12s", "3m05s", "2h04m".
func Duration(d time.Duration) string {
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", max(d, 0).Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	}
	return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
}
