package agent

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"virtkit/agent/exec"
	"virtkit/core/guestwire"
)

// halfClosedLimit ends a dialled connection whose host has said its last and
// reads nothing either: yamux has no word for "gone".
const halfClosedLimit = 60 * time.Second

// dial joins a stream to an address inside the guest.
func (s *server) dial(ctx context.Context, st net.Conn, body json.RawMessage) {
	var m guestwire.Dial
	if err := decode(guestwire.OpDial, body, &m); err != nil {
		reply(st, err)
		return
	}
	switch m.Network {
	case "tcp", "udp", "unix":
	default:
		reply(st, fmt.Errorf("network %q is not tcp, udp or unix", m.Network))
		return
	}
	c, err := s.opt.Dial(ctx, m.Network, m.Addr)
	if err != nil {
		reply(st, err)
		return
	}
	defer c.Close()
	reply(st, nil)
	if m.Network == "udp" {
		spliceDatagrams(st, c)
		return
	}
	splice(st, c)
}

// splice copies both ways. st is a yamux stream: its Close ends one direction.
func splice(st, c net.Conn) {
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		io.Copy(c, st)
		if h, ok := c.(interface{ CloseWrite() error }); ok {
			h.CloseWrite()
		}
		// From here on a write that makes no progress finds nobody there.
		st.SetWriteDeadline(time.Now().Add(halfClosedLimit))
	}()
	b := make([]byte, 64<<10)
	for {
		n, err := c.Read(b)
		if n > 0 {
			if _, werr := st.Write(b[:n]); werr != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	st.Close()
	c.Close()
	st.SetReadDeadline(time.Now().Add(halfClosedLimit))
	wg.Wait()
}

// spliceDatagrams carries each datagram behind its length, two bytes.
func spliceDatagrams(st, c net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer c.Close()
		b := make([]byte, 1<<16)
		for {
			if _, err := io.ReadFull(st, b[:2]); err != nil {
				return
			}
			n := int(binary.BigEndian.Uint16(b))
			if _, err := io.ReadFull(st, b[:n]); err != nil {
				return
			}
			c.Write(b[:n]) // a refused datagram is a lost one
		}
	}()
	b := make([]byte, 2+1<<16)
	for {
		n, err := c.Read(b[2:])
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				break
			}
			select {
			case <-done:
			case <-time.After(10 * time.Millisecond): // an ICMP error, told once
				continue
			}
			break
		}
		if n > 0xffff {
			continue
		}
		binary.BigEndian.PutUint16(b, uint16(n))
		if _, err := st.Write(b[:2+n]); err != nil {
			break
		}
	}
	c.Close()
	st.Close()
	st.SetReadDeadline(time.Unix(1, 0))
	<-done
}

// writeFile makes one file from the stream: whole, or not at all.
func (s *server) writeFile(st io.Reader, body json.RawMessage) (err error) {
	var m guestwire.WriteFile
	if err := decode(guestwire.OpWrite, body, &m); err != nil {
		return err
	}
	if !filepath.IsAbs(m.Path) || filepath.Clean(m.Path) == "/" {
		return fmt.Errorf("path %q is not that of a file", m.Path)
	}
	if m.Size < 0 {
		return fmt.Errorf("%s: size %d", m.Path, m.Size)
	}
	u, err := exec.LookupUser(s.opt.Root, m.User)
	if err != nil {
		return err
	}
	mode := os.FileMode(m.Mode & 0o777)
	if m.Mode == 0 {
		mode = 0o644
	}
	path := filepath.Join(s.opt.Root, filepath.Clean(m.Path))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".vk-write-*")
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
			io.Copy(io.Discard, st) // or the host would wait for its window
		}
	}()
	n, err := io.Copy(f, io.LimitReader(st, m.Size))
	if err != nil {
		return fmt.Errorf("writing %s: %w", m.Path, err)
	}
	if n != m.Size {
		return fmt.Errorf("%s: %d bytes of %d came", m.Path, n, m.Size)
	}
	if extra, _ := st.Read(make([]byte, 1)); extra > 0 {
		return fmt.Errorf("%s: more than %d bytes came", m.Path, m.Size)
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if int(u.UID) != os.Getuid() || int(u.GID) != os.Getgid() {
		if err := f.Chown(int(u.UID), int(u.GID)); err != nil {
			return err
		}
	}
	return os.Rename(f.Name(), path)
}
