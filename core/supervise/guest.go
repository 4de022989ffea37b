package supervise

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
	"virtkit/core/machine"
	"virtkit/core/numa"
)

// Serials of a guest's disks.
const (
	RootSerial  = "vk-root"
	UpperSerial = "vk-upper"

	CheckoutSerial = "vk-checkout"
)

// bootTries bounds how often a guest may reboot before it is ready once.
const bootTries = 3

// guest is one boot of the machine.
type guest struct {
	m    machine.Machine
	ch   *channel
	done chan struct{} // closed when m has ended, after exit was set
	exit machine.Exit
	hung chan hung // that it counts as hung; capacity 1
	from origin
}

// guestGone is the cause of what ends because the guest did.
type guestGone struct{ exit machine.Exit }

func (e *guestGone) Error() string {
	if e.exit.Detail == "" {
		return "the guest ended: " + string(e.exit.Reason)
	}
	return "the guest ended: " + string(e.exit.Reason) + ": " + e.exit.Detail
}

// with returns a context that also ends with the guest, with guestGone as its
// cause.
func (g *guest) with(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-g.done:
			cancel(&guestGone{g.exit})
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// prepareSteps are done once in a supervisor's life.
func (s *supervisor) prepareSteps() []step {
	var images []*fsx.Lock
	letGo := func() {
		for _, l := range images {
			l.Close()
		}
	}
	steps := []step{
		{"socket", func(context.Context) error {
			l, err := s.listen()
			if err != nil {
				return err
			}
			s.clients.serve(l, s)
			return nil
		}, nil}, // finish stops listening, after it told of the end
		{"image", func(ctx context.Context) (err error) {
			if images, err = s.holdImages(ctx); err != nil {
				letGo()
			}
			return err
		}, letGo},
		{"disk", s.freshLayer, nil},
		{"network", s.plug, s.unplug},
		{"driver", func(ctx context.Context) (err error) {
			s.driver = s.d.Driver
			if s.driver != nil {
				return nil
			}
			accel := ""
			if s.driver, accel, err = s.d.NewDriver(ctx, s.spec); err != nil {
				return err
			}
			s.board.update(func(st *State) { st.Accel = accel })
			return nil
		}, nil},
		{"kernel", func(ctx context.Context) (err error) {
			if s.kernel, err = s.d.Kernel(ctx, s.spec); err != nil {
				return err
			}
			s.board.update(func(st *State) { st.Kernel = s.kernel.Version })
			return nil
		}, nil},
	}
	if s.spec.Record != nil {
		steps = append(steps, step{"recording", s.beginRecording, nil})
	}
	if len(s.services) > 0 {
		after := slices.IndexFunc(steps, func(st step) bool { return st.name == "network" })
		steps = slices.Insert(steps, after+1, step{"services", s.startServices, s.stopServices})
	}
	return steps
}

// holdImages keeps the root and the other images from `vk gc` for the guest's
// life. What it holds is returned also with an error.
func (s *supervisor) holdImages(ctx context.Context) ([]*fsx.Lock, error) {
	all := []Image{s.spec.Image}
	for _, d := range s.spec.Disks {
		all = append(all, d.Image)
	}
	var out []*fsx.Lock
	for _, i := range all {
		l, err := holdImage(ctx, i)
		if err != nil {
			return out, err
		}
		out = append(out, l)
	}
	return out, nil
}

func holdImage(ctx context.Context, i Image) (*fsx.Lock, error) {
	var l *fsx.Lock
	if p := i.Lock; p != "" {
		wctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		var err error
		if l, err = fsx.AcquireLock(wctx, p, true); err != nil {
			return nil, fmt.Errorf("holding image %s: %w", i.Ref, err)
		}
	}
	if _, err := os.Stat(i.Path); err != nil {
		l.Close()
		return nil, fault.Newf(fault.NotFound, "image %s is not on this host any more", i.Ref).
			Hint("vk pull %s", i.Ref).Because(err)
	}
	return l, nil
}

func (s *supervisor) plug(ctx context.Context) (err error) {
	if s.spec.Net.Mode == "none" {
		return nil
	}
	switch {
	case s.spec.Net.Mode == modePort && s.uplink == nil:
		return errors.New("a service's supervisor is started by its job's alone")
	case s.uplink != nil:
		s.network = s.uplink
	case s.d.NewNetwork == nil:
		return fmt.Errorf("this program has no network of mode %q", s.spec.Net.Mode)
	default:
		if s.network, err = s.d.NewNetwork(ctx, s.dir, s.spec); err != nil {
			return err
		}
	}
	if err := s.egress.begin(s.dir, s.spec, s.network, s.log); err != nil {
		return err
	}
	if s.port, err = s.network.Plug(ctx, s.spec.Hostname, s.spec.Net); err != nil {
		return err
	}
	var opened []Publish
	for _, p := range s.spec.Net.Publish {
		o, err := s.port.Publish(ctx, p)
		if err != nil {
			return fmt.Errorf("publishing port %d/%s of the guest: %w", p.GuestPort, p.Proto, err)
		}
		opened = append(opened, o)
	}
	s.board.update(func(st *State) { st.Addr, st.Publish = s.port.Guest().Addr, opened })
	return nil
}

func (s *supervisor) unplug() {
	if s.network == nil {
		return
	}
	if err := s.network.Close(); err != nil {
		s.log.Warn("closing the network", logx.Err, err)
	}
	s.egress.end()
}

// bootSteps are done at each boot.
func (s *supervisor) bootSteps() []step {
	return []step{
		{"boot", s.boot, s.killGuest},
		{"contact", s.contact, nil},
		{"template", s.keepTemplate, nil},
		{"setup", s.setup, nil},
		{"command", s.startCommand, nil},
	}
}

// boot starts the VMM.
func (s *supervisor) boot(ctx context.Context) error {
	dir := filepath.Join(s.dir, vmmDir)
	if err := fsx.RemoveTree(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	ms := machine.Spec{
		Name: s.spec.Hostname, CPUs: s.spec.CPUs, MemMiB: s.spec.MemMiB, Dir: dir,
		Kernel:  s.kernel,
		Disks:   []machine.Disk{{Path: s.spec.Image.Path, Serial: RootSerial, ReadOnly: true}},
		Console: s.console, Nested: s.spec.Nested, ProcLog: s.procLog, NoBalloon: s.spec.NoBalloon, Place: s.place(), Unplaced: s.unplaced, Hold: s.hold,
	}
	ms.Kernel.Cmdline = append(slices.Clone(s.kernel.Cmdline), s.pressure())
	if s.spec.Upper > 0 {
		ms.Disks = append(ms.Disks, machine.Disk{Path: filepath.Join(s.dir, UpperFile), Serial: UpperSerial})
	}
	for i, d := range s.spec.Disks {
		ms.Disks = append(ms.Disks, machine.Disk{Path: d.Image.Path, Serial: diskSerial(i), ReadOnly: true})
	}
	if s.spec.Checkout != nil {
		ms.Disks = append(ms.Disks, machine.Disk{Path: filepath.Join(s.dir, CheckoutFile), Serial: CheckoutSerial, ReadOnly: true, Varies: true})
	}
	for i, sh := range s.spec.Shares {
		ms.Shares = append(ms.Shares, machine.Share{Tag: shareTag(i), Source: sh.Source, ReadOnly: sh.ReadOnly})
	}
	if s.port != nil {
		f, err := s.nicFile()
		if err != nil {
			return fmt.Errorf("plugging the guest in: %w", err)
		}
		n := s.port.Guest()
		ms.NIC = &machine.NIC{File: f, Tap: s.spec.Net.Tap(), MAC: n.MAC, MTU: n.MTU}
	}
	var from origin
	from, ms.Restore = s.fromTemplate(ctx, ms)
	s.from = from
	s.restoring.Store(from.restored)
	s.answered.Store(false)
	if from.restored {
		// Its boot is in no console: it was another guest's.
		fmt.Fprintf(s.console, "[guest restored from template %s]\n", from.key)
	}
	m, err := s.driver.Boot(ctx, ms)
	if err != nil {
		return err
	}
	g := &guest{m: m, from: from, done: make(chan struct{}), hung: make(chan hung, 1)}
	var streams func(*yamux.Session)
	if s.spec.ServiceExec == ServiceExecOn {
		streams = s.serviceRequests
	}
	if g.ch, err = newChannel(m.Control(), streams); err != nil {
		m.Kill()
		return err
	}
	go func() {
		x, err := m.Wait(context.Background())
		if err != nil {
			x = machine.Exit{Reason: machine.Crashed, Detail: err.Error(), At: time.Now()}
		}
		g.exit = x
		close(g.done)
	}()
	s.setGuest(g)
	start, _ := fsx.ProcStart(m.PID())
	s.board.update(func(st *State) {
		st.Phase, st.VMMPID, st.VMMStart, st.Restored = Booting, m.PID(), start, from.restored
	})
	return nil
}

// pressure is the kernel's word for whether it accounts for pressure, which its
// scheduler pays for: for recordings, and to know when not to reclaim.
func (s *supervisor) pressure() string {
	if s.spec.Record != nil || s.spec.Reclaim != nil {
		return "psi=1"
	}
	return "psi=0"
}

// place is the memory node of the guest, the same at each boot.
func (s *supervisor) place() *numa.Placement {
	if s.placed || s.spec.Place != nil || s.d.Place == nil {
		s.tellPlace()
		return s.spec.Place
	}
	s.placed = true
	s.spec.Place = s.choosePlace(s.spec)
	s.tellPlace()
	return s.spec.Place
}

// places are the job's guests that were placed: they have hardly touched their
// memory when the next one is.
type places struct {
	mu  sync.Mutex
	all []numa.Outstanding
}

func (p *places) add(at *numa.Placement, memMiB int) {
	if at != nil {
		p.all = append(p.all, numa.Outstanding{Place: at, MemMiB: int64(memMiB)})
	}
}

// choosePlace is the memory node of one of the job's guests; nil = there is no
// choice.
func (s *supervisor) choosePlace(spec Spec) *numa.Placement {
	s.places.mu.Lock()
	defer s.places.mu.Unlock()
	p, err := s.d.Place(spec, s.places.all)
	if err != nil {
		s.log.Warn("choosing a memory node", logx.Err, err)
	}
	s.places.add(p, spec.MemMiB)
	return p
}

// unplaced takes back what was told: the host has refused.
func (s *supervisor) unplaced(error) {
	s.board.update(func(st *State) { st.NUMA = "" })
}

func (s *supervisor) tellPlace() {
	if s.spec.Place == nil {
		return
	}
	line := s.spec.Place.Line()
	s.log.Info(line)
	s.board.update(func(st *State) { st.NUMA = line })
}

// nicFile is the first end of the guest's cable, later a new one.
func (s *supervisor) nicFile() (*os.File, error) {
	if !s.cabled {
		s.cabled = true
		return s.port.File(), nil
	}
	return s.port.Replug()
}

func diskSerial(i int) string { return "vk-disk" + strconv.Itoa(i) }

func shareTag(i int) string { return "vk-share" + strconv.Itoa(i) }

// contact waits for the agent's first answer.
func (s *supervisor) contact(ctx context.Context) error {
	g := s.current()
	ctx, cancel := g.with(ctx)
	defer cancel()
	s.board.stage("waiting for the guest's agent")
	r, err := g.ch.contact(ctx, s.d.Times.Contact)
	if err != nil {
		return err
	}
	s.answered.Store(true)
	s.timerKHz = r.TimerKHz
	s.log.Debug("agent answered", "kernel", r.Kernel, "uptime_ms", r.UptimeMS)
	return nil
}

// setup makes the bare guest into the job's machine.
func (s *supervisor) setup(ctx context.Context) error {
	g := s.current()
	ctx, cancel := g.with(ctx)
	defer cancel()
	g.ch.settle()
	return bounded(ctx, func(ctx context.Context) error {
		last, err := g.ch.client().Setup(ctx, s.guestSetup(), func(stage string) { s.board.stage("guest: " + stage) })
		if err == nil && len(last.Linked) > 0 {
			s.board.update(func(st *State) { st.Linked = last.Linked })
		}
		return err
	})
}

func (s *supervisor) guestSetup() guestwire.Setup {
	if s.machineID == "" {
		s.machineID = randomHex(16) // the same after a reboot
	}
	entropy := make([]byte, 64)
	rand.Read(entropy)
	w := guestwire.Setup{
		Hostname: s.spec.Hostname, Entropy: entropy, MachineID: s.machineID,
		Root:     guestwire.Disk{Serial: RootSerial, FSType: s.spec.Image.FSType},
		Env:      s.spec.Env,
		Loopback: s.spec.Net.Loopback,
		Nested:   s.spec.Nested,
		Reclaim:  s.spec.Reclaim,
		Record:   s.recorder != nil,
		Services: s.spec.ServiceExec,
	}
	if s.spec.Upper > 0 {
		w.Upper = &guestwire.Disk{Serial: UpperSerial, FSType: "ext4"}
	}
	if c := s.spec.Checkout; c != nil {
		w.Checkout = &guestwire.Checkout{Disk: guestwire.Disk{Serial: CheckoutSerial, FSType: c.FSType}, Target: c.Target, User: c.User, Memory: c.Memory}
	}
	if s.port != nil {
		n := s.port.Guest()
		if len(s.spec.Services) > 0 || s.spec.Kind == ServiceKind {
			// A service's bare name is asked for as it is before a search list is
			// tried: db is not db.example.com.
			n.Options = append(n.Options, "ndots:0")
		}
		w.Net = &n
	}
	w.NotNamed = slices.ContainsFunc(s.spec.Services, func(v Service) bool { return v.named(s.spec.Hostname) })
	for i, d := range s.spec.Disks {
		w.Mounts = append(w.Mounts, guestwire.Mount{Kind: "disk", Source: diskSerial(i), FSType: d.Image.FSType, Target: d.Target, ReadOnly: true})
		if d.Tools {
			w.Tools = d.Target
		}
	}
	for i, sh := range s.spec.Shares {
		w.Mounts = append(w.Mounts, guestwire.Mount{Kind: "virtiofs", Source: shareTag(i), Target: sh.Target, ReadOnly: sh.ReadOnly})
	}
	for _, d := range s.spec.Dirs {
		w.Dirs = append(w.Dirs, guestwire.Dir{Path: d.Path, Mode: d.Mode, User: d.User})
	}
	return w
}

// heartbeat watches a running guest's agent and clock until ctx ends. Silence
// is counted in pings that failed, not on the clock, so that a supervisor that
// was itself stopped for a while does not blame the guest.
func (s *supervisor) heartbeat(ctx context.Context, g *guest) {
	var silent time.Duration
	var clock clockWatch
	next := min(s.d.Times.Ping, clockRetry)
	for {
		limit, trial := s.silenceLimit()
		recontact := limit
		if recontact <= 0 {
			recontact = 30 * time.Second
		}
		each := max(recontact/3, time.Millisecond)
		select {
		case <-ctx.Done():
			return
		case <-g.ch.session().CloseChan():
			if err := s.reconnect(ctx, g, recontact); err != nil {
				return
			}
			continue
		case <-time.After(next):
		}
		next = s.d.Times.Ping
		t := time.Now()
		pctx, cancel := context.WithTimeout(ctx, each)
		pong := make(chan guestwire.Pong, 1)
		err := bounded(pctx, func(ctx context.Context) error {
			p, err := g.ch.client().Ping(ctx)
			pong <- p
			return err
		})
		cancel()
		if err == nil {
			silent = 0
			p := <-pong
			s.upper.see(p, s.layerFile())
			next = s.keepClock(ctx, g, &clock, t, p)
			continue
		}
		silent += min(time.Since(t), each)
		next = min(next, clockRetry)
		enough := limit > 0 && silent >= limit-time.Millisecond
		if !enough && !trial {
			continue
		}
		at, dead := standsAt(ctx, g)
		if !enough && !dead {
			continue
		}
		told := limit
		if !enough {
			told = silent.Round(time.Millisecond)
		}
		if why := fmt.Sprintf("the guest's agent was silent for %v", told) + at; !trial {
			s.hang(g, why)
			return
		} else if s.retry(g, why) {
			return
		} // else it has more time now
	}
}

// reconnect replaces a session that broke under a running guest.
func (s *supervisor) reconnect(ctx context.Context, g *guest, limit time.Duration) error {
	// The guest's end breaks the session as well, and is told apart by being
	// the end.
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(100 * time.Millisecond):
	}
	s.log.Warn("the connection to the guest's agent broke; trying to get it back")
	cctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := g.ch.renew()
	if err == nil {
		_, err = g.ch.contact(cctx, min(s.d.Times.Contact, limit))
	}
	if err != nil && ctx.Err() == nil {
		at, _ := standsAt(ctx, g)
		s.hang(g, fmt.Sprintf("the connection to the guest's agent broke and did not come back within %v: %v", limit, err)+at)
	}
	return err
}

func (s *supervisor) hang(g *guest, why string) {
	select {
	case g.hung <- hung{why: why}:
	default:
	}
}

// killGuest ends whatever machine runs and drains what it left.
func (s *supervisor) killGuest() {
	g := s.current()
	if g == nil {
		return
	}
	if err := g.m.Kill(); err != nil {
		s.log.Warn("killing the VMM", logx.Err, err)
	}
	<-g.done
	s.drain(g)
	s.setGuest(nil)
}

// drain lets the guest's last output reach its readers.
func (s *supervisor) drain(g *guest) {
	select {
	case <-g.ch.session().CloseChan(): // it has read all that the guest sent
	case <-time.After(time.Second):
	}
	g.ch.close()
	s.clients.drain(drainLimit)
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}
