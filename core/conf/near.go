package conf

import (
	"strconv"
	"strings"
)

// nearest is the word closest to s, quoted, or "" when none is close.
func nearest(s string, words []string) string {
	best, at := 1<<30, ""
	for _, w := range words {
		if d := distance(fold(s), fold(w)); d < best && plausible(d, s, w) {
			best, at = d, w
		}
	}
	if at == "" {
		return ""
	}
	return strconv.Quote(at)
}

// plausible says whether d edits can be a slip.
func plausible(d int, s, w string) bool {
	n := min(len(s), len(w))
	return d <= max(1, n/3) && d < n
}

// fold makes names comparable: hyphens, case and spaces are common slips.
func fold(s string) string {
	return strings.ToLower(strings.NewReplacer("-", "_", " ", "_").Replace(s))
}

// nearKey is the nearest key to a full name: a sibling, else a key of the
// same name in another section, else whatever is close as a whole.
func nearKey(name string) string {
	section, last := split(name)
	var siblings, all []string
	elsewhere := ""
	for _, r := range table {
		if r.section() == section {
			siblings = append(siblings, r.last())
		} else if elsewhere == "" && fold(r.last()) == fold(last) {
			elsewhere = r.name
		}
		all = append(all, r.name)
	}
	for _, s := range sections {
		if up, l := split(s.name); s.name != "" && up == section {
			siblings = append(siblings, l)
		}
	}
	if n := nearest(last, siblings); n != "" {
		return n
	}
	if elsewhere != "" {
		return strconv.Quote(elsewhere)
	}
	return nearest(name, all)
}

// nearSection is the nearest section, as a header.
func nearSection(name string) string {
	var all []string
	for _, s := range sections[1:] {
		all = append(all, s.name)
		if _, l := split(s.name); fold(l) == fold(name) {
			return "[" + s.name + "]"
		}
	}
	if n := nearest(name, all); n != "" {
		return "[" + strings.Trim(n, `"`) + "]"
	}
	_, last := split(name)
	for _, s := range sections[1:] {
		if _, l := split(s.name); l != s.name && fold(l) == fold(last) {
			return "[" + s.name + "]"
		}
	}
	return ""
}

// distance counts the insertions, deletions, substitutions and swaps of
// neighbours that turn a into b.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 1 << 20 // never close to any name, and not worth the time
	}
	prev2, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}
