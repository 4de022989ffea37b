package tune

import (
	"bytes"
	"fmt"
	"math"
	"regexp"
	"strconv"

	toml "github.com/pelletier/go-toml/v2"

	"virtkit/core/fault"
)

// key is the one that is edited.
const key = "concurrent"

// line finds lines that may be the one: the key in any of its spellings, alone
// on its line, and an integer. The groups are what stands before the number,
// and the number.
var line = regexp.MustCompile(`(?m)^(\x{FEFF}?[ \t]*(?:concurrent|"concurrent"|'concurrent')[ \t]*=[ \t]*)([-+0-9A-Fa-fxob_]+)`)

// Concurrent reads the key of a config.toml.
func Concurrent(data []byte) (int, error) {
	doc, err := parse(data)
	if err != nil {
		return 0, err
	}
	v, ok := doc[key]
	if !ok {
		return 0, fault.Newf(fault.Usage, "has no %s", key).
			Hint("add a line `%s = 1` before the first section: a line of its own is what is edited", key)
	}
	n, ok := v.(int64)
	if !ok || n < 0 || n > math.MaxInt32 {
		return 0, fault.Newf(fault.Usage, "%s is %v, expected a number", key, v)
	}
	return int(n), nil
}

// Edit returns data with another value of `concurrent`, and proves that
// nothing else is different: the text is the same but for the number, and what
// it means is the same but for that key. Otherwise it is an error.
func Edit(data []byte, n int) ([]byte, error) {
	if _, err := Concurrent(data); err != nil {
		return nil, err
	}
	old, err := parse(data)
	if err != nil {
		return nil, err
	}
	// A line may look like the key's and belong to a section or to a text of
	// several lines: the proof tells.
	for _, m := range line.FindAllSubmatchIndex(data, -1) {
		out := make([]byte, 0, len(data)+8)
		out = append(out, data[:m[4]]...)
		out = strconv.AppendInt(out, int64(n), 10)
		out = append(out, data[m[5]:]...)
		doc, err := parse(out)
		if err == nil && differsAlone(old, doc, n) {
			return out, nil
		}
	}
	return nil, fault.Newf(fault.Usage, "%s is not on a line of its own, so that it cannot be edited alone", key).
		Hint("write `%s = 1` on a line of its own, before the first section", key)
}

func parse(data []byte) (map[string]any, error) {
	doc := map[string]any{}
	// A byte order mark is part of the text, not of the document.
	if err := toml.Unmarshal(bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")), &doc); err != nil {
		return nil, fault.New(fault.Usage, "cannot be read as TOML").Because(err)
	}
	return doc, nil
}

// differsAlone says whether b is a but for the key, which is n in b.
func differsAlone(a, b map[string]any, n int) bool {
	if v, ok := b[key].(int64); !ok || v != int64(n) || len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || k != key && !same(v, w) {
			return false
		}
	}
	return true
}

// same compares two values of a document. Not-a-number is itself here.
func same(a, b any) bool {
	switch x := a.(type) {
	case map[string]any:
		y, ok := b.(map[string]any)
		if !ok || len(x) != len(y) {
			return false
		}
		for k, v := range x {
			if w, ok := y[k]; !ok || !same(v, w) {
				return false
			}
		}
		return true
	case []any:
		y, ok := b.([]any)
		if !ok || len(x) != len(y) {
			return false
		}
		for i := range x {
			if !same(x[i], y[i]) {
				return false
			}
		}
		return true
	case float64:
		y, ok := b.(float64)
		return ok && math.Float64bits(x) == math.Float64bits(y)
	}
	return fmt.Sprintf("%T %v", a, a) == fmt.Sprintf("%T %v", b, b)
}
