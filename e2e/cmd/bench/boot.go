package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"virtkit/core/conf"
	"virtkit/vmm/boot"
	"virtkit/vmm/qemu"
	"virtkit/vmm/vmmtest/floor"
)

// memMiB is the memory of every guest measured here.
const memMiB = 512

// prepareFloor makes the bare guest with the kernel and accelerator that vk
// itself would take.
func (b *bench) prepareFloor(ctx context.Context) (*floor.Floor, boot.Kernel, *qemu.Driver, error) {
	state, err := b.stateDir()
	if err != nil {
		return nil, boot.Kernel{}, nil, err
	}
	k, err := boot.Find(state, os.Getenv("VIRTKIT_KERNEL"))
	if err != nil {
		return nil, boot.Kernel{}, nil, err
	}
	d := qemu.New(qemu.Config{CacheDir: filepath.Join(state, "cache")})
	dir := filepath.Join(b.dir, "floor")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, k, nil, err
	}
	f, err := floor.Prepare(ctx, dir, d, k)
	return f, k, d, err
}

func (b *bench) stateDir() (string, error) {
	home, _ := os.UserHomeDir()
	c, err := conf.Load(os.Getenv, home)
	if err != nil {
		return "", err
	}
	dir, _, err := conf.ResolveStateDir(c, os.Getenv, home)
	return dir, err
}

// boot: a whole `vk run local/default true` beside the bare guest, one and
// four at a time, taken in turns so that a busy host hits both.
func (b *bench) boot(ctx context.Context) error {
	f, _, _, err := b.prepareFloor(ctx)
	if err != nil {
		return err
	}
	vkRun := func(ctx context.Context) (time.Duration, error) {
		w, _, err := timed(ctx, b.vk, "run", "--mem", strconv.Itoa(memMiB)+"M", "local/default", "true")
		return w, err
	}
	if _, err := vkRun(ctx); err != nil { // warm every cache
		return err
	}
	for _, n := range []int{1, 4} {
		var wall, fwall, cpu, fcpu []float64
		for range b.rounds {
			w, c, err := together(ctx, n, vkRun)
			if err != nil {
				return err
			}
			wall, cpu = append(wall, w.Seconds()), append(cpu, c.Seconds()/float64(n))
			w, c, err = together(ctx, n, func(ctx context.Context) (time.Duration, error) {
				r, err := f.Run(ctx, memMiB)
				return r.Wall, err
			})
			if err != nil {
				return err
			}
			fwall, fcpu = append(fwall, w.Seconds()), append(fcpu, c.Seconds()/float64(n))
		}
		name := "vk run local/default true"
		if n > 1 {
			name = fmt.Sprintf("%d × %s at once", n, name)
		}
		b.add("boot", name+", wall", "s", median(wall), "floor: bare QEMU", median(fwall), 1.15)
		b.addOver("boot", name+", host CPU each", "s", median(cpu), "floor: bare QEMU", median(fcpu), 0.3)
	}
	return nil
}

// together runs n of a thing at once and gives the wall time until the last
// one ended and the CPU time the whole host spent on it.
func together(ctx context.Context, n int, do func(context.Context) (time.Duration, error)) (time.Duration, time.Duration, error) {
	before := hostCPU()
	start := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for range n {
		g.Go(func() error { _, err := do(ctx); return err })
	}
	err := g.Wait()
	return time.Since(start), hostCPU() - before, err
}

// hostCPU is all CPU time that the machine has spent outside idle, from
// /proc/stat: vk's supervisor and QEMU are not children of this process.
func hostCPU() time.Duration {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	var total int64
	for i, f := range strings.Fields(line)[1:] {
		n, _ := strconv.ParseInt(f, 10, 64)
		if i != 3 && i != 4 && i < 8 { // not idle, not iowait, not the guests counted twice
			total += n
		}
	}
	return time.Duration(total) * time.Second / 100 // USER_HZ
}
