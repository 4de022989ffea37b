package conf

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2/unstable"
)

// kind is the type of a key.
type kind int

const (
	kString  kind = iota
	kPath         // absolute path
	kProgram      // plain name or absolute path
	kEnum
	kBool
	kOptBool // *bool
	kInt
	kSize
	kAmount
	kSecs
	kStrings
	kPorts
	kTable // map[string]string
)

func (k kind) String() string {
	return [...]string{"string", "absolute path", "name or absolute path", "one word", "boolean", "boolean", "whole number",
		"size", "size or percentage", "seconds", "list of strings", "list of ports", "table"}[k]
}

// want says what to write for a key, for error texts.
func (r *row) want() string {
	switch r.kind {
	case kEnum:
		return "expected one of " + quoteList(r.words)
	case kBool, kOptBool:
		return "expected true or false"
	case kInt:
		return "expected a whole number"
	case kSecs:
		return "expected a whole number of seconds"
	case kSize:
		return `expected a size such as "4G" or "512M"`
	case kAmount:
		w := `expected a size such as "4G" or a percentage such as "50%"`
		if len(r.words) > 0 {
			w += ", or " + quoteList(r.words)
		}
		return w
	case kStrings:
		return `expected a list of strings such as ["a", "b"]`
	case kPorts:
		return "expected a list of port numbers such as [80, 443]"
	case kTable:
		return "expected a table of strings"
	}
	return "expected a string"
}

func quoteList(words []string) string {
	q := make([]string, len(words))
	for i, w := range words {
		q[i] = strconv.Quote(w)
	}
	return strings.Join(q, ", ")
}

// value is a TOML value with its place in the document.
type value struct {
	kind unstable.Kind
	text string // of a string; as written, of anything else
	list []value
	off  int // byte offset
}

func (v value) String() string {
	switch v.kind {
	case unstable.String:
		return "the string " + strconv.Quote(clip(v.text))
	case unstable.Bool:
		return "the boolean " + v.text
	case unstable.Integer, unstable.Float:
		return "the number " + v.text
	case unstable.Array:
		return "a list"
	case unstable.InlineTable:
		return "a table"
	}
	return "the date or time " + v.text
}

func clip(s string) string {
	if len(s) > 60 {
		return s[:60] + "…"
	}
	return s
}

func (v value) bad(text, near string) *problem { return &problem{off: v.off, Text: text, Near: near} }

// set stores v in the key's field, or says what is wrong with it.
func (r *row) set(c *Config, v value) *problem {
	wrong := func(near string) *problem { return v.bad("is "+v.String()+", "+r.want(), near) }
	switch p := r.at(c).(type) {
	case *string:
		return r.setString(p, v)
	case *bool:
		if v.kind != unstable.Bool {
			return wrong(nearBool(v))
		}
		*p = v.text == "true"
	case **bool:
		if v.kind != unstable.Bool {
			return wrong(nearBool(v))
		}
		b := v.text == "true"
		*p = &b
	case *int:
		n, w := r.number(v, math.MaxInt32)
		if w != nil {
			return w
		}
		*p = int(n)
	case *time.Duration:
		n, w := r.number(v, math.MaxInt64/int64(time.Second))
		if w != nil {
			return w
		}
		*p = time.Duration(n) * time.Second
	case *int64:
		if v.kind != unstable.String {
			return wrong(nearSize(v))
		}
		n, err := ParseSize(v.text)
		if err != nil {
			return wrong(nearSize(v))
		}
		if n < r.min {
			return v.bad(fmt.Sprintf("is %q, expected at least %q", v.text, FormatSize(r.min)), "")
		}
		*p = n
	case *Amount:
		if v.kind != unstable.String {
			return wrong(nearSize(v))
		}
		a, err := parseAmount(v.text, r.words)
		if err != nil {
			return wrong(nearest(v.text, r.words))
		}
		*p = a
	case *[]string:
		return r.setStrings(p, v)
	case *[]int:
		return r.setPorts(p, v)
	default:
		return wrong("")
	}
	return nil
}

func nearBool(v value) string {
	if v.kind == unstable.String && (v.text == "true" || v.text == "false") {
		return v.text
	}
	return ""
}

func nearSize(v value) string {
	if v.kind == unstable.Integer && len(v.text) < 5 && v.text[0] != '-' {
		return strconv.Quote(v.text + "G")
	}
	if s := strings.ToUpper(strings.ReplaceAll(v.text, " ", "")); v.kind == unstable.String && s != v.text {
		if _, err := ParseSize(s); err == nil {
			return strconv.Quote(s)
		}
	}
	return ""
}

func (r *row) number(v value, most int64) (int64, *problem) {
	if v.kind != unstable.Integer {
		near := ""
		if _, err := strconv.ParseInt(v.text, 10, 64); err == nil && v.kind == unstable.String {
			near = v.text
		}
		return 0, v.bad("is "+v.String()+", "+r.want(), near)
	}
	n, err := strconv.ParseInt(v.text, 0, 64)
	if r.max > 0 {
		most = min(most, r.max)
	}
	if err != nil || n < r.min || n > most {
		return 0, v.bad(fmt.Sprintf("is %s, expected a whole number from %d to %d", v.text, r.min, most), "")
	}
	return n, nil
}

func (r *row) setString(p *string, v value) *problem {
	if v.kind != unstable.String {
		return v.bad("is "+v.String()+", "+r.want(), "")
	}
	if err := r.checkString(v.text); err != nil {
		near := ""
		if r.kind == kEnum {
			near = nearest(v.text, r.words)
		}
		return v.bad(fmt.Sprintf("is %q, %v", clip(v.text), err), near)
	}
	*p = v.text
	return nil
}

func (r *row) checkString(s string) error {
	if strings.ContainsRune(s, 0) {
		return errors.New("expected no NUL character")
	}
	switch r.kind {
	case kEnum:
		if !slices.Contains(r.words, s) {
			return errors.New(r.want())
		}
		return nil
	case kPath:
		return checkAbs(s)
	case kProgram:
		if s == "" || strings.Contains(s, "/") && !path.IsAbs(s) {
			return errors.New("expected a plain name or an absolute path")
		}
		return nil
	}
	if r.check != nil {
		return r.check(s)
	}
	if s == "" {
		return errors.New("expected a string that is not empty; leave the key out to unset it")
	}
	return nil
}

func checkAbs(s string) error {
	if strings.HasPrefix(s, "~") {
		return errors.New("expected an absolute path; ~ is not expanded here")
	}
	if !path.IsAbs(s) {
		return errors.New("expected an absolute path")
	}
	return nil
}

func (r *row) setStrings(p *[]string, v value) *problem {
	if v.kind != unstable.Array {
		near := ""
		if v.kind == unstable.String {
			near = "[" + strconv.Quote(v.text) + "]"
		}
		return v.bad("is "+v.String()+", "+r.want(), near)
	}
	out := []string{} // an explicit empty list is not an absent one
	var ws problemList
	for i, e := range v.list {
		if e.kind != unstable.String {
			ws.add(e.bad(fmt.Sprintf("entry %d is %v, expected a string", i+1, e), ""))
		} else if err := r.checkString(e.text); err != nil {
			ws.add(e.bad(fmt.Sprintf("entry %d is %q, %v", i+1, clip(e.text), err), ""))
		}
		out = append(out, e.text)
	}
	if len(ws) > 0 {
		return ws.chain()
	}
	*p = out
	return nil
}

func (r *row) setPorts(p *[]int, v value) *problem {
	if v.kind != unstable.Array {
		near := ""
		if v.kind == unstable.Integer {
			near = "[" + v.text + "]"
		}
		return v.bad("is "+v.String()+", "+r.want(), near)
	}
	out := []int{}
	var ws problemList
	for i, e := range v.list {
		n, err := strconv.ParseInt(e.text, 0, 64)
		if e.kind != unstable.Integer || err != nil || n < 1 || n > 65535 {
			ws.add(e.bad(fmt.Sprintf("entry %d is %v, expected a port number from 1 to 65535", i+1, e), ""))
		}
		out = append(out, int(n))
	}
	if len(ws) > 0 {
		return ws.chain()
	}
	*p = out
	return nil
}

// setText sets the key from a flag's or variable's text.
func (r *row) setText(c *Config, text string) *problem {
	v := value{kind: unstable.String, text: text}
	switch r.kind {
	case kBool, kOptBool:
		if text == "true" || text == "false" {
			v.kind = unstable.Bool
		}
	case kInt, kSecs:
		if _, err := strconv.ParseInt(text, 10, 64); err == nil {
			v.kind = unstable.Integer
		}
	case kStrings, kPorts:
		v.kind = unstable.Array
		for _, s := range strings.FieldsFunc(text, func(c rune) bool { return c == ',' }) {
			e := value{kind: unstable.String, text: strings.TrimSpace(s)}
			if _, err := strconv.ParseInt(e.text, 10, 64); err == nil && r.kind == kPorts {
				e.kind = unstable.Integer
			}
			v.list = append(v.list, e)
		}
	}
	return r.set(c, v)
}

// setLiteral sets the key from a TOML value.
func (r *row) setLiteral(c *Config, literal string) error {
	var p unstable.Parser
	p.Reset([]byte("x = " + literal))
	if !p.NextExpression() {
		return p.Error()
	}
	if w := r.set(c, toValue(&p, p.Expression().Value(), 0)); w != nil {
		return errors.New(w.Text)
	}
	return nil
}

// literal is the key's value as TOML, "" when not set.
func (r *row) literal(c *Config) string {
	switch p := r.at(c).(type) {
	case *string:
		if *p == "" && r.def == "" {
			return ""
		}
		return quote(*p)
	case *bool:
		return strconv.FormatBool(*p)
	case **bool:
		if *p != nil {
			return strconv.FormatBool(**p)
		}
	case *int:
		return number(int64(*p), r, c)
	case *time.Duration:
		return number(int64(*p/time.Second), r, c)
	case *int64:
		if *p != 0 {
			return quote(FormatSize(*p))
		}
	case *Amount:
		if *p != (Amount{}) {
			return quote(p.String())
		}
	case *[]string:
		if *p != nil {
			q := make([]string, len(*p))
			for i, s := range *p {
				q[i] = quote(s)
			}
			return "[" + strings.Join(q, ", ") + "]"
		}
	case *[]int:
		if *p != nil {
			q := make([]string, len(*p))
			for i, n := range *p {
				q[i] = strconv.Itoa(n)
			}
			return "[" + strings.Join(q, ", ") + "]"
		}
	case *map[string]string:
		if *p != nil {
			var q []string
			for _, k := range slices.Sorted(maps.Keys(*p)) {
				q = append(q, quote(k)+" = "+quote((*p)[k]))
			}
			return "{" + strings.Join(q, ", ") + "}"
		}
	}
	return ""
}

func number(n int64, r *row, c *Config) string {
	if n == 0 && r.def == "" && !c.isSet(r.name) {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// quote is s as a TOML basic string.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < ' ' || r == 0x7f:
			fmt.Fprintf(&b, `\u%04X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}
