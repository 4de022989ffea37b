package relayconf

import (
	"bytes"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"

	"virtkit/core/conf"
)

// positions finds the line of each key and header: "gitlab.url",
// "runners[0].pool", "runners[0].envelope.mem" and "runners[0]".
func positions(data []byte) map[string]int {
	lines := map[string]int{}
	line := func(off uint32) int { return bytes.Count(data[:min(int(off), len(data))], []byte("\n")) + 1 }
	counts := map[string]int{}
	section := ""
	var p unstable.Parser
	p.Reset(data)
	for p.NextExpression() {
		e := p.Expression()
		name, at := keyOf(e)
		switch e.Kind {
		case unstable.ArrayTable:
			section = fmt.Sprintf("%s[%d]", name, counts[name])
			counts[name]++
			lines[section] = line(at)
		case unstable.Table:
			section = name
			if first, rest, ok := strings.Cut(name, "."); ok && counts[first] > 0 {
				section = fmt.Sprintf("%s[%d].%s", first, counts[first]-1, rest)
			}
			lines[section] = line(at)
		case unstable.KeyValue:
			note(lines, section, e, line)
		}
	}
	return lines
}

func keyOf(e *unstable.Node) (name string, off uint32) {
	var parts []string
	for it := e.Key(); it.Next(); {
		n := it.Node()
		if len(parts) == 0 {
			off = n.Raw.Offset
		}
		parts = append(parts, string(n.Data))
	}
	return strings.Join(parts, "."), off
}

func note(lines map[string]int, section string, e *unstable.Node, line func(uint32) int) {
	name, at := keyOf(e)
	if section != "" {
		name = section + "." + name
	}
	lines[name] = line(at)
	if e.Value().Kind == unstable.InlineTable {
		for it := e.Value().Children(); it.Next(); {
			note(lines, name, it.Node(), line)
		}
	}
}

// validator says everything that is wrong with the values.
type validator struct {
	c        *Config
	lines    map[string]int
	problems conf.Problems
}

// bad reports a problem at a key, or at the nearest header above it.
func (v *validator) bad(key, format string, a ...any) {
	line := 0
	for k := key; line == 0 && k != ""; {
		line = v.lines[k]
		i := strings.LastIndexByte(k, '.')
		k = k[:max(i, 0)]
	}
	v.problems = append(v.problems, conf.Problem{File: v.c.File, Line: line, Key: key, Text: fmt.Sprintf(format, a...)})
}

func (v *validator) between(key string, n, lo, hi int) {
	if n < lo || n > hi {
		v.bad(key, "%d is not between %d and %d", n, lo, hi)
	}
}

func (v *validator) all() {
	c := v.c
	v.between("concurrent", c.Concurrent, 0, 1<<16)
	v.between("check_interval", c.CheckInterval, 1, 3600)
	v.between("shutdown_timeout", c.ShutdownTimeout, 0, 7*24*3600)
	if !filepath.IsAbs(c.StateDir) {
		v.bad("state_dir", "%q is not an absolute path", c.StateDir)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		v.bad("log_format", "%q is neither text nor json", c.LogFormat)
	}
	if err := CheckURL(c.GitLab.URL); err != nil {
		v.bad("gitlab.url", "%v", err)
	}
	c.GitLab.URL = strings.TrimRight(c.GitLab.URL, "/")
	if f := c.GitLab.TLSCAFile; f != "" && !filepath.IsAbs(f) {
		v.bad("gitlab.tls_ca_file", "%q is not an absolute path", f)
	}
	switch n := len(c.Runners); {
	case n == 0:
		v.bad("runners", "there is none: each [[runners]] is a runner that was created in GitLab")
	case n > MaxRunners:
		v.bad("runners", "there are %d, at most %d are allowed", n, MaxRunners)
	}
	names, files := map[string]int{}, map[string]int{}
	for i := range c.Runners {
		v.runner(i, names, files)
	}
}

func (v *validator) runner(i int, names, files map[string]int) {
	r := &v.c.Runners[i]
	key := func(name string) string { return "runners[" + strconv.Itoa(i) + "]." + name }
	if r.Name != "" {
		if err := CheckName(r.Name); err != nil {
			v.bad(key("name"), "%v", err)
		} else if j, ok := names[r.Name]; ok {
			v.bad(key("name"), "%q is the name of runners[%d] already: a runner's jobs are kept under its name", r.Name, j)
		}
		names[r.Name] = i
	}
	switch f := r.TokenFile; {
	case f == "":
		v.bad(key("token_file"), "is missing: it names the file with the runner's token, glrt-…")
	case !filepath.IsAbs(f):
		v.bad(key("token_file"), "%q is not an absolute path", f)
	default:
		if j, ok := files[f]; ok {
			v.bad(key("token_file"), "is that of runners[%d] already: a runner is configured once", j)
		}
		files[f] = i
	}
	if r.Pool == "" {
		v.bad(key("pool"), "is missing: it is the hub's pool of nodes that the runner's jobs go to")
	} else if err := CheckName(r.Pool); err != nil {
		v.bad(key("pool"), "%v", err)
	}
	if len(r.Labels) > 64 {
		v.bad(key("labels"), "there are %d, at most 64 are allowed", len(r.Labels))
	}
	for _, l := range r.Labels {
		if err := CheckName(l); err != nil {
			v.bad(key("labels"), "%v", err)
		}
	}
	v.envelope(key("envelope"), &r.Envelope)
	v.between(key("limit"), r.Limit, 0, 1<<16)
	if _, set := v.lines[key("request_concurrency")]; !set && r.RequestConcurrency == 0 {
		r.RequestConcurrency = 1
	}
	v.between(key("request_concurrency"), r.RequestConcurrency, 1, MaxConcurrency)
	v.output(key("output_limit"), r)
}

func (v *validator) envelope(key string, e *Envelope) {
	v.size(key+".mem", e.Mem, &e.Memory, true)
	if e.CPUs == 0 {
		v.bad(key+".cpus", "is missing: it is how many vCPUs a job may use")
	} else {
		v.between(key+".cpus", e.CPUs, 1, 1024)
	}
	v.size(key+".disk", e.Disk, &e.DiskBytes, false)
}

func (v *validator) size(key, s string, to *int64, needed bool) {
	if s == "" {
		if needed {
			v.bad(key, `is missing: it is how much a job may use, as in "4G"`)
		}
		return
	}
	n, err := conf.ParseSize(s)
	if err != nil {
		v.bad(key, "%v", err)
	} else if n <= 0 {
		v.bad(key, "%q is nothing", s)
	}
	*to = n
}

func (v *validator) output(key string, r *Runner) {
	switch o := r.Output.(type) {
	case nil:
		r.OutputLimit = DefaultOutput
		return
	case int64:
		if o > 0 && o <= math.MaxInt64>>10 {
			r.OutputLimit = o << 10
		}
	case string:
		n, err := conf.ParseSize(o)
		if err != nil {
			v.bad(key, "%v", err)
			return
		}
		r.OutputLimit = n
	default:
		v.bad(key, `is neither a number of KiB nor a size, as in "4M"`)
		return
	}
	if r.OutputLimit < 1<<10 || r.OutputLimit > MaxOutput {
		v.bad(key, "is not between 1 KiB and %s, which is what a hub keeps of a job", conf.FormatSize(MaxOutput))
	}
}

// CheckName says what is wrong with the name of a runner, a pool or a label.
func CheckName(s string) error {
	ok := len(s) >= 1 && len(s) <= 64 && s[0] != '.' && s[0] != '-'
	for i := range len(s) {
		c := s[i]
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.')
	}
	if !ok {
		return fmt.Errorf("%q is no name: expected 1 to 64 letters, digits, dots, dashes and underscores, a letter, digit or underscore first", clip(s))
	}
	return nil
}

func clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
