// Package cliutil is how every applet talks to its user: flags, help, usage
// errors, exit codes and output. It sits on urfave/cli and closes the doors
// that library leaves open: it never exits, never reads the environment by
// itself, refuses surplus arguments, repeated flags and unknown commands, and
// writes usage to stderr with status 2.
package cliutil

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/core/fault"
)

// Arity is how many arguments a command takes; Max below 0 means any number.
type Arity struct {
	Min, Max int
	// Tail is after how many arguments flags end: what follows belongs to
	// another program. 0 = flags may stand anywhere.
	Tail int
}

// keys of cli.Command.Metadata that this package owns.
const (
	metaArity = "arity"
	metaExit  = "exit"
	metaHelp  = "help"
	metaRuns  = "runs" // it has commands, and does something without one
)

// Takes declares a command's arguments.
func Takes(c *cli.Command, a Arity) *cli.Command {
	put(c, metaArity, a)
	if a.Tail > 0 {
		n := a.Tail
		c.StopOnNthArg = &n
	}
	return c
}

// Status is one line of a command's EXIT STATUS section.
type Status struct{ Code, Means string }

// Exits declares what a command's exit status can be beyond those that all
// commands share.
func Exits(c *cli.Command, s ...Status) *cli.Command {
	put(c, metaExit, s)
	return c
}

func put(c *cli.Command, key string, v any) {
	if c.Metadata == nil {
		c.Metadata = map[string]any{}
	}
	c.Metadata[key] = v
}

// ArityOf is what Takes declared; the zero Arity (no arguments) otherwise.
func ArityOf(c *cli.Command) Arity { a, _ := c.Metadata[metaArity].(Arity); return a }

// StatusOf is what Exits declared.
func StatusOf(c *cli.Command) []Status { s, _ := c.Metadata[metaExit].([]Status); return s }

// usageError is a mistake on the command line, with the command it was made in.
type usageError struct {
	path string // "vk run"
	line string // usage line
	err  error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// Prepare makes the tree below root behave as the package comment says. Call
// it once, after all commands and flags are in.
func Prepare(root *cli.Command, env appenv.Env) {
	root.Reader, root.Writer, root.ErrWriter = env.Stdin, env.Stdout, env.Stderr
	root.ExitErrHandler = func(context.Context, *cli.Command, error) {}
	prepare(root, root.Name, nil, env)
}

func prepare(c *cli.Command, path string, globals []*Flag, env appenv.Env) {
	c.HideHelp = true
	c.HideHelpCommand = true
	c.HideVersion = true
	c.DisableSliceFlagSeparator = true
	c.Suggest = false
	help := new(bool)
	if c.Name != "help" {
		c.Flags = append(c.Flags, Bool(help, "help", "show this help").Short("h").NoEnv())
	}
	own, inherited := FlagsOf(c), globals
	all := append(append([]*Flag(nil), own...), inherited...)
	c.OnUsageError = func(_ context.Context, _ *cli.Command, err error, _ bool) error {
		return &usageError{path, UsageLine(c, path), explain(err, all)}
	}
	action := c.Action
	if action != nil && len(c.Commands) > 0 {
		put(c, metaRuns, true)
	}
	c.Action = func(ctx context.Context, cc *cli.Command) error {
		if *help {
			_, err := io.WriteString(env.Stdout, HelpText(c, path, inherited))
			return err
		}
		usage := func(err error) error { return &usageError{path, UsageLine(c, path), err} }
		args := cc.Args().Slice()
		if len(c.Commands) > 0 && (action == nil || len(args) > 0) {
			if len(args) == 0 {
				return usage(errors.New("no command given"))
			}
			if args[0] == "help" {
				text, err := helpOf(c, path, globals, args[1:])
				if err != nil {
					return usage(err)
				}
				_, err = io.WriteString(env.Stdout, text)
				return err
			}
			return usage(unknownCommand(c, args[0]))
		}
		if err := checkArity(ArityOf(c), c.ArgsUsage, args); err != nil {
			return usage(err)
		}
		for _, f := range all {
			if err := f.fromEnvironment(env.LookupEnv); err != nil {
				return usage(err)
			}
		}
		err := action(ctx, cc)
		if u, ok := errors.AsType[*optionError](err); ok {
			return usage(u.err)
		}
		return err
	}
	for _, f := range own {
		if f.global {
			globals = append(globals, f)
		}
	}
	for _, sub := range c.Commands {
		prepare(sub, path+" "+sub.Name, globals, env)
	}
}

// helpOf answers "help WORDS…", which people type as often as --help.
func helpOf(c *cli.Command, path string, globals []*Flag, words []string) (string, error) {
	for _, w := range words {
		sub := c.Command(w)
		if sub == nil {
			return "", unknownCommand(c, w)
		}
		c, path = sub, path+" "+w
	}
	return HelpText(c, path, globals), nil
}

// optionError marks an error of a command's own validation, so that it is
// shown with the usage line.
type optionError struct{ err error }

func (e *optionError) Error() string { return e.err.Error() }
func (e *optionError) Unwrap() error { return e.err }

// BadOption reports options that do not go together or arguments that mean
// nothing; the user sees it with the command's usage line, and status 2.
func BadOption(format string, a ...any) error {
	return &optionError{fault.Newf(fault.Usage, format, a...)}
}

// FlagsOf lists the flags a command declares itself.
func FlagsOf(c *cli.Command) []*Flag {
	var out []*Flag
	for _, f := range c.Flags {
		if f, ok := f.(*Flag); ok {
			out = append(out, f)
		}
	}
	return out
}

// The two texts by which the library's parser says what was wrong. They are
// not API; a test fails when an upgrade changes them.
const (
	libUnknownFlag = "flag provided but not defined: -"
	libNeedsValue  = "flag needs an argument: "
)

// explain says in our words what the library's parser found.
func explain(err error, flags []*Flag) error {
	for _, f := range flags {
		if f.err != nil {
			return f.err
		}
	}
	text := err.Error()
	if name, ok := strings.CutPrefix(text, libUnknownFlag); ok {
		shown := "--" + name
		if len(name) == 1 {
			shown = "-" + name
		}
		var names []string
		for _, f := range flags {
			names = append(names, f.name)
		}
		if near := nearest(name, names); near != "" {
			return fmt.Errorf("unknown flag %s; did you mean --%s?", shown, near)
		}
		return fmt.Errorf("unknown flag %s", shown)
	}
	if name, ok := strings.CutPrefix(text, libNeedsValue); ok {
		if len(name) == 1 {
			name = "-" + name
		}
		return fmt.Errorf("flag %s needs a value", name)
	}
	return err
}

func unknownCommand(c *cli.Command, word string) error {
	var names []string
	for _, s := range c.Commands {
		if !s.Hidden {
			names = append(names, s.Name)
		}
	}
	if near := nearest(word, names); near != "" {
		return fmt.Errorf("unknown command %q; did you mean %q?", word, near)
	}
	return fmt.Errorf("unknown command %q", word)
}

func checkArity(a Arity, usage string, args []string) error {
	switch {
	case len(args) < a.Min:
		// Of a usage such as "[MORE…] WHAT", what may be left out is not missing.
		var words []string
		for _, w := range strings.Fields(usage) {
			if !strings.HasPrefix(w, "[") {
				words = append(words, w)
			}
		}
		if len(args) < len(words) {
			return fmt.Errorf("argument %s is missing", words[len(args)])
		}
		return errors.New("an argument is missing")
	case a.Max >= 0 && len(args) > a.Max:
		return fmt.Errorf("unexpected argument %q", args[a.Max])
	}
	return nil
}

// nearest is the word that s begins with or the beginning of (three letters at
// least), else the one at most two edits away, or "".
func nearest(s string, words []string) string {
	for _, w := range words {
		if min(len(s), len(w)) >= 3 && (strings.HasPrefix(s, w) || strings.HasPrefix(w, s)) {
			return w
		}
	}
	best, at := "", 3
	for _, w := range words {
		if d := distance(s, w); d < at && d < len(w) {
			best, at = w, d
		}
	}
	return best
}

// distance counts insertions, deletions and substitutions between a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diag := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diag, row[j] = row[j], min(row[j]+1, row[j-1]+1, diag+cost)
		}
	}
	return row[len(b)]
}
