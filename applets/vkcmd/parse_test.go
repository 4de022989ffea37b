package vkcmd

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/supervise"
)

func TestParsePublish(t *testing.T) {
	for in, want := range map[string]supervise.Publish{
		"8080:80":           {HostPort: 8080, GuestPort: 80, Proto: "tcp"},
		"0:22":              {GuestPort: 22, Proto: "tcp"},
		"8080:80/tcp":       {HostPort: 8080, GuestPort: 80, Proto: "tcp"},
		"0.0.0.0:53:53/udp": {HostAddr: "0.0.0.0", HostPort: 53, GuestPort: 53, Proto: "udp"},
		"[::1]:1:2":         {HostAddr: "::1", HostPort: 1, GuestPort: 2, Proto: "tcp"},
	} {
		got, err := parsePublish(in)
		if err != nil {
			t.Errorf("parsePublish(%q): %v", in, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("parsePublish(%q): %s", in, d)
		}
		if again, err := parsePublish(formatPublish(got)); err != nil || again.GuestPort != got.GuestPort || again.Proto != got.Proto {
			t.Errorf("parsePublish(formatPublish(%q)) = %v, %v", in, again, err)
		}
	}
	for _, in := range []string{"", "80", ":", "80:", ":80", "80:0", "80:65536", "-1:80", "+1:80", "a:80", "host:1:2", "1:2/sctp", "80:80/"} {
		if p, err := parsePublish(in); err == nil {
			t.Errorf("parsePublish(%q) = %+v, want an error", in, p)
		} else if !strings.Contains(err.Error(), "[ADDR:]HOST:GUEST") {
			t.Errorf("parsePublish(%q): %q does not say how it is written", in, err)
		}
	}
}

func TestParseShare(t *testing.T) {
	for in, want := range map[string]supervise.Share{
		"/a:/b":      {Source: "/a", Target: "/b"},
		"/a:/b:ro":   {Source: "/a", Target: "/b", ReadOnly: true},
		"/a:/b:rw":   {Source: "/a", Target: "/b"},
		".:/b/":      {Source: "/here", Target: "/b"},
		"sub/d:/b/c": {Source: "/here/sub/d", Target: "/b/c"},
	} {
		got, err := parseShare(in, "/here")
		if err != nil {
			t.Errorf("parseShare(%q): %v", in, err)
		} else if d := cmp.Diff(want, got); d != "" {
			t.Errorf("parseShare(%q): %s", in, d)
		}
	}
	for _, in := range []string{"", "/a", "/a:b", ":/b", "/a:/", "/a:/b:rx", "/a:/b:ro:x", "/a:/b/.."} {
		if s, err := parseShare(in, "/here"); err == nil {
			t.Errorf("parseShare(%q) = %+v, want an error", in, s)
		}
	}
}

func TestExpandEnv(t *testing.T) {
	lookup := func(k string) (string, bool) {
		v, ok := map[string]string{"SET": "a,b = c ", "EMPTY": ""}[k]
		return v, ok
	}
	got, err := expandEnv([]string{"A=1,2", "SET", "EMPTY", "MISSING", "B="}, lookup)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"A=1,2", "SET=a,b = c ", "EMPTY=", "B="}, got); d != "" {
		t.Error(d)
	}
	for _, in := range []string{"", "=x", "A=\x00"} {
		if got, err := expandEnv([]string{in}, lookup); err == nil {
			t.Errorf("expandEnv(%q) = %q, want an error", in, got)
		}
	}
}

func TestLoopbackFlag(t *testing.T) {
	var l loopback
	if err := l.set("true"); err != nil || !l.all || l.ports != nil {
		t.Errorf("bare: %+v, %v", l, err)
	}
	l = loopback{}
	if err := l.set("80,8080"); err != nil || l.all || !cmp.Equal(l.ports, []int{80, 8080}) {
		t.Errorf("ports: %+v, %v", l, err)
	}
	for _, in := range []string{"", "0", "80,", "x", "70000"} {
		if err := new(loopback).set(in); err == nil {
			t.Errorf("set(%q) succeeded", in)
		}
	}
}

func TestCheckName(t *testing.T) {
	for _, s := range []string{"a", "web-1", "A.b_c", strings.Repeat("x", 63)} {
		if err := checkName(s); err != nil {
			t.Errorf("checkName(%q) = %v", s, err)
		}
	}
	for _, s := range []string{"", "-a", ".a", "a b", "a/b", "ä", strings.Repeat("x", 64)} {
		if checkName(s) == nil {
			t.Errorf("checkName(%q) = nil, want an error", s)
		}
	}
}
