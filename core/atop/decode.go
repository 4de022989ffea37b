package atop

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
)

// Limits of what a reader takes from a file that a guest may have written.
const (
	maxLine    = 64 << 10 // bytes; a longer line is skipped
	maxProcs   = 1 << 20  // processes of one sample
	maxDevices = 4096     // processors, disks, interfaces of one sample, each
	maxIntern  = 1 << 16  // texts that are kept to be given again
)

// Reader reads samples one after the other, from a recording of virtkit's or
// from the output of atop -P of version 2.8. It needs memory for one sample.
// Whatever a file holds, it goes on with the next line it can read.
type Reader struct {
	r     *bufio.Reader
	s     *Sample
	texts map[string]string
	index map[int]int // process of this sample by pid, made when lines are out of order
	at    [4]int      // next process expected on PRG, PRC, PRM, PRD
	head  []byte      // of this sample's lines, between label and fields
	dirty bool        // lines of this sample were read
	stats ReadStats

	// Brief reads of a process only what an account of it needs: who and what
	// it is, its time, resident memory and disk I/O. Twice as fast.
	Brief bool
}

// ReadStats tells what of a file could not be read.
type ReadStats struct {
	Lines   int64 // of the labels that Reader knows
	Skipped int64 // of them, lines that are not as the format says, or are too many
	Torn    int64 // samples that no SEP closed, the last one included
}

// NewReader returns a reader of r.
func NewReader(r io.Reader) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, maxLine), texts: map[string]string{}}
}

// Stats are of what was read up to now.
func (r *Reader) Stats() ReadStats { return r.stats }

// Next reads the next sample into s, whose slices are used again. At the end
// of the file it returns io.EOF; a sample that was not closed by then is not
// returned. Another error is r's own: what came before is good.
func (r *Reader) Next(s *Sample) error {
	r.begin(s)
	for {
		line, err := r.line()
		if err != nil {
			if r.dirty {
				r.stats.Torn++
				r.dirty = false
			}
			return err
		}
		switch {
		case bytes.Equal(line, sep):
			if r.dirty {
				r.dirty = false
				return nil
			}
			r.begin(s)
		case bytes.Equal(line, reset):
			r.torn(s)
			s.Reset = true
		default:
			r.record(line)
		}
	}
}

var sep, reset = []byte("SEP"), []byte("RESET")

func (r *Reader) begin(s *Sample) {
	*s = Sample{
		CPUs: s.CPUs[:0], DSK: s.DSK[:0], NET: s.NET[:0], Procs: s.Procs[:0], Waits: s.Waits[:0], Stacks: s.Stacks[:0],
	}
	r.s, r.index, r.at, r.dirty = s, nil, [4]int{}, false
}

// torn forgets a sample that was not closed.
func (r *Reader) torn(s *Sample) {
	if r.dirty {
		r.stats.Torn++
	}
	r.begin(s)
}

// line reads one line without its end. A line that is too long is skipped, and
// what follows the last line end is no line.
func (r *Reader) line() ([]byte, error) {
	for {
		b, err := r.r.ReadSlice('\n')
		if err == nil {
			return b[:len(b)-1], nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		r.stats.Skipped++
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = r.r.ReadSlice('\n')
		}
		if err != nil {
			return nil, err
		}
	}
}

// record reads one line of a sample.
func (r *Reader) record(line []byte) {
	c := cursor{b: line}
	label := string(c.word()) // does not escape
	kind := kindOf(label)
	if kind == 0 {
		return
	}
	r.stats.Lines++
	// The lines of a sample have one head.
	if n := len(r.head); r.dirty && len(c.b) > n && c.b[n] == ' ' && bytes.Equal(c.b[:n], r.head) {
		c.b = c.b[n:]
		if !r.fields(kind, &c) {
			r.stats.Skipped++
		}
		return
	}
	head := c.b
	host, epoch := c.word(), c.num()
	c.word() // date and time say the same
	c.word()
	interval := c.num()
	if c.bad {
		r.stats.Skipped++
		return
	}
	if r.dirty && epoch != r.s.Epoch {
		r.torn(r.s)
	}
	if !r.dirty {
		r.dirty = true
		r.s.Epoch, r.s.Interval, r.s.Host = epoch, interval, r.text(host)
		r.head = append(r.head[:0], head[:len(head)-len(c.b)]...)
	}
	if !r.fields(kind, &c) {
		r.stats.Skipped++
	}
}

type kind byte

const (
	kCPU kind = iota + 1
	kcpu
	kCPL
	kMEM
	kSWP
	kPAG
	kPSI
	kDSK
	kNET
	kPRG
	kPRC
	kPRM
	kPRD
	kPRW
	kPRK
)

func kindOf(label string) kind {
	switch label {
	case "PRG":
		return kPRG
	case "PRC":
		return kPRC
	case "PRM":
		return kPRM
	case "PRD":
		return kPRD
	case "CPU":
		return kCPU
	case "cpu":
		return kcpu
	case "CPL":
		return kCPL
	case "MEM":
		return kMEM
	case "SWP":
		return kSWP
	case "PAG":
		return kPAG
	case "PSI":
		return kPSI
	case "DSK":
		return kDSK
	case "NET":
		return kNET
	case "PRW":
		return kPRW
	case "PRK":
		return kPRK
	}
	return 0
}

// fields reads what follows the head and says whether it is as it should be.
func (r *Reader) fields(k kind, c *cursor) bool {
	s := r.s
	switch k {
	case kPRG:
		return r.prg(c)
	case kPRC, kPRM, kPRD:
		return r.more(k, c)
	case kPRW:
		return r.prw(c)
	case kPRK:
		return r.prk(c)
	case kCPU:
		if v := readCPU(c); !c.bad {
			s.CPU, s.Has = v, s.Has|HasCPU
		}
	case kcpu:
		if v := readCPU(c); !c.bad && len(s.CPUs) < maxDevices {
			s.CPUs = append(s.CPUs, v)
		}
	case kDSK:
		return r.disk(c)
	case kNET:
		return r.net(c)
	default:
		return r.system(k, c)
	}
	return !c.bad
}

func readCPU(c *cursor) CPU {
	return CPU{Hertz: c.num(), N: c.num(), Sys: c.num(), User: c.num(), Nice: c.num(), Idle: c.num(), Wait: c.num(),
		IRQ: c.num(), Soft: c.num(), Steal: c.num(), Guest: c.num()}
}

func (r *Reader) system(k kind, c *cursor) bool {
	s := r.s
	bit := uint(0)
	switch k {
	case kCPL:
		v := CPL{CPUs: c.num(), Load1: c.float(), Load5: c.float(), Load15: c.float(), Switches: c.num(), Interrupts: c.num()}
		if !c.bad {
			s.CPL, bit = v, HasCPL
		}
	case kMEM:
		v := MEM{PageSize: c.num(), Phys: c.num(), Free: c.num(), Cache: c.num(), Buffers: c.num(), Slab: c.num(),
			Dirty: c.num(), SlabReclaim: c.num()}
		c.skip(1)
		v.Shmem = c.num()
		c.skip(2)
		v.HugeSize, v.HugeTotal, v.HugeFree = c.num(), c.num(), c.num()
		c.skip(3)
		v.TCP, v.UDP, v.PageTabs = c.num(), c.num(), c.num()
		if !c.bad {
			s.MEM, bit = v, HasMEM
		}
	case kSWP:
		v := SWP{PageSize: c.num(), Total: c.num(), Free: c.num(), Cached: c.num(), Committed: c.num(), Limit: c.num()}
		c.skip(1)
		v.ZStored, v.ZPool = c.num(), c.num()
		if !c.bad {
			s.SWP, bit = v, HasSWP
		}
	case kPAG:
		v := PAG{PageSize: c.num(), Scans: c.num(), AllocStalls: c.num()}
		c.skip(1)
		v.In, v.Out, v.OOMKills, v.CompactStalls = c.num(), c.num(), c.num(), c.num()
		v.Migrated, v.NUMA, v.Ins, v.Outs = c.num(), c.num(), c.num(), c.num()
		if !c.bad {
			s.PAG, bit = v, HasPAG
		}
	case kPSI:
		v := PSI{Present: c.flag()}
		for _, st := range []*Stall{&v.CPUSome, &v.MemSome, &v.MemFull, &v.IOSome, &v.IOFull} {
			*st = Stall{Avg10: c.float(), Avg60: c.float(), Avg300: c.float(), Total: c.num()}
		}
		if !c.bad {
			s.PSI, bit = v, HasPSI
		}
	}
	s.Has |= bit
	return bit != 0
}

func (r *Reader) disk(c *cursor) bool {
	name := c.word()
	d := Disk{BusyMS: c.num(), Reads: c.num(), RSect: c.num(), Writes: c.num(), WSect: c.num(),
		Discards: c.num(), DSect: c.num(), InFlight: c.num(), Queue: c.float()}
	if c.bad || len(r.s.DSK) >= maxDevices {
		return false
	}
	d.Name = r.text(name)
	r.s.DSK = append(r.s.DSK, d)
	return true
}

func (r *Reader) net(c *cursor) bool {
	name := c.word()
	if string(name) == "upper" {
		v := Upper{TCPIn: c.num(), TCPOut: c.num(), UDPIn: c.num(), UDPOut: c.num(), IPIn: c.num(), IPOut: c.num(),
			IPDeliver: c.num(), IPForward: c.num(), UDPErrs: c.num(), UDPNoPort: c.num(), ActiveOpens: c.num(), PassiveOpens: c.num(),
			Established: c.num(), Resent: c.num(), TCPErrs: c.num(), Resets: c.num()}
		if c.bad {
			return false
		}
		r.s.TCP, r.s.Has = v, r.s.Has|HasNET
		return true
	}
	v := Interface{RPack: c.num(), RBytes: c.num(), SPack: c.num(), SBytes: c.num(), Speed: c.num(), Duplex: c.num()}
	if c.bad || len(r.s.NET) >= maxDevices {
		return false
	}
	v.Name = r.text(name)
	r.s.NET = append(r.s.NET, v)
	return true
}

// again is text for what is likely to be old.
func (r *Reader) again(old string, b []byte) string {
	if old == string(b) {
		return old
	}
	return r.text(b)
}

// text is a string of b, the same one for the same text.
func (r *Reader) text(b []byte) string {
	if t, ok := r.texts[string(b)]; ok {
		return t
	}
	if len(r.texts) >= maxIntern {
		clear(r.texts)
	}
	t := string(b)
	r.texts[t] = t
	return t
}

// Describe words what could not be read; "" when all could.
func (s ReadStats) Describe() string {
	var parts []string
	if s.Skipped > 0 {
		parts = append(parts, number(s.Skipped, "line", "lines")+" could not be read")
	}
	if s.Torn > 0 {
		parts = append(parts, number(s.Torn, "sample", "samples")+" left incomplete")
	}
	return strings.Join(parts, ", ")
}

func number(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.FormatInt(n, 10) + " " + many
}
