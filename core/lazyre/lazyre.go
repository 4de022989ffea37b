// Package lazyre has regular expressions that are compiled when first used.
// Those of package variables would else be compiled at each start of each of
// virtkit's programs, of which a short command uses one or two; together they
// cost several milliseconds.
package lazyre

import (
	"regexp"
	"sync"
)

// RE is a regular expression. Make it with New; it is safe for concurrent use.
type RE struct{ get func() *regexp.Regexp }

// New returns the expression that expr, in the syntax of package regexp, will
// be at its first use, which panics when expr is none.
func New(expr string) *RE {
	return &RE{sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })}
}

// MatchString is regexp.Regexp's.
func (r *RE) MatchString(s string) bool { return r.get().MatchString(s) }

// FindStringSubmatch is regexp.Regexp's.
func (r *RE) FindStringSubmatch(s string) []string { return r.get().FindStringSubmatch(s) }
