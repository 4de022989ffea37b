// Command bench measures virtkit beside a peer or a floor in the same run and
// writes bench.json. It never judges against an absolute time: each row says
// what it ran beside, the ratio, the ratio that counts as met, and whether it
// was. `make bench` runs it; VIRTKIT_BENCH_ROUNDS sets how often each pair is
// taken (default 5, medians are shown). For work on the network's rows,
// VIRTKIT_BENCH_VERBOSE shows every sample, VIRTKIT_BENCH_BESIDE names the one
// program to be measured beside, and VIRTKIT_BENCH_PROFILE is the beginning of
// the names of CPU profiles of the switches' processes.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// Row is one line of bench.json (DESIGN.md section 9).
type Row struct {
	Area      string  `json:"area"`
	Row       string  `json:"row"`
	Unit      string  `json:"unit"`
	VK        float64 `json:"vk"`
	Peer      string  `json:"peer"`
	PeerValue float64 `json:"peer_value"`
	Ratio     float64 `json:"ratio"`
	Goal      float64 `json:"goal"`
	Met       bool    `json:"met"`
}

// bench is one run of the program.
type bench struct {
	vk     string // the binary under test
	rounds int
	dir    string // scratch
	rows   []Row

	sockets int // made so far; see socket
}

// area is a group of measurements that can be asked for by name.
type area struct {
	name string
	run  func(*bench, context.Context) error
}

var areas = []area{
	{"host", (*bench).startup},
	{"host-admission", (*bench).admission},
	{"host-history", (*bench).history},
	{"host-atop", (*bench).summary},
	{"host-idle", (*bench).idle},
	{"boot", (*bench).boot},
	{"guest", (*bench).guest},
	{"image", (*bench).image},
	{"checkout", (*bench).checkoutArea},
	{"checkout-status", (*bench).firstStatus},
	{"net", (*bench).network},
	{"net-peers", beside((*bench).netPeers)},
	{"net-dns", beside((*bench).netDNS)},
	{"net-policy", beside((*bench).netPolicy)},
	{"net-guest", beside((*bench).netGuest)},
	{"trace", (*bench).traceArea},
	{"hub", (*bench).hub},
	{"placing", (*bench).placing},
	{"relay", (*bench).relay},
	{"placing-history", (*bench).jobHistory},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if len(os.Args) == 3 && os.Args[1] == switchWord {
		err = runSwitch(ctx, os.Args[2])
	} else if len(os.Args) == 4 && os.Args[1] == floorWord {
		err = runHubFloor(os.Args[2], os.Args[3])
	} else if len(os.Args) == 6 && os.Args[1] == relayFloor {
		err = runRelayFloor(ctx, os.Args[2], os.Args[3], os.Args[4], os.Args[5])
	} else {
		err = run(ctx, os.Args[1:])
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, only []string) error {
	b := &bench{rounds: 5}
	if s := os.Getenv("VIRTKIT_BENCH_ROUNDS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return fmt.Errorf("VIRTKIT_BENCH_ROUNDS=%q: expected a number from 1", s)
		}
		b.rounds = n
	}
	var err error
	if b.vk, err = filepath.Abs("bin/vk"); err != nil {
		return err
	}
	if _, err := os.Stat(b.vk); err != nil {
		return fmt.Errorf("%w: run make build", err)
	}
	if b.dir, err = os.MkdirTemp("", "vk-bench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	for _, a := range areas {
		whole, _, _ := strings.Cut(a.name, "-") // "net" is all of its parts too
		if len(only) > 0 && !slices.Contains(only, a.name) && !slices.Contains(only, whole) {
			continue
		}
		fmt.Fprintf(os.Stderr, "bench: %s …\n", a.name)
		if err := a.run(b, ctx); err != nil {
			b.print() // what took minutes is worth seeing; bench.json is whole or not there
			return fmt.Errorf("measuring %s: %w", a.name, err)
		}
	}
	b.print()
	out, err := json.MarshalIndent(b.rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile("bench.json", append(out, '\n'), 0o644)
}

// add records a pair where less is better; goal is the largest ratio that
// counts as met.
func (b *bench) add(area, row, unit string, vk float64, peer string, peerValue, goal float64) {
	b.record(Row{Area: area, Row: row, Unit: unit, VK: vk, Peer: peer, PeerValue: peerValue, Goal: goal}, func(r Row) bool { return r.Ratio <= goal })
}

// addRate records a pair where more is better; goal is the least ratio.
func (b *bench) addRate(area, row, unit string, vk float64, peer string, peerValue, goal float64) {
	b.record(Row{Area: area, Row: row, Unit: unit, VK: vk, Peer: peer, PeerValue: peerValue, Goal: goal}, func(r Row) bool { return r.Ratio >= goal })
}

// addOver records a pair whose difference is what counts: met when vk is at
// most limit above the peer. The goal is written as the ratio that makes.
func (b *bench) addOver(area, row, unit string, vk float64, peer string, peerValue, limit float64) {
	r := Row{Area: area, Row: row, Unit: unit, VK: vk, Peer: peer, PeerValue: peerValue}
	if peerValue > 0 {
		r.Goal = (peerValue + limit) / peerValue
	}
	b.record(r, func(r Row) bool { return vk-peerValue <= limit })
}

// record adds a row and shows that the run goes on. A side that is not above
// zero was not measured: that is never met.
func (b *bench) record(r Row, met func(Row) bool) {
	if r.VK > 0 && r.PeerValue > 0 {
		r.Ratio = r.VK / r.PeerValue
		r.Met = met(r)
	}
	b.rows = append(b.rows, r)
	fmt.Fprintf(os.Stderr, "bench: %s: %s: %.4g %s, %s: %.4g\n", r.Area, r.Row, r.VK, r.Unit, r.Peer, r.PeerValue)
}

func (b *bench) print() {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "AREA\tROW\tVK\tPEER\t\tUNIT\tRATIO\tGOAL\tMET")
	for _, r := range b.rows {
		met := "yes"
		if !r.Met {
			met = "NO"
		}
		fmt.Fprintf(w, "%s\t%s\t%.4g\t%.4g\t%s\t%s\t%.2f\t%.2f\t%s\n", r.Area, r.Row, r.VK, r.PeerValue, r.Peer, r.Unit, r.Ratio, r.Goal, met)
	}
	w.Flush()
}

// median of some samples; the samples are sorted in place.
func median(s []float64) float64 {
	slices.Sort(s)
	n := len(s)
	if n == 0 {
		return 0
	}
	if n%2 == 1 {
		return s[n/2]
	}
	return (s[n/2-1] + s[n/2]) / 2
}

// timed runs a command and gives its wall time and the CPU time of it and of
// all children it waited for.
func timed(ctx context.Context, name string, args ...string) (wall, cpu time.Duration, err error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	start := time.Now()
	err = cmd.Run()
	wall = time.Since(start)
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, errs.String())
	}
	return wall, cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}

// startup: how long the program itself takes, beside a static C program that
// does nothing.
func (b *bench) startup(ctx context.Context) error {
	floor := filepath.Join(b.dir, "nop")
	gcc := exec.CommandContext(ctx, "gcc", "-static", "-O1", "-x", "c", "-o", floor, "-")
	gcc.Stdin = strings.NewReader("int main(void){return 0;}\n")
	if out, err := gcc.CombinedOutput(); err != nil {
		return fmt.Errorf("compiling the floor: %w: %s", err, out)
	}
	var vk, nop []float64
	for range max(20, b.rounds) {
		w, _, err := timed(ctx, b.vk, "version")
		if err != nil {
			return err
		}
		vk = append(vk, ms(w))
		if w, _, err = timed(ctx, floor); err != nil {
			return err
		}
		nop = append(nop, ms(w))
	}
	// 30 ms is the issue's own limit for start-up.
	b.addOver("host", "vk version", "ms", median(vk), "floor: static C program", median(nop), 30)
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
