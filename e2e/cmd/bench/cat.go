package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"virtkit/vmm/boot"
)

// catSource is an init that copies /dev/zero to the virtio-serial port "cat",
// 64 KiB at a time as `cat` or `dd` would, then powers off.
const catSource = `
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <unistd.h>
static char buf[65536];
int main(void) {
	mkdir("/dev", 0755);
	mount("dev", "/dev", "devtmpfs", 0, 0);
	int fd = -1;
	for (int i = 0; i < 500 && fd < 0; i++) {
		fd = open("/dev/vport0p1", O_WRONLY);
		if (fd < 0) fd = open("/dev/vport1p1", O_WRONLY);
		if (fd < 0) fd = open("/dev/vport2p1", O_WRONLY);
		if (fd < 0) usleep(10000);
	}
	if (fd < 0) printf("cat: no port\n");
	int zero = open("/dev/zero", O_RDONLY);
	for (long left = BYTES; fd >= 0 && left > 0;) {
		ssize_t n = read(zero, buf, sizeof buf);
		if (n <= 0) break;
		n = write(fd, buf, n);
		if (n <= 0) break;
		left -= n;
	}
	usleep(200000);
	reboot(RB_POWER_OFF);
	return 0;
}
`

// bare is a guest of QEMU, a kernel and one program of a few lines.
type bare struct {
	name string
	args []string // of QEMU, but for the devices
	bin  string   // QEMU
}

// prepareBare compiles a program to be a bare guest's init, with the kernel and
// the accelerator that vk would take.
func (b *bench) prepareBare(ctx context.Context, name, source string, bytes int) (*bare, error) {
	_, k, d, err := b.prepareFloor(ctx)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(b.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	bin := filepath.Join(dir, "init")
	gcc := exec.CommandContext(ctx, "gcc", "-static", "-O1", "-w", "-s", "-DBYTES="+strconv.Itoa(bytes)+"L", "-x", "c", "-o", bin, "-")
	gcc.Stdin = strings.NewReader(source)
	if out, err := gcc.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compiling the bare guest's init: %w: %s", err, out)
	}
	if !k.Tuned {
		return nil, fmt.Errorf("the bare guest needs the tuned kernel (virtio built in): run make kernel")
	}
	init, err := os.ReadFile(bin)
	if err != nil {
		return nil, err
	}
	kernel, err := boot.Prepare(ctx, dir, k, boot.Options{Agent: init})
	if err != nil {
		return nil, err
	}
	words := "console=ttyS0 quiet panic=-1 reboot=t rdinit=/init"
	accel, cpu := "kvm", "host"
	v, err := d.Verdict(ctx, kernel)
	if err != nil {
		return nil, err
	}
	if v.Accel == "tcg" {
		khz, err := d.ClockKHz()
		if err != nil {
			return nil, err
		}
		accel, cpu = "tcg", "max"
		words += " tsc=reliable tsc_early_khz=" + strconv.FormatUint(khz, 10)
	}
	return &bare{name: name, bin: "qemu-system-x86_64", args: []string{"-M", "microvm,acpi=on", "-accel", accel, "-cpu", cpu,
		"-m", strconv.Itoa(memMiB) + "M", "-smp", strconv.Itoa(guestCPUs), "-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio",
		"-global", "virtio-mmio.force-legacy=false",
		"-kernel", kernel.Image, "-initrd", kernel.Initrd, "-append", words}}, nil
}

// command is the guest with devices added, and words to its kernel's.
func (g *bare) command(ctx context.Context, words string, devices ...string) *exec.Cmd {
	args := append([]string(nil), g.args...)
	args[len(args)-1] += words
	return exec.CommandContext(ctx, g.bin, append(args, devices...)...)
}

// prepareCat compiles the bare guest of streamOut; the function it returns
// runs it once and gives MB/s.
func (b *bench) prepareCat(ctx context.Context) (func(context.Context) (float64, error), error) {
	g, err := b.prepareBare(ctx, "cat", catSource, (warmMiB+streamMiB)<<20)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (float64, error) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		host, guest := os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "guest")
		defer host.Close()
		cmd := g.command(ctx, "",
			"-chardev", "socket,id=cat,fd=3", "-device", "virtio-serial-device,max_ports=2", "-device", "virtserialport,chardev=cat,name=cat")
		cmd.ExtraFiles = []*os.File{guest}
		var said strings.Builder
		cmd.Stdout, cmd.Stderr = &said, &said
		if err := cmd.Start(); err != nil {
			guest.Close()
			return 0, err
		}
		guest.Close()
		m := meter{skip: warmMiB << 20}
		_, err = io.CopyBuffer(struct{ io.Writer }{&m}, struct{ io.Reader }{host}, make([]byte, 256<<10))
		werr := cmd.Wait()
		if err != nil || werr != nil || m.n != streamMiB<<20 {
			return 0, fmt.Errorf("bare virtio-serial: %d bytes, read %v, QEMU %v: %s", m.n, err, werr, said.String())
		}
		return m.rate(), nil
	}, nil
}
