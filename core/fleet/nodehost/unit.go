package nodehost

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// systemdPath is the PATH that systemd gives its services (systemd.exec(5)).
const systemdPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// unitDirs are where system units are looked for, the first wins
// (systemd.unit(5)).
var unitDirs = []string{
	"/etc/systemd/system.control", "/run/systemd/system.control", "/run/systemd/transient",
	"/run/systemd/generator.early", "/etc/systemd/system", "/run/systemd/system",
	"/run/systemd/generator", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system",
	"/run/systemd/generator.late",
}

// Unit is a service unit of the system manager as systemd would load it: the
// file that wins, and its drop-ins.
type Unit struct {
	Name   string
	File   string // of the host
	Masked bool
	User   string   // of User=; "" = root
	Exec   []string // words of ExecStart=, the program first, without systemd's prefixes
	Files  []string // File and the drop-ins that were read
}

// FindUnit looks a system service up ("gitlab-runner.service"). A nil Unit
// means that there is none.
func (r Root) FindUnit(name string) (*Unit, error) {
	u := &Unit{Name: name}
	for _, d := range unitDirs {
		p := filepath.Join(d, name)
		masked, err := r.masked(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		u.File, u.Masked = p, masked
		break
	}
	if u.File == "" {
		return nil, nil
	}
	if u.Masked {
		return u, nil
	}
	files := []string{u.File}
	drops, err := r.dropIns(name)
	if err != nil {
		return nil, err
	}
	for _, f := range append(files, drops...) {
		b, err := r.read(f)
		if errors.Is(err, fs.ErrNotExist) && f != u.File {
			continue
		}
		if err != nil {
			return nil, err
		}
		u.Files = append(u.Files, f)
		u.apply(string(b))
	}
	return u, nil
}

// masked says whether a unit's file is a link to /dev/null, or empty.
func (r Root) masked(p string) (bool, error) {
	at := r.Path(p)
	if to, err := os.Readlink(at); err == nil && to == "/dev/null" {
		return true, nil
	}
	st, err := os.Stat(at)
	if err != nil {
		if _, lerr := os.Lstat(at); lerr == nil && errors.Is(err, fs.ErrNotExist) {
			return false, fs.ErrNotExist // a link to nothing is no unit
		}
		return false, err
	}
	return st.Mode().IsRegular() && st.Size() == 0, nil
}

// dropIns are the files that change a unit, in the order in which they are
// applied: by name, and of one name the first directory's.
func (r Root) dropIns(name string) ([]string, error) {
	stem, suffix := strings.TrimSuffix(name, ".service"), ".service"
	folders := []string{"service.d"}
	for i, c := range stem { // a-b.service: a-.service.d, too
		if c == '-' && i+1 < len(stem) {
			folders = append(folders, stem[:i+1]+suffix+".d")
		}
	}
	folders = append(folders, name+".d")
	found := map[string]string{}
	for _, folder := range folders { // a more specific folder's file replaces one of the same name
		own := map[string]string{}
		for _, d := range unitDirs {
			ents, err := os.ReadDir(r.Path(filepath.Join(d, folder)))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			for _, e := range ents {
				if _, ok := own[e.Name()]; !ok && strings.HasSuffix(e.Name(), ".conf") {
					own[e.Name()] = filepath.Join(d, folder, e.Name())
				}
			}
		}
		for n, p := range own {
			found[n] = p
		}
	}
	var names []string
	for n := range found {
		names = append(names, n)
	}
	slices.Sort(names)
	var out []string
	for _, n := range names {
		masked, err := r.masked(found[n])
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err == nil && !masked {
			out = append(out, found[n])
		}
	}
	return out, nil
}

// apply reads one file of the unit over what the ones before said.
func (u *Unit) apply(text string) {
	section := ""
	for _, l := range logical(text) {
		if strings.HasPrefix(l, "[") && strings.HasSuffix(l, "]") {
			section = l
			continue
		}
		key, val, ok := strings.Cut(l, "=")
		if !ok || section != "[Service]" {
			continue
		}
		switch val = strings.TrimSpace(val); strings.TrimSpace(key) {
		case "User":
			u.User = val
		case "ExecStart":
			// Empty forgets the ones before; a simple service has just one.
			u.Exec = words(strings.TrimLeft(val, "@-:+!|"))
		}
	}
}

// logical are the lines of a unit's file, joined where they continue, without
// comments.
func logical(text string) []string {
	var out []string
	cur, open := "", false
	for l := range strings.SplitSeq(text, "\n") {
		t := strings.TrimSpace(l)
		if strings.HasPrefix(t, "#") || strings.HasPrefix(t, ";") || t == "" && !open {
			continue // also between the parts of one that continues
		}
		cont := strings.HasSuffix(t, `\`)
		cur += strings.TrimSuffix(t, `\`)
		if open = cont; open {
			cur += " "
			continue
		}
		out = append(out, strings.TrimSpace(cur))
		cur = ""
	}
	if t := strings.TrimSpace(cur); t != "" {
		out = append(out, t)
	}
	return out
}

// words splits a command as systemd does (systemd.service(5), COMMAND LINES):
// quotes of both kinds, C escapes, %% for a percent sign. Other specifiers and
// variables stay as they are written. It ends at a lone semicolon.
func words(s string) []string {
	var out []string
	var b strings.Builder
	in, quote := false, byte(0)
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '\\' && i+1 < len(s):
			i++
			in = true
			switch e := s[i]; e {
			case 'n':
				b.WriteByte('\n')
			case 't':
				b.WriteByte('\t')
			case 's':
				b.WriteByte(' ')
			default:
				b.WriteByte(e)
			}
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			b.WriteByte(c)
		case (c == '"' || c == '\'') && !in:
			quote, in = c, true
		case c == ' ' || c == '\t':
			if in {
				out = append(out, b.String())
				b.Reset()
				in = false
			}
		default:
			b.WriteByte(c)
			in = true
		}
	}
	if in {
		out = append(out, b.String())
	}
	if i := slices.Index(out, ";"); i >= 0 {
		out = out[:i]
	}
	for i := range out {
		out[i] = strings.ReplaceAll(out[i], "%%", "%")
	}
	return out
}

// Program is where a program of a unit is: an absolute path that can be
// executed, or a name found on systemd's PATH. "" when there is none.
func (r Root) Program(name string) string {
	if strings.Contains(name, "/") {
		if filepath.IsAbs(name) && r.executable(name) {
			return name
		}
		return ""
	}
	for _, d := range filepath.SplitList(systemdPath) {
		if p := filepath.Join(d, name); name != "" && r.executable(p) {
			return p
		}
	}
	return ""
}

func (r Root) executable(p string) bool {
	st, err := os.Stat(r.Path(p))
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}

// flagOf is the value of a flag among a command's words: --config X, --config=X,
// -c X. "" when it is not there.
func flagOf(args []string, names ...string) string {
	val := ""
	for i, a := range args {
		for _, n := range names {
			if a == n && i+1 < len(args) {
				val = args[i+1]
			} else if v, ok := strings.CutPrefix(a, n+"="); ok {
				val = v
			}
		}
	}
	return val
}
