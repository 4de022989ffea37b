package atop

import "bytes"

// cursor reads the fields of one line from its left.
type cursor struct {
	b   []byte
	bad bool // a field was missing or no number
}

// word is the next field.
func (c *cursor) word() []byte {
	b := c.b
	for len(b) > 0 && b[0] == ' ' {
		b = b[1:]
	}
	i := bytes.IndexByte(b, ' ')
	if i < 0 {
		i = len(b)
	}
	if i == 0 {
		c.bad = true
	}
	w := b[:i]
	c.b = b[i:]
	return w
}

// skip passes n fields.
func (c *cursor) skip(n int) {
	b := c.b
	for range n {
		if len(b) == 0 || b[0] != ' ' {
			c.bad = true
			return
		}
		i := bytes.IndexByte(b[1:], ' ')
		if i < 0 {
			b = nil
		} else {
			b = b[i+1:]
		}
	}
	c.b = b
}

// num is the next field as a number. One that no int64 holds is cut to the
// nearest, as is what atop prints of a counter that went backwards.
func (c *cursor) num() int64 {
	b := c.b
	i := 0
	for i < len(b) && b[i] == ' ' {
		i++
	}
	neg := false
	if i < len(b) && b[i] == '-' {
		neg = true
		i++
	}
	start, n := i, uint64(0)
	for i < len(b) && b[i] != ' ' {
		d := b[i] - '0'
		if d > 9 {
			c.bad = true
			c.b = nil
			return 0
		}
		n = n*10 + uint64(d)
		i++
	}
	if i == start {
		c.bad = true
	}
	if i-start > 18 { // may not fit
		n = 1<<63 - 1
	}
	c.b = b[i:]
	if neg {
		return -int64(n)
	}
	return int64(n)
}

// float is the next field as a number with a fraction.
func (c *cursor) float() float64 {
	w := c.word()
	neg := len(w) > 0 && w[0] == '-'
	if neg {
		w = w[1:]
	}
	v, scale, digits := 0.0, 0.0, 0
	for _, ch := range w {
		switch {
		case ch == '.' && scale == 0:
			scale = 1
		case ch >= '0' && ch <= '9':
			v = v*10 + float64(ch-'0')
			scale *= 10
			digits++
		default:
			c.bad = true
			return 0
		}
	}
	if digits == 0 || digits > 18 {
		c.bad = true
		return 0
	}
	if scale > 1 {
		v /= scale
	}
	if neg {
		return -v
	}
	return v
}

// flag is the next field as y or n.
func (c *cursor) flag() bool {
	w := c.word()
	if len(w) != 1 || w[0] != 'y' && w[0] != 'n' {
		c.bad = true
		return false
	}
	return w[0] == 'y'
}

// name reads " (name)": a name is at most MaxName bytes, so that its end is
// the last parenthesis in reach that is followed as it must be: at the end of
// the line, or by a space. A state and a number follow where state is set.
func (c *cursor) name(state bool) []byte {
	b := c.b
	if len(b) < 3 || b[0] != ' ' || b[1] != '(' {
		c.bad = true
		return nil
	}
	for i := min(2+MaxName, len(b)-1); i >= 2; i-- {
		if b[i] != ')' || i+1 < len(b) && b[i+1] != ' ' {
			continue
		}
		if state && (i+4 >= len(b) || b[i+3] != ' ' || b[i+2] == ' ') {
			continue
		}
		c.b = b[i+1:]
		return b[2:i]
	}
	c.bad = true
	return nil
}

// PRG's fields after the command line, but the last one.
const prgTail = 16

// prg reads a line of PRG, which makes a process.
func (r *Reader) prg(c *cursor) bool {
	if len(r.s.Procs) >= maxProcs {
		return false
	}
	pid, name := c.num(), c.name(true)
	state := c.word()
	if c.bad || len(state) != 1 {
		return false
	}
	n := len(r.s.Procs)
	// The process in this place of the sample before is mostly the same one, so
	// that its texts need not be looked up again.
	var was Proc
	if n < cap(r.s.Procs) {
		r.s.Procs = r.s.Procs[:n+1]
		was = r.s.Procs[n]
		r.s.Procs[n] = Proc{}
	} else {
		r.s.Procs = append(r.s.Procs, Proc{})
	}
	p := &r.s.Procs[n]
	p.PID, p.State = int(pid), state[0]
	p.UID, p.GID = int(c.num()), int(c.num())
	c.num()
	p.Threads, p.Exit, p.Start = int(c.num()), int(c.num()), c.num()
	cmd, tail, cgroup := cutPRG(c.b)
	if cmd == nil {
		c.bad = true
	}
	c.b = tail
	p.PPID, p.Running = int(c.num()), int(c.num())
	if r.Brief {
		c.skip(9)
	} else {
		p.Sleeping, p.Blocked = int(c.num()), int(c.num())
		p.EUID, p.EGID, p.SUID, p.SGID = int(c.num()), int(c.num()), int(c.num()), int(c.num())
		p.FUID, p.FGID, p.Elapsed = int(c.num()), int(c.num()), c.num()
	}
	isProc := c.flag()
	c.skip(3)
	fresh := c.word()
	if c.bad || !isProc || len(fresh) != 1 {
		r.s.Procs = r.s.Procs[:n]
		return !c.bad && !isProc // a thread of its own, of a foreign recording
	}
	p.New = fresh[0] == 'N'
	p.Name, p.Cmdline, p.CGroup = r.again(was.Name, name), r.again(was.Cmdline, cmd), r.again(was.CGroup, cgroup)
	return true
}

// cutPRG takes " (command line) … (control group)" apart, from its end: both
// texts may hold parentheses, but what stands between has a known number of
// fields.
func cutPRG(b []byte) (cmd, tail, cgroup []byte) {
	if len(b) < 4 || b[0] != ' ' || b[1] != '(' || b[len(b)-1] != ')' {
		return nil, nil, nil
	}
	for open := bytes.LastIndex(b, []byte(" (")); open > 0; open = bytes.LastIndex(b[:open], []byte(" (")) {
		i := open
		for n := 0; n < prgTail && i > 0; n++ {
			i = bytes.LastIndexByte(b[:i], ' ')
		}
		if i > 1 && b[i-1] == ')' && (b[open-1] == '-' || b[open-1] == 'N') && b[open-2] == ' ' {
			return b[2 : i-1], b[i:open], b[open+2 : len(b)-1]
		}
	}
	return nil, nil, nil
}

// more reads a line that adds to a process.
func (r *Reader) more(k kind, c *cursor) bool {
	pid, name := int(c.num()), c.name(true)
	state := c.word()
	if c.bad {
		return false
	}
	p := r.find(k, pid, name, state[0])
	known := p != nil
	if !known {
		p = &Proc{}
	}
	q := *p
	whole := true // not a thread's, as foreign recordings have them
	switch k {
	case kPRC:
		p.Hertz, p.User, p.Sys = c.num(), c.num(), c.num()
		if r.Brief {
			c.skip(7)
			whole = c.flag()
			break
		}
		p.Nice, p.Prio, p.RTPrio, p.Policy, p.CPU = int(c.num()), int(c.num()), int(c.num()), int(c.num()), int(c.num())
		c.skip(2)
		whole = c.flag()
		p.RunDelay = c.num()
		p.WChan = r.text(c.name(false))
		p.BlkDelay = c.num()
	case kPRM:
		if r.Brief {
			c.skip(2)
			p.RSize = c.num()
			c.skip(10)
			whole = c.flag()
			break
		}
		p.PageSize, p.VSize, p.RSize, p.VExec, p.VGrow, p.RGrow = c.num(), c.num(), c.num(), c.num(), c.num(), c.num()
		p.MinFlt, p.MajFlt, p.VLibs, p.VData, p.VStack, p.VSwap = c.num(), c.num(), c.num(), c.num(), c.num(), c.num()
		c.skip(1)
		whole = c.flag()
		c.skip(1)
		p.VLock = c.num()
	case kPRD:
		c.word()
		p.IO = c.flag()
		p.Reads, p.RSect, p.Writes, p.WSect, p.CancelWSect = c.num(), c.num(), c.num(), c.num(), c.num()
		c.skip(2)
		whole = c.flag()
	}
	if c.bad || !whole {
		*p = q
	}
	return !c.bad && (known || !whole)
}

// find is the process that a line is about: the next one in the order of PRG,
// or else the first one of that pid and state.
func (r *Reader) find(k kind, pid int, name []byte, state byte) *Proc {
	is := func(p *Proc) bool { return p.PID == pid && p.State == state && p.Name == string(name) }
	at := &r.at[k-kPRG]
	ps := r.s.Procs
	if *at < len(ps) && is(&ps[*at]) {
		*at++
		return &ps[*at-1]
	}
	if r.index == nil {
		r.index = map[int]int{}
	}
	if len(r.index) == 0 {
		for i := range ps {
			key := ps[i].PID<<8 | int(ps[i].State)
			if _, ok := r.index[key]; !ok {
				r.index[key] = i
			}
		}
	}
	if i, ok := r.index[pid<<8|int(state)]; ok && is(&ps[i]) {
		*at = i + 1
		return &ps[i]
	}
	return nil
}

func (r *Reader) prw(c *cursor) bool {
	pid, name := c.num(), c.name(false)
	if c.bad || len(r.s.Waits) >= maxProcs {
		return false
	}
	w := Waits{PID: int(pid), Name: r.text(name)}
	for len(bytes.TrimLeft(c.b, " ")) > 0 {
		f := c.word()
		i := bytes.LastIndexByte(f, ':')
		if i <= 0 {
			return false
		}
		d := cursor{b: f[i+1:]}
		n := d.num()
		if d.bad {
			return false
		}
		w.Channels = append(w.Channels, Channel{r.text(f[:i]), int(n)})
	}
	r.s.Waits = append(r.s.Waits, w)
	return true
}

func (r *Reader) prk(c *cursor) bool {
	pid, name := c.num(), c.name(false)
	k := Stack{PID: int(pid), TID: int(c.num()), WChan: r.text(c.word())}
	frames := c.word()
	if c.bad || len(r.s.Stacks) >= maxProcs {
		return false
	}
	k.Name = r.text(name)
	if string(frames) != "-" {
		for f := range bytes.SplitSeq(frames, []byte(";")) {
			k.Frames = append(k.Frames, r.text(f))
		}
	}
	r.s.Stacks = append(r.s.Stacks, k)
	return true
}
