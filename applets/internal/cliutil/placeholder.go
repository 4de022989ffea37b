package cliutil

import (
	"context"

	"github.com/urfave/cli/v3"
)

// Placeholder is a program whose name is there and whose commands are not: it
// has help, and anything else is a usage error.
func Placeholder(name, usage, description string, err error) *cli.Command {
	c := &cli.Command{Name: name, Usage: usage, Description: description}
	c.Action = func(context.Context, *cli.Command) error { return &optionError{err} }
	return Takes(c, Arity{Max: -1})
}
