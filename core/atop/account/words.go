package account

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"
)

// Size is a number of bytes in words: "42 B", "92 KiB", "1.4 GiB".
func Size(n int64) string {
	switch {
	case n < 0:
		return "-"
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20-1<<9:
		return fmt.Sprintf("%d KiB", (n+1<<9)>>10)
	case n < 1<<30-1<<19:
		return fmt.Sprintf("%d MiB", (n+1<<19)>>20)
	}
	v := math.Round(float64(n)/(1<<30)*10) / 10
	if v == math.Trunc(v) {
		return fmt.Sprintf("%.0f GiB", v)
	}
	return fmt.Sprintf("%.1f GiB", v)
}

// CPUTime is processor time in words: "0.3s", "6m12s", "11h58m".
func CPUTime(secs float64) string {
	if secs < 59.95 {
		return fmt.Sprintf("%.1fs", secs)
	}
	return Long(int64(math.Round(secs)))
}

// Long is a time of whole seconds in words: "10s", "5m00s", "11h58m".
func Long(secs int64) string {
	switch {
	case secs < 60:
		return fmt.Sprintf("%ds", secs)
	case secs < 3600:
		return fmt.Sprintf("%dm%02ds", secs/60, secs%60)
	}
	return fmt.Sprintf("%dh%02dm", secs/3600, secs%3600/60)
}

// short is a time of microseconds in words: "182ms", "1.2s".
func short(us int64) string {
	if us < 999_500 {
		return fmt.Sprintf("%dms", (us+500)/1000)
	}
	return CPUTime(float64(us) / 1e6)
}

// Percent is a part of 1 in words.
func Percent(part float64) string { return fmt.Sprintf("%.0f%%", part*100) }

// Clock is the time of day of an epoch, in UTC.
func Clock(epoch int64) string { return time.Unix(epoch, 0).UTC().Format("15:04:05") }

// Text is what a guest wrote as one piece of a line that a terminal may show,
// cut to width characters; 0 does not cut.
func Text(s string, width int) string {
	if utf8.ValidString(s) && strings.IndexFunc(s, unprintable) < 0 && (width <= 0 || len(s) <= width) {
		return s
	}
	var b strings.Builder
	n := 0
	for _, r := range strings.ToValidUTF8(s, "\uFFFD") {
		if n++; width > 0 && n > width {
			out := []rune(b.String())
			return string(out[:width-1]) + "…"
		}
		if unprintable(r) {
			r = '\uFFFD'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// unprintable are control characters and those that change the direction of
// text.
func unprintable(r rune) bool {
	return r < ' ' || r >= 0x7f && r < 0xa0 || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 || r == 0x200e || r == 0x200f
}
