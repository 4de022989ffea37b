// Command testinit is PID 1 of the guests that drivers are tested with. It
// loads the modules of the initramfs, opens the control port and obeys one
// command a line (see package vmmtest, which implements the same in a fake).
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
)

func main() {
	fmt.Println("testinit: first line")
	for fs, dir := range map[string]string{"proc": "/proc", "sysfs": "/sys", "devtmpfs": "/dev"} {
		if err := unix.Mount(fs, dir, fs, 0, ""); err != nil {
			fmt.Println("testinit: mounting", dir, err)
		}
	}
	loadModules()
	port, err := openPort()
	if err != nil {
		fmt.Println("testinit:", err)
		unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	}
	fmt.Println("testinit: ready")
	in := bufio.NewReader(port)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			fmt.Println("testinit: control channel:", err)
			unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
		}
		obey(port, strings.TrimSpace(line))
	}
}

// memory is what keep remembers.
var memory string

func obey(port *os.File, line string) {
	cmd, arg, _ := strings.Cut(line, " ")
	switch cmd {
	case "echo":
		fmt.Fprintf(port, "%s\n", line)
	case "say":
		fmt.Println(arg)
		fmt.Fprintln(port, "said")
	case "keep":
		memory = arg
		fmt.Fprintln(port, "kept")
	case "recall":
		fmt.Fprintln(port, memory)
	case "flood": // KiB
		n, _ := strconv.Atoi(arg)
		chunk := bytes.Repeat([]byte("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcd\r\n"), 16)
		for range n {
			os.Stdout.Write(chunk)
		}
		fmt.Fprintln(port, "flooded")
	case "dump": // bytes
		n, _ := strconv.Atoi(arg)
		port.Write(bytes.Repeat([]byte("d"), n))
	case "poweroff":
		unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case "reboot":
		unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	case "panic":
		os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	case "hang":
		fmt.Fprintln(port, "hanging")
		for {
			time.Sleep(time.Hour)
		}
	case "disks": // serials in order
		var out []string
		for c := 'a'; ; c++ {
			b, err := os.ReadFile("/sys/block/vd" + string(c) + "/serial")
			if err != nil {
				break
			}
			ro, _ := os.ReadFile("/sys/block/vd" + string(c) + "/ro")
			out = append(out, strings.TrimSpace(string(b))+"="+strings.TrimSpace(string(ro)))
		}
		fmt.Fprintln(port, "disks", strings.Join(out, " "))
	case "scribble": // writes its word to the second disk
		f, err := os.OpenFile("/dev/vdb", os.O_RDWR, 0)
		if err == nil {
			if _, err = f.WriteAt([]byte(arg), 8192); err == nil {
				err = f.Sync()
			}
			f.Close()
		}
		fmt.Fprintln(port, "scribble", err)
	case "net": // address and MTU of eth0
		mac, _ := os.ReadFile("/sys/class/net/eth0/address")
		mtu, _ := os.ReadFile("/sys/class/net/eth0/mtu")
		fmt.Fprintln(port, "net", strings.TrimSpace(string(mac)), strings.TrimSpace(string(mtu)))
	case "share": // TAG FILE TEXT: mounts, reads FILE, then writes TEXT to FILE.new
		fmt.Fprintln(port, "share", share(strings.Fields(arg)))
	case "clock":
		b, _ := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
		fmt.Fprintln(port, "clock", strings.TrimSpace(string(b)))
	default:
		fmt.Fprintf(port, "unknown %q\n", cmd)
	}
}

func share(a []string) string {
	if len(a) != 3 {
		return "needs three words"
	}
	os.MkdirAll("/mnt", 0o755)
	if err := unix.Mount(a[0], "/mnt", "virtiofs", 0, ""); err != nil {
		return "mount: " + err.Error()
	}
	defer unix.Unmount("/mnt", 0)
	got, err := os.ReadFile("/mnt/" + a[1])
	if err != nil {
		return "read: " + err.Error()
	}
	if err := os.WriteFile("/mnt/"+a[1]+".new", []byte(a[2]), 0o644); err != nil {
		return "read " + string(got) + ", write: " + err.Error()
	}
	return "read " + string(got) + ", wrote"
}

func loadModules() {
	const dir = "/lib/vk-modules/"
	order, _ := os.ReadFile(dir + "order")
	for _, m := range strings.Fields(string(order)) {
		f, err := os.Open(dir + m)
		if err != nil {
			fmt.Println("testinit:", err)
			continue
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST && err != unix.ENODEV {
			fmt.Println("testinit: loading", m, err)
		}
		f.Close()
	}
}

// openPort finds the port by its name, waiting for the driver.
func openPort() (*os.File, error) {
	for range 2000 {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			b, _ := os.ReadFile(n)
			if strings.TrimSpace(string(b)) == guestwire.PortName {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	return nil, fmt.Errorf("there is no port %s", guestwire.PortName)
}
