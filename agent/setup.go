package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/agent/exec"
	"virtkit/agent/mount"
	"virtkit/agent/netup"
	"virtkit/agent/reclaim"
	"virtkit/core/guestwire"
)

// deviceWait is how long a device that the host has promised may take to
// appear: drivers probe beside us.
const deviceWait = 10 * time.Second

// step is one stage of a setup.
type step struct {
	name string
	do   func(*guestwire.Setup) error
}

// Setup implements System. What needs the root's files waits for it; the rest
// is done beside it, which a guest of several processors gains from. All of it
// ends before the switch, because /proc, /sys and /dev move then.
func (g *guest) Setup(m *guestwire.Setup, progress func(string)) (linked []string, err error) {
	network := g.beside("network", func() error { return g.network(m) })
	steps := []step{
		{"clock", g.stepClock},
		{"root", g.stepRoot},
		{"kernel", func(*guestwire.Setup) error { return g.kernel() }},
		{"network", func(*guestwire.Setup) error { return network() }},
		{"switch", g.stepSwitch},
		{"identity", g.stepIdentity},
		{"mounts", g.stepMounts},
		{"dirs", g.stepDirs},
		{"checkout", g.stepCheckout},
		{"services", g.stepServices},
	}
	if m.Tools != "" {
		steps = append(steps, step{"tools", func(m *guestwire.Setup) (err error) {
			linked, err = linkTools("/", m.Tools, binDir, m.Env)
			return err
		}})
	}
	if m.Nested {
		steps = append(steps, step{"nested", g.stepNested})
	}
	if m.Checkout == nil {
		steps = slices.DeleteFunc(steps, func(s step) bool { return s.name == "checkout" })
	}
	for _, s := range steps {
		g.stage(s.name)
		progress(s.name)
		if err := s.do(m); err != nil {
			g.say("stage %s: %v", s.name, err)
			return nil, err
		}
	}
	if m.Reclaim != nil {
		g.srv.guard("reclaim", func() { g.reclaim(m.Reclaim.Keep) })
	}
	if err := slowMonitor("/proc"); err != nil {
		g.say("the runtime's monitor stays as fast as it is: %v", err)
	}
	g.stage("ready")
	progress("ready") // what still comes is the answer, which takes no time
	return linked, nil
}

// reclaim evicts idle file cache for the guest's life.
func (g *guest) reclaim(keep int64) {
	r := reclaim.New(keep)
	if err := r.Possible(); err != nil {
		g.say("reclaim: %v", err)
		return
	}
	for range time.Tick(r.Every()) {
		if _, err := r.Tick(); err != nil {
			g.say("reclaim: given up: %v", err)
			return
		}
	}
}

// beside does f in a goroutine and returns what waits for its end.
func (g *guest) beside(name string, f func() error) (wait func() error) {
	done := make(chan struct{})
	var err error
	g.srv.guard(name, func() { defer close(done); err = f() })
	return func() error { <-done; return err }
}

func (g *guest) stepClock(m *guestwire.Setup) error {
	if m.UnixNano > 0 {
		if err := setClock(m.UnixNano); err != nil {
			return err
		}
	}
	if len(m.Entropy) > 0 {
		if err := addEntropy(m.Entropy); err != nil {
			return err
		}
	}
	return nil
}

// stepRoot mounts the image, the writable layer and the two as one.
func (g *guest) stepRoot(m *guestwire.Setup) error {
	dev, err := mount.Disk(m.Root.Serial, deviceWait)
	if err != nil {
		return err
	}
	if err := mount.Lower(dev, m.Root.FSType); err != nil {
		return err
	}
	up, typ := "", ""
	if m.Upper != nil {
		if up, err = mount.Disk(m.Upper.Serial, deviceWait); err != nil {
			return err
		}
		typ = m.Upper.FSType
	}
	if err := mount.Upper(up, typ); err != nil {
		return err
	}
	if up != "" {
		if fd, err := unix.Open(mount.UpperDir, unix.O_PATH|unix.O_CLOEXEC, 0); err == nil {
			g.upperFD = fd
		}
	}
	return mount.Overlay()
}

func (g *guest) stepSwitch(*guestwire.Setup) error {
	return mount.SwitchRoot("/init", []string{ShellName})
}

// mountKernel mounts the kernel's filesystems, which the root gets when it is
// switched to, and sets what CI jobs expect. It needs nothing of the host and
// begins with the guest.
func (g *guest) mountKernel() error {
	cg, why, err := mount.Kernel()
	if err != nil {
		return err
	}
	if why != nil {
		// Programs are then ended by session, and OOM kills are not told.
		g.say("control groups: %v", why)
	}
	g.srv.execs.SetCgroup(cg)
	for _, s := range tunables {
		os.WriteFile(s[0], []byte(s[1]), 0) // where this kernel has it
	}
	return nil
}

// tunables are files of the kernel and what they are set to.
var tunables = [][2]string{
	// As container engines do: ping and ports below 1024 without privilege.
	{"/proc/sys/net/ipv4/ping_group_range", "0 2147483647"},
	{"/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"},
	// What search engines, file watchers and test runners ask for.
	{"/proc/sys/vm/max_map_count", "262144"},
	{"/proc/sys/fs/inotify/max_user_watches", "524288"},
	{"/proc/sys/fs/inotify/max_user_instances", "1024"},
	// A kernel that has lost its footing ends, and the job with a reason.
	{"/proc/sys/kernel/panic_on_oops", "1"},
	{"/sys/kernel/mm/lru_gen/enabled", "y"},
}

func (g *guest) network(m *guestwire.Setup) error {
	if err := netup.Loopback(); err != nil {
		return err
	}
	if m.Net == nil {
		return nil
	}
	if err := netup.Apply(m.Net, deviceWait); err != nil {
		return err
	}
	g.mu.Lock()
	g.net = m.Net
	g.mu.Unlock()
	return netup.Forward(m.Loopback, m.Net.Gateway, g.srv.guard)
}

// stepIdentity writes the files that say who this machine is.
func (g *guest) stepIdentity(m *guestwire.Setup) error {
	if err := mount.Dir("/tmp", 0o777|os.ModeSticky); err != nil {
		return err
	}
	if m.Hostname != "" {
		if err := setHostname(m.Hostname); err != nil {
			return err
		}
	}
	if err := writeHosts(m); err != nil {
		return err
	}
	if m.MachineID != "" {
		if err := replaceFile("/etc/machine-id", m.MachineID+"\n", 0o444); err != nil {
			return err
		}
	}
	return writeResolv(m.Net)
}

func (g *guest) stepMounts(m *guestwire.Setup) error {
	for _, s := range m.Mounts {
		if err := mountShare(s); err != nil {
			return err
		}
	}
	return nil
}

func mountShare(s guestwire.Mount) error {
	if !filepath.IsAbs(s.Target) {
		return fmt.Errorf("mount target %q is not absolute", s.Target)
	}
	fs := mount.FS{Source: s.Source, Target: s.Target, Type: s.FSType, Flags: unix.MS_NODEV}
	if s.Kind == "disk" {
		fs.Flags |= unix.MS_NOSUID // files of the host's, not of the image's
	}
	switch s.Kind {
	case "virtiofs":
		fs.Type = "virtiofs"
	case "disk":
		dev, err := mount.Disk(s.Source, deviceWait)
		if err != nil {
			return fmt.Errorf("mount %s: %w", s.Target, err)
		}
		fs.Source = dev
		if s.ReadOnly {
			fs.Data = mount.ReadOnlyData(s.FSType)
		}
	default:
		return fmt.Errorf("mount %s: kind %q is not virtiofs or disk", s.Target, s.Kind)
	}
	if s.ReadOnly {
		fs.Flags |= unix.MS_RDONLY
	}
	return fs.Do()
}

func (g *guest) stepDirs(m *guestwire.Setup) error {
	for _, d := range m.Dirs {
		if err := makeDir(d); err != nil {
			return fmt.Errorf("directory %s: %w", d.Path, err)
		}
	}
	return nil
}

func makeDir(d guestwire.Dir) error {
	if !filepath.IsAbs(d.Path) {
		return fmt.Errorf("%q is not absolute", d.Path)
	}
	u, err := exec.LookupUser("/", d.User)
	if err != nil {
		return err
	}
	mode := unixMode(d.Mode)
	if d.Mode == 0 {
		// Only wanted to be there: what the image has keeps its owner and mode.
		if fi, err := os.Stat(d.Path); err == nil && fi.IsDir() {
			return nil
		}
		mode = 0o755
	}
	if err := os.MkdirAll(d.Path, 0o755); err != nil {
		return err
	}
	if err := os.Chown(d.Path, int(u.UID), int(u.GID)); err != nil {
		return err
	}
	return os.Chmod(d.Path, mode)
}

// unixMode is a mode of stat(2) as Go writes it.
func unixMode(m uint32) os.FileMode {
	mode := os.FileMode(m & 0o777)
	if m&unix.S_ISUID != 0 {
		mode |= os.ModeSetuid
	}
	if m&unix.S_ISGID != 0 {
		mode |= os.ModeSetgid
	}
	if m&unix.S_ISVTX != 0 {
		mode |= os.ModeSticky
	}
	return mode
}

// stepNested makes /dev/kvm there for everybody.
func (g *guest) stepNested(*guestwire.Setup) error {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return fmt.Errorf("nested virtualization was asked for, but this guest has no /dev/kvm (its processor has no vmx or svm, or its kernel no kvm modules)")
	}
	return os.Chmod("/dev/kvm", 0o666)
}
