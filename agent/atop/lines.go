package atop

import (
	"bytes"
	"strings"
)

// Reading of what /proc prints. Whatever is not there is 0.

// num is the number that b begins with, after spaces.
func num(b []byte) int64 {
	b = bytes.TrimLeft(b, " \t")
	neg := len(b) > 0 && b[0] == '-'
	if neg {
		b = b[1:]
	}
	n := int64(0)
	for _, c := range b {
		if c < '0' || c > '9' {
			break
		}
		n = n*10 + int64(c-'0')
	}
	if neg {
		return -n
	}
	return n
}

// decimal is a number with a fraction.
func decimal(b []byte) float64 {
	whole, frac, _ := bytes.Cut(bytes.TrimSpace(b), []byte("."))
	v, scale := float64(num(whole)), 1.0
	for _, c := range frac {
		if c < '0' || c > '9' {
			break
		}
		scale /= 10
		v += float64(c-'0') * scale
	}
	return v
}

// lines calls f with each line of b.
func lines(b []byte, f func(line []byte)) {
	for len(b) > 0 {
		line := b
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			line, b = b[:i], b[i+1:]
		} else {
			b = nil
		}
		f(line)
	}
}

// pairs calls f with the first word of each line, a colon cut off, and the rest.
func pairs(b []byte, f func(name, rest []byte)) {
	lines(b, func(line []byte) {
		i := bytes.IndexAny(line, " \t:")
		if i <= 0 {
			return
		}
		f(line[:i], bytes.TrimLeft(line[i:], ": \t"))
	})
}

// fields cuts b at spaces into out, as far as out goes, and returns how many
// there were.
func fields(b []byte, out [][]byte) int {
	n := 0
	for n < len(out) {
		b = bytes.TrimLeft(b, " \t\n")
		if len(b) == 0 {
			return n
		}
		i := bytes.IndexAny(b, " \t\n")
		if i < 0 {
			i = len(b)
		}
		out[n] = b[:i]
		b = b[i:]
		n++
	}
	return n
}

// channel is a wait channel as /proc has it.
func channel(b []byte) string {
	b = bytes.TrimSpace(b)
	if len(b) == 0 || string(b) == "0" {
		return "-"
	}
	return string(b)
}

// maxFrames bounds one stack.
const maxFrames = 64

// frames are the functions of a stack as /proc/PID/stack has it.
func frames(b []byte) []string {
	var out []string
	lines(b, func(line []byte) {
		_, f, ok := bytes.Cut(line, []byte("] "))
		if !ok || len(out) == maxFrames {
			return
		}
		f, _, _ = bytes.Cut(f, []byte("+"))
		out = append(out, strings.ReplaceAll(string(f), ";", "_"))
	})
	return out
}
