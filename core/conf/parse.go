package conf

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	toml "github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"virtkit/core/lazyre"
)

// maxFile is more than any configuration needs; it bounds what a wrong
// $VIRTKIT_CONFIG (a disk image, a device) makes us read.
const maxFile = 1 << 20

// Parse reads a configuration; file is its name in messages. The error is a
// fault.Usage whose chain holds Problems: all of them, not the first.
func Parse(file string, data []byte) (*Config, error) {
	c := Default()
	c.File = file
	if len(data) > maxFile {
		return nil, Problems{{File: file, Text: fmt.Sprintf("is %d bytes long, expected at most %d: not a configuration", len(data), maxFile)}}.fault()
	}
	// A byte order mark is kept as spaces so that columns stay right.
	data = append([]byte(nil), data...)
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		copy(data, "   ")
	}
	r := &reader{c: c, file: file, data: data, keys: map[string]int{}, heads: map[string]int{}}
	r.all()
	if len(r.problems) == 0 {
		r.conformance()
	}
	r.crossCheck()
	if len(r.problems) > 0 {
		return nil, r.problems.fault()
	}
	slices.SortStableFunc(r.warnings, func(a, b warning) int { return a.line - b.line })
	for _, w := range r.warnings {
		c.Warnings = append(c.Warnings, place(file, w.line, 0)+": "+w.text)
	}
	return c, nil
}

type warning struct {
	line int
	text string
}

type reader struct {
	c        *Config
	file     string
	data     []byte
	base     int            // offset in data where the parser's input starts
	section  []string       // of the last header
	skip     bool           // the last header is unknown: its keys were not asked about
	keys     map[string]int // keys seen, and where
	heads    map[string]int // headers seen, and where
	problems Problems
	warnings []warning
}

// all reads the whole document. After a syntax error it goes on at the next
// line, but reports another one only after something could be read again.
func (r *reader) all() {
	var p unstable.Parser
	calm := true
	for errs := 0; errs < 20 && r.base < len(r.data); errs++ {
		in := r.data[r.base:len(r.data):len(r.data)]
		p.Reset(in)
		for p.NextExpression() {
			r.expression(&p)
			calm = true
		}
		err := p.Error()
		if err == nil {
			return
		}
		at, text := len(in), err.Error()
		if pe, ok := errors.AsType[*unstable.ParserError](err); ok {
			text = pe.Message
			if pe.Highlight != nil {
				at = min(cap(in)-cap(pe.Highlight), len(in))
			}
		}
		if calm {
			r.report(r.base+at, problem{Text: "not TOML: " + text})
		}
		calm = false
		nl := bytes.IndexByte(in[at:], '\n')
		if nl < 0 {
			return
		}
		r.base += at + nl + 1
	}
}

func (r *reader) report(off int, p problem) {
	line, col := r.position(off)
	r.problems = append(r.problems, Problem{File: r.file, Line: line, Col: col, Key: p.Key, Text: p.Text, Near: p.Near})
}

// position counts lines and characters.
func (r *reader) position(off int) (line, col int) {
	before := r.data[:min(off, len(r.data))]
	start := bytes.LastIndexByte(before, '\n') + 1
	return bytes.Count(before, []byte("\n")) + 1, utf8.RuneCount(before[start:]) + 1
}

func (r *reader) line(off int) int { l, _ := r.position(off); return l }

// path are the parts of a dotted name, with the offset of its start.
func (r *reader) path(it unstable.Iterator) (parts []string, off int) {
	off = -1
	for it.Next() {
		n := it.Node()
		if off < 0 {
			off = r.base + int(n.Raw.Offset)
		}
		parts = append(parts, string(n.Data))
	}
	return parts, max(off, 0)
}

// join is the dotted name of parts; what is no bare key is quoted, so that it
// cannot be taken for something else.
func join(parts []string) string {
	out := make([]string, len(parts))
	for i, s := range parts {
		if bare.MatchString(s) {
			out[i] = s
		} else {
			out[i] = quote(clip(s))
		}
	}
	return strings.Join(out, ".")
}

var bare = lazyre.New(`^[A-Za-z0-9_-]{1,80}$`)

func (r *reader) expression(p *unstable.Parser) {
	e := p.Expression()
	switch e.Kind {
	case unstable.Table, unstable.ArrayTable:
		parts, off := r.path(e.Key())
		r.section = parts
		r.skip = !r.header(join(parts), off, e.Kind == unstable.ArrayTable)
	case unstable.KeyValue:
		if !r.skip {
			r.assign(p, r.section, e)
		}
	}
}

// header checks a [section] line and says whether its keys make sense.
func (r *reader) header(name string, off int, list bool) bool {
	bad := func(text, near string) bool {
		r.report(off, problem{Key: name, Text: text, Near: near})
		return false
	}
	if row := r.leafAbove(name); row != nil {
		return bad("is a table, "+row.want(), "")
	}
	row := lookup(name)
	if !isSection(name) && (row == nil || row.kind != kTable) {
		return bad("is not a section", nearSection(name))
	}
	if list {
		bad("is a list of tables, expected one table", "["+name+"]")
		return true // its keys can still be checked
	}
	if first, ok := r.heads[name]; ok {
		bad(fmt.Sprintf("is opened again, first on line %d; a section may be written once", r.line(first)), "")
		return true
	}
	r.heads[name] = off
	return true
}

// leafAbove is the key with a value, not a table, that name is or lies below.
func (r *reader) leafAbove(name string) *row {
	for n := name; n != ""; n, _ = split(n) {
		if row := lookup(n); row != nil && row.kind != kTable {
			return row
		}
	}
	return nil
}

func (r *reader) assign(p *unstable.Parser, section []string, e *unstable.Node) {
	parts, off := r.path(e.Key())
	parts = slices.Concat(section, parts)
	v := toValue(p, e.Value(), r.base)
	v.place(off)
	if up := join(parts[:len(parts)-1]); isTable(up) {
		r.entry(up, parts[len(parts)-1], v, off)
		return
	}
	name := join(parts)
	if isSection(name) || isTable(name) {
		if v.kind != unstable.InlineTable {
			r.report(off, problem{Key: name, Text: "is " + v.String() + ", expected a section: write [" + name + "] above its keys"})
			return
		}
		for it := e.Value().Children(); it.Next(); {
			r.assign(p, parts, it.Node())
		}
		return
	}
	row := lookup(name)
	if row == nil {
		if leaf := r.leafAbove(name); leaf != nil {
			r.report(off, problem{Key: leaf.name, Text: "is a table, " + leaf.want()})
			return
		}
		r.unknown(parts, off)
		return
	}
	if first, ok := r.keys[name]; ok {
		r.report(off, problem{Key: name, Text: fmt.Sprintf("is set twice, first on line %d", r.line(first))})
		return
	}
	r.keys[name] = off
	if w := row.set(r.c, v); w != nil {
		for _, q := range append([]problem{*w}, w.more...) {
			q.Key = name
			r.report(q.off, q)
		}
		return
	}
	line, col := r.position(off)
	r.c.origins[name] = Origin{Source: FromFile, File: r.file, Line: line, Col: col}
	r.warn(row, line, v)
}

func isTable(name string) bool { row := lookup(name); return row != nil && row.kind == kTable }

// unknown reports a key that does not exist, or the section it would be in.
func (r *reader) unknown(parts []string, off int) {
	name := join(parts)
	if up := join(parts[:len(parts)-1]); !isSection(up) {
		r.report(off, problem{Key: name, Text: "is not a configuration key: there is no section [" + up + "]", Near: nearSection(up)})
		return
	}
	r.report(off, problem{Key: name, Text: "is not a configuration key", Near: nearKey(name)})
}

func (r *reader) warn(row *row, line int, v value) {
	switch {
	case !row.acted:
		r.warnings = append(r.warnings, warning{line, row.name + " is not acted on yet"})
	case slices.Contains(row.later, v.text):
		r.warnings = append(r.warnings, warning{line, fmt.Sprintf("%s = %q is not acted on yet", row.name, v.text)})
	}
}

// entry is one line of a table of strings, [executor.share].
func (r *reader) entry(section, key string, v value, off int) {
	row := lookup(section)
	name := section + "." + quote(key)
	if first, ok := r.keys[name]; ok {
		r.report(off, problem{Key: name, Text: fmt.Sprintf("is set twice, first on line %d", r.line(first))})
		return
	}
	r.keys[name] = off
	if err := checkAbs(key); err != nil {
		r.report(off, problem{Key: name, Text: fmt.Sprintf("the path in the guest is %q, %v", key, err)})
	}
	if v.kind != unstable.String {
		r.report(v.off, problem{Key: name, Text: "is " + v.String() + ", expected a directory of the host as a string"})
		return
	}
	if err := checkAbs(v.text); err != nil {
		r.report(v.off, problem{Key: name, Text: fmt.Sprintf("is %q, %v", v.text, err)})
		return
	}
	m := row.at(r.c).(*map[string]string)
	if *m == nil {
		*m = map[string]string{}
	}
	(*m)[key] = v.text
	line, col := r.position(off)
	if _, ok := r.c.origins[section]; !ok {
		r.c.origins[section] = Origin{Source: FromFile, File: r.file, Line: line, Col: col}
		r.warn(row, line, v)
	}
}

// toValue copies a node out of the parser.
func toValue(p *unstable.Parser, n *unstable.Node, base int) value {
	v := value{kind: n.Kind, text: string(n.Data), off: base + int(n.Raw.Offset)}
	switch n.Kind {
	case unstable.Array:
		v.off = -1 // the parser keeps no place for a list
		for it := n.Children(); it.Next(); {
			v.list = append(v.list, toValue(p, it.Node(), base))
		}
	case unstable.InlineTable:
		v.text = ""
	}
	return v
}

// place gives lists the place of what they are in.
func (v *value) place(off int) {
	if v.off < 0 {
		v.off = off
	}
	for i := range v.list {
		v.list[i].place(v.off)
	}
}

// conformance lets the TOML library judge what the walk above does not look
// at, such as a table extended in two places.
func (r *reader) conformance() {
	var m map[string]any
	err := toml.Unmarshal(r.data, &m)
	if de, ok := errors.AsType[*toml.DecodeError](err); ok {
		line, col := de.Position()
		r.problems = append(r.problems, Problem{File: r.file, Line: line, Col: col,
			Key: strings.Join(de.Key(), "."), Text: "not TOML: " + strings.TrimPrefix(de.Error(), "toml: ")})
	} else if err != nil {
		r.problems = append(r.problems, Problem{File: r.file, Text: "not TOML: " + err.Error()})
	}
}

// crossCheck compares keys with each other.
func (r *reader) crossCheck() {
	at := func(key, text string) {
		if o := r.c.Origin(key); o.Source == FromFile {
			r.problems = append(r.problems, Problem{File: o.File, Line: o.Line, Col: o.Col, Key: key, Text: text})
		}
	}
	vm := r.c.Executor.VM
	if vm.MaxCPUs > 0 && vm.CPUs > vm.MaxCPUs {
		at("executor.vm.cpus", fmt.Sprintf("is %d, expected at most executor.vm.max_cpus, which is %d", vm.CPUs, vm.MaxCPUs))
	}
	if vm.MaxMem > 0 && vm.Mem > vm.MaxMem {
		at("executor.vm.mem", fmt.Sprintf("is %q, expected at most executor.vm.max_mem, which is %q", FormatSize(vm.Mem), FormatSize(vm.MaxMem)))
	}
	if r.c.isSet("executor.vm.reclaim") && r.c.isSet("executor.vm.balloon") && !vm.Balloon && vm.Reclaim.Word != "off" {
		at("executor.vm.reclaim", `needs executor.vm.balloon = true, or expected "off"`)
	}
}
