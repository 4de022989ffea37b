package cliutil

import (
	"io"
	"os"
	"strings"

	"virtkit/core/fault"
)

// maxToken is the most that is read for a token, in bytes.
const maxToken = 4096

// Token is how a command is given a secret: by value, which shows it to every
// user of the host and is warned of, from a file, or from standard input.
type Token struct {
	Value string // of --token; - reads it from Stdin
	File  string // of --token-file
	Stdin io.Reader
	Warn  func(format string, args ...any)
	Hint  string // where one is had from
}

// Read is the token, without spaces around it. No error holds it.
func (o *Token) Read() (string, error) {
	switch {
	case o.Value != "" && o.File != "":
		return "", fault.New(fault.Usage, "--token and --token-file exclude each other")
	case o.File != "":
		f, err := os.Open(o.File)
		if err != nil {
			return "", fault.New(fault.Usage, "reading --token-file").Because(err)
		}
		defer f.Close()
		return tokenIn(f, o.File)
	case o.Value == "-":
		return tokenIn(o.Stdin, "standard input")
	case o.Value != "":
		o.Warn("a token on the command line can be read by every user of this host until join ends; --token - reads it from standard input")
		return o.Value, nil
	}
	return "", fault.New(fault.Usage, "no token").Hint("%s", o.Hint)
}

func tokenIn(r io.Reader, from string) (string, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxToken))
	if err != nil {
		return "", fault.Newf(fault.Usage, "reading the token from %s", from).Because(err)
	}
	if s := strings.TrimSpace(string(b)); s != "" {
		return s, nil
	}
	return "", fault.Newf(fault.Usage, "%s holds no token", from)
}
