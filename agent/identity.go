package agent

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
)

func setClock(unixNano int64) error {
	ts := unix.NsecToTimespec(unixNano)
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("setting the clock: %w", err)
	}
	return nil
}

// addEntropy credits the kernel's pool with b, all of it random, and has its
// generator start from it.
func addEntropy(b []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("adding entropy: %w", err)
	}
	defer f.Close()
	const max = 4096
	b = b[:min(len(b), max)]
	// struct rand_pool_info: bits, bytes, the bytes.
	arg := binary.NativeEndian.AppendUint32(nil, uint32(8*len(b)))
	arg = binary.NativeEndian.AppendUint32(arg, uint32(len(b)))
	arg = append(arg, b...)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&arg[0]))); e != 0 {
		return fmt.Errorf("adding entropy: %w", e)
	}
	const reseed = 0x5207 // RNDRESEEDCRNG, since Linux 4.17
	unix.Syscall(unix.SYS_IOCTL, f.Fd(), reseed, 0)
	return nil
}

func setHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("setting the hostname %q: %w", name, err)
	}
	return replaceFile("/etc/hostname", name+"\n", 0o644)
}

// replaceFile writes a file in the place of whatever the image has there; a
// link is replaced, not followed.
func replaceFile(path, text string, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.WriteString(text); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func writeHosts(m *guestwire.Setup) error {
	return replaceFile("/etc/hosts", hostsText(m), 0o644)
}

func hostsText(m *guestwire.Setup) string {
	var b strings.Builder
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	if m.Hostname != "" && !m.NotNamed {
		own := "127.0.1.1"
		if m.Net != nil {
			if p, err := netip.ParsePrefix(m.Net.Addr); err == nil {
				own = p.Addr().String()
			}
		}
		b.WriteString(own + "\t" + m.Hostname + "\n")
	}
	for _, h := range m.Hosts {
		b.WriteString(h.Addr + "\t" + strings.Join(h.Names, " ") + "\n")
	}
	return b.String()
}

func writeResolv(n *guestwire.Net) error {
	return replaceFile("/etc/resolv.conf", resolvText(n), 0o644)
}

func resolvText(n *guestwire.Net) string {
	if n == nil {
		return "# this guest has no network\n"
	}
	servers := n.DNS
	if len(servers) == 0 && n.Gateway != "" {
		servers = []string{n.Gateway}
	}
	var b strings.Builder
	for _, s := range servers {
		b.WriteString("nameserver " + s + "\n")
	}
	if len(n.Search) > 0 {
		b.WriteString("search " + strings.Join(n.Search, " ") + "\n")
	}
	if len(n.Options) > 0 {
		b.WriteString("options " + strings.Join(n.Options, " ") + "\n")
	}
	return b.String()
}
