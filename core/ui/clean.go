package ui

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Clean makes text from outside safe to show: control characters (escape
// sequences, carriage returns, C1), marks that reorder text, and bytes that
// are no UTF-8 become visible as \x1b or \u202e. Newlines and tabs stay.
func Clean(s string) string { return clean(s, "\n\t") }

// CleanLine is Clean for text that must stay on one line.
func CleanLine(s string) string { return clean(s, "") }

func clean(s, keep string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case strings.ContainsRune(keep, r):
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < ' ' || r == 0x7f:
			fmt.Fprintf(&b, `\x%02x`, r)
		case r >= 0x80 && r < 0xa0, isFormat(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += n
	}
	return b.String()
}

// isFormat says whether r reorders or hides text: directional marks, line and
// paragraph separators, zero-width characters but the joiner.
func isFormat(r rune) bool {
	switch {
	case r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x2028, r == 0x2029,
		r == 0x200b, r == 0x200e, r == 0x200f, r == 0x061c, r == 0xfeff:
		return true
	}
	return false
}

// Truncate is s in at most n columns, one column a character.
func Truncate(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	r := []rune(s)
	if n < 1 {
		return ""
	}
	return string(r[:n-1]) + "…"
}
