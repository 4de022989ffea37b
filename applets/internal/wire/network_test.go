package wire

import (
	"net"
	"strconv"
	"testing"
	"time"

	"virtkit/core/supervise"
	"virtkit/netsw"
	"virtkit/netsw/netswtest"
)

// What guests send each other is in no figure; what goes outside is, as payload.
func TestTrafficBetweenGuestsIsNotCounted(t *testing.T) {
	host, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	sw, err := netsw.New(netsw.Config{HostLoopback: true})
	if err != nil {
		t.Fatal(err)
	}
	n := &network{sw: sw}
	defer n.Close()
	var ports []supervise.Plugged
	var guests []*netswtest.Guest
	for _, name := range []string{"job", "service"} {
		p, err := n.Plug(t.Context(), name, supervise.NetSpec{})
		if err != nil {
			t.Fatal(err)
		}
		f := p.File()
		ports, guests = append(ports, p), append(guests, netswtest.New(t, f, p.Guest()))
		f.Close()
	}
	got, err := guests[1].ListenUDP(5000)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	say := func(to, text string, heard func([]byte) (int, error)) {
		t.Helper()
		c, err := guests[0].DialUDP(to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		if k, err := heard(b); err != nil || string(b[:k]) != text {
			t.Fatalf("%s got %q, %v; want %q", to, b[:k], err, text)
		}
	}
	_ = got.SetReadDeadline(time.Now().Add(time.Minute))
	_ = host.SetReadDeadline(time.Now().Add(time.Minute))
	say(net.JoinHostPort(guests[1].Addr.String(), "5000"), "to a sibling", func(b []byte) (int, error) {
		k, _, err := got.ReadFrom(b)
		return k, err
	})
	say(net.JoinHostPort(sw.Gateway().String(), strconv.Itoa(host.LocalAddr().(*net.UDPAddr).Port)), "out", func(b []byte) (int, error) {
		k, _, err := host.ReadFrom(b)
		return k, err
	})
	// It is counted when it has been sent.
	for end := time.Now().Add(time.Minute); ports[0].Stats().SentBytes == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	if s := ports[0].Stats(); s != (supervise.NetStats{SentBytes: 3}) {
		t.Errorf("the sender's port counts %+v, want 3 bytes sent", s)
	}
	if s := ports[1].Stats(); s != (supervise.NetStats{}) {
		t.Errorf("the sibling's port counts %+v, want nothing", s)
	}
	if sent, received := n.Traffic(); sent != 3 || received != 0 {
		t.Errorf("the network counts %d bytes sent and %d received, want 3 and 0", sent, received)
	}
}
