package policy

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds on strings that others chose, in bytes.
const (
	maxText = 256
	maxVM   = 64
)

// CleanName is a name fit for a trace or a list: lower case, no final dot, at
// most 253 bytes, and each character outside those a hostname is spelled with
// replaced by "?", a byte that is written as an escape (a\.b, \195) being one
// character. The root is ".".
func CleanName(name string) string {
	name = CanonicalName(name)
	if name == "" {
		return "."
	}
	var b strings.Builder
	for len(name) > 0 {
		r, n := utf8.DecodeRuneInString(name)
		if r == '\\' {
			n = escape(name)
		}
		name = name[n:]
		switch {
		case b.Len() >= maxName-3:
			return b.String() + "..?"
		case r < utf8.RuneSelf && (hostByte(byte(r)) || r == '.'):
			b.WriteByte(byte(r))
		default:
			b.WriteByte('?')
		}
	}
	return b.String()
}

// escape is how long the escape is that s begins with: a backslash with three
// digits or any other byte.
func escape(s string) int {
	if len(s) >= 4 && strings.Trim(s[1:4], "0123456789") == "" {
		return 4
	}
	return min(2, len(s))
}

// CleanText is text of others, at most n bytes, with everything that does not
// print, or that changes the direction of writing, replaced by "?".
func CleanText(s string, n int) string {
	ok := len(s) <= n
	for i := 0; ok && i < len(s); i++ {
		ok = s[i] >= 0x20 && s[i] < 0x7f
	}
	if ok {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			r = '?'
		}
		if b.Len()+utf8.RuneLen(r) > n-len("…") {
			return b.String() + "…"
		}
		b.WriteRune(r)
	}
	return b.String()
}

func cleanList(l []string) string {
	out := make([]string, len(l))
	for i, s := range l {
		out[i] = CleanText(s, maxText)
	}
	return strings.Join(out, ", ")
}
