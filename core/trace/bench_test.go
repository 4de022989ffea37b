package trace

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// logOf is what jobs print, with a secret in one of a hundred lines.
func logOf(size int, secrets []string) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, "[%5d/5000] Compiling src/module_%d/file_%d.c -O2 -Wall\n", i, i%17, i)
		if i%100 == 0 {
			fmt.Fprintf(&b, "Authorization: Bearer %s\n", secrets[i%len(secrets)])
		}
	}
	return b.Bytes()
}

// BenchmarkTrace masks and stamps; beside it, the two ways at hand in the
// standard library, line by line.
func BenchmarkTrace(b *testing.B) {
	for _, n := range []int{1, 10, 1000} {
		secrets := manySecrets(n)
		text := logOf(1<<20, secrets)
		b.Run(fmt.Sprintf("vk/%d", n), func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			tr := New(io.Discard, Options{Secrets: secrets, Timestamps: true, Limit: 1 << 40})
			for b.Loop() {
				s := tr.Stream(Work, Stdout)
				for chunk := range slices.Chunk(text, 32<<10) {
					s.Write(chunk)
				}
				s.Close()
			}
		})
		lines := func(replace func(string) string) {
			w := bufio.NewWriter(io.Discard)
			sc := bufio.NewScanner(bytes.NewReader(text))
			for sc.Scan() {
				w.WriteString(time.Now().UTC().Format("2006-01-02T15:04:05.000000Z") + " 01O " + replace(sc.Text()) + "\n")
			}
		}
		b.Run(fmt.Sprintf("strings.Replacer/%d", n), func(b *testing.B) {
			var pairs []string
			for _, s := range secrets {
				pairs = append(pairs, s, "[MASKED]")
			}
			r := strings.NewReplacer(pairs...)
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				lines(r.Replace)
			}
		})
		if n > 10 {
			continue // minutes
		}
		b.Run(fmt.Sprintf("regexp/%d", n), func(b *testing.B) {
			re := regexp.MustCompile(strings.Join(secrets, "|"))
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				lines(func(s string) string { return re.ReplaceAllLiteralString(s, "[MASKED]") })
			}
		})
	}
}
