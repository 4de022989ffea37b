package account

import (
	"encoding/json"
	"strings"

	"virtkit/core/atop"
)

// Exporter turns the samples of one recording into JSON, one object each. The
// units are the recording's: pages, ticks, sectors of 512 bytes.
type Exporter struct{ stalls *atop.Stalls }

// NewExporter returns one for the samples of a recording in their order.
func NewExporter() *Exporter { return &Exporter{atop.NewStalls()} }

type jsonSample struct {
	Epoch    int64  `json:"epoch"`
	Interval int64  `json:"interval"` // seconds
	Boot     bool   `json:"boot"`     // covers the guest's boot
	Host     string `json:"host"`
	Hertz    *int64 `json:"hertz"`
	PageSize *int64 `json:"pagesize"` // bytes

	CPU        *jsonCPU        `json:"cpu"`
	CPUs       []jsonCPU       `json:"cpus"`
	Load       *jsonLoad       `json:"load"`
	Memory     *jsonMemory     `json:"memory"`
	Swap       *jsonSwap       `json:"swap"`
	Paging     *jsonPaging     `json:"paging"`
	Pressure   *jsonPressure   `json:"pressure"`
	Disks      []jsonDisk      `json:"disks"`
	Protocols  *jsonProtocols  `json:"protocols"`
	Interfaces []jsonInterface `json:"interfaces"`
	Procs      []jsonProc      `json:"procs"`
	Stacks     []jsonStack     `json:"stacks"`
}

type jsonCPU struct {
	CPU     *int64 `json:"cpu,omitempty"`
	Count   *int64 `json:"count,omitempty"`
	User    int64  `json:"user"`
	System  int64  `json:"system"`
	Nice    int64  `json:"nice"`
	Idle    int64  `json:"idle"`
	Wait    int64  `json:"wait"`
	IRQ     int64  `json:"irq"`
	SoftIRQ int64  `json:"softirq"`
	Steal   int64  `json:"steal"`
	Guest   int64  `json:"guest"`
}

type jsonLoad struct {
	Load1      float64 `json:"load1"`
	Load5      float64 `json:"load5"`
	Load15     float64 `json:"load15"`
	Switches   int64   `json:"context_switches"`
	Interrupts int64   `json:"interrupts"`
}

type jsonMemory struct {
	Total       int64 `json:"total"`
	Free        int64 `json:"free"`
	Cache       int64 `json:"cache"`
	Buffers     int64 `json:"buffers"`
	Slab        int64 `json:"slab"`
	SlabReclaim int64 `json:"slab_reclaimable"`
	Dirty       int64 `json:"dirty"`
	Shmem       int64 `json:"shmem"`
	PageTables  int64 `json:"page_tables"`
	HugeSize    int64 `json:"huge_page_size"`
	HugeTotal   int64 `json:"huge_pages"`
	HugeFree    int64 `json:"huge_pages_free"`
	TCP         int64 `json:"tcp"`
	UDP         int64 `json:"udp"`
}

type jsonSwap struct {
	Total     int64 `json:"total"`
	Free      int64 `json:"free"`
	Cached    int64 `json:"cached"`
	Committed int64 `json:"committed"`
	Limit     int64 `json:"commit_limit"`
	ZStored   int64 `json:"zswap_stored"`
	ZPool     int64 `json:"zswap_pool"`
}

type jsonPaging struct {
	Scans         int64 `json:"scans"`
	AllocStalls   int64 `json:"alloc_stalls"`
	SwapIn        int64 `json:"swapped_in"`
	SwapOut       int64 `json:"swapped_out"`
	OOMKills      int64 `json:"oom_kills"`
	CompactStalls int64 `json:"compact_stalls"`
	Migrated      int64 `json:"migrated"`
	NUMAMigrated  int64 `json:"numa_migrated"`
	In            int64 `json:"pages_in"`
	Out           int64 `json:"pages_out"`
}

type jsonPressure struct {
	CPU     jsonStall `json:"cpu"`
	Mem     jsonStall `json:"memory"`
	MemFull jsonStall `json:"memory_full"`
	IO      jsonStall `json:"io"`
	IOFull  jsonStall `json:"io_full"`
}

type jsonStall struct {
	Avg10  float64 `json:"avg10"`
	Avg60  float64 `json:"avg60"`
	Avg300 float64 `json:"avg300"`
	Micros int64   `json:"microseconds"`
}

type jsonDisk struct {
	Name             string  `json:"name"`
	BusyMS           int64   `json:"busy_ms"`
	Reads            int64   `json:"reads"`
	ReadSectors      int64   `json:"read_sectors"`
	Writes           int64   `json:"writes"`
	WriteSectors     int64   `json:"write_sectors"`
	Discards         *int64  `json:"discards"`
	DiscardedSectors *int64  `json:"discarded_sectors"`
	InFlight         int64   `json:"in_flight"`
	Queue            float64 `json:"queue"`
}

type jsonProtocols struct {
	TCPIn       int64 `json:"tcp_in"`
	TCPOut      int64 `json:"tcp_out"`
	UDPIn       int64 `json:"udp_in"`
	UDPOut      int64 `json:"udp_out"`
	IPIn        int64 `json:"ip_in"`
	IPOut       int64 `json:"ip_out"`
	Established int64 `json:"tcp_established"`
	Resent      int64 `json:"tcp_resent"`
	Resets      int64 `json:"tcp_resets"`
	Errors      int64 `json:"tcp_errors"`
}

type jsonInterface struct {
	Name            string `json:"name"`
	ReceivedPackets int64  `json:"received_packets"`
	ReceivedBytes   int64  `json:"received_bytes"`
	SentPackets     int64  `json:"sent_packets"`
	SentBytes       int64  `json:"sent_bytes"`
}

type jsonProc struct {
	PID      int    `json:"pid"`
	PPID     int    `json:"ppid"`
	Name     string `json:"name"`
	Cmdline  string `json:"cmdline"`
	State    string `json:"state"`
	UID      int    `json:"uid"`
	GID      int    `json:"gid"`
	EUID     int    `json:"euid"`
	EGID     int    `json:"egid"`
	CGroup   string `json:"cgroup"`
	Start    int64  `json:"start"`
	New      bool   `json:"new"`
	Exit     *int   `json:"exit"`    // of an ended one; 256 + signal
	Elapsed  *int64 `json:"elapsed"` // of an ended one, ticks
	Threads  int    `json:"threads"`
	Running  int    `json:"threads_running"`
	Sleeping int    `json:"threads_sleeping"`
	Blocked  int    `json:"threads_blocked"`

	User     int64  `json:"user"`
	System   int64  `json:"system"`
	Nice     int    `json:"nice"`
	Priority int    `json:"priority"`
	CPU      *int   `json:"cpu"`
	RunDelay int64  `json:"run_delay_ns"`
	BlkDelay int64  `json:"block_delay"`
	WChan    string `json:"wchan"`

	VSize  int64 `json:"vsize_kib"`
	RSize  int64 `json:"rsize_kib"`
	VGrow  int64 `json:"vgrow_kib"`
	RGrow  int64 `json:"rgrow_kib"`
	VSwap  int64 `json:"swap_kib"`
	VLock  int64 `json:"locked_kib"`
	MinFlt int64 `json:"minor_faults"`
	MajFlt int64 `json:"major_faults"`

	ReadSectors   *int64 `json:"read_sectors"`
	WriteSectors  *int64 `json:"write_sectors"`
	CancelSectors *int64 `json:"cancelled_sectors"`

	WChans map[string]int `json:"wchans"`
	Since  *int64         `json:"wchans_since"`
}

type jsonStack struct {
	PID    int      `json:"pid"`
	Name   string   `json:"name"`
	TID    int      `json:"tid"`
	WChan  string   `json:"wchan"`
	Frames []string `json:"frames"`
}

func cpuOf(c *atop.CPU) jsonCPU {
	return jsonCPU{User: c.User, System: c.Sys, Nice: c.Nice, Idle: c.Idle, Wait: c.Wait, IRQ: c.IRQ, SoftIRQ: c.Soft, Steal: c.Steal, Guest: c.Guest}
}

func stallOf(s atop.Stall) jsonStall { return jsonStall{s.Avg10, s.Avg60, s.Avg300, s.Total} }

// known is nil for what the kernel does not count.
func known[T int | int64](v T, is bool) *T {
	if !is {
		return nil
	}
	return &v
}

// Line is the next sample as one line of JSON, its end included.
func (x *Exporter) Line(s *atop.Sample) ([]byte, error) {
	x.stalls.Add(s, func(atop.Stalled) {})
	b, err := json.Marshal(x.convert(s))
	if err != nil {
		return nil, err
	}
	return append(b, '\n'), nil
}

func utf8Of(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func (x *Exporter) convert(s *atop.Sample) jsonSample {
	j := jsonSample{Epoch: s.Epoch, Interval: s.Interval, Boot: s.Reset, Host: utf8Of(s.Host),
		CPUs: []jsonCPU{}, Disks: []jsonDisk{}, Interfaces: []jsonInterface{}, Procs: []jsonProc{}, Stacks: []jsonStack{}}
	has := func(bit uint) bool { return s.Has&bit != 0 }
	j.Hertz, j.PageSize = known(s.CPU.Hertz, has(atop.HasCPU)), known(s.MEM.PageSize, has(atop.HasMEM))
	if has(atop.HasCPU) {
		c := cpuOf(&s.CPU)
		c.Count = &s.CPU.N
		j.CPU = &c
	}
	for i := range s.CPUs {
		c := cpuOf(&s.CPUs[i])
		c.CPU = &s.CPUs[i].N
		j.CPUs = append(j.CPUs, c)
	}
	if has(atop.HasCPL) {
		j.Load = &jsonLoad{s.CPL.Load1, s.CPL.Load5, s.CPL.Load15, s.CPL.Switches, s.CPL.Interrupts}
	}
	if m := &s.MEM; has(atop.HasMEM) {
		j.Memory = &jsonMemory{m.Phys, m.Free, m.Cache, m.Buffers, m.Slab, m.SlabReclaim, m.Dirty, m.Shmem, m.PageTabs,
			m.HugeSize, m.HugeTotal, m.HugeFree, m.TCP, m.UDP}
	}
	if w := &s.SWP; has(atop.HasSWP) {
		j.Swap = &jsonSwap{w.Total, w.Free, w.Cached, w.Committed, w.Limit, w.ZStored, w.ZPool}
	}
	// A kernel that counts no OOM kills counts no events of memory at all
	// (CONFIG_VM_EVENT_COUNTERS).
	if p := &s.PAG; has(atop.HasPAG) && p.OOMKills >= 0 {
		j.Paging = &jsonPaging{p.Scans, p.AllocStalls, p.In, p.Out, p.OOMKills, p.CompactStalls, p.Migrated, p.NUMA, p.Ins, p.Outs}
	}
	if p := &s.PSI; has(atop.HasPSI) && p.Present {
		j.Pressure = &jsonPressure{stallOf(p.CPUSome), stallOf(p.MemSome), stallOf(p.MemFull), stallOf(p.IOSome), stallOf(p.IOFull)}
	}
	for i := range s.DSK {
		d := &s.DSK[i]
		j.Disks = append(j.Disks, jsonDisk{utf8Of(d.Name), d.BusyMS, d.Reads, d.RSect, d.Writes, d.WSect,
			known(d.Discards, d.Discards >= 0), known(d.DSect, d.Discards >= 0), d.InFlight, d.Queue})
	}
	if u := &s.TCP; has(atop.HasNET) {
		j.Protocols = &jsonProtocols{u.TCPIn, u.TCPOut, u.UDPIn, u.UDPOut, u.IPIn, u.IPOut, u.Established, u.Resent, u.Resets, u.TCPErrs}
	}
	for _, n := range s.NET {
		j.Interfaces = append(j.Interfaces, jsonInterface{utf8Of(n.Name), n.RPack, n.RBytes, n.SPack, n.SBytes})
	}
	for i := range s.Procs {
		j.Procs = append(j.Procs, x.proc(&s.Procs[i]))
	}
	for _, k := range s.Stacks {
		f := []string{}
		for _, v := range k.Frames {
			f = append(f, utf8Of(v))
		}
		j.Stacks = append(j.Stacks, jsonStack{k.PID, utf8Of(k.Name), k.TID, utf8Of(k.WChan), f})
	}
	return j
}

func (x *Exporter) proc(p *atop.Proc) jsonProc {
	j := jsonProc{PID: p.PID, PPID: p.PPID, Name: utf8Of(p.Name), Cmdline: utf8Of(p.Cmdline), State: utf8Of(string(rune(p.State))),
		UID: p.UID, GID: p.GID, EUID: p.EUID, EGID: p.EGID, CGroup: utf8Of(p.CGroup), Start: p.Start, New: p.New,
		Exit: known(p.Exit, p.Ended()), Elapsed: known(p.Elapsed, p.Ended()),
		Threads: p.Threads, Running: p.Running, Sleeping: p.Sleeping, Blocked: p.Blocked,
		User: p.User, System: p.Sys, Nice: p.Nice, Priority: p.Prio, CPU: known(p.CPU, p.CPU >= 0),
		RunDelay: p.RunDelay, BlkDelay: p.BlkDelay, WChan: utf8Of(p.WChan),
		VSize: p.VSize, RSize: p.RSize, VGrow: p.VGrow, RGrow: p.RGrow, VSwap: p.VSwap, VLock: p.VLock, MinFlt: p.MinFlt, MajFlt: p.MajFlt,
		ReadSectors: known(p.RSect, p.IO), WriteSectors: known(p.WSect, p.IO), CancelSectors: known(p.CancelWSect, p.IO)}
	if p.Threads > 1 && !p.Ended() {
		if w := x.stalls.Waits(p.PID); len(w.Channels) > 0 {
			j.WChans, j.Since = map[string]int{}, &w.At
			for _, c := range w.Channels {
				j.WChans[utf8Of(c.Name)] += c.Threads
			}
		}
	}
	return j
}
