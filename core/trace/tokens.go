package trace

// tokens masks what follows a token prefix and keeps the prefix:
// glpat-abc.def becomes glpat-[MASKED].
type tokens struct {
	a    *automaton
	next next

	s       int32
	held    []byte // the beginning of a prefix, from earlier writes
	after   bool   // a prefix has just ended, or its token goes on
	swallow bool   // there was at least one byte of a token
}

// DefaultTokenPrefixes are the prefixes of GitLab's own tokens that
// gitlab-runner masks unless FF_MASK_ALL_DEFAULT_TOKENS is off, when it masks
// the first alone (vectors/README.md 6.5).
var DefaultTokenPrefixes = []string{
	"glpat-", "gloas-", "gldt-", "glrt-", "glcbt-", "glrtr-", "glptt-", "glft-",
	"glimt-", "glagent-", "glsoat-", "glffct-", "_gitlab_session=", "gltok-",
}

// ofToken are the bytes that tokens are made of.
var ofToken = func() (t [256]bool) {
	for _, b := range []byte("-._=0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") {
		t[b] = true
	}
	return t
}()

func (t *tokens) put(p []byte, mark bool) {
	if mark {
		t.flush()
		t.next.put(p, true)
		return
	}
	a, s, from := t.a, t.s, 0
	k := a.seek(p)
	for i := 0; i < len(p); {
		if t.after {
			for i < len(p) && ofToken[p[i]] {
				t.swallow = true
				i++
			}
			from = i
			if i == len(p) {
				break
			}
			t.endToken()
		}
		if s == 0 {
			if i = k.from(i); i == len(p) {
				break
			}
		}
		s = a.step(s, p[i])
		i++
		if n := &a.nodes[s]; n.length > 0 || n.suffix > 0 {
			t.pass(p[from:i])
			s, from, t.after = 0, i, true
		}
	}
	t.s = s
	keep := min(int(a.nodes[s].depth), len(t.held)+len(p)-from)
	if n := len(p) - from - keep; n >= 0 {
		t.pass(p[from : from+n])
		t.held = append(t.held, p[from+n:]...)
		return
	}
	// What was held goes on being held, in part.
	n := len(t.held) + len(p) - from - keep
	if n > 0 {
		t.next.put(t.held[:n], false)
	}
	t.held = append(t.held[n:], p[from:]...)
}

// pass lets what is held and p through.
func (t *tokens) pass(p []byte) {
	if len(t.held) > 0 {
		t.next.put(t.held, false)
		t.held = t.held[:0]
	}
	if len(p) > 0 {
		t.next.put(p, false)
	}
}

func (t *tokens) endToken() {
	if t.swallow {
		t.next.put(masked, true)
	}
	t.after, t.swallow = false, false
}

// flush decides what is under way: no prefix goes on across a secret.
func (t *tokens) flush() {
	t.pass(nil)
	t.s = 0
}

func (t *tokens) close() {
	t.pass(nil)
	t.endToken()
	t.next.close()
}
