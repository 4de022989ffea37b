// Package asked reads, from the first bytes of a connection, whom it asks for:
// the server name of a TLS hello (RFC 8446, RFC 6066) and the host of an
// HTTP/1 request (RFC 9112). It only looks; what it reads is passed on as it was.
//
// It waits for no protocol but these two. More bytes are asked for only while
// those that came are the beginning of a TLS record with a hello in it, or of a
// request with a method that servers know; any other protocol is told from the
// first bytes it sends.
//
// What it cannot see: names inside an encrypted hello (the outer one is read),
// requests after the first on the same connection, hellos after a plain
// beginning (STARTTLS, a proxy's CONNECT), HTTP/2 without TLS, and QUIC.
package asked

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"

	"virtkit/core/policy"
)

// Max is how many bytes are looked at, at most. Real hellos have less than 2
// KiB, requests of browsers less than 16.
const Max = 32 << 10

// Parse reads the first bytes of a connection. More says that they are too few:
// ask again with those that follow added. Names are whom it asks for, as written
// but each once; policy.UnreadableName stands for one that is there and cannot be
// read. There may be two that a server could choose from, such as those of a
// request's target and of its Host. It does not keep b.
func Parse(b []byte) (names []string, more bool) {
	switch {
	case len(b) == 0:
		return nil, true
	case b[0] == recordHandshake:
		names, more = hello(b)
	default:
		names, more = request(b)
	}
	if more && len(b) >= Max {
		return unreadable, false
	}
	return names, more
}

var unreadable = []string{policy.UnreadableName}

// name is one as a list of names takes it.
func name(s string) (string, bool) {
	if a := strings.TrimSuffix(s, "."); a == "" || address(a) {
		return "", false // nobody, or an address: no name is asked for
	}
	if len(s) > 255 {
		return policy.UnreadableName, true
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' {
			return policy.UnreadableName, true
		}
	}
	return s, true
}

func address(s string) bool {
	_, err := netip.ParseAddr(strings.Trim(s, "[]"))
	return err == nil
}

// add appends a name unless it is there already.
func add(names []string, s string) []string {
	n, ok := name(s)
	if !ok || slices.ContainsFunc(names, func(o string) bool { return policy.CanonicalName(o) == policy.CanonicalName(n) }) {
		return names
	}
	return append(names, n)
}

// What TLS writes.
const (
	recordHandshake = 22
	recordHead      = 5
	recordMax       = 1<<14 + 256
	messageHead     = 4
	clientHello     = 1
	extServerName   = 0
	nameHost        = 0
)

// hello reads the client hello at the beginning of a TLS connection. It may be
// spread over records.
func hello(b []byte) (names []string, more bool) {
	if len(b) > 1 && b[1] >= 16 {
		return nil, false // clients say 3.x; servers take less for it, but not this
	}
	var msg []byte
	for len(b) > 0 {
		if len(b) < recordHead {
			return nil, true
		}
		n := int(b[3])<<8 | int(b[4])
		if b[0] != recordHandshake || n == 0 || n > recordMax {
			if msg == nil {
				return nil, false
			}
			return unreadable, false
		}
		part := b[recordHead:min(recordHead+n, len(b))]
		if msg == nil {
			msg = part[:len(part):len(part)] // the usual case copies nothing
		} else {
			msg = append(msg, part...)
		}
		b = b[recordHead+len(part):]
		if len(msg) > 0 && msg[0] != clientHello {
			return nil, false
		}
		if len(msg) < messageHead {
			continue
		}
		size := messageHead + (int(msg[1])<<16 | int(msg[2])<<8 | int(msg[3]))
		if size > Max {
			return unreadable, false
		}
		if len(msg) >= size {
			names, ok := serverNames(msg[messageHead:size])
			if !ok {
				return unreadable, false
			}
			return names, false
		}
	}
	return nil, true
}

// fields cuts a hello into its parts, which say their length before them.
type fields struct {
	b  []byte
	ok bool
}

// take cuts off n bytes.
func (f *fields) take(n int) []byte {
	if !f.ok || n > len(f.b) {
		f.ok = false
		return nil
	}
	out := f.b[:n]
	f.b = f.b[n:]
	return out
}

// number cuts off a number of n bytes.
func (f *fields) number(n int) (v int) {
	for _, c := range f.take(n) {
		v = v<<8 | int(c)
	}
	return v
}

// vector cuts off a part whose length is a number of n bytes.
func (f *fields) vector(n int) []byte { return f.take(f.number(n)) }

// serverNames reads the body of a client hello.
func serverNames(b []byte) (names []string, ok bool) {
	f := &fields{b, true}
	f.take(2 + 32) // version, random
	f.vector(1)    // session
	f.vector(2)    // ciphers
	f.vector(1)    // compressions
	if f.ok && len(f.b) == 0 {
		return nil, true // no extensions, so before RFC 3546
	}
	exts := &fields{f.vector(2), f.ok}
	exts.ok = exts.ok && f.ok && len(f.b) == 0
	for exts.ok && len(exts.b) > 0 {
		kind, data := exts.number(2), exts.vector(2)
		if kind != extServerName {
			continue
		}
		l := &fields{data, exts.ok}
		list := &fields{l.vector(2), l.ok}
		list.ok = l.ok && len(l.b) == 0 && len(list.b) > 0
		for list.ok && len(list.b) > 0 {
			typ, n := list.number(1), list.vector(2)
			if list.ok && typ == nameHost {
				names = add(names, string(n))
			}
		}
		exts.ok = exts.ok && list.ok
	}
	return names, exts.ok
}

// methods are those that servers know (RFC 9110, RFC 5789, WebDAV).
var methods = []string{
	"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "PROPFIND", "PROPPATCH", "MKCOL",
	"COPY", "MOVE", "LOCK", "UNLOCK", "REPORT", "SEARCH", "MERGE", "MKACTIVITY", "MKCALENDAR", "CHECKOUT", "VERSION-CONTROL",
	"BIND", "UNBIND", "REBIND", "LINK", "UNLINK", "ACL", "PURGE", "BAN", "QUERY", "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE", "M-SEARCH",
}

// known says whether a request line that begins so may be waited for.
func known(b []byte) bool {
	word, _, whole := strings.Cut(string(b[:min(len(b), 20)]), " ")
	return slices.ContainsFunc(methods, func(m string) bool {
		return m == word || !whole && strings.HasPrefix(m, word)
	})
}

// request reads the head of an HTTP/1 request.
func request(b []byte) (names []string, more bool) {
	for len(b) > 0 && (b[0] == '\r' || b[0] == '\n') { // servers take empty lines before it
		b = b[1:]
	}
	line, rest, whole := bytes.Cut(b, []byte("\n"))
	if !whole {
		return nil, known(b)
	}
	f := bytes.Fields(line)
	if len(f) < 2 || !bytes.HasPrefix(f[len(f)-1], []byte("HTTP/1.")) {
		return nil, false
	}
	if len(f) > 2 {
		names = target(names, string(f[1]))
	}
	host, has := "", false
	for {
		if line, rest, whole = bytes.Cut(rest, []byte("\n")); !whole {
			return nil, true
		}
		line = bytes.TrimSuffix(line, []byte("\r"))
		if len(line) > 0 && (line[0] == ' ' || line[0] == '\t') { // goes on with the line before
			if has {
				host += strings.TrimSpace(string(line))
			}
			continue
		}
		if has {
			names = add(names, withoutPort(host))
		}
		if len(line) == 0 {
			return names, false
		}
		key, value, _ := strings.Cut(string(line[:min(len(line), 1024)]), ":")
		host, has = strings.TrimSpace(value), strings.EqualFold(strings.TrimSpace(key), "host")
	}
}

// target adds the name of a request's target, where it has one: a whole URL, or
// the host and port of a CONNECT.
func target(names []string, t string) []string {
	_, rest, url := strings.Cut(t, "://")
	switch {
	case strings.HasPrefix(t, "/"), t == "*":
		return names
	case url:
		t = rest
	}
	if i := strings.IndexAny(t, "/?#"); i >= 0 {
		t = t[:i]
	}
	t = t[strings.LastIndexByte(t, '@')+1:]
	if !url && !strings.Contains(t, ":") {
		return names
	}
	return add(names, withoutPort(t))
}

func withoutPort(h string) string {
	if i := strings.LastIndexByte(h, ':'); i >= 0 && !strings.HasSuffix(h, "]") && strings.Count(h, ":") == 1 || i >= 0 && strings.HasPrefix(h, "[") && !strings.HasSuffix(h, "]") {
		return h[:i]
	}
	return h
}
