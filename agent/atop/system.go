package atop

import (
	"bytes"
	"strings"

	format "virtkit/core/atop"
)

// system is what the counters of the machine stood at.
type system struct {
	cpu      format.CPU
	cpus     []format.CPU
	switches int64
	intr     int64
	forks    int64
	pag      format.PAG
	psi      format.PSI
	disks    map[string]disk
	upper    format.Upper
	ifaces   map[string]format.Interface
}

type disk struct {
	format.Disk
	weighted int64 // milliseconds that requests waited, all together
}

// since is a counter's growth; one that went back has begun anew.
func since(now, before int64) int64 {
	if now < before {
		return now
	}
	return now - before
}

func (r *Recorder) system(s *format.Sample) {
	r.stat(s)
	r.memory(s)
	r.paging(s)
	r.pressure(s)
	r.disks(s)
	r.network(s)
}

func cpuOf(rest []byte) format.CPU {
	var f [10][]byte
	fields(rest, f[:])
	return format.CPU{Hertz: hertz, User: num(f[0]), Nice: num(f[1]), Sys: num(f[2]), Idle: num(f[3]), Wait: num(f[4]),
		IRQ: num(f[5]), Soft: num(f[6]), Steal: num(f[7]), Guest: num(f[8])}
}

func cpuSince(a, b format.CPU) format.CPU {
	return format.CPU{Hertz: a.Hertz, N: a.N, Sys: since(a.Sys, b.Sys), User: since(a.User, b.User), Nice: since(a.Nice, b.Nice),
		Idle: since(a.Idle, b.Idle), Wait: since(a.Wait, b.Wait), IRQ: since(a.IRQ, b.IRQ), Soft: since(a.Soft, b.Soft),
		Steal: since(a.Steal, b.Steal), Guest: since(a.Guest, b.Guest)}
}

func (r *Recorder) stat(s *format.Sample) {
	var all format.CPU
	var each []format.CPU
	switches, intr, forks := int64(0), int64(0), int64(0)
	pairs(r.file("stat"), func(name, rest []byte) {
		switch {
		case string(name) == "cpu":
			all = cpuOf(rest)
		case bytes.HasPrefix(name, []byte("cpu")):
			c := cpuOf(rest)
			c.N = num(name[3:])
			each = append(each, c)
		case string(name) == "ctxt":
			switches = num(rest)
		case string(name) == "intr":
			intr = num(rest)
		case string(name) == "processes":
			forks = num(rest)
		}
	})
	r.forked = forks == 0 || forks != r.sys.forks
	r.sys.forks = forks
	if all.Hertz == 0 {
		return
	}
	s.Has |= format.HasCPU
	all.N = int64(len(each))
	s.CPU = cpuSince(all, r.sys.cpu)
	for i, c := range each {
		var before format.CPU
		if i < len(r.sys.cpus) && r.sys.cpus[i].N == c.N {
			before = r.sys.cpus[i]
		}
		s.CPUs = append(s.CPUs, cpuSince(c, before))
	}
	var f [3][]byte
	fields(r.file("loadavg"), f[:])
	s.Has |= format.HasCPL
	s.CPL = format.CPL{CPUs: all.N, Load1: decimal(f[0]), Load5: decimal(f[1]), Load15: decimal(f[2]),
		Switches: since(switches, r.sys.switches), Interrupts: since(intr, r.sys.intr)}
	r.sys.cpu, r.sys.cpus, r.sys.switches, r.sys.intr = all, each, switches, intr
}

func (r *Recorder) memory(s *format.Sample) {
	m, w := format.MEM{PageSize: r.page}, format.SWP{PageSize: r.page}
	kib := func(b []byte) int64 { return num(b) * 1024 / r.page }
	b := r.file("meminfo")
	if b == nil {
		return
	}
	pairs(b, func(name, v []byte) {
		switch string(name) {
		case "MemTotal":
			m.Phys = kib(v)
		case "MemFree":
			m.Free = kib(v)
		case "Buffers":
			m.Buffers = kib(v)
		case "Cached":
			m.Cache = kib(v)
		case "SwapCached":
			w.Cached = kib(v)
		case "SwapTotal":
			w.Total = kib(v)
		case "SwapFree":
			w.Free = kib(v)
		case "Zswap":
			w.ZPool = kib(v)
		case "Zswapped":
			w.ZStored = kib(v)
		case "Dirty":
			m.Dirty = kib(v)
		case "Shmem":
			m.Shmem = kib(v)
		case "Slab":
			m.Slab = kib(v)
		case "SReclaimable":
			m.SlabReclaim = kib(v)
		case "PageTables":
			m.PageTabs = kib(v)
		case "CommitLimit":
			w.Limit = kib(v)
		case "Committed_AS":
			w.Committed = kib(v)
		case "HugePages_Total":
			m.HugeTotal = num(v)
		case "HugePages_Free":
			m.HugeFree = num(v)
		case "Hugepagesize":
			m.HugeSize = num(v) * 1024
		}
	})
	pairs(r.file("net/sockstat"), func(name, v []byte) {
		if i := bytes.Index(v, []byte("mem ")); i >= 0 {
			switch string(name) {
			case "TCP":
				m.TCP = num(v[i+4:])
			case "UDP":
				m.UDP = num(v[i+4:])
			}
		}
	})
	s.MEM, s.SWP = m, w
	s.Has |= format.HasMEM | format.HasSWP
}

func (r *Recorder) paging(s *format.Sample) {
	p := format.PAG{PageSize: r.page, OOMKills: -1}
	b := r.file("vmstat")
	if b == nil {
		return
	}
	pairs(b, func(name, v []byte) {
		switch string(name) {
		case "pgpgin":
			p.Ins = num(v) * 1024 / r.page
		case "pgpgout":
			p.Outs = num(v) * 1024 / r.page
		case "pswpin":
			p.In = num(v)
		case "pswpout":
			p.Out = num(v)
		case "oom_kill":
			p.OOMKills = num(v)
		case "compact_stall":
			p.CompactStalls = num(v)
		case "numa_pages_migrated":
			p.NUMA = num(v)
		case "pgmigrate_success":
			p.Migrated = num(v)
		default:
			switch {
			case bytes.HasPrefix(name, []byte("pgscan_")):
				p.Scans += num(v)
			case bytes.HasPrefix(name, []byte("allocstall")):
				p.AllocStalls += num(v)
			}
		}
	})
	o := r.sys.pag
	r.sys.pag = p
	oom := p.OOMKills
	if oom >= 0 {
		oom = since(oom, o.OOMKills)
	}
	s.PAG = format.PAG{PageSize: p.PageSize, Scans: since(p.Scans, o.Scans), AllocStalls: since(p.AllocStalls, o.AllocStalls),
		In: since(p.In, o.In), Out: since(p.Out, o.Out), OOMKills: oom, CompactStalls: since(p.CompactStalls, o.CompactStalls),
		Migrated: since(p.Migrated, o.Migrated), NUMA: since(p.NUMA, o.NUMA), Ins: since(p.Ins, o.Ins), Outs: since(p.Outs, o.Outs)}
	s.Has |= format.HasPAG
}

func (r *Recorder) pressure(s *format.Sample) {
	var p format.PSI
	read := func(file string, some, full *format.Stall) {
		b := r.file("pressure/" + file)
		if b == nil {
			return
		}
		p.Present = true
		pairs(b, func(name, rest []byte) {
			st := some
			if string(name) == "full" {
				st = full
			}
			if st == nil {
				return
			}
			var f [4][]byte
			fields(rest, f[:])
			for _, w := range f {
				k, v, _ := bytes.Cut(w, []byte("="))
				switch string(k) {
				case "avg10":
					st.Avg10 = decimal(v)
				case "avg60":
					st.Avg60 = decimal(v)
				case "avg300":
					st.Avg300 = decimal(v)
				case "total":
					st.Total = num(v)
				}
			}
		})
	}
	read("cpu", &p.CPUSome, nil)
	read("memory", &p.MemSome, &p.MemFull)
	read("io", &p.IOSome, &p.IOFull)
	o := r.sys.psi
	r.sys.psi = p
	for _, v := range []struct {
		st  *format.Stall
		was int64
	}{{&p.CPUSome, o.CPUSome.Total}, {&p.MemSome, o.MemSome.Total}, {&p.MemFull, o.MemFull.Total}, {&p.IOSome, o.IOSome.Total}, {&p.IOFull, o.IOFull.Total}} {
		v.st.Total = since(v.st.Total, v.was)
	}
	s.PSI = p
	s.Has |= format.HasPSI
}

// disks are whole disks; a partition's name begins with its disk's, which the
// kernel lists before it.
func (r *Recorder) disks(s *format.Sample) {
	now := map[string]disk{}
	whole := ""
	lines(r.file("diskstats"), func(line []byte) {
		var f [18][]byte
		n := fields(line, f[:])
		if n < 14 {
			return
		}
		name := string(f[2])
		if whole != "" && strings.HasPrefix(name, whole) && partOf(name[len(whole):], whole) {
			return
		}
		whole = name
		d := disk{Disk: format.Disk{Name: name, Reads: num(f[3]), RSect: num(f[5]), Writes: num(f[7]), WSect: num(f[9]),
			InFlight: num(f[11]), BusyMS: num(f[12]), Discards: -1}, weighted: num(f[13])}
		if n >= 18 {
			d.Discards, d.DSect = num(f[14]), num(f[16])
		}
		if d.Reads+d.Writes+max(0, d.Discards) == 0 {
			return
		}
		now[name] = d
		o := r.sys.disks[name]
		g := d.Disk
		g.Reads, g.RSect, g.Writes, g.WSect = since(d.Reads, o.Reads), since(d.RSect, o.RSect), since(d.Writes, o.Writes), since(d.WSect, o.WSect)
		g.BusyMS, g.DSect = since(d.BusyMS, o.BusyMS), since(d.DSect, o.DSect)
		if d.Discards >= 0 {
			g.Discards = since(d.Discards, max(0, o.Discards))
		}
		if g.BusyMS > 0 {
			g.Queue = float64(since(d.weighted, o.weighted)) / float64(g.BusyMS)
		}
		if g.Reads+g.Writes+max(0, g.Discards)+g.InFlight > 0 {
			s.DSK = append(s.DSK, g)
		}
	})
	r.sys.disks = now
}

// partOf says whether rest, what follows a disk's name, is a partition's
// number: vda1, nvme0n1p1.
func partOf(rest, disk string) bool {
	if last := disk[len(disk)-1]; last >= '0' && last <= '9' {
		if !strings.HasPrefix(rest, "p") {
			return false
		}
		rest = rest[1:]
	}
	if rest == "" {
		return false
	}
	for _, c := range rest {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

func (r *Recorder) network(s *format.Sample) {
	now := map[string]format.Interface{}
	lines(r.file("net/dev"), func(line []byte) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		if !ok {
			return
		}
		var f [10][]byte
		if fields(rest, f[:]) < 10 {
			return
		}
		n := format.Interface{Name: string(bytes.TrimSpace(name)), RBytes: num(f[0]), RPack: num(f[1]), SBytes: num(f[8]), SPack: num(f[9])}
		now[n.Name] = n
		o := r.sys.ifaces[n.Name]
		s.NET = append(s.NET, format.Interface{Name: n.Name, RBytes: since(n.RBytes, o.RBytes), RPack: since(n.RPack, o.RPack),
			SBytes: since(n.SBytes, o.SBytes), SPack: since(n.SPack, o.SPack)})
	})
	r.sys.ifaces = now
	u := r.protocols()
	o := r.sys.upper
	r.sys.upper = u
	s.TCP = format.Upper{TCPIn: since(u.TCPIn, o.TCPIn), TCPOut: since(u.TCPOut, o.TCPOut), UDPIn: since(u.UDPIn, o.UDPIn), UDPOut: since(u.UDPOut, o.UDPOut),
		IPIn: since(u.IPIn, o.IPIn), IPOut: since(u.IPOut, o.IPOut), IPDeliver: since(u.IPDeliver, o.IPDeliver), IPForward: since(u.IPForward, o.IPForward),
		UDPErrs: since(u.UDPErrs, o.UDPErrs), UDPNoPort: since(u.UDPNoPort, o.UDPNoPort), ActiveOpens: since(u.ActiveOpens, o.ActiveOpens),
		PassiveOpens: since(u.PassiveOpens, o.PassiveOpens), Established: u.Established, Resent: since(u.Resent, o.Resent),
		TCPErrs: since(u.TCPErrs, o.TCPErrs), Resets: since(u.Resets, o.Resets)}
	s.Has |= format.HasNET
}

// protocols reads the counters of IP, UDP and TCP, of both versions together.
func (r *Recorder) protocols() format.Upper {
	var u format.Upper
	add := func(name []byte, n int64) {
		switch string(name) {
		case "Ip.InReceives", "Ip6InReceives":
			u.IPIn += n
		case "Ip.OutRequests", "Ip6OutRequests":
			u.IPOut += n
		case "Ip.InDelivers", "Ip6InDelivers":
			u.IPDeliver += n
		case "Ip.ForwDatagrams", "Ip6OutForwDatagrams":
			u.IPForward += n
		case "Udp.InDatagrams", "Udp6InDatagrams":
			u.UDPIn += n
		case "Udp.OutDatagrams", "Udp6OutDatagrams":
			u.UDPOut += n
		case "Udp.InErrors", "Udp6InErrors":
			u.UDPErrs += n
		case "Udp.NoPorts", "Udp6NoPorts":
			u.UDPNoPort += n
		case "Tcp.InSegs":
			u.TCPIn = n
		case "Tcp.OutSegs":
			u.TCPOut = n
		case "Tcp.ActiveOpens":
			u.ActiveOpens = n
		case "Tcp.PassiveOpens":
			u.PassiveOpens = n
		case "Tcp.CurrEstab":
			u.Established = n
		case "Tcp.RetransSegs":
			u.Resent = n
		case "Tcp.InErrs":
			u.TCPErrs = n
		case "Tcp.OutRsts":
			u.Resets = n
		}
	}
	// A line of names, then one of numbers.
	var head [32][]byte
	var section, key []byte
	n := 0
	lines(r.file("net/snmp"), func(line []byte) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		if !ok {
			return
		}
		var f [32][]byte
		m := fields(rest, f[:])
		if !bytes.Equal(name, section) {
			section, n, head = name, m, f
			return
		}
		for i := range min(n, m) {
			key = append(append(append(key[:0], section...), '.'), head[i]...)
			add(key, num(f[i]))
		}
		section = nil
	})
	pairs(r.file("net/snmp6"), func(name, v []byte) { add(name, num(v)) })
	return u
}
