package conf

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Markdown is docs/config.md.
func Markdown() string {
	var b strings.Builder
	b.WriteString(`# Configuration

<!-- Made from the table in core/conf/keys.go: go test ./core/conf -run TestDocs -update -->

One TOML file configures a host. virtkit reads the first of these that exists:

1. the file that ` + "`$VIRTKIT_CONFIG`" + ` names (a missing one is an error),
2. ` + "`~/.config/virtkit/config.toml`" + `,
3. ` + "`/etc/virtkit/config.toml`" + `.

Without any of them the defaults below hold. A variable of the environment
comes before the file, a flag before both. ` + "`vk config show --origin`" + ` prints
every value and where it comes from, ` + "`vk config check [FILE]`" + ` only checks.
A key that does not exist, or a value that makes no sense, is an error with
its line, its column and the nearest right name; nothing runs with half a
configuration.

Sizes are text: digits and ` + "`K`, `M`, `G`, `T` or `P`" + ` (powers of 1024), as in
` + "`\"16G\"`" + `. Percentages are text too: ` + "`\"50%\"`" + `. Keys marked *not yet* are
checked, and a warning says that they change nothing so far.
`)
	for _, s := range sections {
		if s.name == "" {
			b.WriteString("\n## Top level\n\n")
		} else {
			fmt.Fprintf(&b, "\n## `[%s]`\n\n", s.name)
		}
		b.WriteString(s.doc + "\n\n")
		b.WriteString("| key | type | default | meaning |\n|---|---|---|---|\n")
		for _, r := range rowsOf(s.name) {
			b.WriteString(r.markdown())
		}
	}
	return b.String()
}

// rowsOf are the keys of a section. A table of strings is a section itself.
func rowsOf(section string) []*row {
	var out []*row
	for i := range table {
		r := &table[i]
		if r.kind == kTable && r.name == section || r.kind != kTable && r.section() == section {
			out = append(out, r)
		}
	}
	return out
}

func (r *row) markdown() string {
	name, typ, def := "`"+r.last()+"`", r.kind.String(), "not set"
	if r.kind == kTable {
		name, typ, def = "`\"/path/in/guest\"`", "absolute path", "none"
	}
	if r.def != "" {
		def = "`" + r.def + "`"
	}
	if len(r.words) > 0 {
		q := "`" + strings.Join(r.words, "`, `") + "`"
		if r.kind == kEnum {
			typ = q
		} else {
			typ += ", or " + q
		}
	}
	doc := r.doc
	if r.env != "" {
		doc += " `$" + r.env + "` overrides it."
	}
	switch {
	case !r.acted:
		doc += " *Not yet.*"
	case len(r.later) > 0:
		doc += " *Not yet: `" + strings.Join(r.later, "`, `") + "`.*"
	}
	return fmt.Sprintf("| %s | %s | %s | %s |\n", name, typ, def, doc)
}

// Example is packaging/config.example.toml: every key, commented out, with
// its default or an example.
func Example() string {
	var b strings.Builder
	b.WriteString(`# virtkit's configuration: copy to /etc/virtkit/config.toml or
# ~/.config/virtkit/config.toml. Every key is here, commented out: with its
# default, or with an example where it has none. docs/config.md explains more.
# Made from core/conf/keys.go: go test ./core/conf -run TestDocs -update
`)
	for _, s := range sections {
		b.WriteByte('\n')
		for _, l := range wrap(plain(s.doc), 76) {
			b.WriteString("# " + l + "\n")
		}
		if s.name != "" {
			b.WriteString("[" + s.name + "]\n")
		}
		for _, r := range rowsOf(s.name) {
			b.WriteString(r.exampleText())
		}
	}
	return b.String()
}

func (r *row) exampleText() string {
	if r.kind == kTable {
		return "#" + r.example + "\n"
	}
	doc := plain(r.doc)
	if !r.acted {
		doc += " (not yet)"
	}
	if r.def == "" {
		doc += " Example:"
	}
	var b strings.Builder
	b.WriteString("\n")
	for _, l := range wrap(doc, 76) {
		b.WriteString("# " + l + "\n")
	}
	if r.def != "" {
		b.WriteString("#" + r.last() + " = " + r.def + "\n")
	} else {
		b.WriteString("#" + r.last() + " = " + r.example + "\n")
	}
	return b.String()
}

// plain drops Markdown's marks.
func plain(s string) string { return strings.ReplaceAll(s, "`", "") }

func wrap(s string, width int) []string {
	var lines []string
	line := ""
	for _, w := range strings.Fields(s) {
		if line != "" && len(line)+1+len(w) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += w
	}
	return append(lines, line)
}

// Dump is the effective configuration as TOML that Parse reads back. With
// origins, each line ends with a comment saying where its value comes from.
func (c *Config) Dump(origins bool) string {
	var b strings.Builder
	for _, s := range sections {
		var lines []string
		for _, r := range rowsOf(s.name) {
			v := r.literal(c)
			if v == "" {
				continue
			}
			note := ""
			if origins {
				note = "  # " + commentSafe(c.Origin(r.name).String())
			}
			if m, ok := r.at(c).(*map[string]string); ok {
				for _, k := range slices.Sorted(maps.Keys(*m)) {
					lines = append(lines, quote(k)+" = "+quote((*m)[k])+note)
				}
				continue
			}
			lines = append(lines, r.last()+" = "+v+note)
		}
		if len(lines) == 0 {
			continue
		}
		if b.Len() > 0 {
			b.WriteByte('\n')
		}
		if s.name != "" {
			b.WriteString("[" + s.name + "]\n")
		}
		b.WriteString(strings.Join(lines, "\n") + "\n")
	}
	return b.String()
}

func commentSafe(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s)
}
