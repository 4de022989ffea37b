// Package floor measures what no driver can beat: a bare QEMU with the same
// kernel, machine, memory and accelerator, whose init prints one line and
// powers off. `make bench` runs it beside vk in the same run.
package floor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"virtkit/core/machine"
	"virtkit/vmm/boot"
	"virtkit/vmm/qemu"
)

// Line is what the floor's init prints.
const Line = "floor: first line"

// initSource is the smallest PID 1 there can be: write(2), then reboot(2) with
// the power-off command.
const initSource = `
.globl _start
_start:
	mov $1, %eax
	mov $1, %edi
	lea line(%rip), %rsi
	mov $(end-line), %edx
	syscall
	mov $169, %eax
	mov $0xfee1dead, %edi
	mov $672274793, %esi
	mov $0x4321fedc, %edx
	xor %r10d, %r10d
	syscall
	hlt
line: .ascii "` + Line + `\n"
end:
`

// Floor is a bare guest, ready to be run many times.
type Floor struct {
	info   qemu.Info
	accel  string
	tscKHz uint64
	kernel machine.Kernel

	// Words are added to the kernel's command line, which without them is that
	// of a guest nobody tuned: give qemu.Words to take the driver's choice of
	// words out of a comparison.
	Words []string
	// CPUs is how many processors the guest has; 0 is one.
	CPUs int
}

// Prepare compiles the init with the host's gcc and makes its initramfs in
// dir. The accelerator is the one that d chooses for the kernel.
func Prepare(ctx context.Context, dir string, d *qemu.Driver, k boot.Kernel) (*Floor, error) {
	bin := filepath.Join(dir, "floor-init")
	cmd := exec.CommandContext(ctx, "gcc", "-nostdlib", "-static", "-s", "-x", "assembler", "-o", bin, "-")
	cmd.Stdin = strings.NewReader(initSource)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compiling the floor's init with gcc: %w: %s", err, out)
	}
	agent, err := os.ReadFile(bin)
	if err != nil {
		return nil, err
	}
	k.Tuned = true // its init loads no modules: none in the initramfs
	f := &Floor{}
	if f.kernel, err = boot.Prepare(ctx, dir, k, boot.Options{Agent: agent}); err != nil {
		return nil, err
	}
	if f.info, err = d.Info(ctx); err != nil {
		return nil, err
	}
	v, err := d.Verdict(ctx, f.kernel)
	if err != nil {
		return nil, err
	}
	f.accel = v.Accel
	if f.accel == "tcg" {
		if f.tscKHz, err = d.ClockKHz(); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// Accel is the accelerator that the bare guest runs with: "kvm" or "tcg".
func (f *Floor) Accel() string { return f.accel }

// Result is one run.
type Result struct {
	FirstLine time.Duration // from the start of QEMU to init's line
	Wall      time.Duration // to the end of QEMU
	CPU       time.Duration // user and system time of QEMU
}

// Run runs the bare guest once.
func (f *Floor) Run(ctx context.Context, memMiB int) (Result, error) {
	words := "console=ttyS0 quiet panic=-1 reboot=t rdinit=/init"
	cpu := "host"
	if f.accel == "tcg" {
		cpu = "max"
		words += " tsc=reliable tsc_early_khz=" + strconv.FormatUint(f.tscKHz, 10)
	}
	if len(f.Words) > 0 {
		words += " " + strings.Join(f.Words, " ")
	}
	cmd := exec.CommandContext(ctx, f.info.Binary, "-M", "microvm,acpi=on", "-accel", f.accel, "-cpu", cpu,
		"-m", strconv.Itoa(memMiB)+"M", "-smp", strconv.Itoa(max(f.CPUs, 1)), "-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
		"-serial", "stdio", "-kernel", f.kernel.Image, "-initrd", f.kernel.Initrd, "-append", words)
	var res Result
	out := &watch{start: time.Now()}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	res.Wall = time.Since(out.start)
	if err != nil {
		return res, fmt.Errorf("running the bare guest: %w: %s", err, out.seen.String())
	}
	if out.at == 0 {
		return res, fmt.Errorf("the bare guest ended without its line; it said %q", out.seen.String())
	}
	res.FirstLine = out.at
	res.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	return res, nil
}

// RunFloor prepares and runs the floor once, in a directory of its own.
func RunFloor(ctx context.Context, d *qemu.Driver, k boot.Kernel, memMiB int) (wall, hostCPU time.Duration, err error) {
	dir, err := os.MkdirTemp("", "vk-floor-")
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(dir)
	f, err := Prepare(ctx, dir, d, k)
	if err != nil {
		return 0, 0, err
	}
	r, err := f.Run(ctx, memMiB)
	return r.Wall, r.CPU, err
}

// watch notes when the line comes. Stdout and stderr are the same writer, so
// exec calls it from one goroutine.
type watch struct {
	start time.Time
	seen  bytes.Buffer
	at    time.Duration
}

func (w *watch) Write(p []byte) (int, error) {
	w.seen.Write(p)
	if w.at == 0 && bytes.Contains(w.seen.Bytes(), []byte(Line)) {
		w.at = time.Since(w.start)
	}
	return len(p), nil
}
