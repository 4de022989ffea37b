package transfer

import (
	"strconv"
	"strings"

	"virtkit/core/cijob"
)

// maxWord is the longest ${...} that is read, in bytes; a longer one stays as it
// is written. It bounds what a name that is nothing but openings costs.
const maxWord = 4096

// Words replaces the variables of an artifact's name or path as gitlab-runner's
// helper does, which reads them as a shell reads what is between double quotes:
// ${X:-else}, ${X-else}, ${X:+then}, ${X+then} and ${#X} beside $X and ${X}, a
// backslash before a dollar. What a shell would know of itself is nothing.
// Commands are not run, and stay as they are written.
func Words(t cijob.Transfer, s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		switch {
		case s[i] == '\\' && i+1 < len(s) && strings.IndexByte("$`\"\\", s[i+1]) >= 0:
			b.WriteByte(s[i+1])
			i += 2
		case s[i] == '$' && i+1 < len(s):
			text, n := word(t, s[i+1:])
			b.WriteString(text)
			i += 1 + n
		default:
			b.WriteByte(s[i])
			i++
		}
	}
	return b.String()
}

// word reads what is behind a dollar, and how long it is.
func word(t cijob.Transfer, s string) (text string, n int) {
	if s[0] == '{' {
		if end := closing(s); end > 0 {
			return braced(t, s[1:end]), end + 1
		}
		return "$", 0
	}
	if n = name(s); n > 0 {
		text, _ = t.Env(s[:n])
		return text, n
	}
	if strings.IndexByte("$*@#?!-0123456789", s[0]) >= 0 {
		return "", 1
	}
	return "$", 0
}

// closing is where the brace that s begins with ends, 0 = nowhere near.
func closing(s string) int {
	depth := 0
	for i := range min(len(s), maxWord) {
		switch s[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return 0
}

// name is how much of s is a variable's name.
func name(s string) (n int) {
	for n < len(s) && (s[n] == '_' || s[n] >= 'a' && s[n] <= 'z' || s[n] >= 'A' && s[n] <= 'Z' || n > 0 && s[n] >= '0' && s[n] <= '9') {
		n++
	}
	return n
}

func braced(t cijob.Transfer, s string) string {
	if n := name(strings.TrimPrefix(s, "#")); strings.HasPrefix(s, "#") && n == len(s)-1 && n > 0 {
		v, _ := t.Env(s[1:])
		return strconv.Itoa(len([]rune(v)))
	}
	n := name(s)
	v, set := t.Env(s[:n])
	op := s[n:]
	if rest, colon := strings.CutPrefix(op, ":"); colon {
		op, set = rest, v != ""
	}
	switch {
	case op == "" || n == 0:
		return v
	case op[0] == '-' || op[0] == '=':
		if !set {
			return Words(t, op[1:])
		}
	case op[0] == '+':
		if set {
			return Words(t, op[1:])
		}
		return ""
	}
	return v
}
