// Package atop is the recording that a guest makes of itself: the text that
// `atop -P` of atop 2.8.1 prints (atop(1), PARSEABLE OUTPUT), with two labels of
// virtkit's own. It holds what a sample is (Sample), how it is written
// (AppendSample) and read (Reader), and when a process counts as stalled
// (Stalls). It does no I/O: the guest's recorder is agent/atop, the archive
// of recordings core/atop/archive, the account of one core/atop/account.
//
// A recording is lines of fields separated by spaces. Each begins with label,
// host, epoch (seconds), date, time (both UTC) and the seconds that the sample
// covers. RESET opens the first sample of a boot, whose counters cover all of
// that boot; SEP closes every sample, and what no SEP closes is not a sample.
// Counters are those of the interval, sizes as they stood. A task that ended in
// the interval has state E. Names and command lines stand between parentheses
// and may hold spaces and parentheses, but no control characters.
//
// virtkit's own labels, which readers of the format skip:
//
//	PRW pid (name) CHANNEL:THREADS …     threads of a process of several that were
//	                                     not running, by wait channel; written when
//	                                     it has changed
//	PRK pid (name) tid CHANNEL FRAME;…   the kernel stack of one thread of a stalled
//	                                     process, written once; "-" without frames
//
// The package is linked into guests: nothing but the standard library.
package atop

// Labels of a line, as bits of Sample.Has.
const (
	HasCPU = 1 << iota
	HasCPL
	HasMEM
	HasSWP
	HasPAG
	HasPSI
	HasNET // the line "upper"
)

// Sample is one interval of a guest, or all of its boot. Numbers that the
// guest's kernel does not have are -1 where a field says so; a label whose bit
// is not in Has was not recorded at all.
type Sample struct {
	Reset    bool // covers the guest's boot instead of an interval
	Host     string
	Epoch    int64 // end of the interval, seconds
	Interval int64 // seconds
	Has      uint

	CPU  CPU   // all of them
	CPUs []CPU // one each
	CPL  CPL
	MEM  MEM
	SWP  SWP
	PAG  PAG
	PSI  PSI
	DSK  []Disk
	TCP  Upper
	NET  []Interface

	Procs  []Proc
	Waits  []Waits // those that changed
	Stacks []Stack
}

// CPU is the use of one processor or of all, in ticks of the interval.
type CPU struct {
	Hertz                                                int64 // ticks in a second
	N                                                    int64 // how many processors, or which one
	Sys, User, Nice, Idle, Wait, IRQ, Soft, Steal, Guest int64
}

// Busy is the time that the processor did something, in ticks.
func (c *CPU) Busy() int64 { return c.Sys + c.User + c.Nice + c.IRQ + c.Soft + c.Steal }

// Used is the time that it did something of this guest's, in ticks.
func (c *CPU) Used() int64 { return c.Sys + c.User + c.Nice + c.IRQ + c.Soft }

// Total is all of its time, in ticks.
func (c *CPU) Total() int64 { return c.Busy() + c.Idle + c.Wait }

// CPL is the load.
type CPL struct {
	CPUs                 int64
	Load1, Load5, Load15 float64
	Switches, Interrupts int64 // in the interval
}

// MEM is the memory, in pages of PageSize bytes.
type MEM struct {
	PageSize                                                 int64
	Phys, Free, Cache, Buffers, Slab, Dirty, SlabReclaim     int64
	Shmem, HugeSize, HugeTotal, HugeFree, TCP, UDP, PageTabs int64
}

// Held is what is in use and not to be had back by asking, in pages.
func (m *MEM) Held() int64 { return max(0, m.Phys-m.Free-m.Cache-m.Buffers-m.SlabReclaim+m.Shmem) }

// SWP is the swap space, in pages of PageSize bytes.
type SWP struct {
	PageSize, Total, Free, Cached, Committed, Limit, ZStored, ZPool int64
}

// PAG is the paging of the interval.
type PAG struct {
	PageSize                                                                  int64
	Scans, AllocStalls, In, Out, OOMKills, CompactStalls, Migrated, NUMA, Ins int64 // OOMKills -1 = not counted
	Outs                                                                      int64
}

// PSI is the pressure (Documentation/accounting/psi.rst).
type PSI struct {
	Present                                   bool
	CPUSome, MemSome, MemFull, IOSome, IOFull Stall
}

// Stall is one line of a pressure file.
type Stall struct {
	Avg10, Avg60, Avg300 float64 // percent, as they stood
	Total                int64   // microseconds of the interval
}

// Disk is one disk's traffic in the interval.
type Disk struct {
	Name                                string
	BusyMS, Reads, RSect, Writes, WSect int64 // sectors are of 512 bytes
	Discards, DSect, InFlight           int64 // Discards -1 = not counted
	Queue                               float64
}

// Upper is the traffic of TCP, UDP and IP in the interval.
type Upper struct {
	TCPIn, TCPOut, UDPIn, UDPOut, IPIn, IPOut, IPDeliver, IPForward int64
	UDPErrs, UDPNoPort, ActiveOpens, PassiveOpens                   int64
	Established                                                     int64 // as it stood
	Resent, TCPErrs, Resets                                         int64
}

// Interface is one network interface's traffic in the interval.
type Interface struct {
	Name                         string
	RPack, RBytes, SPack, SBytes int64
	Speed, Duplex                int64 // Mb/s, 1 = full; 0 when unknown
}

// Proc is one process: the labels PRG, PRC, PRM and PRD together.
type Proc struct {
	PID                                          int
	Name                                         string
	State                                        byte // as of ps(1); E = ended in the interval
	UID, GID, EUID, EGID, SUID, SGID, FUID, FGID int
	Threads, Running, Sleeping, Blocked          int   // Blocked is uninterruptible
	Exit                                         int   // status of an ended one; 256 + signal
	Start                                        int64 // epoch
	Cmdline                                      string
	PPID                                         int
	Elapsed                                      int64 // of an ended one, ticks
	New                                          bool  // started in the interval
	CGroup                                       string

	Hertz                      int64
	User, Sys                  int64 // ticks of the interval
	Nice, Prio, RTPrio, Policy int
	CPU                        int   // where it ran last; -1 = ended
	RunDelay                   int64 // nanoseconds of the interval
	WChan                      string
	BlkDelay                   int64 // ticks of the interval

	PageSize                           int64
	VSize, RSize, VExec, VGrow, RGrow  int64 // KiB
	MinFlt, MajFlt                     int64
	VLibs, VData, VStack, VSwap, VLock int64 // KiB

	IO                                       bool  // the kernel accounts the five below
	Reads, RSect, Writes, WSect, CancelWSect int64 // of the interval; sectors of 512 bytes
}

// Ended says whether the process ended in the interval.
func (p *Proc) Ended() bool { return p.State == 'E' }

// Failed says whether an ended process did so with another status than 0.
func (p *Proc) Failed() bool { return p.Ended() && p.Exit != 0 }

// Title is what to call the process: its command line, else its name.
func (p *Proc) Title() string {
	if p.Cmdline != "" {
		return p.Cmdline
	}
	return p.Name
}

// Waits are the threads of a process that were not running, by wait channel.
type Waits struct {
	PID      int
	Name     string
	Channels []Channel // sorted by name
}

// Channel is one wait channel and how many threads wait in it.
type Channel struct {
	Name    string
	Threads int
}

// Stack is one thread's kernel stack, innermost frame first.
type Stack struct {
	PID    int
	Name   string
	TID    int
	WChan  string
	Frames []string // nil: the kernel tells none
}

// Limits of a line's texts, in bytes, as atop has them.
const (
	MaxName    = 15
	MaxCmdline = 255
)

// Names of the files of one recording's directory.
const (
	LogFile     = "atop.log"        // as it is written
	PackedFile  = "atop.log.zst"    // once the guest is gone
	ThreadsFile = "vmm-threads.txt" // of the VMM, when the host stopped it
)
