package vkcmd

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"virtkit/core/supervise"
)

// parsePublish reads [ADDR:]HOST:GUEST[/udp], such as 8080:80,
// 0.0.0.0:5353:53/udp or [::1]:0:22. A host port of 0 takes any free one.
func parsePublish(s string) (supervise.Publish, error) {
	bad := func(why string) (supervise.Publish, error) {
		return supervise.Publish{}, fmt.Errorf("%q %s; a port is published as [ADDR:]HOST:GUEST[/udp], such as 8080:80", s, why)
	}
	p := supervise.Publish{Proto: "tcp"}
	rest := s
	if r, proto, ok := strings.Cut(s, "/"); ok {
		if proto != "tcp" && proto != "udp" {
			return bad("names a protocol that is neither tcp nor udp")
		}
		rest, p.Proto = r, proto
	}
	i := strings.LastIndexByte(rest, ':')
	if i < 0 {
		return bad("has no colon")
	}
	guest, rest := rest[i+1:], rest[:i]
	host := rest
	if j := strings.LastIndexByte(rest, ':'); j >= 0 {
		host = rest[j+1:]
		addr := strings.TrimSuffix(strings.TrimPrefix(rest[:j], "["), "]")
		a, err := netip.ParseAddr(addr)
		if err != nil {
			return bad("has no IP address before its ports")
		}
		p.HostAddr = a.String()
	}
	var err error
	if p.GuestPort, err = parsePort(guest, 1); err != nil {
		return bad("has a guest port that " + err.Error())
	}
	if p.HostPort, err = parsePort(host, 0); err != nil {
		return bad("has a host port that " + err.Error())
	}
	return p, nil
}

func parsePort(s string, least int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < least || n > 65535 || s[0] == '+' {
		return 0, fmt.Errorf("is not a number between %d and 65535", least)
	}
	return n, nil
}

// formatPublish is the inverse of parsePublish, for people.
func formatPublish(p supervise.Publish) string {
	addr := p.HostAddr
	if addr == "" {
		addr = "127.0.0.1"
	}
	if strings.Contains(addr, ":") {
		addr = "[" + addr + "]"
	}
	s := fmt.Sprintf("%s:%d:%d", addr, p.HostPort, p.GuestPort)
	if p.Proto == "udp" {
		s += "/udp"
	}
	return s
}

// parseShare reads SRC:DST[:ro|:rw]. SRC is made absolute against dir; a
// source with colons in it cannot be written this way.
func parseShare(s, dir string) (supervise.Share, error) {
	bad := func(why string) (supervise.Share, error) {
		return supervise.Share{}, fmt.Errorf("%q %s; a directory is shared as SRC:DST[:ro]", s, why)
	}
	f := strings.Split(s, ":")
	var sh supervise.Share
	switch {
	case len(f) == 3 && f[2] == "ro":
		sh.ReadOnly = true
	case len(f) == 3 && f[2] == "rw", len(f) == 2:
	case len(f) == 3:
		return bad("ends in neither :ro nor :rw")
	default:
		return bad("is not two paths")
	}
	if f[0] == "" {
		return bad("has no source")
	}
	if !path.IsAbs(f[1]) || path.Clean(f[1]) == "/" {
		return bad("has a target that is not an absolute path below /")
	}
	sh.Source, sh.Target = f[0], path.Clean(f[1])
	if !filepath.IsAbs(sh.Source) {
		sh.Source = filepath.Join(dir, sh.Source)
	}
	return sh, nil
}

// expandEnv turns --env values into KEY=VALUE: a bare KEY takes the value it
// has here, and is left out when it has none.
func expandEnv(in []string, lookup func(string) (string, bool)) ([]string, error) {
	var out []string
	for _, e := range in {
		k, _, has := strings.Cut(e, "=")
		if k == "" || strings.ContainsRune(e, 0) {
			return nil, fmt.Errorf("flag --env: %q is neither KEY=VALUE nor KEY", e)
		}
		if has {
			out = append(out, e)
		} else if v, ok := lookup(k); ok {
			out = append(out, k+"="+v)
		}
	}
	return out, nil
}

// loopback is the value of --net-host-loopback: bare it opens the host's
// 127.0.0.1 at the gateway's address, with ports it passes these ports of the
// guest's own 127.0.0.1 on.
type loopback struct {
	all   bool
	ports []int
}

func (l *loopback) set(s string) error {
	if s == "true" { // the parser's word for a switch without a value
		l.all = true
		return nil
	}
	for w := range strings.SplitSeq(s, ",") {
		n, err := parsePort(w, 1)
		if err != nil {
			return fmt.Errorf("%q %w", w, err)
		}
		l.ports = append(l.ports, n)
	}
	return nil
}

// checkName accepts what can be a host name and a word on a command line.
func checkName(s string) error {
	if s == "" || len(s) > 63 {
		return errors.New("has to have 1 to 63 characters")
	}
	for i, c := range s {
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '-' && c != '_' && c != '.') {
			return fmt.Errorf("has %q in it; letters, digits, '-', '_' and '.' are allowed, the first being a letter or digit", string(c))
		}
	}
	return nil
}
