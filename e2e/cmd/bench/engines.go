package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// engineRow compares two figures that the Go benchmarks of an engine report in
// the same run. Each is named "Benchmark unit", such as "Down MB/s".
type engineRow struct {
	row, unit string
	vk        string
	peer      string
	peerName  string
	goal      float64
	more      bool // more is better
}

// engineRun is one run of a package's benchmarks. They live beside the code
// that they measure; the rows say what it is judged by.
type engineRun struct {
	area, pkg, bench string
	time             string // -benchtime
	rows             []engineRow
}

var imageRun = engineRun{"image", "./core/image", "^BenchmarkBootable$", "1x", []engineRow{
	{"image to bootable", "s", "Bootable vk-s", "Bootable peer-s", "umoci unpack + mkfs.erofs", 1.2, false},
	{"image that shares all layers but one", "s", "Bootable shared-s", "Bootable peer-s", "umoci unpack + mkfs.erofs", 0.6, false},
}}

// The guest's end is a user-space stack in the same process, as dear as the
// switch, and its bytes cross three sockets instead of one: a tenth of what the
// kernel alone does with them is what a guest needs and a busy host can give.
var netRun = engineRun{"net", "./netsw", "^Benchmark(Floor|Down|Up)$", "100x", []engineRow{
	{"to a guest through the switch", "MB/s", "Down MB/s", "Floor MB/s", "floor: host loopback", 0.1, true},
	{"from a guest through the switch", "MB/s", "Up MB/s", "Floor MB/s", "floor: host loopback", 0.1, true},
}}

func (b *bench) image(ctx context.Context) error   { return b.engine(ctx, imageRun) }
func (b *bench) network(ctx context.Context) error { return b.engine(ctx, netRun) }

// goFlags are those of the Makefile: with others all would be compiled again.
var goFlags = []string{"-trimpath", "-buildvcs=false", "-tags", "netgo,osusergo"}

// engine takes the medians of b.rounds runs.
func (b *bench) engine(ctx context.Context, r engineRun) error {
	vals := map[string][]float64{}
	var out []byte
	for range b.rounds {
		args := append([]string{"test"}, goFlags...)
		cmd := exec.CommandContext(ctx, "go", append(args, "-run", "^$", "-bench", r.bench, "-benchtime", r.time, r.pkg)...)
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it ends its benchmark
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w: %s", r.pkg, r.bench, err, out)
		}
		if err := figures(string(out), vals); err != nil {
			return fmt.Errorf("%s %s: %w", r.pkg, r.bench, err)
		}
	}
	if err := b.addRows(r, vals); err != nil {
		return fmt.Errorf("%s %s %w: %s", r.pkg, r.bench, err, out)
	}
	return nil
}

// result is a benchmark's line: its name, the times it ran, and figures.
var result = regexp.MustCompile(`(?m)^Benchmark(\w+?)(?:-\d+)?\s+\d+\s+(.*)$`)

// figures adds what the benchmarks in a go test's output report to vals, by
// "Benchmark unit".
func figures(out string, vals map[string][]float64) error {
	for _, m := range result.FindAllStringSubmatch(out, -1) {
		f := strings.Fields(m[2])
		for i := 0; i+1 < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return fmt.Errorf("reading %q: %w", m[0], err)
			}
			key := m[1] + " " + f[i+1]
			vals[key] = append(vals[key], v)
		}
	}
	return nil
}

func (b *bench) addRows(r engineRun, vals map[string][]float64) error {
	for _, row := range r.rows {
		if len(vals[row.vk]) == 0 || len(vals[row.peer]) == 0 {
			return fmt.Errorf("reports no %q and %q", row.vk, row.peer)
		}
		add := b.add
		if row.more {
			add = b.addRate
		}
		add(r.area, row.row, row.unit, median(vals[row.vk]), row.peerName, median(vals[row.peer]), row.goal)
	}
	return nil
}
