package asked_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/netsw/asked"
)

// helloOf is what Go's client says first.
func helloOf(t testing.TB, c *tls.Config) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer far.Close()
	go func() {
		_ = tls.Client(near, c).Handshake()
		near.Close()
	}()
	b := make([]byte, 64<<10)
	n, err := far.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

// records cuts the hello of one record into records of n bytes.
func records(hello []byte, n int) []byte {
	var out []byte
	for m := hello[5:]; len(m) > 0; {
		k := min(n, len(m))
		out = append(append(out, 22, 3, 1, byte(k>>8), byte(k)), m[:k]...)
		m = m[k:]
	}
	return out
}

func TestHellos(t *testing.T) {
	long := make([]string, 200) // protocols, for a hello of 12 KiB
	for i := range long {
		long[i] = strings.Repeat("p", 60)
	}
	for what, c := range map[string]struct {
		cfg  *tls.Config
		want []string
	}{
		"a name":        {&tls.Config{ServerName: "Shop.Example.COM"}, []string{"Shop.Example.COM"}},
		"old TLS":       {&tls.Config{ServerName: "a.example", MaxVersion: tls.VersionTLS12}, []string{"a.example"}},
		"a long hello":  {&tls.Config{ServerName: "a.example", NextProtos: long}, []string{"a.example"}},
		"no name":       {&tls.Config{InsecureSkipVerify: true}, nil},
		"an address":    {&tls.Config{ServerName: "192.0.2.1"}, nil},
		"a strange one": {&tls.Config{ServerName: "a_b.example"}, []string{"a_b.example"}},
	} {
		t.Run(what, func(t *testing.T) {
			whole := helloOf(t, c.cfg)
			for _, h := range [][]byte{whole, records(whole, 1), records(whole, 100), records(whole, 1000)} {
				if len(h) > asked.Max {
					continue
				}
				step := 1 + len(h)/400
				for n := 0; n < len(h); n += step {
					if names, more := asked.Parse(h[:n]); names != nil || !more {
						t.Fatalf("%d of %d bytes: %q, %v, want more asked for", n, len(h), names, more)
					}
				}
				names, more := asked.Parse(append(h, "early data"...))
				if d := cmp.Diff(c.want, names); d != "" || more {
					t.Fatalf("more %v (-want +got):\n%s", more, d)
				}
			}
		})
	}
}

// Names as Go's client does not write them, which others may.
func TestNamesOfHellos(t *testing.T) {
	h := helloOf(t, &tls.Config{ServerName: "good.example"})
	at := strings.Index(string(h), "good.example")
	for in, want := range map[string][]string{ // each as long as the name that it stands for
		"GOOD.EXAMPLE": {"GOOD.EXAMPLE"}, "good.exampl.": {"good.exampl."}, "xn--bcher-kv": {"xn--bcher-kv"},
		"192.0.2.123.": nil, "192.000.2.12": {"192.000.2.12"}, "............": {"............"},
		"b\xc3\xbccher.test": {"?"}, "*.exampl.com": {"?"}, "good.exampl\n": {"?"}, "a.example:80": {"?"}, "good\\examplx": {"?"},
	} {
		b := append([]byte(nil), h...)
		if copy(b[at:], in) != len("good.example") {
			t.Fatalf("%q is not as long as the name that it stands for", in)
		}
		names, more := asked.Parse(b)
		if d := cmp.Diff(want, names); d != "" || more {
			t.Errorf("%q: more %v (-want +got):\n%s", in, more, d)
		}
	}
	// Two names: a server may take either.
	list := []byte("\x00\x00\x00\x1a\x00\x18\x00\x00\x09a.example\x00\x00\x09b.example")
	body := append([]byte("\x03\x03"+strings.Repeat("r", 32)+"\x00\x00\x02\x13\x01\x01\x00"), append([]byte{0, byte(len(list))}, list...)...)
	b := append([]byte{22, 3, 1, 0, byte(len(body) + 4), 1, 0, 0, byte(len(body))}, body...)
	for _, h := range [][]byte{b, records(b, 1), records(b, 50)} {
		if names, more := asked.Parse(h); more || strings.Join(names, " ") != "a.example b.example" {
			t.Errorf("two names in a hello: %q, %v", names, more)
		}
	}
}

func TestHellosThatCannotBeRead(t *testing.T) {
	h := helloOf(t, &tls.Config{ServerName: "good.example"})
	at := strings.Index(string(h), "good.example")
	with := func(change func(b []byte) []byte) []byte { return change(append([]byte(nil), h...)) }
	for what, b := range map[string][]byte{
		"a name with a NUL":       with(func(b []byte) []byte { b[at+4] = 0; return b }),
		"a name with a slash":     with(func(b []byte) []byte { b[at+4] = '/'; return b }),
		"a name past its list":    with(func(b []byte) []byte { b[at-1]++; return b }),
		"a list past its end":     with(func(b []byte) []byte { b[at-4]++; return b }),
		"a hello past its record": with(func(b []byte) []byte { b[7], b[8] = 0xff, 0xff; return b }),
		"another record within":   append(records(h, 100)[:105], 23, 3, 3, 0, 1, 0),
		"one without end":         append(records(h, 100)[:105], make([]byte, asked.Max)...),
		"records of one byte":     records(with(func(b []byte) []byte { b[7] = 0x70; return append(b, make([]byte, asked.Max)...) }), 1)[:asked.Max],
	} {
		if names, more := asked.Parse(b); more || len(names) != 1 || names[0] != "?" {
			t.Errorf("%s: %q, %v, want ?", what, names, more)
		}
	}
	for what, b := range map[string][]byte{
		"no handshake": {22, 3, 3, 0, 1, 2}, "no version": {22, 99}, "an empty record": {22, 3, 1, 0, 0},
	} {
		if names, more := asked.Parse(b); more || names != nil {
			t.Errorf("%s: %q, %v, want nothing", what, names, more)
		}
	}
}

func TestRequests(t *testing.T) {
	for in, want := range map[string][]string{
		"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n":                                          {"a.example"},
		"GET / HTTP/1.1\nX: y\nhOsT :A.example:8080\n\n":                                     {"A.example"},
		"\r\nPOST /x?y HTTP/1.0\r\nAccept: */*\r\nHost:\ta.example \r\n\r\nHost: no.example": {"a.example"},
		"GET http://user@b.example:80/x HTTP/1.1\r\nHost: a.example\r\n\r\n":                 {"b.example", "a.example"},
		"GET http://a.example HTTP/1.1\r\nHost: A.EXAMPLE.\r\n\r\n":                          {"a.example"},
		"GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n":                       {"a.example", "b.example"},
		"GET / HTTP/1.1\r\nHost: a.ex\r\n ample\r\n\r\n":                                     {"a.example"},
		"CONNECT c.example:443 HTTP/1.1\r\n\r\n":                                             {"c.example"},
		"OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n":                                      {"a.example"},
		"FOO /x HTTP/1.1\r\nHost: a.example\r\n\r\n":                                         {"a.example"},
		"GET / HTTP/1.1\r\nHost: a b.example\r\n\r\n":                                        {"?"},
		"GET / HTTP/1.1\r\nHost: " + strings.Repeat("a", 300) + "\r\n\r\n":                   {"?"},
		"GET / HTTP/1.1\r\nHost: 192.0.2.1:80\r\n\r\n":                                       nil,
		"GET / HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n":                                   nil,
		"GET / HTTP/1.1\r\nHost:\r\n\r\n":                                                    nil,
		"GET / HTTP/1.0\r\n\r\n":                                                             nil,
	} {
		for n := range len(in) {
			if names, more := asked.Parse([]byte(in[:n])); more && names != nil {
				t.Fatalf("%q: names before the end", in[:n])
			} else if !more && !strings.Contains(in[:n], "\n\r\n") && !strings.Contains(in[:n], "\n\n") && !strings.HasPrefix(in, "FOO") {
				t.Fatalf("%q: no more asked for", in[:n])
			}
		}
		names, more := asked.Parse([]byte(in))
		if d := cmp.Diff(want, names); d != "" || more {
			t.Errorf("%q: more %v (-want +got):\n%s", in, more, d)
		}
	}
	if names, more := asked.Parse([]byte("GET / HTTP/1.1\r\nX: " + strings.Repeat("y", asked.Max))); more || len(names) != 1 || names[0] != "?" {
		t.Errorf("a head without end: %q, %v", names, more)
	}
}

// No other protocol is waited for.
func TestOtherProtocols(t *testing.T) {
	for _, in := range []string{
		"SSH-2.0-OpenSSH_9.2\r\n", "*1\r\n$4\r\nPING\r\n", "PING\r\n", "GET key\r\n", "SET k v\r\n", "get k\r\n", "ruok", "stat",
		"\x00\x00\x00\x08\x04\xd2\x16\x2f", "EHLO me\r\n", "NICK me\r\nUSER me\r\n", "\x10\x0c\x00\x04MQTT", "AMQP\x00\x00\x09\x01",
		"0032git-upload-pack /x\x00", "@RSYNCD: 31.0\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x80\x2e\x01\x03\x01", "PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n", "a",
	} {
		if names, more := asked.Parse([]byte(in)); more || names != nil {
			t.Errorf("%q: %q, %v, want it passed on at once", in, names, more)
		}
	}
}

// FuzzParse holds the parser to what it promises: an answer once it has Max
// bytes, and names that a host could have.
func FuzzParse(f *testing.F) {
	// The least that is a hello: Go's are long, and minimizing takes minutes.
	ext := "\x00\x00\x00\x0e\x00\x0c\x00\x00\x09a.example"
	body := "\x03\x03" + strings.Repeat("r", 32) + "\x00\x00\x02\x13\x01\x01\x00\x00" + string(rune(len(ext))) + ext
	h := []byte("\x16\x03\x01\x00" + string(rune(len(body)+4)) + "\x01\x00\x00" + string(rune(len(body))) + body)
	if names, _ := asked.Parse(h); len(names) != 1 {
		f.Fatalf("the seed names %q", names)
	}
	f.Add(h)
	f.Add(records(h, 7))
	f.Add([]byte("GET http://a.example/ HTTP/1.1\r\nHost: b.example:80\r\n\r\n"))
	f.Add([]byte("CONNECT [::1]:80 HTTP/1.1\nHost\n: x\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		names, more := asked.Parse(b)
		if more && (len(b) >= asked.Max || names != nil) {
			t.Fatalf("more of %d bytes, with %q", len(b), names)
		}
		if more {
			return
		}
		for _, n := range names {
			if n == "" || strings.ContainsAny(n, " \x00\r\n\t/\\") {
				t.Fatalf("name %q", n)
			}
		}
	})
}

// Where Go's server reads a hello that somebody has been at, it reads the same
// name, or we say that it cannot be read.
func TestHellosAsGoReadsThem(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	h := helloOf(t, &tls.Config{ServerName: "good.example"})
	at := strings.Index(string(h), "good.example")
	read := 0
	for range 20000 {
		b := append([]byte(nil), h...)
		for range 1 + rnd.IntN(3) {
			i := rnd.IntN(len(b))
			if rnd.IntN(2) == 0 { // where it matters most
				i = at - 12 + rnd.IntN(24)
			}
			b[i] ^= 1 << rnd.IntN(8)
		}
		got, ok := goReads(b)
		if !ok || got == "" || net.ParseIP(got) != nil {
			continue
		}
		read++
		names, _ := asked.Parse(b)
		if len(names) == 0 || names[0] != "?" && !strings.EqualFold(names[0], got) {
			t.Fatalf("%q, Go reads %q in\n% x", names, got, b)
		}
	}
	if read < 1000 {
		t.Errorf("Go could read only %d of the hellos", read)
	}
}

var errRead = errors.New("read")

// goReads is the server name as crypto/tls reads it.
func goReads(b []byte) (name string, ok bool) {
	_ = tls.Server(&deaf{Reader: bytes.NewReader(b)}, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		name, ok = h.ServerName, true
		return nil, errRead
	}}).Handshake()
	return name, ok
}

// deaf is a connection that is read from alone.
type deaf struct {
	net.Conn
	io.Reader
}

func (d *deaf) Read(b []byte) (int, error)       { return d.Reader.Read(b) }
func (d *deaf) Write(b []byte) (int, error)      { return len(b), nil }
func (d *deaf) SetWriteDeadline(time.Time) error { return nil }
func (d *deaf) Close() error                     { return nil }
