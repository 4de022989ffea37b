package auth

import (
	"path"
	"strings"

	"virtkit/core/lazyre"
)

// maxPath is the most bytes of a path to come back to.
const maxPath = 512

// local is a path of plain segments, with a query of plain characters. What a
// browser could read as another host, or as another path than this program
// does, is not in it: a second slash in front, backslashes, percent-encoding in
// the path, control characters, spaces, other alphabets.
var local = lazyre.New(`^/([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*/?)?(\?[A-Za-z0-9._~=&%+-]*)?$`)

// LocalPath is s if it is a plain path of this site to which a browser may be
// sent, with or without a query, and "/" otherwise. The paths of signing in
// and out are none: who is signed in has nothing to do there.
func LocalPath(s string) string {
	if len(s) > maxPath || !local.MatchString(s) {
		return "/"
	}
	p, _, _ := strings.Cut(s, "?")
	if c := path.Clean(p); c != p && c+"/" != p {
		return "/" // dot segments, which browsers resolve
	}
	switch first, _, _ := strings.Cut(strings.TrimPrefix(p, "/"), "/"); first {
	case "auth", "login", "logout", "static":
		return "/"
	}
	return s
}
