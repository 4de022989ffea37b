package trace

import (
	"bytes"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// through writes parts to one stream and returns the output.
func through(t testing.TB, o Options, parts ...string) string {
	t.Helper()
	var b bytes.Buffer
	tr := New(&b, o)
	s := tr.Stream(Work, Stdout)
	for _, p := range parts {
		if n, err := s.Write([]byte(p)); n != len(p) || err != nil {
			t.Fatalf("Write(%q) = %d, %v", p, n, err)
		}
	}
	if err := errors.Join(s.Close(), tr.Close()); err != nil {
		t.Fatal(err)
	}
	if size, crc := tr.Sum(); size != int64(b.Len()) || crc != crc32.ChecksumIEEE(b.Bytes()) {
		t.Errorf("the sums are of something else: %d, %08x", size, crc)
	}
	return b.String()
}

func TestSecrets(t *testing.T) {
	for _, c := range []struct {
		secrets []string
		in      string // | is where a write ends
		want    string
	}{
		{nil, "nothing to hide", "nothing to hide"},
		{[]string{""}, "an empty secret hides nothing", "an empty secret hides nothing"},
		{[]string{"hunter2"}, "hunter2", "[MASKED]"},
		{[]string{"hunter2"}, "h|u|n|t|e|r|2", "[MASKED]"},
		{[]string{"hunter2"}, "hunter2hunter2", "[MASKED][MASKED]"},
		{[]string{"hunter2"}, "hhunter2 hunterhunter2 hunter", "h[MASKED] hunter[MASKED] hunter"},
		{[]string{"hunter2"}, "hunter|", "hunter"},
		{[]string{"abab"}, "abaababab", "aba[MASKED]ab"},
		{[]string{"aa"}, "aaaaa", "[MASKED][MASKED]a"},
		{[]string{"aab"}, "aa|aab", "aa[MASKED]"},
		// The longer secret wins, wherever it starts.
		{[]string{"s3cr3t", "s3cr3t-longer"}, "s3cr3t s3cr3t-long|er s3cr3t-l|x", "[MASKED] [MASKED] [MASKED]-lx"},
		{[]string{"xab", "abcd"}, "xa|bcd xab", "x[MASKED] [MASKED]"},
		{[]string{"this is the end", "en foobar", "en"}, "this is the en| foobar", "this is the [MASKED]"},
		// Longest first: efghij, so not cdefg, so abc.
		{[]string{"abc", "cdefg", "efghij"}, "abcdefghij", "[MASKED]d[MASKED]"},
		{[]string{"xxAB", "BCD", "CD"}, "xxABCD", "[MASKED][MASKED]"},
		{[]string{"abc"}, "ab|x|ab|c", "abx[MASKED]"},
		{[]string{"line one\nline two"}, "line one\n|line two\n", "[MASKED]\n"},
		{[]string{"MASKED", "secret"}, "secret", "[MASKED]"},
		{[]string{"\xff\xfe"}, "a\xff|\xfeb", "a[MASKED]b"},
	} {
		if got := through(t, Options{Secrets: c.secrets}, strings.Split(c.in, "|")...); got != c.want {
			t.Errorf("%q in %q: %q, expected %q", c.secrets, c.in, got, c.want)
		}
	}
}

func TestTokensAndParameters(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"glpat-abc.D_-=9 next", "glpat-[MASKED] next"},
		{"xglpat-abc", "xglpat-[MASKED]"},
		{"gl|pat|-a|bc| next", "glpat-[MASKED] next"},
		{"glpat-| next glpat", "glpat- next glpat"},
		{"glpat-oneglpat-two", "glpat-[MASKED]"},
		{"gglpat-x ggl|pat-x", "gglpat-[MASKED] gglpat-[MASKED]"},
		{"_gitlab_session=0123; gltok-x glrtr-x gldt-x", "_gitlab_session=[MASKED]; gltok-[MASKED] glrtr-[MASKED] gldt-[MASKED]"},
		{"mine-abc", "mine-[MASKED]"},
		{"glcbt-64_hidden", "[MASKED]"},
		{"glpat-hidden1 glpat-a hidden1", "glpat-[MASKED] glpat-[MASKED] [MASKED]"},
		{"https://h/?private_token=abc&x=1", "https://h/?private_token=[MASKED]&x=1"},
		{"?X-Amz-Signature=deadbeef&x-AMZ-credential=a/b end", "?X-Amz-Signature=[MASKED]&x-AMZ-credential=[MASKED] end"},
		{"?|pri|vate_token|=|a|b|c", "?private_token=[MASKED]"},
		{"&rss_token=", "&rss_token=[MASKED]"},
		{"?x-amz-security-token=abc&authenticity_token=d end", "?x-amz-security-token=[MASKED]&authenticity_token=[MASKED] end"},
		{"&rss_token=a\x1b[0m", "&rss_token=[MASKED]\x1b[0m"},
		{"&rss_token=a\n&rss_token=b??rss_token=c", "&rss_token=[MASKED]\n&rss_token=[MASKED]??rss_token=[MASKED]"},
		{"rss_token=seen ?token=seen ?private_token_=seen ?xprivate_token=seen", "rss_token=seen ?token=seen ?private_token_=seen ?xprivate_token=seen"},
		{"?rss_token=hidden1hidden1#x", "?rss_token=[MASKED]"},
		{"?rss_to|", "?rss_to"},
		{"?a-key-longer-than-any-of-them=x?rss_token=y", "?a-key-longer-than-any-of-them=x?rss_token=[MASKED]"},
	} {
		o := Options{Secrets: []string{"glcbt-64_hidden", "hidden1"}, Prefixes: []string{"mine-", ""}}
		if got := through(t, o, strings.Split(c.in, "|")...); got != c.want {
			t.Errorf("%q: %q, expected %q", c.in, got, c.want)
		}
	}
}

// reference is the rule itself: of all occurrences the longest is replaced,
// then the longest that is left, of equal ones the first.
func reference(text string, secrets []string) string {
	type span struct{ from, to int }
	var all []span
	for _, s := range secrets {
		for i := 0; s != "" && i+len(s) <= len(text); i++ {
			if text[i:i+len(s)] == s {
				all = append(all, span{i, i + len(s)})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b span) int {
		if d := (b.to - b.from) - (a.to - a.from); d != 0 {
			return d
		}
		return a.from - b.from
	})
	var won []span
	for _, s := range all {
		if !slices.ContainsFunc(won, func(w span) bool { return w.from < s.to && s.from < w.to }) {
			won = append(won, s)
		}
	}
	slices.SortFunc(won, func(a, b span) int { return a.from - b.from })
	var b strings.Builder
	at := 0
	for _, w := range won {
		b.WriteString(text[at:w.from])
		b.WriteString("[MASKED]")
		at = w.to
	}
	return b.String() + text[at:]
}

// cutUp cuts text at random places.
func cutUp(rnd *rand.Rand, text string) []string {
	var parts []string
	for text != "" {
		n := 1 + rnd.IntN(len(text))
		parts = append(parts, text[:n])
		text = text[n:]
	}
	return parts
}

func TestSecretsAgainstTheRule(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	word := func(alphabet string, max int) string {
		b := make([]byte, 1+rnd.IntN(max))
		for i := range b {
			b[i] = alphabet[rnd.IntN(len(alphabet))]
		}
		return string(b)
	}
	for range 20000 {
		alphabet := "abc"[:1+rnd.IntN(3)]
		var secrets []string
		for range 1 + rnd.IntN(5) {
			secrets = append(secrets, word(alphabet, 6))
		}
		text := word(alphabet, 40)
		want := reference(text, secrets)
		parts := cutUp(rnd, text)
		if got := through(t, Options{Secrets: secrets}, parts...); got != want {
			t.Fatalf("%q in %q: %q, expected %q", secrets, parts, got, want)
		}
	}
}

// A thousand secrets, most of them beyond the states with a full row.
func TestManyLongSecrets(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	secrets := manySecrets(1000)
	var text strings.Builder
	for range 300 {
		text.WriteString("some words ")
		s := secrets[rnd.IntN(len(secrets))]
		text.WriteString(s[:rnd.IntN(len(s)+1)])
		text.WriteString(secrets[rnd.IntN(len(secrets))])
	}
	want := reference(text.String(), secrets)
	if strings.Count(want, "[MASKED]") < 300 {
		t.Fatal("the text holds too few secrets")
	}
	for range 5 {
		if got := through(t, Options{Secrets: secrets}, cutUp(rnd, text.String())...); got != want {
			t.Fatal("the output differs from the rule")
		}
	}
}

func manySecrets(n int) []string {
	rnd := rand.New(rand.NewPCG(5, 6))
	const chars = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	out := make([]string, n)
	for i := range out {
		b := make([]byte, 16+rnd.IntN(48))
		for j := range b {
			b[j] = chars[rnd.IntN(len(chars))]
		}
		out[i] = string(b)
	}
	return out
}

// All 256 bytes in use leave no class for the others.
func TestEveryByte(t *testing.T) {
	var all []byte
	for b := range 256 {
		all = append(all, byte(b))
	}
	if got := through(t, Options{Secrets: []string{string(all)}}, "a", string(all[:100]), string(all[100:]), "\x00b"); got != "a[MASKED]\x00b" {
		t.Errorf("%q", got)
	}
}

// Case S05: a long secret, one that is a prefix of another, and a secret in a
// line of megabytes, cut at each of its bytes.
func TestLongSecretsAndLines(t *testing.T) {
	long := strings.Repeat("0123456789", 600)
	if got := through(t, Options{Secrets: []string{long, long[:4000]}}, "a"+long[:3000], long[3000:]+"b"+long[:4500]); got != "a[MASKED]b[MASKED]"+long[4000:4500] {
		t.Errorf("%q", got)
	}
	secret := manySecrets(1)[0]
	for i := range secret {
		line := strings.Repeat("no newline ", 100<<10/11)
		if i == 7 {
			line = strings.Repeat("no newline ", 5<<20/11)
		}
		if got := through(t, Options{Secrets: []string{secret}, Limit: 64 << 20}, line+secret[:i], secret[i:]+line); got != line+"[MASKED]"+line {
			t.Fatalf("cut after %d bytes: %d bytes of output, with the secret: %v", i, len(got), strings.Contains(got, secret))
		}
	}
}

// What is held back is no more than what may still be a secret.
func TestHeldBack(t *testing.T) {
	var b bytes.Buffer
	s := New(&b, Options{Secrets: []string{"hunter2", "huge secret"}}).Stream(Work, Stdout)
	for _, c := range []struct{ in, out string }{
		{"plain text\n", "plain text\n"},
		{"hunter", ""},
		{"3\n", "hunter3\n"},
		{"hunter2", "[MASKED]"}, // nothing longer begins with it
		{"a glpa", "a "},
		{"b", "glpab"},
	} {
		b.Reset()
		s.Write([]byte(c.in))
		if b.String() != c.out {
			t.Errorf("after %q came %q, expected %q", c.in, b.String(), c.out)
		}
	}
}

// An output of nothing but the beginnings of secrets keeps memory bounded.
func TestHeldBackIsBounded(t *testing.T) {
	p := &phrases{a: newAutomaton(toBytes([]string{"aa", strings.Repeat("a", 50) + "b"})), next: plain{func([]byte) {}}}
	run := bytes.Repeat([]byte("a"), 10000)
	for range 20 {
		p.put(run, false)
		if len(p.held) > 200 || len(p.found) > 200 {
			t.Fatalf("%d bytes and %d occurrences are held back", len(p.held), len(p.found))
		}
	}
}

type ticks struct{ n int }

func (c *ticks) now() time.Time {
	c.n++
	return time.Date(2026, 11, 29, 16, 0, 0, 0, time.UTC).Add(time.Duration(c.n) * 1000001 * time.Microsecond)
}

func TestStamps(t *testing.T) {
	for _, c := range []struct{ in, want string }{ // | ends a write, whose lines share a stamp; N: is one
		{"a line\n", "1: a line\n"},
		{"a |line| in pieces\nnext\n", "1: a line in pieces\n2: next\n"},
		{"one\ntwo\n\nfour", "1: one\n1: two\n1: \n1: four\n"},
		{"10%\r|20%\r|done\r\n|next\n", "1: 10%\r\n2:+20%\r\n3:+done\r\n4: next\n"},
		{"dos\r\n|dos\r\n", "1: dos\r\n2: dos\r\n"},
		{"section_start:1:a\r\x1b[0K|heading\n|text\n", "1: section_start:1:a\r\x1b[0K\n2:+heading\n3: text\n"},
		{"text |section_end:1:a\r\x1b[0K|more", "1: text section_end:1:a\r\x1b[0K\n2:+more\n"},
		{"a\nb\rc|d\n", "1: a\n1: b\rc\n2:+d\n"},
		{"", ""},
		{strings.Repeat("x", 8000) + "|" + strings.Repeat("y", 200) + "|z\n", "1: " + strings.Repeat("x", 8000) + strings.Repeat("y", 200) + "\n2:+z\n"},
		{strings.Repeat("x", 8192) + "|z\n", "1: " + strings.Repeat("x", 8192) + "z\n"},
		{strings.Repeat("x", 8193) + "|z|\n", "1: " + strings.Repeat("x", 8193) + "\n2:+z\n"},
	} {
		want := ""
		for _, line := range strings.SplitAfter(c.want, "\n") {
			if n, rest, ok := strings.Cut(line, ":"); ok && len(n) == 1 {
				line = "2026-11-29T16:00:0" + n + ".00000" + n + "Z 01O" + rest
			}
			want += line
		}
		if got := through(t, Options{Timestamps: true, Clock: (&ticks{}).now}, strings.Split(c.in, "|")...); got != want {
			t.Errorf("%q:\n%q, expected\n%q", c.in, got, want)
		}
	}
}

func TestStreamsAreApart(t *testing.T) {
	var b bytes.Buffer
	tr := New(&b, Options{Timestamps: true, Secrets: []string{"hunter2"}, Clock: (&ticks{}).now})
	node, out, errs := tr.Stream(Executor, Stdout), tr.Stream(Work, Stdout), tr.Stream(255, Stderr)
	out.Write([]byte("begun hun"))
	errs.Write([]byte("ter2\n"))
	node.Write([]byte("node's\n"))
	out.Write([]byte("ter2\n"))
	for _, s := range []*Stream{node, out, errs} {
		s.Close()
	}
	if _, err := out.Write([]byte("x")); err == nil {
		t.Error("a closed stream takes more")
	}
	want := "2026-11-29T16:00:02.000002Z ffE ter2\n" +
		"2026-11-29T16:00:03.000003Z 00O node's\n" +
		"2026-11-29T16:00:01.000001Z 01O begun [MASKED]\n"
	if b.String() != want {
		t.Errorf("%q, expected\n%q", b.String(), want)
	}
}

func TestInvalidUTF8(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"\xff\xfe\xc3(", "\uFFFD\uFFFD\uFFFD("},
		{"\xe2\x9c|\x93 split", "\u2713 split"},
		{"\xe2|\x9c|\x93\xe2\x9c", "\u2713\uFFFD\uFFFD"},
		{"\xe2\x9c|x", "\uFFFD\uFFFDx"},
		{"nul\x00byte\xf0\x9f\x98\x80", "nul\x00byte\U0001F600"},
		{"\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD"},
	} {
		if got := through(t, Options{}, strings.Split(c.in, "|")...); got != c.want {
			t.Errorf("%q: %q, expected %q", c.in, got, c.want)
		}
	}
}

// Cases S04 and S06: one notice, and no character cut.
func TestLimit(t *testing.T) {
	notice := "\n\x1b[33;1mJob's log exceeded limit of 10 bytes.\nJob execution will continue but no more output will be collected.\x1b[0;m\n"
	for _, c := range []struct{ in, want string }{
		{"0123456789", "0123456789"},
		{"0123456789a", "0123456789" + notice},
		{"01234|56789|a|b|c", "0123456789" + notice},
		{"\U0001F600\U0001F600\U0001F600", "\U0001F600\U0001F600" + notice},
		{"012345678\xff", "012345678" + notice},
	} {
		got := through(t, Options{Limit: 10}, strings.Split(c.in, "|")...)
		if got != c.want || !utf8.ValidString(got) {
			t.Errorf("%q: %q, expected %q", c.in, got, c.want)
		}
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestWriterFails(t *testing.T) {
	tr := New(failing{}, Options{})
	s := tr.Stream(Work, Stdout)
	if _, err := s.Write([]byte("x")); err == nil || err.Error() != "disk full" {
		t.Errorf("Write: %v", err)
	}
	if tr.Close() == nil || s.Close() == nil {
		t.Error("the error is forgotten")
	}
}

// Secrets that begin with few bytes and with many, of all lengths, in texts that come in pieces of any length.
func TestBeginnings(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	word := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = "abcdefg\xff"[rnd.IntN(8)]
		}
		return string(b)
	}
	for range 2000 {
		var secrets []string
		for range 1 + rnd.IntN(12) {
			secrets = append(secrets, word(1+rnd.IntN(5)*rnd.IntN(2)+rnd.IntN(2)))
		}
		a := newAutomaton(toBytes(secrets))
		text := word(rnd.IntN(60))
		var got bytes.Buffer
		p := &phrases{a: a, next: plain{func(b []byte) { got.Write(b) }}}
		pieces := cutUp(rnd, text)
		for _, s := range pieces {
			p.put([]byte(s), false)
		}
		p.close()
		if want := reference(text, secrets); got.String() != want {
			t.Fatalf("%q in %q: %q, expected %q", secrets, pieces, got.String(), want)
		}
	}
}

func FuzzMasking(f *testing.F) {
	f.Add("abcabd", "abc", "bd", uint64(1))
	f.Add("aaaa", "aa", "aaab", uint64(2))
	f.Add("?private_token=abc glpat-xyz", "abc", "xyz", uint64(3))
	f.Fuzz(func(t *testing.T, text, a, b string, seed uint64) {
		text, a, b = text[:min(len(text), 200)], a[:min(len(a), 20)], b[:min(len(b), 20)]
		secrets := []string{a, b}
		rnd := rand.New(rand.NewPCG(seed, 0))
		var whole, parts bytes.Buffer
		for _, c := range []struct {
			to *bytes.Buffer
			in []string
		}{{&whole, []string{text}}, {&parts, cutUp(rnd, text)}} {
			p := &phrases{a: newAutomaton(toBytes(secrets)), next: plain{func(b []byte) { c.to.Write(b) }}}
			if p.a == nil {
				return
			}
			for _, s := range c.in {
				p.put([]byte(s), false)
			}
			p.close()
		}
		if want := reference(text, secrets); whole.String() != want || parts.String() != want {
			t.Errorf("%q in %q: %q whole, %q in parts, expected %q", secrets, text, whole.String(), parts.String(), want)
		}
		through(t, Options{Secrets: secrets, Timestamps: true, Limit: 100}, cutUp(rnd, text)...)
	})
}
