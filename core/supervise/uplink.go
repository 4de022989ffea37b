package supervise

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
)

// The uplink of a service
//
// The switch is the job's supervisor's; a service's supervisor has but a port
// of it. The two speak over a SOCK_SEQPACKET pair that the service's inherits:
// it sends one uplinkRequest a packet and gets one uplinkAnswer, with the
// guest's end of the port's link as a descriptor (SCM_RIGHTS) where one was
// asked for. Its end is the end of the other process.
const (
	uplinkPlug   = "plug"   // answers with Net and the link
	uplinkReplug = "replug" // answers with a new link
	uplinkStats  = "stats"  // answers with Stats
)

type uplinkRequest struct {
	Op string `json:"op"`
}

type uplinkAnswer struct {
	Net   *guestwire.Net `json:"net,omitempty"`
	Stats *NetStats      `json:"stats,omitempty"`
	Err   string         `json:"err,omitempty"`
}

// maxUplink bounds a packet, in bytes.
const maxUplink = 64 << 10

// uplinkPair makes the two ends: ours, and the file for the child.
func uplinkPair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a service's uplink: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "uplink")
	c, err := uplinkConn(os.NewFile(uintptr(fds[0]), "uplink"))
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return c, theirs, nil
}

// uplinkConn takes f over.
func uplinkConn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("using a service's uplink: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("a service's uplink is no unix socket")
	}
	return u, nil
}

// serveUplink answers for a port until the other end is gone.
func serveUplink(c *net.UnixConn, port Plugged) {
	defer c.Close()
	buf := make([]byte, maxUplink)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		var r uplinkRequest
		var a uplinkAnswer
		var link *os.File
		if err := json.Unmarshal(buf[:n], &r); err != nil {
			a.Err = "decoding the request: " + err.Error()
		} else {
			switch r.Op {
			case uplinkPlug:
				n := port.Guest()
				a.Net = &n
				if link = port.File(); link == nil {
					a.Err = "the port was taken before"
				}
			case uplinkReplug:
				if link, err = port.Replug(); err != nil {
					a.Err = err.Error()
				}
			case uplinkStats:
				s := port.Stats()
				a.Stats = &s
			default:
				a.Err = fmt.Sprintf("unknown request %q", r.Op)
			}
		}
		err = sendUplink(c, a, link)
		if link != nil {
			link.Close()
		}
		if err != nil {
			return
		}
	}
}

func sendUplink(c *net.UnixConn, v any, link *os.File) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding for an uplink: %w", err)
	}
	var oob []byte
	if link != nil {
		oob = unix.UnixRights(int(link.Fd()))
	}
	_, _, err = c.WriteMsgUnix(b, oob, nil)
	return err
}

// uplink is the service's end. It is the Network of its supervisor.
type uplink struct {
	conn    *net.UnixConn
	answers chan linked
	gone    chan struct{} // closed when the other process is gone

	mu sync.Mutex // one question at a time
}

// linked is an answer with the descriptor that came with it, or nil.
type linked struct {
	uplinkAnswer
	link *os.File
}

func newUplink(c *net.UnixConn) *uplink {
	u := &uplink{conn: c, answers: make(chan linked), gone: make(chan struct{})}
	go u.read()
	return u
}

func (u *uplink) read() {
	defer close(u.gone)
	buf, oob := make([]byte, maxUplink), make([]byte, unix.CmsgSpace(4))
	for {
		n, on, _, _, err := u.conn.ReadMsgUnix(buf, oob)
		if err != nil {
			return
		}
		var l linked
		if l.link, err = oneRight(oob[:on]); err == nil {
			err = json.Unmarshal(buf[:n], &l.uplinkAnswer)
		}
		if err != nil {
			l.Err = "an answer that makes no sense: " + err.Error()
		}
		u.answers <- l
	}
}

// oneRight is the descriptor of a control message, nil without one. Go's own
// reader asks for close-on-exec.
func oneRight(oob []byte) (*os.File, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(msgs) == 0 {
		return nil, err
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) == 0 {
		return nil, err
	}
	for _, fd := range fds[1:] {
		unix.Close(fd)
	}
	return os.NewFile(uintptr(fds[0]), "link"), nil
}

var errUplinkGone = errors.New("the job's supervisor is gone")

func (u *uplink) ask(op string) (linked, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if err := sendUplink(u.conn, uplinkRequest{Op: op}, nil); err != nil {
		return linked{}, fmt.Errorf("asking the job's supervisor for the network: %w", err)
	}
	select {
	case a := <-u.answers:
		if a.Err != "" {
			if a.link != nil {
				a.link.Close()
			}
			return linked{}, fmt.Errorf("asking the job's supervisor for the network: %s", a.Err)
		}
		return a, nil
	case <-u.gone:
		return linked{}, errUplinkGone
	}
}

// Plug asks for the port that was made for this service; its names were told
// when it was made.
func (u *uplink) Plug(context.Context, string, NetSpec) (Plugged, error) {
	a, err := u.ask(uplinkPlug)
	if err != nil {
		return nil, err
	}
	if a.Net == nil || a.link == nil {
		return nil, errors.New("the job's supervisor gave no port")
	}
	return &uplinkPort{u: u, net: *a.Net, link: a.link}, nil
}

// Close ends nothing: the switch is another's.
func (u *uplink) Close() error { return nil }

// uplinkPort is a port of another process's switch.
type uplinkPort struct {
	u   *uplink
	net guestwire.Net

	mu   sync.Mutex
	link *os.File
}

func (p *uplinkPort) File() *os.File {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.link
	p.link = nil
	return f
}

func (p *uplinkPort) Guest() guestwire.Net { return p.net }

func (p *uplinkPort) Replug() (*os.File, error) {
	a, err := p.u.ask(uplinkReplug)
	if err != nil {
		return nil, err
	}
	if a.link == nil {
		return nil, errors.New("the job's supervisor gave no link")
	}
	return a.link, nil
}

func (p *uplinkPort) Publish(context.Context, Publish) (Publish, error) {
	return Publish{}, fault.New(fault.Conflict, "a service's ports are not published on the host")
}

func (p *uplinkPort) Unpublish(Publish) error {
	return fault.New(fault.NotFound, "a service publishes no port")
}

// Stats asks the switch; zeros when it is gone.
func (p *uplinkPort) Stats() NetStats {
	a, err := p.u.ask(uplinkStats)
	if err != nil || a.Stats == nil {
		return NetStats{}
	}
	return *a.Stats
}

// Unplug does nothing: whose the port is takes it off.
func (p *uplinkPort) Unplug() {}
