package qemu

import (
	"fmt"
	"strconv"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/lazyre"
	"virtkit/core/machine"
)

// plan is all that decides QEMU's command line: the guest, and the numbers
// that its descriptors will have in QEMU. No path is given to QEMU but that of
// its own firmware.
type plan struct {
	spec    machine.Spec
	accel   string // "kvm" or "tcg"
	tscKHz  uint64 // of the host, for tcg
	qmp     int    // descriptors
	console int
	control int
	kernel  int
	initrd  int
	disks   []int
	nic     int
	shares  []int
	restore int // 0 = it boots
}

// translationMiB bounds what QEMU keeps of translated code under TCG, which is
// host memory beside the guest's. QEMU's own bound is 1 GiB: twice what many a
// guest has. What does not fit is translated again.
const translationMiB = 256

// OwnMiB is the most memory that a VMM takes beside its guest's under accel:
// 20 to 30 MiB were seen, and what TCG translates.
func OwnMiB(accel string) int64 {
	if accel == "kvm" {
		return 64
	}
	return 64 + translationMiB
}

// shareTag and the like end up inside QEMU's comma-separated options.
var (
	nameRE   = lazyre.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)
	serialRE = lazyre.New(`^[A-Za-z0-9._-]{1,20}$`)
	tagRE    = lazyre.New(`^[A-Za-z0-9._-]{1,35}$`)
	macRE    = lazyre.New(`^[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}$`)
)

// The machine has 24 virtio-mmio transports; serial, balloon and rng take one
// each.
const maxDevices = 24 - 3

func validate(s machine.Spec) error {
	bad := func(format string, a ...any) error { return fault.Newf(fault.Usage, "guest: "+format, a...) }
	switch {
	case !nameRE.MatchString(s.Name):
		return bad("name %q is not made of letters, digits, dots, dashes and underscores (at most 63)", s.Name)
	case s.CPUs < 1 || s.CPUs > 255:
		return bad("%d CPUs are not between 1 and 255", s.CPUs)
	case s.MemMiB < 64:
		return bad("%d MiB of memory are less than 64", s.MemMiB)
	case s.Kernel.Image == "":
		return bad("no kernel was given")
	}
	n := len(s.Disks) + len(s.Shares)
	if s.NIC != nil {
		n++
		if !macRE.MatchString(s.NIC.MAC) {
			return bad("%q is no MAC address", s.NIC.MAC)
		}
		if s.NIC.File == nil {
			return bad("its network device leads nowhere")
		}
		if s.NIC.MTU != 0 && (s.NIC.MTU < 576 || s.NIC.MTU > 65535) {
			return bad("an MTU of %d is not between 576 and 65535", s.NIC.MTU)
		}
	}
	if n > maxDevices {
		return bad("%d disks, shares and network devices are more than the machine's %d", n, maxDevices)
	}
	for _, d := range s.Disks {
		if !serialRE.MatchString(d.Serial) {
			return bad("disk %s: serial %q is not 1 to 20 letters, digits, dots, dashes or underscores", d.Path, d.Serial)
		}
	}
	for _, sh := range s.Shares {
		if !tagRE.MatchString(sh.Tag) {
			return bad("share of %s: tag %q is not 1 to 35 letters, digits, dots, dashes or underscores", sh.Source, sh.Tag)
		}
	}
	return nil
}

// Words are those of the kernel's command line that only spare start-up time,
// for guests under accel ("kvm" or "tcg"); docs/kernels.md has what each is
// worth: one serial port instead of four, no 256 BSD terminals, loop devices
// made on demand, no waiting for RCU grace periods.
func Words(accel string) []string {
	w := []string{"8250.nr_uarts=1", "pty.legacy_count=0", "loop.max_loop=0", "rcupdate.rcu_expedited=1"}
	if accel == "tcg" {
		// Patching the kernel's locks for a single processor makes TCG
		// translate all of that code again.
		// And TCG translates a program anew for each address that it runs at:
		// with addresses at random the start of one costs five times as much.
		w = append(w, "noreplace-smp", "norandmaps")
	}
	return w
}

// cmdline is the kernel's command line: the driver's words, then the spec's.
func (p plan) cmdline() string {
	// The last two: no device of the kernel's own beside lo, so that a guest
	// without a network has none, and one with has the switch's alone.
	w := []string{"console=ttyS0", "quiet", "panic=-1", "reboot=t", "rdinit=/init", "random.trust_cpu=on",
		"dummy.numdummies=0", "fb_tunnels=none"}
	w = append(w, Words(p.accel)...)
	if p.accel == "tcg" {
		// The machine has no PIT tick, so the kernel would calibrate by polling
		// the PIT, which fails at random on a busy host and then hangs for
		// ever. TCG's TSC is the host's. Under KVM, kvm-clock tells the rate.
		w = append(w, "tsc_early_khz="+strconv.FormatUint(p.tscKHz, 10), "tsc=reliable")
	}
	return strings.Join(append(w, p.spec.Kernel.Cmdline...), " ")
}

// args is QEMU's command line without argv[0].
func (p plan) args() []string {
	s := p.spec
	m := "microvm,acpi=on,dump-guest-core=off" // without ACPI it cannot power off
	var a []string
	add := func(w ...string) { a = append(a, w...) }
	if len(p.shares) > 0 { // a vhost-user device maps the guest's memory
		m += ",memory-backend=mem"
		add("-object", fmt.Sprintf("memory-backend-memfd,id=mem,size=%dM,share=on", s.MemMiB))
	}
	add("-M", m)
	switch p.accel {
	case "kvm":
		cpu := "host"
		if !s.Nested {
			cpu += ",vmx=off,svm=off"
		}
		add("-accel", "kvm", "-cpu", cpu)
	default:
		// TCG runs "rep stosb" and "rep movsb" a byte at a time, and the kernel,
		// libc and Go take them for all clearing and copying where the processor
		// says that they are fast (erms).
		cpu := "max,erms=off"
		if !s.Nested {
			cpu += ",svm=off"
		}
		add("-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", translationMiB), "-cpu", cpu)
	}
	add("-m", strconv.Itoa(s.MemMiB)+"M", "-smp", strconv.Itoa(s.CPUs),
		"-nodefaults", "-no-user-config", "-nographic",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-name", "vk:"+s.Name+",process=vk:"+s.Name,
		// A reset ends the VMM. It pauses first, so that what the guest said
		// last can be read to the end; the driver then tells it to quit.
		"-no-reboot", "-action", "reboot=shutdown,shutdown=pause,panic=pause",
		"-global", "virtio-mmio.force-legacy=false",
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d", p.qmp), "-mon", "chardev=qmp,mode=control",
		"-chardev", fmt.Sprintf("socket,id=con,fd=%d", p.console), "-serial", "chardev:con",
		"-kernel", procFD(p.kernel))
	if s.Kernel.Initrd != "" {
		add("-initrd", procFD(p.initrd))
	}
	add("-append", p.cmdline(),
		"-chardev", fmt.Sprintf("socket,id=ctl,fd=%d", p.control),
		"-device", "virtio-serial-device,max_ports=2",
		"-device", "virtserialport,chardev=ctl,name="+guestwire.PortName)
	for i, d := range s.Disks {
		opts := fmt.Sprintf("if=none,id=d%d,file=/dev/fdset/%d,format=raw,aio=threads", i, i)
		if d.ReadOnly {
			opts += ",readonly=on"
		} else {
			// It never outlives its guest. QEMU would open it read-only first and
			// again for writing, for which the descriptor handed over is no good.
			opts += ",cache=unsafe,discard=unmap,auto-read-only=off"
		}
		add("-add-fd", fmt.Sprintf("fd=%d,set=%d", p.disks[i], i), "-drive", opts,
			"-device", fmt.Sprintf("virtio-blk-device,drive=d%d,serial=%s", i, d.Serial))
	}
	if s.NIC != nil {
		dev := "virtio-net-device,netdev=n0,mac=" + s.NIC.MAC
		if s.NIC.MTU != 0 {
			dev += ",host_mtu=" + strconv.Itoa(s.NIC.MTU)
		}
		net := fmt.Sprintf("stream,id=n0,server=off,addr.type=fd,addr.str=%d", p.nic)
		if s.NIC.Tap {
			// Whether frames carry a virtio header, QEMU asks the device. vhost would
			// need /dev/vhost-net as well, and a guest that it is worth it to.
			net = fmt.Sprintf("tap,id=n0,fd=%d,vhost=off", p.nic)
		}
		add("-netdev", net, "-device", dev)
	}
	for i, sh := range s.Shares {
		add("-chardev", fmt.Sprintf("socket,id=fs%d,fd=%d", i, p.shares[i]),
			"-device", fmt.Sprintf("vhost-user-fs-device,queue-size=1024,chardev=fs%d,tag=%s", i, sh.Tag))
	}
	if !s.NoBalloon {
		add("-device", "virtio-balloon-device,free-page-reporting=on")
	}
	add("-device", "virtio-rng-device")
	if p.restore != 0 {
		add("-incoming", "fd:"+strconv.Itoa(p.restore))
	}
	return a
}

func procFD(n int) string { return "/proc/self/fd/" + strconv.Itoa(n) }
