package netup

import (
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// conn is a route netlink socket.
type conn struct {
	fd  int
	seq uint32
}

func dial() (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("netlink socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("netlink bind", err)
	}
	return &conn{fd: fd}, nil
}

func (c *conn) close() { unix.Close(c.fd) }

// message is a request in the making: a header, a fixed part, attributes.
type message struct {
	typ, flags uint16
	body       []byte
}

func (m *message) attr(typ uint16, data []byte) {
	m.body = binary.NativeEndian.AppendUint16(m.body, uint16(4+len(data)))
	m.body = binary.NativeEndian.AppendUint16(m.body, typ)
	m.body = append(m.body, data...)
	for len(m.body)%4 != 0 {
		m.body = append(m.body, 0)
	}
}

func u32(v int) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(v)) }

// do sends a request and waits for the kernel's verdict on it; f sees the
// messages of a dump.
func (c *conn) do(m message, f func(typ uint16, body []byte)) error {
	c.seq++
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(m.body)))
	b = binary.NativeEndian.AppendUint16(b, m.typ)
	b = binary.NativeEndian.AppendUint16(b, m.flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b = binary.NativeEndian.AppendUint32(b, c.seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	if err := unix.Sendto(c.fd, append(b, m.body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("netlink send", err)
	}
	buf := make([]byte, 32<<10)
	for {
		n, _, err := unix.Recvfrom(c.fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("netlink receive", err)
		}
		done, err := c.parse(buf[:n], f)
		if done || err != nil {
			return err
		}
	}
}

func (c *conn) parse(b []byte, f func(uint16, []byte)) (done bool, err error) {
	for len(b) >= unix.NLMSG_HDRLEN {
		size := int(binary.NativeEndian.Uint32(b))
		typ := binary.NativeEndian.Uint16(b[4:])
		seq := binary.NativeEndian.Uint32(b[8:])
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return true, fmt.Errorf("netlink: message of %d bytes in %d", size, len(b))
		}
		body := b[unix.NLMSG_HDRLEN:size]
		b = b[min((size+3)&^3, len(b)):]
		if seq != c.seq {
			continue
		}
		switch typ {
		case unix.NLMSG_DONE:
			return true, nil
		case unix.NLMSG_ERROR:
			if len(body) < 4 {
				return true, fmt.Errorf("netlink: error of %d bytes", len(body))
			}
			if e := int32(binary.NativeEndian.Uint32(body)); e != 0 {
				return true, unix.Errno(-e)
			}
			return true, nil
		default:
			if f != nil {
				f(typ, body)
			}
		}
	}
	return false, nil
}

// linkSet changes an interface: up or down, and its MTU and hardware address
// when given.
func (c *conn) linkSet(index int, up bool, mtu int, mac []byte) error {
	m := message{typ: unix.RTM_NEWLINK, body: make([]byte, unix.SizeofIfInfomsg)}
	binary.NativeEndian.PutUint32(m.body[4:], uint32(index))
	if up {
		binary.NativeEndian.PutUint32(m.body[8:], unix.IFF_UP)
	}
	binary.NativeEndian.PutUint32(m.body[12:], unix.IFF_UP)
	if mtu > 0 {
		m.attr(unix.IFLA_MTU, u32(mtu))
	}
	if mac != nil {
		m.attr(unix.IFLA_ADDRESS, mac)
	}
	return c.do(m, nil)
}

// addrAdd puts an address on an interface.
func (c *conn) addrAdd(index int, ip []byte, bits int) error {
	m := message{typ: unix.RTM_NEWADDR, flags: unix.NLM_F_CREATE | unix.NLM_F_REPLACE, body: make([]byte, unix.SizeofIfAddrmsg)}
	m.body[0], m.body[1] = family(ip), byte(bits)
	if len(ip) == 16 {
		m.body[2] = unix.IFA_F_NODAD
	}
	binary.NativeEndian.PutUint32(m.body[4:], uint32(index))
	m.attr(unix.IFA_LOCAL, ip)
	m.attr(unix.IFA_ADDRESS, ip)
	return c.do(m, nil)
}

// addrFlush removes every address of an interface but link-local ones.
func (c *conn) addrFlush(index int) error {
	var found [][]byte
	q := message{typ: unix.RTM_GETADDR, flags: unix.NLM_F_DUMP, body: make([]byte, unix.SizeofIfAddrmsg)}
	err := c.do(q, func(typ uint16, b []byte) {
		if typ == unix.RTM_NEWADDR && len(b) >= unix.SizeofIfAddrmsg && int(binary.NativeEndian.Uint32(b[4:])) == index && b[3] != unix.RT_SCOPE_LINK {
			found = append(found, append([]byte(nil), b...))
		}
	})
	if err != nil {
		return err
	}
	for _, b := range found {
		if err := c.do(message{typ: unix.RTM_DELADDR, body: b}, nil); err != nil && err != unix.EADDRNOTAVAIL {
			return err
		}
	}
	return nil
}

// routeDefault makes everything else go by gw.
func (c *conn) routeDefault(index int, gw []byte) error {
	m := message{typ: unix.RTM_NEWROUTE, flags: unix.NLM_F_CREATE | unix.NLM_F_REPLACE, body: make([]byte, unix.SizeofRtMsg)}
	m.body[0] = family(gw)
	m.body[4] = unix.RT_TABLE_MAIN
	m.body[5] = unix.RTPROT_BOOT
	m.body[6] = unix.RT_SCOPE_UNIVERSE
	m.body[7] = unix.RTN_UNICAST
	m.attr(unix.RTA_GATEWAY, gw)
	m.attr(unix.RTA_OIF, u32(index))
	return c.do(m, nil)
}

func family(ip []byte) byte {
	if len(ip) == 4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
