package supervise_test

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
)

// joint is a client's socket spliced to a stream whose other end is guest.
func joint(t *testing.T) (client *net.UnixConn, guest *yamux.Stream, done chan struct{}) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := fsx.ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err = fsx.DialUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	served, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	a, b := net.Pipe()
	host, err := yamux.Client(a, guestwire.MuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	far, err := yamux.Server(b, guestwire.MuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	st, err := host.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	if guest, err = far.AcceptStream(); err != nil {
		t.Fatal(err)
	}
	done = make(chan struct{})
	go func() {
		supervise.Splice(served, st)
		served.Close()
		close(done)
	}()
	t.Cleanup(func() { client.Close(); host.Close(); far.Close() })
	client.SetDeadline(time.Now().Add(time.Minute))
	guest.SetDeadline(time.Now().Add(time.Minute))
	return client, guest, done
}

func ends(t *testing.T, done chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("the splice did not end")
	}
}

func TestSpliceClientHalfCloses(t *testing.T) {
	client, guest, done := joint(t)
	in := bytes.Repeat([]byte("in"), 500_000)
	go func() {
		client.Write(in)
		client.CloseWrite()
	}()
	got, err := io.ReadAll(guest)
	if err != nil || !bytes.Equal(got, in) {
		t.Fatalf("the guest read %d bytes, %v; want %d and EOF", len(got), err, len(in))
	}
	// The other way is still open.
	go func() {
		guest.Write([]byte("after EOF"))
		guest.Close()
	}()
	back, err := io.ReadAll(client)
	if err != nil || string(back) != "after EOF" {
		t.Errorf("the client read %q, %v", back, err)
	}
	client.Close()
	ends(t, done)
}

func TestSpliceGuestHalfCloses(t *testing.T) {
	client, guest, done := joint(t)
	go func() {
		guest.Write([]byte("out"))
		guest.Close()
	}()
	out, err := io.ReadAll(client)
	if err != nil || string(out) != "out" {
		t.Fatalf("the client read %q, %v", out, err)
	}
	if _, err := client.Write([]byte("still")); err != nil {
		t.Fatalf("writing after the guest's EOF: %v", err)
	}
	client.CloseWrite()
	in, err := io.ReadAll(guest)
	if err != nil || string(in) != "still" {
		t.Errorf("the guest read %q, %v", in, err)
	}
	ends(t, done)
}

// A client that goes away while the guest says nothing ends the splice, and a
// guest that goes on writing is not blocked for ever.
func TestSpliceClientGoes(t *testing.T) {
	client, guest, done := joint(t)
	client.Close()
	if _, err := io.ReadAll(guest); err != nil {
		t.Errorf("the guest saw %v, want EOF", err)
	}
	ends(t, done)
	n, err := guest.Write(make([]byte, 8<<20)) // over every window
	if err != nil && n == 0 && os.IsTimeout(err) {
		t.Errorf("the guest's write blocked: %v", err)
	}
}

// The same of one that goes with something unread, as a program does that is
// killed before it has heard that its command has started.
func TestSpliceClientGoesUnread(t *testing.T) {
	client, guest, done := joint(t)
	if _, err := guest.Write([]byte("started")); err != nil {
		t.Fatal(err)
	}
	rc, err := client.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	rc.Read(func(fd uintptr) bool { // until it has come, without taking it
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK)
		return err != unix.EAGAIN || n > 0
	})
	client.Close()
	if _, err := io.ReadAll(guest); err != nil {
		t.Errorf("the guest saw %v, want EOF", err)
	}
	ends(t, done)
}
