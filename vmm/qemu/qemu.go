// Package qemu drives QEMU (7.2 or later) as a machine.Driver: one process per
// guest, machine type microvm, every socket and file handed over by
// descriptor.
//
// Files it owns, all in Config.CacheDir, each replaced atomically and only
// ever a saving of time (any of them may be removed):
//
//	tsc.json         rate of the host's clock, for its boot id
//	qemu.json        version of the QEMU binary, for its path, size and time
//	accel-HEX.json   verdict of the KVM probe, for boot id, kernel and QEMU
package qemu

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
	"virtkit/core/logx"
	"virtkit/core/machine"
	"virtkit/vmm/internal/spawn"
	"virtkit/vmm/virtiofs"
)

// Config sets a Driver up.
type Config struct {
	Binary   string       // "" = qemu-system-x86_64 in PATH
	Accel    string       // "auto" (or ""), "kvm" or "tcg"; $VIRTKIT_ACCEL wins
	CacheDir string       // where the probe's verdicts and the clock's rate are kept; made when missing
	Log      *slog.Logger // nil = none
}

// Driver boots guests under QEMU. Make it with New.
type Driver struct {
	cfg Config
	log *slog.Logger
	dev string // /dev/kvm
	sys string // /sys
	// probe boots k under KVM; replaced in tests.
	probe func(ctx context.Context, k machine.Kernel) error

	tscMu sync.Mutex
	tsc   uint64

	mu       sync.Mutex
	info     Info
	verdicts map[string]Verdict
}

var _ machine.Driver = (*Driver)(nil)

// New makes a Driver; nothing is looked up until it is used.
func New(cfg Config) *Driver {
	d := &Driver{cfg: cfg, log: cfg.Log, dev: "/dev/kvm", sys: "/sys", verdicts: map[string]Verdict{}}
	if d.log == nil {
		d.log = logx.Discard()
	}
	d.probe = d.probeKVM
	return d
}

// Name is "qemu".
func (d *Driver) Name() string { return "qemu" }

// Boot implements machine.Driver.
func (d *Driver) Boot(ctx context.Context, s machine.Spec) (machine.Machine, error) {
	m, err := d.decideAndBoot(ctx, s)
	if err != nil {
		if s.NIC != nil && s.NIC.File != nil {
			s.NIC.File.Close() // taken over, also on error
		}
		if s.Restore != nil {
			s.Restore.Close() // likewise
		}
		return nil, err
	}
	return m, nil
}

func (d *Driver) decideAndBoot(ctx context.Context, s machine.Spec) (*guest, error) {
	if err := validate(s); err != nil {
		return nil, err
	}
	v, err := d.Verdict(ctx, s.Kernel)
	if err != nil {
		return nil, err
	}
	if s.Nested && v.Accel == "kvm" {
		if err := CanNest(d.sys); err != nil {
			return nil, err
		}
	}
	return d.boot(ctx, s, v.Accel)
}

// boot starts QEMU with the accelerator given.
func (d *Driver) boot(ctx context.Context, s machine.Spec, accel string) (_ *guest, err error) {
	info, err := d.Info(ctx)
	if err != nil {
		return nil, err
	}
	p := plan{spec: s, accel: accel}
	if accel == "tcg" {
		if p.tscKHz, err = d.ClockKHz(); err != nil {
			return nil, err
		}
	}
	var o opened
	defer func() {
		o.closeTheirs()
		if err != nil {
			o.closeOurs()
		}
	}()
	if err := o.open(ctx, &p); err != nil {
		return nil, fmt.Errorf("booting %s: %w", s.Name, err)
	}
	g := newGuest(s, d.log.With(logx.VM, s.Name))
	g.daemons = o.daemons
	cmd := exec.Command(info.Binary, p.args()...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8"}
	cmd.ExtraFiles = slices.Concat(o.theirs, s.Hold) // in this order: theirs have their numbers
	out := io.Writer(&g.words)
	if s.ProcLog != nil {
		out = io.MultiWriter(&g.words, s.ProcLog)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if cmd.SysProcAttr, err = credential(accel, d.dev); err != nil {
		return nil, err
	}
	if err := spawn.StartPlaced(cmd, placer(s.Place, g.log, s.Unplaced)); err != nil {
		return nil, fmt.Errorf("starting %s: %w", info.Binary, err)
	}
	o.closeTheirs()
	g.run(cmd, o.qmp, o.console, o.control)
	if err := g.awaitVMM(ctx); err != nil {
		g.Kill()
		return nil, fmt.Errorf("booting %s: %w", s.Name, err)
	}
	return g, nil
}

// opened is what was opened for one QEMU: theirs go to it in this order as
// descriptors 3, 4, …
type opened struct {
	theirs  []*os.File
	closed  bool
	daemons []*virtiofs.Daemon

	qmp, console, control *net.UnixConn
}

func (o *opened) give(f *os.File) int {
	o.theirs = append(o.theirs, f)
	return 2 + len(o.theirs)
}

func (o *opened) pair() (*net.UnixConn, int, error) {
	ours, theirs, err := socketpair()
	if err != nil {
		return nil, 0, err
	}
	return ours, o.give(theirs), nil
}

func (o *opened) open(ctx context.Context, p *plan) (err error) {
	s := p.spec
	if o.qmp, p.qmp, err = o.pair(); err != nil {
		return err
	}
	if o.console, p.console, err = o.pair(); err != nil {
		return err
	}
	if o.control, p.control, err = o.pair(); err != nil {
		return err
	}
	if p.kernel, err = o.bootFile("kernel", s.Kernel.Image); err != nil {
		return err
	}
	if s.Kernel.Initrd != "" {
		if p.initrd, err = o.bootFile("initramfs", s.Kernel.Initrd); err != nil {
			return err
		}
	}
	for _, d := range s.Disks {
		how := os.O_RDWR
		if d.ReadOnly {
			how = os.O_RDONLY
		}
		f, err := os.OpenFile(d.Path, how, 0)
		if err != nil {
			return fmt.Errorf("disk %s: %w", d.Serial, err)
		}
		p.disks = append(p.disks, o.give(f))
	}
	if s.NIC != nil {
		p.nic = o.give(s.NIC.File)
	}
	if s.Restore != nil {
		p.restore = o.give(s.Restore)
	}
	for _, sh := range s.Shares {
		dm, conn, err := virtiofs.Serve(ctx, virtiofs.Config{
			Source: sh.Source, ReadOnly: sh.ReadOnly, Dir: s.Dir, Log: s.ProcLog,
		})
		if err != nil {
			return err
		}
		o.daemons = append(o.daemons, dm)
		p.shares = append(p.shares, o.give(conn))
	}
	return nil
}

// bootFile opens what QEMU reads once by way of /proc/self/fd, which asks for
// the file's permissions again. A file that not everybody may read is given as
// a copy in memory, because QEMU may run as another user.
func (o *opened) bootFile(what, path string) (int, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	if os.Geteuid() != 0 || st.Mode()&0o004 != 0 {
		return o.give(f), nil
	}
	defer f.Close()
	fd, err := unix.MemfdCreate("vk-"+what, unix.MFD_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("%s: copying %s to memory: %w", what, path, err)
	}
	mem := os.NewFile(uintptr(fd), path)
	if _, err := io.Copy(mem, f); err != nil {
		mem.Close()
		return 0, fmt.Errorf("%s: copying %s to memory: %w", what, path, err)
	}
	return o.give(mem), nil
}

func (o *opened) closeTheirs() {
	if o.closed {
		return
	}
	o.closed = true
	for _, f := range o.theirs {
		f.Close()
	}
}

func (o *opened) closeOurs() {
	for _, c := range []*net.UnixConn{o.qmp, o.console, o.control} {
		if c != nil {
			c.Close()
		}
	}
	for _, d := range o.daemons {
		d.Kill()
	}
}

func socketpair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a socket pair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "socketpair")
	f := os.NewFile(uintptr(fds[0]), "socketpair")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("making a socket pair: %w", err)
	}
	return c.(*net.UnixConn), theirs, nil
}

// Unprivileged user ids for QEMU, one at random for each guest, above what
// distributions and container managers hand out (systemd's UIDS-GIDS document).
const (
	uidBase  = 0x7000_0000
	uidRange = 0x00ff_ffff
)

// credential takes root from QEMU when vk has it: every file is open already,
// and it keeps /dev/kvm by its group. As another user than root, or where the
// host's user namespace has no such ids, QEMU runs as vk does.
func credential(accel, kvmDev string) (*syscall.SysProcAttr, error) {
	a := &syscall.SysProcAttr{}
	if os.Geteuid() != 0 || !idsMapped() {
		return a, nil
	}
	var b [4]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, err
	}
	id := uint32(uidBase + binary.LittleEndian.Uint32(b[:])%uidRange)
	c := &syscall.Credential{Uid: id, Gid: id, Groups: []uint32{}}
	if accel == "kvm" {
		var st unix.Stat_t
		if err := unix.Stat(kvmDev, &st); err != nil {
			return nil, fmt.Errorf("%s: %w", kvmDev, err)
		}
		switch {
		case st.Mode&0o006 == 0o006:
		case st.Mode&0o060 == 0o060 && st.Gid != 0:
			c.Groups = append(c.Groups, st.Gid)
		default:
			return a, nil // root alone may open it
		}
	}
	a.Credential = c
	return a, nil
}

// idsMapped says whether the ids above exist in this user namespace.
func idsMapped() bool {
	for _, f := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		b, err := os.ReadFile(f)
		if err != nil || !mapCovers(string(b), uidBase, uidRange) {
			return false
		}
	}
	return true
}

// cacheGet reads a cached value; whatever is wrong with it means that it is
// not there.
func (d *Driver) cacheGet(name string, v any) bool {
	if d.cfg.CacheDir == "" {
		return false
	}
	b, err := os.ReadFile(filepath.Join(d.cfg.CacheDir, name))
	return err == nil && json.Unmarshal(b, v) == nil
}

func (d *Driver) cachePut(name string, v any) {
	if d.cfg.CacheDir == "" {
		return
	}
	b, err := json.Marshal(v)
	if err == nil {
		err = os.MkdirAll(d.cfg.CacheDir, 0o755)
	}
	if err == nil {
		err = fsx.WriteFile(filepath.Join(d.cfg.CacheDir, name), append(b, '\n'), 0o644)
	}
	if err != nil && !errors.Is(err, os.ErrExist) {
		d.log.Debug("keeping a measurement", logx.Path, name, logx.Err, err)
	}
}
