// Package supervise runs one guest for its whole life: a supervisor process
// owns the VMM, the network switch and the shares of one job, listens on a
// socket in the job's directory, and leaves nothing behind when it ends.
//
// The process is a session of its own, so it outlives `vk gitlab prepare`.
// It holds an exclusive lock on <jobdir>/lock for its life: whoever gets that
// lock knows that the supervisor is gone and may sweep the directory.
//
// Files of a job directory (all 0600 in a 0700 directory):
//
//	lock          held by the supervisor
//	spec.json     the Spec it was started with (no secrets)
//	state.json    the last State, replaced atomically
//	sup.sock      clients connect here
//	sup.log       the supervisor's log and what the VMM printed
//	console.log   the guest's console, bounded (see ConsoleMax); older part in console.log.1
//	command.log   output of Spec.Command, bounded likewise
//	egress.json   what the guests reached and were refused (EgressRecord), when Spec.Net.Egress is set
//	upper.img     the guest's writable layer
//	checkout.img  the work tree packed for the guest, when Spec.Checkout is set
//	vmm/          the driver's own files
//	services/     one directory like this one for each of Spec.Services
package supervise

import (
	"time"

	"virtkit/core/guestwire"
	"virtkit/core/numa"
)

// Spec says what a supervisor runs. It is written to <jobdir>/spec.json and
// never holds a secret.
type Spec struct {
	ID       string    `json:"id"`   // directory name; [A-Za-z0-9._-]
	Name     string    `json:"name"` // what the user calls it
	Kind     string    `json:"kind"` // "run" or "gitlab"
	Created  time.Time `json:"created"`
	Hostname string    `json:"hostname"`
	CPUs     int       `json:"cpus"`
	MemMiB   int       `json:"mem_mib"`
	Nested   bool      `json:"nested,omitempty"`

	// Reclaim has the guest give idle file cache back; NoBalloon keeps what it
	// frees, and with it what it gives back.
	Reclaim   *guestwire.Reclaim `json:"reclaim,omitempty"`
	NoBalloon bool               `json:"no_balloon,omitempty"`
	// Place is the memory node that was chosen for the guest; nil = Deps.Place
	// chooses when it boots.
	Place *numa.Placement `json:"place,omitempty"`

	Image Image `json:"image"`
	Upper int64 `json:"upper_bytes"` // capacity of the writable layer

	Net    NetSpec `json:"net"`
	Shares []Share `json:"shares,omitempty"`
	Disks  []Disk  `json:"disks,omitempty"`
	Dirs   []Dir   `json:"dirs,omitempty"`

	// Checkout, when set, is a work tree in the guest. Its image is CheckoutFile
	// in the directory.
	Checkout *Checkout `json:"checkout,omitempty"`

	// Owner, when its PID is not 0, is the process without which this guest
	// has no purpose: the supervisor ends when it is gone.
	Owner Owner `json:"owner"`
	// Deadline ends the guest whatever happens; zero = none. For jobs whose
	// cleanup never comes.
	Deadline time.Time `json:"deadline,omitzero"`
	// Keep leaves the directory (console, state) after the guest's end.
	Keep bool `json:"keep,omitempty"`
	// Trial says that nothing of the user's has run in the guest until a client
	// says so (Client.Begin). A guest that falls silent before is booted anew,
	// once. It means nothing with a Command.
	Trial bool `json:"trial,omitempty"`

	Command   *Command      `json:"command,omitempty"` // of `vk run -d`: started after boot, the guest ends with it
	Env       []string      `json:"env,omitempty"`     // the image's ENV
	BootLimit time.Duration `json:"boot_limit"`        // from start to ready
	HangLimit time.Duration `json:"hang_limit"`        // silence of the agent that ends the guest; 0 = never
	Kernel    string        `json:"kernel,omitempty"`  // "" = the best one installed, else a name or path
	Accel     string        `json:"accel,omitempty"`   // auto|kvm|tcg

	// Record, when set, has the guest recorded (core/atop).
	Record *Record `json:"record,omitempty"`

	NoTemplate bool `json:"no_template,omitempty"` // boot; use no template and make none

	// Services are guests of their own on this guest's switch. They start with
	// it and end with it; services.go tells how.
	Services []Service `json:"services,omitempty"`
	// ServiceExec says what the guest's `vk-agent exec --service` may do.
	ServiceExec ServiceExec `json:"service_exec,omitempty"`
}

// Service is a sibling of a guest.
type Service struct {
	// Spec is its guest. ID is the name of its directory below services/ and of
	// its port on the switch, and differs from the guest's hostname; Net.Names
	// is what the other guests may call it; Command is what it runs and ends
	// with. The supervisor fills in Kind, Net.Mode, Owner and Keep.
	Spec Spec `json:"spec"`
	// Ports are the TCP ports that it is to accept connections on before the
	// guest counts as running; Wait bounds that, from the start of its command
	// (SlowWait times as long under emulation). None, or Wait 0: no wait.
	Ports []int         `json:"ports,omitempty"`
	Wait  time.Duration `json:"wait,omitempty"`
}

// ServiceExec says whether a guest may run commands in its services.
type ServiceExec = guestwire.ServiceExec

// The values of ServiceExec.
const (
	ServiceExecNone    = guestwire.ServiceExecNone
	ServiceExecOn      = guestwire.ServiceExecOn
	ServiceExecRefused = guestwire.ServiceExecRefused
)

// Record says how a guest is recorded.
type Record struct {
	Name     string        `json:"name"`     // of the recording, as Recordings.Begin takes it
	Interval time.Duration `json:"interval"` // between two samples; at least a second
}

// Image is the root the guest runs.
type Image struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest"`
	Path   string `json:"path"`   // read-only filesystem image
	FSType string `json:"fstype"` // "ext4"
	Lock   string `json:"lock"`   // file whose shared lock keeps it from `vk gc`
}

// NetSpec is the guest's network.
type NetSpec struct {
	Mode         string    `json:"mode"`                    // "switch", "none", "tap", "pool", or of a service "port"
	Names        []string  `json:"names,omitempty"`         // what the other guests on the switch may call it; nil = its hostname
	HostLoopback bool      `json:"host_loopback,omitempty"` // gateway's address reaches the host's 127.0.0.1
	Loopback     []int     `json:"loopback,omitempty"`      // guest's 127.0.0.1:port passed on to the host's
	Publish      []Publish `json:"publish,omitempty"`
	// Egress is what the guests of the switch may reach, services included;
	// nil restricts nothing and records nothing.
	Egress *Egress `json:"egress,omitempty"`
}

// Tap reports whether the guest is on a tap device of the host.
func (n NetSpec) Tap() bool { return n.Mode == "tap" || n.Mode == "pool" }

// Publish makes a port of the guest reachable on the host.
type Publish struct {
	HostAddr  string `json:"host_addr"` // "" = 127.0.0.1
	HostPort  int    `json:"host_port"` // 0 = any free one; the State tells which
	GuestPort int    `json:"guest_port"`
	Proto     string `json:"proto"` // "tcp" or "udp"
}

// Filled is p with what was left out: 127.0.0.1 and tcp. The same port is one
// value then, however it was written.
func (p Publish) Filled() Publish {
	if p.HostAddr == "" {
		p.HostAddr = "127.0.0.1"
	}
	if p.Proto == "" {
		p.Proto = "tcp"
	}
	return p
}

// Share is a host directory in the guest.
type Share struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// Disk is a read-only filesystem image, of something of the host's, that the
// guest mounts. It is held like the root for the guest's life.
type Disk struct {
	Image  Image  `json:"image"`
	Target string `json:"target"`
	// Tools puts the programs in it on the PATH where the root lacks them; of
	// one disk at most.
	Tools bool `json:"tools,omitempty"`
}

// ToolsTarget is where a guest mounts its host's tools.
const ToolsTarget = "/run/vk/tools"

// Checkout is a work tree that was packed for the guest.
type Checkout struct {
	FSType string `json:"fstype"`
	Target string `json:"target"`         // in the guest
	User   string `json:"user,omitempty"` // whom it belongs to there; "" = root
	// Memory is how many bytes of the guest's memory the writable layer above
	// it may take; 0 puts that layer on the guest's own disk.
	Memory int64 `json:"memory,omitempty"`
}

// Dir is a directory to make in the guest before anything runs; Mode 0 leaves an
// existing one as it is.
type Dir struct {
	Path string `json:"path"`
	Mode uint32 `json:"mode"`
	User string `json:"user,omitempty"`
}

// Owner is a process, told from a later one of the same number by its start
// time (field 22 of /proc/PID/stat, in clock ticks since boot).
type Owner struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// Command is what a detached guest runs.
type Command struct {
	Argv []string `json:"argv"`
	Env  []string `json:"-"` // may be secret: it is in the supervisor's memory alone
	Dir  string   `json:"dir,omitempty"`
	User string   `json:"user,omitempty"`
	TTY  bool     `json:"tty,omitempty"`
}

// Phase is where a guest is in its life.
type Phase string

// The phases, in order.
const (
	Starting Phase = "starting" // supervisor is setting up
	Booting  Phase = "booting"  // VMM runs, agent not ready
	Running  Phase = "running"
	Stopping Phase = "stopping"
	Ended    Phase = "ended"
)

// State is what a supervisor tells of its guest.
type State struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Kind    string    `json:"kind"`
	Phase   Phase     `json:"phase"`
	Stage   string    `json:"stage"` // last boot stage reached, in words
	Since   time.Time `json:"since"` // of the phase
	Created time.Time `json:"created"`
	PID     int       `json:"pid"`     // supervisor
	VMMPID  int       `json:"vmm_pid"` // 0 when none
	// Start and VMMStart are the start times of PID and VMMPID (see Owner).
	Start    uint64 `json:"start,omitempty"`
	VMMStart uint64 `json:"vmm_start,omitempty"`
	Image    string `json:"image"`
	Digest   string `json:"digest"`
	CPUs     int    `json:"cpus"`
	MemMiB   int    `json:"mem_mib"`
	Accel    string `json:"accel"`
	Restored bool   `json:"restored,omitempty"` // it started from a template, without booting
	// Retried says of each start that was given up, so that the guest was booted
	// again, why; the first one first.
	Retried []string  `json:"retried,omitempty"`
	Kernel  string    `json:"kernel"`
	Addr    string    `json:"addr,omitempty"`
	Publish []Publish `json:"publish,omitempty"`
	Boots   int       `json:"boots"` // 1 + reboots
	BootMS  int64     `json:"boot_ms"`
	Steps   []Step    `json:"steps,omitempty"`
	Exit    *Exit     `json:"exit,omitempty"` // once ended

	Services []ServiceState `json:"services,omitempty"`

	// NUMA says on which memory node the guest is; "" where there is no choice.
	NUMA string `json:"numa,omitempty"`
	// Linked are the programs of the disk of tools that the root lacks.
	Linked []string `json:"linked,omitempty"`

	// Recording is the directory that the guest's recording is in; "" when it
	// has none. RecordErr is why there is none although it was asked for.
	Recording string `json:"recording,omitempty"`
	RecordErr string `json:"record_err,omitempty"`
}

// ServiceState is what a supervisor tells of one of its services.
type ServiceState struct {
	Name   string        `json:"name"` // its Spec.ID
	Phase  Phase         `json:"phase"`
	Addr   string        `json:"addr,omitempty"`
	Start  time.Duration `json:"start,omitempty"`  // until its command was started
	Ready  time.Duration `json:"ready,omitempty"`  // from then until all of its ports accepted
	Waited bool          `json:"waited,omitempty"` // the wait for its ports is over
	Closed []int         `json:"closed,omitempty"` // those that did not accept within Limit
	Limit  time.Duration `json:"limit,omitempty"`  // how long they were waited for
	// Retried and NUMA are State's, of the service's guest.
	Retried []string `json:"retried,omitempty"`
	NUMA    string   `json:"numa,omitempty"`
	Exit    *Exit    `json:"exit,omitempty"` // once ended
}

// Step is one timed step of the start, for the trace.
type Step struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"`
}

// Exit is why and how a guest ended.
type Exit struct {
	Reason  string   `json:"reason"` // a machine.Reason or one of the Reason constants
	Detail  string   `json:"detail,omitempty"`
	Console []string `json:"console,omitempty"` // last lines, when the end was not asked for
	Code    *int     `json:"code,omitempty"`    // of Spec.Command
	Step    string   `json:"step,omitempty"`    // of the start, when that failed
	Kind    string   `json:"kind,omitempty"`    // fault.Kind of a failed start
	Hint    string   `json:"hint,omitempty"`    // of a failed start
}

// Reasons of an Exit beside machine's.
const (
	ReasonStopped     = "stopped"      // asked to, by a client or a signal
	ReasonOwnerGone   = "owner-gone"   // the process it was for, or that was starting it, is gone
	ReasonDeadline    = "deadline"     // Spec.Deadline passed
	ReasonBootTimeout = "boot-timeout" // not ready within Spec.BootLimit
	ReasonHang        = "hang"         // the agent fell silent
	ReasonFailed      = "failed"       // a step of the start failed
	ReasonExited      = "exited"       // Spec.Command ended: see Code
)

// Asked reports whether the guest's end was wanted.
func (e *Exit) Asked() bool {
	switch e.Reason {
	case ReasonStopped, ReasonOwnerGone, ReasonDeadline, ReasonExited, "poweroff":
		return true
	}
	return false
}
