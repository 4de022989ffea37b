package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

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
	c, state, err := hostConfig()
	if err != nil {
		return nil, boot.Kernel{}, nil, err
	}
	k, err := boot.Find(state, c.VMM.Kernel)
	if err != nil {
		return nil, boot.Kernel{}, nil, err
	}
	d := qemu.New(qemu.Config{Binary: c.VMM.QEMU, Accel: c.VMM.Accel, CacheDir: filepath.Join(state, "cache")})
	dir := filepath.Join(b.dir, "floor")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, k, nil, err
	}
	f, err := floor.Prepare(ctx, dir, d, k)
	return f, k, d, err
}

// hostConfig is the configuration and the state directory that vk takes.
func hostConfig() (*conf.Config, string, error) {
	home, _ := os.UserHomeDir()
	c, err := conf.Load(os.Getenv, home)
	if err != nil {
		return nil, "", err
	}
	dir, _, err := conf.ResolveStateDir(c, os.Getenv, home)
	return c, dir, err
}

// Of the guests that boot measures: what `vk run` gives a guest that asks for
// nothing, and one processor, where nothing can be done beside the kernel.
var bootCPUs = []int{2, 1}

// boot: a whole `vk run local/default true` beside the bare guest with as many
// processors and as much memory, one and four at a time, taken in turns so
// that a busy host hits both.
func (b *bench) boot(ctx context.Context) error {
	f, _, _, err := b.prepareFloor(ctx)
	if err != nil {
		return err
	}
	// What a process leaves behind (vk's supervisor, and through it QEMU)
	// becomes a child of this one, so that its CPU time can be counted.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("becoming the reaper of orphans: %w", err)
	}
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	for _, cpus := range bootCPUs {
		bare, words := *f, *f
		bare.CPUs, words.CPUs = cpus, cpus
		words.Words = qemu.Words(bare.Accel())
		for _, n := range []int{1, 4} {
			if err := b.bootPairs(ctx, cpus, n, &bare, &words); err != nil {
				return err
			}
		}
	}
	return nil
}

// bootPairs takes n guests of vk, from templates and booted, and n bare ones in
// turns and adds their rows. words is the bare guest with the words that vk adds
// to the kernel's command line; it is measured where n is 1.
func (b *bench) bootPairs(ctx context.Context, cpus, n int, bare, words *floor.Floor) error {
	vkRun := func(templates string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, _, err := timed(ctx, "env", "VIRTKIT_TEMPLATES="+templates, b.vk, "run", "--cpus", strconv.Itoa(cpus), "--mem", strconv.Itoa(memMiB)+"M", "local/default", "true")
			return err
		}
	}
	runs := []func(context.Context) error{vkRun("auto"), runFloor(bare), vkRun("off"), runFloor(words)}
	if n > 1 {
		runs = runs[:3]
	}
	for range 2 { // warm every cache; the first leaves its template to the second
		if err := runs[0](ctx); err != nil {
			return err
		}
	}
	wall, cpu := make([][]float64, len(runs)), make([][]float64, len(runs))
	for range b.rounds {
		for i, run := range runs {
			w, c, err := together(ctx, n, run)
			if err != nil {
				return err
			}
			wall[i], cpu[i] = append(wall[i], w.Seconds()), append(cpu[i], c.Seconds()/float64(n))
		}
	}
	name := fmt.Sprintf("vk run local/default true, %d CPUs", cpus)
	if n > 1 {
		name = fmt.Sprintf("%d × %s at once", n, name)
	}
	peer := "floor: bare QEMU"
	for _, r := range []struct {
		i   int
		how string
	}{{0, ""}, {2, ", without templates"}} {
		b.add("boot", name+r.how+", wall", "s", median(wall[r.i]), peer, median(wall[1]), 1.15)
		b.addOver("boot", name+r.how+", host CPU each", "s", median(cpu[r.i]), peer, median(cpu[1]), 0.3)
	}
	if n == 1 {
		b.add("boot", name+", without templates, wall", "s", median(wall[2]), peer+" with vk's kernel words", median(wall[3]), 1.15)
	}
	return nil
}

func runFloor(f *floor.Floor) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := f.Run(ctx, memMiB)
		return err
	}
}

// together runs n of a thing at once and gives the wall time until the last
// one ended, and the CPU time of all of their processes to their ends.
func together(ctx context.Context, n int, do func(context.Context) error) (wall, cpu time.Duration, err error) {
	before, err := childCPU()
	if err != nil {
		return 0, 0, err
	}
	start := time.Now()
	g, gctx := errgroup.WithContext(ctx)
	for range n {
		g.Go(func() error { return do(gctx) })
	}
	if err := g.Wait(); err != nil {
		return 0, 0, err
	}
	wall = time.Since(start)
	after, err := childCPU()
	return wall, after - before, err
}

// childCPU is the CPU time of all children that have ended, once all have.
func childCPU() (time.Duration, error) {
	for {
		_, err := unix.Wait4(-1, nil, 0, nil)
		if errors.Is(err, unix.ECHILD) {
			break
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return 0, fmt.Errorf("waiting for what the guests left: %w", err)
		}
	}
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &r); err != nil {
		return 0, fmt.Errorf("reading the CPU time of children: %w", err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano()), nil
}
