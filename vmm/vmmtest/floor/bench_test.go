package floor_test

import (
	"bufio"
	"io"
	"syscall"
	"testing"
	"time"

	"virtkit/core/machine"
	"virtkit/vmm/boot"
	"virtkit/vmm/qemu"
	"virtkit/vmm/vmmtest"
	"virtkit/vmm/vmmtest/floor"
)

// BenchmarkBoot times a guest of the driver, from Boot to the agent's first
// answer and to its end, beside the bare guest; for each kernel there is.
func BenchmarkBoot(b *testing.B) {
	vmmtest.NeedQEMU(b)
	for _, name := range []string{"tuned", "debian"} {
		k := vmmtest.NeedKernel(b, name)
		d := qemu.New(qemu.Config{CacheDir: b.TempDir()})
		f, err := floor.Prepare(b.Context(), b.TempDir(), d, k)
		if err != nil {
			b.Skipf("needs the floor: %v", err)
		}
		for _, words := range [][]string{nil, qemu.Words("tcg")} {
			label := name + "/bare"
			if words != nil {
				label = name + "/bare-same-words"
			}
			b.Run(label, func(b *testing.B) {
				var first, cpu time.Duration
				f.Words = words
				for b.Loop() {
					r, err := f.Run(b.Context(), 512)
					if err != nil {
						b.Fatal(err)
					}
					first += r.FirstLine
					cpu += r.CPU
				}
				report(b, first, cpu)
			})
		}
		mk, err := boot.Prepare(b.Context(), b.TempDir(), k, boot.Options{Agent: vmmtest.BuildInit(b)})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name+"/driver", func(b *testing.B) {
			var first time.Duration
			before := childCPU()
			for b.Loop() {
				start := time.Now()
				m, err := d.Boot(b.Context(), machine.Spec{Name: "bench", CPUs: 1, MemMiB: 512, Dir: b.TempDir(), Kernel: mk})
				if err != nil {
					b.Fatal(err)
				}
				io.WriteString(m.Control(), "echo up\npoweroff\n")
				if got, err := bufio.NewReader(m.Control()).ReadString('\n'); err != nil {
					b.Fatalf("%q, %v", got, err)
				}
				first += time.Since(start)
				if _, err := m.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
				m.Control().Close()
			}
			report(b, first, childCPU()-before)
		})
	}
}

func report(b *testing.B, first, cpu time.Duration) {
	b.ReportMetric(first.Seconds()*1e3/float64(b.N), "first-ms/op")
	b.ReportMetric(cpu.Seconds()*1e3/float64(b.N), "cpu-ms/op")
}

// childCPU is the processor time of all children that have ended.
func childCPU() time.Duration {
	var r syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_CHILDREN, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
