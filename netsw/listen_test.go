package netsw_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/asked"
)

// outside is a server of the host that tells what it got of each connection,
// and how it ended. With a banner it speaks first.
func outside(t *testing.T, banner string) (port int, got chan string) {
	got = make(chan string, 16)
	return serve(t, func(c *net.TCPConn) {
		if banner != "" { // an empty write would take the connection's error away
			_, _ = io.WriteString(c, banner)
		}
		var b bytes.Buffer
		_, err := io.Copy(&b, c)
		if err != nil {
			b.WriteString("<reset>")
		}
		got <- b.String()
	}), got
}

// tlsHello is what a TLS client says first.
func tlsHello(t testing.TB, name string) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer far.Close()
	go func() {
		_ = tls.Client(near, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
		near.Close()
	}()
	b := make([]byte, 64<<10)
	n, err := far.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

func refuseName(bad string) func(policy.Flow, string) policy.Verdict {
	return func(_ policy.Flow, n string) policy.Verdict {
		return policy.Verdict{Allow: policy.CanonicalName(n) != bad && n != policy.UnreadableName, Layer: "job", Reason: "not listed"}
	}
}

func TestFlowsAreHeldToTheNameTheyAskFor(t *testing.T) {
	good, bad := tlsHello(t, "ok.example"), tlsHello(t, "BAD.example")
	get := "GET / HTTP/1.1\r\nHost: %s\r\n\r\n"
	post := "POST / HTTP/1.1\r\nHost: bad.example\r\nContent-Length: 6\r\n\r\nsecret"
	third := len(bad) / 3
	for _, c := range []struct {
		what  string
		parts [][]byte
		name  string // that the policy is to hear; "" = none
		stays bool   // nothing may come out
	}{
		{"TLS", [][]byte{good, []byte("more")}, "ok.example", false},
		{"TLS in pieces", [][]byte{good[:1], good[1:3], good[3:9], good[9:200], good[200:]}, "ok.example", false},
		{"TLS, refused", [][]byte{bad}, "BAD.example", true},
		{"TLS in pieces, refused", [][]byte{bad[:third], bad[third : 2*third], bad[2*third:]}, "BAD.example", true},
		{"HTTP", [][]byte{[]byte(strings.Replace(get, "%s", "ok.example:8080", 1))}, "ok.example", false},
		{"HTTP, refused", [][]byte{[]byte(post)}, "bad.example", true},
		{"HTTP in pieces, refused", [][]byte{[]byte(post[:2]), []byte(post[2:20]), []byte(post[20:])}, "bad.example", true},
		{"HTTP of two names, refused", [][]byte{[]byte("GET http://ok.example/ HTTP/1.1\r\nHost: bad.example\r\n\r\n")}, "bad.example", true},
		{"a name that none is, refused", [][]byte{bytes.Replace(good, []byte("ok.example"), []byte("ok/example"), 1)}, "?", true},
		{"a head without end, refused", [][]byte{[]byte("GET / HTTP/1.1\r\nX: "), make([]byte, asked.Max)}, "?", true},
		{"no name", [][]byte{[]byte("GET / HTTP/1.0\r\n\r\n")}, "", false},
		{"another protocol", [][]byte{[]byte("*1\r\n$4\r\nPING\r\n")}, "", false},
		{"a long one", [][]byte{pattern(200 << 10)}, "", false},
		{"silence", nil, "", false},
	} {
		t.Run(c.what, func(t *testing.T) {
			port, got := outside(t, "")
			j := &judge{asked: refuseName("bad.example")}
			sw := open(t, netsw.Config{HostLoopback: true, Policy: j})
			p, g := join(t, sw, "job")
			conn, err := g.Dial(within(t), at(sw, port))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			for i, b := range c.parts {
				if i > 0 {
					// The piece before is in the switch when this one goes.
					eventually(t, "piece taken", func() bool { return p.Stats().BytesIn > uint64(i) })
				}
				if _, err := conn.Write(b); err != nil && !c.stays {
					t.Fatal(err)
				}
			}
			whole := string(bytes.Join(c.parts, nil))
			if c.stays {
				_ = conn.SetReadDeadline(time.Now().Add(limit))
				if _, err := conn.Read(make([]byte, 1)); err == nil || err == io.EOF {
					t.Errorf("the guest's end: %v, want a reset", err)
				}
				whole = "<reset>"
			} else {
				_ = conn.CloseWrite()
			}
			select {
			case b := <-got:
				if b != whole {
					t.Errorf("outside got %.60q… (%d bytes), want %.60q… (%d)", b, len(b), whole, len(whole))
				}
			case <-time.After(limit):
				t.Fatal("the connection outside goes on")
			}
			j.mu.Lock()
			defer j.mu.Unlock()
			if heard := strings.Join(j.names, " "); c.name == "" && heard != "" || !strings.HasSuffix(heard, c.name) {
				t.Errorf("the policy heard %q, want %q", heard, c.name)
			}
			s := p.Stats()
			if c.stays && (s.Sent != 0 || s.Dropped(netsw.DropDenied) != 1) {
				t.Errorf("Stats() = %+v, want nothing sent and one denied", s)
			}
			if !c.stays && s.Sent != uint64(len(whole)) {
				t.Errorf("%d bytes counted as sent, want %d", s.Sent, len(whole))
			}
		})
	}
}

// A server that speaks first is not waited with, and a guest that has begun to
// speak is heard whatever else goes on.
func TestServersThatSpeakFirst(t *testing.T) {
	port, got := outside(t, "SSH-2.0-example\r\n")
	j := &judge{asked: refuseName("bad.example")}
	sw := open(t, netsw.Config{HostLoopback: true, Policy: j})
	_, g := join(t, sw, "job")
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetReadDeadline(time.Now().Add(limit))
	b := make([]byte, 17)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "SSH-2.0-example\r\n" {
		t.Fatalf("before the guest said anything: %q, %v", b, err)
	}
	_, _ = io.WriteString(c, "SSH-2.0-guest\r\n")
	_ = c.CloseWrite()
	select {
	case b := <-got:
		if b != "SSH-2.0-guest\r\n" {
			t.Errorf("outside got %q", b)
		}
	case <-time.After(limit):
		t.Fatal("what the guest said did not come out")
	}
}

// The guest that ends its sentence in the middle, or goes away, leaves nothing
// behind.
func TestHellosThatEndInTheMiddle(t *testing.T) {
	port, got := outside(t, "")
	j := &judge{asked: refuseName("bad.example")}
	sw := open(t, netsw.Config{HostLoopback: true, Policy: j})
	p, g := join(t, sw, "job")
	hello := tlsHello(t, "ok.example")
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write(hello[:100])
	_ = c.CloseWrite()
	if b := <-got; b != "<reset>" {
		t.Errorf("outside got %q of a hello cut off", b)
	}
	c.Close()
	if c, err = g.Dial(within(t), at(sw, port)); err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write(hello[:100])
	eventually(t, "the flow is there", func() bool { return sw.Stats().OpenFlows == 1 })
	p.Remove()
	if b := <-got; b != "<reset>" {
		t.Errorf("outside got %q of a guest that is gone", b)
	}
}

// A policy that does not want to know is not told, and nothing is held.
func TestNobodyListens(t *testing.T) {
	port, got := outside(t, "")
	j := &judge{quiet: true, asked: refuseName("bad.example")}
	sw := open(t, netsw.Config{HostLoopback: true, Policy: j})
	_, g := join(t, sw, "job")
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	hello := tlsHello(t, "bad.example")
	_, _ = c.Write(hello)
	c.Close()
	if b := <-got; b != string(hello) || len(j.names) != 0 {
		t.Errorf("outside got %d of %d bytes, the policy heard %q", len(b), len(hello), j.names)
	}
}
