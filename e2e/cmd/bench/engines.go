package main

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// engineRow is one figure that a Go benchmark of an engine reports beside its
// floor: both come from the same benchmark run, as custom metrics.
type engineRow struct {
	pkg, bench      string
	vk, peer        string // metric names
	area, row, unit string
	peerName        string
	goal            float64
	more            bool // more is better
}

// The benchmarks live beside the code they measure; this table says what each
// one is judged by.
var imageRows = []engineRow{}
var netRows = []engineRow{}

func (b *bench) image(ctx context.Context) error   { return b.engines(ctx, imageRows) }
func (b *bench) network(ctx context.Context) error { return b.engines(ctx, netRows) }

var metric = regexp.MustCompile(`([0-9.e+]+) (\S+)`)

func (b *bench) engines(ctx context.Context, rows []engineRow) error {
	for _, r := range rows {
		cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^"+r.bench+"$", "-benchtime", "3x", r.pkg)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s %s: %w: %s", r.pkg, r.bench, err, out)
		}
		vals := map[string]float64{}
		for line := range strings.Lines(string(out)) {
			if !strings.HasPrefix(line, "Benchmark") {
				continue
			}
			for _, m := range metric.FindAllStringSubmatch(line, -1) {
				vals[m[2]], _ = strconv.ParseFloat(m[1], 64)
			}
		}
		v, ok1 := vals[r.vk]
		p, ok2 := vals[r.peer]
		if !ok1 || !ok2 {
			return fmt.Errorf("%s %s reports no %q and %q: %s", r.pkg, r.bench, r.vk, r.peer, out)
		}
		if r.more {
			b.addRate(r.area, r.row, r.unit, v, r.peerName, p, r.goal)
		} else {
			b.add(r.area, r.row, r.unit, v, r.peerName, p, r.goal)
		}
	}
	return nil
}
