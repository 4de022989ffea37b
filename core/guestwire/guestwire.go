// Package guestwire is what the host and a guest's agent say to each other.
//
// Transport: one byte stream (virtio-serial, vsock, or a pipe in tests) with
// yamux over it; the host is the yamux client, the agent the server. Each
// yamux stream carries one request: the opener writes one Header frame, then
// what the op says. A frame is a 4-byte big-endian length (at most MaxFrame)
// followed by that many bytes of JSON. No stream stays open while nothing is
// asked, so that an idle guest can be saved to and restored from memory.
//
// The end of a stream, said by the host, means on a stdin stream that the input
// ends; on a stdout or stderr stream that nobody reads it any more (the
// program finds its pipe broken); on an exec stream before its last event that
// the host is gone (the program is ended, unless ExecRequest.Detach).
//
// Host and guest always ship together: Hello compares version.Build and there
// is no negotiation.
//
// The agent opens a stream itself for one thing alone, and only when Setup said
// ServiceExecOn: a program of the guest runs a command in one of the job's
// services. Such a stream begins with an OpService header whose body names the
// service and holds the exec or stdio header that goes on to it; from then on
// the stream is one of the service's agent.
package guestwire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/hashicorp/yamux"
)

// PortName is the virtio-serial port's name (/sys/class/virtio-ports/*/name).
const PortName = "vk.agent.0"

// VsockPort is the agent's port where the channel is AF_VSOCK.
const VsockPort = 1024

// MaxFrame bounds one JSON frame, in bytes.
const MaxFrame = 1 << 20

// Ops of a Header.
const (
	OpHello    = "hello"    // Hello → HelloReply
	OpSetup    = "setup"    // Setup → Reply (after Progress frames)
	OpResume   = "resume"   // Resume → Reply
	OpExec     = "exec"     // ExecRequest; then ExecControl ⇄ ExecEvent frames
	OpStdio    = "stdio"    // Stdio; then raw bytes, half-closed at EOF
	OpPing     = "ping"     // no body → Pong
	OpVictims  = "victims"  // no body → Victims
	OpShutdown = "shutdown" // Shutdown → Reply
	OpDial     = "dial"     // Dial → Reply; then raw bytes both ways (udp: each datagram after its length, 2 bytes)
	OpWrite    = "write"    // WriteFile; then raw bytes until EOF → Reply
	OpSample   = "sample"   // no body → Reply; then a sample of core/atop as raw bytes until EOF

	// From the agent to the host:
	OpService = "service" // Service; then as its Request says
)

// Service asks for a stream of a service of the job. What is refused is
// answered as Request.Op is: an exec with a last ExecEvent, a stdio stream by
// its end.
type Service struct {
	Name    string `json:"name"` // any that the service has
	Request Header `json:"request"`
}

// MaxServiceExecs is how many commands a job runs in its services at once.
const MaxServiceExecs = 4

// ServiceExec says whether programs of the guest may run commands in the job's
// services.
type ServiceExec string

// The values of ServiceExec.
const (
	ServiceExecNone    ServiceExec = ""        // the job has no services
	ServiceExecOn      ServiceExec = "on"      // they may
	ServiceExecRefused ServiceExec = "refused" // the host's configuration refuses it
)

// Header opens a stream.
type Header struct {
	Op   string          `json:"op"`
	Body json.RawMessage `json:"body,omitempty"`
}

// Reply ends a request that has no answer of its own. Err is "" on success.
type Reply struct {
	Err   string `json:"err,omitempty"`
	Stage string `json:"stage,omitempty"` // where a setup failed
}

// Hello is the host's first request.
type Hello struct {
	Build string `json:"build"`
}

// ResetPhrase begins the line, after "vk-agent: ", in which an agent tells the
// console why it resets its guest. Nothing of the user's has run by then.
const ResetPhrase = "reset: "

// HelloReply tells what answered.
type HelloReply struct {
	Build    string `json:"build"`
	Kernel   string `json:"kernel"`    // uname -r
	UptimeMS int64  `json:"uptime_ms"` // of the guest
	Ready    bool   `json:"ready"`     // Setup was done before (the host reconnected)
	// TimerKHz is the rate that the kernel takes its processors' timer to have,
	// as it measured it at boot; 0 = unknown.
	TimerKHz int `json:"timer_khz,omitempty"`
}

// Progress is one step of a Setup; frames with Stage come before the last one,
// which has Done set and tells how it went.
type Progress struct {
	Stage  string   `json:"stage,omitempty"`
	Done   bool     `json:"done,omitempty"`
	Err    string   `json:"err,omitempty"`
	Linked []string `json:"linked,omitempty"` // programs of Setup.Tools that the image lacks, sorted
}

// Setup makes the bare guest into the job's machine. All sizes are bytes.
type Setup struct {
	Hostname  string      `json:"hostname"`
	NotNamed  bool        `json:"not_named,omitempty"` // Hostname means another guest: no line of /etc/hosts for it
	UnixNano  int64       `json:"unix_nano"`           // host's clock when sent
	Entropy   []byte      `json:"entropy"`             // credited to the guest's pool
	MachineID string      `json:"machine_id,omitempty"`
	Root      Disk        `json:"root"`            // read-only image
	Upper     *Disk       `json:"upper,omitempty"` // writable layer; nil = tmpfs
	Net       *Net        `json:"net,omitempty"`   // nil = no device
	Hosts     []HostEntry `json:"hosts,omitempty"`
	Mounts    []Mount     `json:"mounts,omitempty"`
	Dirs      []Dir       `json:"dirs,omitempty"`
	Checkout  *Checkout   `json:"checkout,omitempty"`
	Env       []string    `json:"env,omitempty"`      // the image's environment, KEY=VALUE; base of every exec
	Loopback  []int       `json:"loopback,omitempty"` // TCP ports of the guest's 127.0.0.1 passed to the gateway
	Nested    bool        `json:"nested,omitempty"`
	Record    bool        `json:"record,omitempty"` // samples will be asked for (OpSample): listen for what ends
	Services  ServiceExec `json:"services,omitempty"`
	Reclaim   *Reclaim    `json:"reclaim,omitempty"` // nil: idle file cache stays
	Tools     string      `json:"tools,omitempty"`   // directory (of a Mount) whose programs are put on the PATH where the image lacks them
}

// Reclaim has the guest evict idle file cache.
type Reclaim struct {
	Keep int64 `json:"keep,omitempty"` // bytes that stay whatever their age; 0 = by age
}

// Disk names a block device by its virtio serial.
type Disk struct {
	Serial string `json:"serial"`
	FSType string `json:"fstype"` // "ext4", "erofs"
}

// Mount is a share put into the guest.
type Mount struct {
	Kind     string `json:"kind"` // "virtiofs" (Source is the tag), "disk" (Source is the serial)
	Source   string `json:"source"`
	FSType   string `json:"fstype,omitempty"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// Checkout is a disk with a work tree that appears at Target below a writable
// layer of its own. What is root's on the disk is User's in the guest.
type Checkout struct {
	Disk   Disk   `json:"disk"`
	Target string `json:"target"`
	User   string `json:"user,omitempty"` // as in ExecRequest.User; "" = root
	// Memory is the most that the layer may hold, in bytes of the guest's
	// memory; 0 puts it beside the root's, on Setup.Upper.
	Memory int64 `json:"memory,omitempty"`
}

// Dir is a directory to make in the root (parents 0755 root when missing). One
// that exists is given this owner and mode, unless Mode is 0: then it is left
// as it is, and a missing one is made 0755.
type Dir struct {
	Path string `json:"path"`
	Mode uint32 `json:"mode"`
	User string `json:"user,omitempty"` // owner as in ExecRequest.User; "" = root
}

// Net is the guest's one interface.
type Net struct {
	MAC     string   `json:"mac"`
	Addr    string   `json:"addr"`    // CIDR, such as 10.200.0.2/24
	Gateway string   `json:"gateway"` // also answers DNS unless DNS says otherwise
	DNS     []string `json:"dns"`
	Search  []string `json:"search,omitempty"`
	Options []string `json:"options,omitempty"` // of resolv.conf(5), such as ndots:0
	MTU     int      `json:"mtu,omitempty"`
}

// HostEntry is a line of /etc/hosts.
type HostEntry struct {
	Addr  string   `json:"addr"`
	Names []string `json:"names"`
}

// Resume is sent to a guest restored from memory, and after every pause.
// Empty fields leave what is there.
type Resume struct {
	UnixNano  int64  `json:"unix_nano"`
	Entropy   []byte `json:"entropy,omitempty"`
	Hostname  string `json:"hostname,omitempty"`
	MachineID string `json:"machine_id,omitempty"`
	Net       *Net   `json:"net,omitempty"`
}

// ExecRequest starts a program. ID is chosen by the host (32 hex digits) and
// joins the exec stream with its OpStdio streams, which may arrive in any
// order; the program starts when all that it declares have arrived.
type ExecRequest struct {
	ID     string   `json:"id"`
	Argv   []string `json:"argv"`
	Env    []string `json:"env,omitempty"`       // over Setup.Env; later entries win
	Clear  bool     `json:"clear_env,omitempty"` // start from nothing but PATH
	Dir    string   `json:"dir,omitempty"`       // "" = the user's home, else /
	MkDir  bool     `json:"mkdir,omitempty"`     // make Dir when it is missing
	User   string   `json:"user,omitempty"`      // name|uid[:group|gid]; "" = root
	TTY    bool     `json:"tty,omitempty"`       // stdout carries everything
	Rows   uint16   `json:"rows,omitempty"`
	Cols   uint16   `json:"cols,omitempty"`
	Stdin  bool     `json:"stdin,omitempty"` // false = /dev/null
	Stdout bool     `json:"stdout,omitempty"`
	Stderr bool     `json:"stderr,omitempty"`
	Detach bool     `json:"detach,omitempty"` // survives the loss of its streams
}

// MarshalJSON refuses what JSON would change on its way: text that is not UTF-8.
func (r ExecRequest) MarshalJSON() ([]byte, error) {
	for _, s := range slices.Concat(r.Argv, r.Env, []string{r.Dir, r.User}) {
		if !utf8.ValidString(s) {
			return nil, fmt.Errorf("%.80q is not UTF-8, and nothing else can be passed on to a guest: give it by a file or standard input", s)
		}
	}
	type plain ExecRequest
	return json.Marshal(plain(r))
}

// Stdio announces a raw stream of an exec. FD is 0, 1 or 2.
type Stdio struct {
	ID string `json:"id"`
	FD int    `json:"fd"`
}

// ExecControl is what the host may say on an exec stream after the request.
type ExecControl struct {
	Signal int     `json:"signal,omitempty"` // to the program's process group
	Kill   bool    `json:"kill,omitempty"`   // SIGKILL to all it started
	Resize *Resize `json:"resize,omitempty"`
}

// Resize is a terminal's new size.
type Resize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// ExecEvent is what the agent says on an exec stream. The last one has Exited
// set; it comes after all output has been written to the stdio streams. That of
// the start is left out when the end follows at once.
type ExecEvent struct {
	PID    int    `json:"pid,omitempty"` // started
	Exited bool   `json:"exited,omitempty"`
	Code   int    `json:"code"`             // exit status; 128+n when Signal is n
	Signal int    `json:"signal,omitempty"` // signal that ended it
	OOM    bool   `json:"oom,omitempty"`    // the guest's kernel killed it for memory
	Down   bool   `json:"down,omitempty"`   // the guest was shutting down: its own end tells why
	Err    string `json:"err,omitempty"`    // it never started: 127 not found, 126 not executable
}

// Pong is the guest's pulse.
type Pong struct {
	UptimeMS int64 `json:"uptime_ms"`
	UnixNano int64 `json:"unix_nano"`
	MemTotal int64 `json:"mem_total"`     // bytes
	MemAvail int64 `json:"mem_available"` // bytes
	Execs    int   `json:"execs"`         // running
	OOMKills int64 `json:"oom_kills"`     // since boot
	// UpperUsed are bytes of the writable layer: of the root, or with a
	// Setup.Checkout in memory the most that its layer has held so far.
	UpperUsed int64 `json:"upper_used"`
	UpperSize int64 `json:"upper_size"`
}

// MaxVictims is how many victims are named.
const MaxVictims = 64

// Victims are the processes that the guest's kernel killed for want of memory,
// as far as its log remembers.
type Victims struct {
	List  []Victim `json:"list,omitempty"` // the first MaxVictims
	Total int      `json:"total"`
	Err   string   `json:"err,omitempty"` // the log could not be read
}

// Victim is one of them.
type Victim struct {
	Name     string `json:"name"`
	PID      int    `json:"pid"`
	RSS      int64  `json:"rss"`       // anonymous memory that it held, bytes
	UptimeMS int64  `json:"uptime_ms"` // of the guest at its death
}

// Shutdown ends the guest in order.
type Shutdown struct {
	Reboot bool          `json:"reboot,omitempty"`
	Grace  time.Duration `json:"grace"` // from SIGTERM to SIGKILL
}

// Dial connects to an address inside the guest.
type Dial struct {
	Network string `json:"network"` // "tcp", "udp", "unix"
	Addr    string `json:"addr"`
}

// WriteFile makes one file (and its parents) from the bytes that follow.
type WriteFile struct {
	Path string `json:"path"`
	Mode uint32 `json:"mode"`
	User string `json:"user,omitempty"`
	Size int64  `json:"size"` // exactly this many bytes follow
}

// MuxConfig is the yamux configuration both ends use. Keep-alive is off (an
// idle guest sends nothing) and the timeouts are long, because a guest under
// emulation may take many seconds to answer its first open.
func MuxConfig() *yamux.Config {
	c := yamux.DefaultConfig()
	c.EnableKeepAlive = false
	c.MaxStreamWindowSize = 1 << 20
	c.StreamOpenTimeout = 0
	c.StreamCloseTimeout = 0
	c.ConnectionWriteTimeout = 10 * time.Minute
	c.AcceptBacklog = 4096
	c.LogOutput = io.Discard
	return c
}

// Send writes v as one frame.
func Send(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding frame: %w", err)
	}
	if len(b) > MaxFrame {
		return fmt.Errorf("frame of %d bytes is over the limit of %d", len(b), MaxFrame)
	}
	buf := make([]byte, 4, 4+len(b))
	binary.BigEndian.PutUint32(buf, uint32(len(b)))
	_, err = w.Write(append(buf, b...))
	return err
}

// Recv reads one frame into v. io.EOF means that the stream ended between
// frames.
func Recv(r io.Reader, v any) error {
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return err
	}
	l := binary.BigEndian.Uint32(n[:])
	if l > MaxFrame {
		return fmt.Errorf("frame of %d bytes is over the limit of %d", l, MaxFrame)
	}
	b := make([]byte, l)
	if _, err := io.ReadFull(r, b); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("decoding frame: %w", err)
	}
	return nil
}

// Open writes the Header that starts a request with body (nil for none).
func Open(w io.Writer, op string, body any) error {
	h := Header{Op: op}
	if body != nil {
		b, err := json.Marshal(body)
		if own := (*json.MarshalerError)(nil); errors.As(err, &own) {
			return own.Err
		}
		if err != nil {
			return fmt.Errorf("encoding %s: %w", op, err)
		}
		h.Body = b
	}
	return Send(w, h)
}
