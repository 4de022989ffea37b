package trace

import (
	"bytes"
	"unicode"
)

// params masks the values of URL parameters that carry credentials:
// ?private_token=…, &x-amz-signature=…, in any case, up to the next separator,
// white space or control character.
type params struct {
	next    next
	key     []byte // since a ? or &, when inKey
	inKey   bool
	masking bool
}

// secretParams are the keys, as gitlab-runner has them (vectors/README.md 6.5).
var secretParams = map[string]bool{
	"private_token":        true,
	"authenticity_token":   true,
	"rss_token":            true,
	"x-amz-signature":      true,
	"x-amz-credential":     true,
	"x-amz-security-token": true,
}

const longestParam = len("x-amz-security-token")

func (s *params) put(p []byte, mark bool) {
	from := 0 // of what is not passed on yet
	for i := 0; i < len(p); {
		if s.masking {
			end := bytes.IndexFunc(p[i:], endsParam)
			if end < 0 {
				return
			}
			s.masking = false
			s.next.put(masked, true)
			i += end
			from = i
		}
		if !s.inKey {
			j := indexSeparator(p[i:])
			if j < 0 {
				break
			}
			i += j + 1
			s.inKey, s.key = true, s.key[:0]
			continue
		}
		switch b := p[i]; {
		case b == '?' || b == '&':
			s.key = s.key[:0]
		case b == '=':
			s.inKey = false
			if secretParams[string(bytes.ToLower(s.key))] {
				s.next.put(p[from:i+1], mark)
				from = i + 1
				s.masking = true
			}
		case len(s.key) == longestParam:
			s.inKey = false
		default:
			s.key = append(s.key, b)
		}
		i++
	}
	if from < len(p) {
		s.next.put(p[from:], mark)
	}
}

func (s *params) close() {
	if s.masking {
		s.masking = false
		s.next.put(masked, true)
	}
	s.next.close()
}

// indexSeparator is where a parameter may begin, or -1.
func indexSeparator(p []byte) int {
	const window = 256 // what is searched twice is bounded
	for at := 0; at < len(p); at += window {
		w := p[at:min(at+window, len(p))]
		i := bytes.IndexByte(w, '?')
		if i >= 0 {
			w = w[:i]
		}
		if j := bytes.IndexByte(w, '&'); j >= 0 {
			i = j
		}
		if i >= 0 {
			return at + i
		}
	}
	return -1
}

func endsParam(r rune) bool {
	return r == '?' || r == '&' || unicode.IsSpace(r) || unicode.IsControl(r)
}
