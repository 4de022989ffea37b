package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
)

// guest: what a running guest costs and how fast one can work in it.
func (b *bench) guest(ctx context.Context) error {
	names := []string{}
	defer func() {
		for _, n := range names {
			exec.Command(b.vk, "stop", n).Run()
		}
	}()
	start := func() error {
		name := fmt.Sprintf("bench-%d-%d", os.Getpid(), len(names))
		out, err := exec.CommandContext(ctx, b.vk, "run", "-d", "--cpus", strconv.Itoa(guestCPUs), "--mem", strconv.Itoa(memMiB)+"M", "--name", name, "local/default", "sleep", "3600").CombinedOutput()
		if err != nil {
			return fmt.Errorf("starting %s: %w: %s", name, err, out)
		}
		names = append(names, name)
		return nil
	}
	if err := start(); err != nil {
		return err
	}
	c, err := b.dial(names[0])
	if err != nil {
		return err
	}
	if err := b.execRoundTrip(ctx, c); err != nil {
		return err
	}
	if err := b.streamOut(ctx, c); err != nil {
		return err
	}
	if err := settle(ctx); err != nil {
		return err
	}
	one, err := b.pss(names[:1])
	if err != nil {
		return err
	}
	for len(names) < 8 {
		if err := start(); err != nil {
			return err
		}
	}
	if err := settle(ctx); err != nil {
		return err
	}
	eight, err := b.pss(names)
	if err != nil {
		return err
	}
	const limit = 15 // MiB a guest, the issue's own limit
	b.add("guest", "PSS of vk's processes, 1 idle guest", "MiB", one, "limit", limit, 1)
	b.add("guest", "PSS of vk's processes, each of 8 idle guests", "MiB", eight/8, "limit", limit, 1)
	b.add("guest", "PSS each of 8, flat", "MiB", eight/8, "1 guest", one, 1.1)
	return nil
}

// settle lets guests become idle: what a supervisor touched for its start and
// its clients it gives back within some seconds.
func settle(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(15 * time.Second):
		return nil
	}
}

// dial finds a guest by name as `vk list --json` tells it.
func (b *bench) dial(name string) (*supervise.Client, error) {
	id, err := b.listed(name)
	if err != nil {
		return nil, err
	}
	_, state, err := hostConfig()
	if err != nil {
		return nil, err
	}
	return supervise.Dial(filepath.Join(state, "jobs", id.ID))
}

type listed struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	PID  int    `json:"pid"`
}

func (b *bench) listed(name string) (listed, error) {
	out, err := exec.Command(b.vk, "list", "--json").Output()
	if err != nil {
		return listed{}, fmt.Errorf("vk list --json: %w", err)
	}
	var doc struct{ Guests []listed }
	if err := json.Unmarshal(out, &doc); err != nil {
		return listed{}, fmt.Errorf("reading vk list --json: %w", err)
	}
	for _, g := range doc.Guests {
		if g.Name == name {
			return g, nil
		}
	}
	return listed{}, fmt.Errorf("vk list --json does not show %q: %s", name, out)
}

// execRoundTrip: a `true` from the host beside fork+exec of the same program
// by a shell inside the guest.
func (b *bench) execRoundTrip(ctx context.Context, c *supervise.Client) error {
	const n = 50
	do := func(argv ...string) (time.Duration, string, error) {
		var out bytes.Buffer
		start := time.Now()
		res, err := c.Exec(ctx, guestwire.ExecRequest{ID: guestclient.NewExecID(), Argv: argv, Stdout: true}, guestclient.Stdio{Out: &out}, nil)
		if err == nil && res.Code != 0 {
			err = fmt.Errorf("%v ended with %d: %s", argv, res.Code, out.String())
		}
		return time.Since(start), out.String(), err
	}
	// The floor forks from a small shell: dash, without a subshell in between.
	loop := `a=$(date +%s%N); i=0; while [ $i -lt ` + strconv.Itoa(n) + ` ]; do /bin/true; i=$((i+1)); done; z=$(date +%s%N); echo $((z-a))`
	var vk, inside []float64
	for range b.rounds {
		for range n / b.rounds {
			d, _, err := do("/bin/true")
			if err != nil {
				return err
			}
			vk = append(vk, ms(d))
		}
		_, out, err := do("/bin/sh", "-c", loop)
		if err != nil {
			return err
		}
		ns, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
		if err != nil {
			return fmt.Errorf("the floor printed %q", out)
		}
		inside = append(inside, ns/n/1e6)
	}
	b.addOver("guest", "exec true, round trip", "ms", median(vk), "floor: fork+exec in the guest", median(inside), 2)
	return nil
}

// guestCPUs is what the guests of this file have, the bare one too.
const guestCPUs = 2

// Of a stream out of a guest the first warmMiB do not count: an emulated guest
// translates what it does for the first time, and the bare one is a new guest
// for each sample.
const (
	streamMiB = 256
	warmMiB   = 64
)

// streamOut: bytes of a program in the guest as they reach the host, beside a
// bare guest whose init writes them to a virtio-serial port.
func (b *bench) streamOut(ctx context.Context, c *supervise.Client) error {
	cat, err := b.prepareCat(ctx)
	if err != nil {
		return err
	}
	var vk, floor []float64
	for range b.rounds {
		m := meter{skip: warmMiB << 20}
		res, err := c.Exec(ctx, guestwire.ExecRequest{ID: guestclient.NewExecID(), Stdout: true,
			Argv: []string{"dd", "if=/dev/zero", "bs=64k", "count=" + strconv.Itoa((warmMiB+streamMiB)<<20/(64<<10)), "status=none"}}, guestclient.Stdio{Out: &m}, nil)
		if err != nil {
			return err
		}
		if res.Code != 0 || m.n != streamMiB<<20 {
			return fmt.Errorf("streaming out of the guest: exit %d, %d bytes", res.Code, m.n)
		}
		vk = append(vk, m.rate())
		r, err := cat(ctx)
		if err != nil {
			return err
		}
		floor = append(floor, r)
	}
	fmt.Fprintf(os.Stderr, "bench: guest: stream out, each round: vk %.4g, bare %.4g MB/s\n", vk, floor)
	b.addRate("guest", "stream out of the guest", "MB/s", median(vk), "floor: bare virtio-serial", median(floor), 0.8)
	return nil
}

// meter counts bytes between the first write and the last, after skip others.
type meter struct {
	skip, n     int64
	first, last time.Time
}

func (m *meter) Write(p []byte) (int, error) {
	if m.skip > 0 {
		m.skip -= int64(len(p))
		m.n -= min(m.skip, 0) // what is over belongs to the first write that counts
		m.first, m.last = time.Now(), time.Now()
		return len(p), nil
	}
	m.last = time.Now()
	if m.n == 0 {
		m.first = m.last
	}
	m.n += int64(len(p))
	return len(p), nil
}

// rate is in MB/s.
func (m *meter) rate() float64 {
	if d := m.last.Sub(m.first).Seconds(); d > 0 {
		return float64(m.n) / 1e6 / d
	}
	return 0
}

var _ io.Writer = (*meter)(nil)

// pss sums the proportional memory of vk's own processes (the supervisors) of
// the named guests, in MiB. QEMU, which holds the guest itself, is not vk's.
func (b *bench) pss(names []string) (float64, error) {
	total := 0.0
	for _, n := range names {
		g, err := b.listed(n)
		if err != nil {
			return 0, err
		}
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", g.PID))
		if err != nil {
			return 0, err
		}
		mib, err := pssOf(string(raw))
		if err != nil {
			return 0, fmt.Errorf("process %d of guest %s: %w", g.PID, n, err)
		}
		total += mib
	}
	return total, nil
}

// pssOf reads a process's smaps_rollup, in MiB.
func pssOf(rollup string) (float64, error) {
	for line := range strings.Lines(rollup) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
			kib, err := strconv.ParseFloat(f[1], 64)
			return kib / 1024, err
		}
	}
	return 0, errors.New("its smaps_rollup has no Pss")
}
