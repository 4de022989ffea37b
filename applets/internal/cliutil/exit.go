package cliutil

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/core/fault"
	"virtkit/core/ui"
)

// Run parses args (args[0] is the program's name) against root, runs the
// command and returns the exit status, having told the user what went wrong.
func Run(ctx context.Context, root *cli.Command, env appenv.Env) int {
	Prepare(root, env)
	err := root.Run(ctx, env.Args)
	return Report(env.Stderr, root.Name, err)
}

// silent is an error whose text the user has seen already, or that has none.
type silent struct{ error }

// Silent keeps Report from printing err; the exit status stays.
func Silent(err error) error {
	if err == nil {
		return nil
	}
	return silent{err}
}

func (s silent) Unwrap() error { return s.error }

// Exit is an error that carries nothing but an exit status.
func Exit(code int) error {
	if code == 0 {
		return nil
	}
	return Silent(fault.New(fault.JobFailed, fmt.Sprintf("exit status %d", code)).WithExit(code))
}

// Report prints err as the program's last words and returns the exit status.
// It is the only place where an error becomes a status.
func Report(w io.Writer, prog string, err error) int {
	if err == nil {
		return 0
	}
	if _, ok := errors.AsType[silent](err); ok {
		return StatusFor(err)
	}
	for line := range strings.SplitSeq(ui.Clean(strings.TrimRight(err.Error(), "\n")), "\n") {
		fmt.Fprintf(w, "%s: %s\n", prog, line)
	}
	if u, ok := errors.AsType[*usageError](err); ok {
		fmt.Fprintf(w, "usage: %s\n", u.line)
		if h := fault.HintOf(err); h != "" {
			fmt.Fprintf(w, "%s: hint: %s\n", prog, ui.CleanLine(h))
		} else {
			fmt.Fprintf(w, "%s: hint: %s --help tells more\n", prog, u.path)
		}
		return StatusFor(err)
	}
	if h := fault.HintOf(err); h != "" {
		fmt.Fprintf(w, "%s: hint: %s\n", prog, ui.CleanLine(h))
	}
	return StatusFor(err)
}

// StatusFor is the exit status of an error: 0, 2 for a usage error, 130 for a
// context cancelled by a signal, else core/fault's.
func StatusFor(err error) int {
	if err == nil {
		return 0
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		return fault.Table[fault.Usage].Exit
	}
	if _, ok := errors.AsType[*fault.Error](err); !ok && errors.Is(err, context.Canceled) {
		return fault.Table[fault.Interrupted].Exit
	}
	return fault.ExitCode(err)
}

// JSON writes one document with its schema's name, such as vk.list/1, as the
// first key.
func JSON(w io.Writer, schema string, v any) error {
	body, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", schema, err)
	}
	if len(body) < 2 || body[0] != '{' {
		return fmt.Errorf("encoding %s: the document is not an object", schema)
	}
	head := fmt.Sprintf("{\n  \"schema\": %q", schema)
	if string(body) != "{}" {
		head += ","
	}
	_, err = fmt.Fprintf(w, "%s%s\n", head, strings.TrimPrefix(string(body), "{"))
	return err
}

// JSONLine is JSON on one line, for documents without end.
func JSONLine(w io.Writer, schema string, v any) error {
	var b, line bytes.Buffer
	if err := JSON(&b, schema, v); err != nil {
		return err
	}
	if err := json.Compact(&line, b.Bytes()); err != nil {
		return fmt.Errorf("encoding %s: %w", schema, err)
	}
	line.WriteByte('\n')
	_, err := w.Write(line.Bytes())
	return err
}
