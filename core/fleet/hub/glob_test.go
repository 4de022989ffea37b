package hub

import (
	"strings"
	"testing"
)

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"", "", true}, {"", "a", false}, {"a", "", false}, {"*", "", true}, {"**", "", true}, {"?", "", false},
		{"a/b", "a/b", true}, {"a/b", "a/bc", false}, {"a/b", "xa/b", false},
		{"a/*", "a/b", true}, {"a/*", "a/", true}, {"a/*", "a/b/c", false}, {"a/**", "a/b/c", true}, {"a/***", "a/b/c", true},
		{"*/c", "b/c", true}, {"*/c", "a/b/c", false}, {"**/c", "a/b/c", true}, {"**/c", "c", false},
		{"a?c", "abc", true}, {"a?c", "a/c", false}, {"a?c", "ac", false}, {"v*.*", "v1.2", true}, {"v*.*", "v1", false},
		{"*a*b", "xaxb", true}, {"*a*b", "xaxbx", false}, {"a**b*c", "a/x/b1c", true}, {"a**b*c", "a/x/b/c", false},
		// Tried one after the other, these would take years.
		{strings.Repeat("**a", 20) + "b", strings.Repeat("a", 255), false},
		{strings.Repeat("**a", 20), strings.Repeat("a", 255), true},
	} {
		if got := glob(c.pattern, c.s); got != c.want {
			t.Errorf("glob(%q, %.20q) = %v", c.pattern, c.s, got)
		}
	}
}
