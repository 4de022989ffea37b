package checkout

import (
	"fmt"
	"strings"
	"testing"
)

// What git says is told in few lines, whole ones, however it is written.
func TestEdges(t *testing.T) {
	say := func(text string, piece int) string {
		var e edges
		for text != "" {
			k := min(piece, len(text))
			if n, err := e.Write([]byte(text[:k])); n != k || err != nil {
				t.Fatalf("Write: %d, %v", n, err)
			}
			text = text[k:]
		}
		return e.String()
	}
	var many, want strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&many, "error: unable to write file f%03d\n", i)
		switch {
		case i == edgeLines:
			fmt.Fprintf(&want, "(%d more lines)\n", 1001-2*edgeLines)
		case i < edgeLines, i > 1000-edgeLines:
			fmt.Fprintf(&want, "error: unable to write file f%03d\n", i)
		}
	}
	many.WriteString("fatal: the last word")
	want.WriteString("fatal: the last word")
	for _, piece := range []int{1, 7, 4096, 1 << 20} {
		for text, want := range map[string]string{
			"": "", "one": "one", "one\n": "one", "a\n\nb\n": "a\n\nb",
			many.String(): want.String(),
			"a\n" + strings.Repeat("x", lineMax) + "\nb":   "a\n" + strings.Repeat("x", lineMax) + "\nb",
			"a\n" + strings.Repeat("x", lineMax+1) + "\nb": "a\n(a line of more than 4096 bytes)\nb",
			strings.Repeat("x", 1<<16):                     "(a line of more than 4096 bytes)",
		} {
			if got := say(text, piece); got != want {
				t.Errorf("pieces of %d: %.300q, want %.300q", piece, got, want)
			}
		}
	}
}
