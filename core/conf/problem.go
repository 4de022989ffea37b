package conf

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/fault"
)

// Problem is one thing wrong with a configuration.
type Problem struct {
	File string
	Line int // from 1; 0 = of no place
	Col  int // in characters, from 1
	Key  string
	Text string // what is wrong and what was expected
	Near string // the nearest right name or value; ""
}

// Error is FILE:LINE:COL: KEY: TEXT; did you mean NEAR?
func (p Problem) Error() string {
	var b strings.Builder
	if w := place(p.File, p.Line, p.Col); w != "" {
		b.WriteString(w + ": ")
	}
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	b.WriteString(p.Text)
	if p.Near != "" {
		b.WriteString("; did you mean " + p.Near + "?")
	}
	return b.String()
}

func place(file string, line, col int) string {
	if line > 0 {
		file += ":" + strconv.Itoa(line)
		if col > 0 {
			file += ":" + strconv.Itoa(col)
		}
	}
	return file
}

// Problems is everything wrong with a configuration, in the file's order.
type Problems []Problem

// Error has one line for each problem.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find a single Problem.
func (ps Problems) Unwrap() []error {
	out := make([]error, len(ps))
	for i, p := range ps {
		out[i] = p
	}
	return out
}

// ProblemsOf are the problems in err's chain.
func ProblemsOf(err error) Problems {
	ps, _ := errors.AsType[Problems](err)
	return ps
}

// fault makes the error for users: a usage error with all the lines.
func (ps Problems) fault() error {
	slices.SortStableFunc(ps, func(a, b Problem) int { return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col)) })
	return fault.New(fault.Usage, "").Because(ps).
		Hint("correct the file, then try it with `vk config check`; docs/config.md lists every key")
}

// problem is a Problem whose place is still a byte offset. more are others
// found in the same value.
type problem struct {
	off  int
	Key  string
	Text string
	Near string
	more []problem
}

func (p problem) err() error {
	ps := Problems{}
	for _, q := range append([]problem{p}, p.more...) {
		ps = append(ps, Problem{Key: cmp.Or(q.Key, p.Key), Text: q.Text, Near: q.Near})
	}
	return fault.New(fault.Usage, "").Because(ps).Hint("correct it or leave it out; docs/config.md lists every key")
}

type problemList []problem

func (l *problemList) add(p *problem) { *l = append(*l, *p) }

// chain is the list as one problem.
func (l problemList) chain() *problem {
	p := l[0]
	p.more = l[1:]
	return &p
}
