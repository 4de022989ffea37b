package agent_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/agent/agenttest"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

func TestDial(t *testing.T) {
	c := agenttest.Start(t).Client
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				b, _ := io.ReadAll(conn) // until the half-close
				fmt.Fprintf(conn, "%d bytes", len(b))
				conn.Close()
			}()
		}
	}()
	conn, err := c.Dial(ctxFor(t), "tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn.Write(make([]byte, 700000))
	guestclient.CloseWrite(conn)
	if b, err := io.ReadAll(conn); err != nil || string(b) != "700000 bytes" {
		t.Errorf("answer %q, %v", b, err)
	}
	conn.Close()
	if _, err := c.Dial(ctxFor(t), "unix", "/no/such/socket"); err == nil || !strings.Contains(err.Error(), "/no/such/socket") {
		t.Errorf("Dial of nothing = %v", err)
	}
	if _, err := c.Dial(ctxFor(t), "ip", "127.0.0.1"); err == nil {
		t.Error("Dial of network ip was not refused")
	}
}

func TestDialUDP(t *testing.T) {
	c := agenttest.Start(t).Client
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	go func() {
		b := make([]byte, 2000)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			pc.WriteTo(append([]byte("re:"), b[:n]...), from)
		}
	}()
	conn, err := c.Dial(ctxFor(t), "udp", pc.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, m := range []string{"one", "three"} {
		conn.Write(append([]byte{0, byte(len(m))}, m...))
		b := make([]byte, 2+3+len(m))
		if _, err := io.ReadFull(conn, b); err != nil || string(b[2:]) != "re:"+m {
			t.Errorf("datagram %q came back as %q, %v", m, b, err)
		}
	}
}

func TestWriteFile(t *testing.T) {
	c := agenttest.Start(t).Client
	path := filepath.Join(t.TempDir(), "new", "dir", "file")
	data := bytes.Repeat([]byte("0123456789"), 300000)
	w := guestwire.WriteFile{Path: path, Mode: 0o750, Size: int64(len(data))}
	if err := c.WriteFile(ctxFor(t), w, bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	fi, _ := os.Stat(path)
	if err != nil || !bytes.Equal(b, data) || fi.Mode().Perm() != 0o750 {
		t.Errorf("file has %d bytes, mode %v, %v", len(b), fi.Mode(), err)
	}
	w.Size = 5
	if err := c.WriteFile(ctxFor(t), w, strings.NewReader("abc")); err == nil {
		t.Error("a short file was not refused")
	}
	if b, _ := os.ReadFile(path); !bytes.Equal(b, data) {
		t.Error("a refused write changed the file")
	}
	w.Path = "relative"
	if err := c.WriteFile(ctxFor(t), w, strings.NewReader("abcde")); err == nil || !strings.Contains(err.Error(), "relative") {
		t.Errorf("relative path: %v", err)
	}
	ents, _ := os.ReadDir(filepath.Dir(path))
	if len(ents) != 1 {
		t.Errorf("left in the directory: %v", ents)
	}
}

func TestUnknownOp(t *testing.T) {
	p := agenttest.Start(t)
	conn, err := p.Client.Open(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	guestwire.Open(conn, "frobnicate", nil)
	var rep guestwire.Reply
	if err := guestwire.Recv(conn, &rep); err != nil || !strings.Contains(rep.Err, "frobnicate") {
		t.Errorf("got %+v, %v", rep, err)
	}
}

func TestShutdownEndsServe(t *testing.T) {
	p := agenttest.Start(t)
	if err := p.Client.Shutdown(ctxFor(t), guestwire.Shutdown{}); err != nil {
		t.Fatal(err)
	}
	if err := p.Cmd.Wait(); err != nil {
		t.Errorf("the agent ended with %v", err)
	}
}
