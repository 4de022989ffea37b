package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"virtkit/core/lazyre"
	"virtkit/core/machine"
)

var _ machine.Stander = (*guest)(nil)

// Limits of StandsAt: for QEMU's monitor to answer, and between two looks, which
// tell a processor that runs from one that does not.
const (
	standsLimit = 3 * time.Second
	standsPause = 100 * time.Millisecond
)

// StandsAt implements machine.Stander.
func (g *guest) StandsAt(ctx context.Context) (at string, dead bool) {
	ctx, cancel := context.WithTimeout(ctx, standsLimit)
	defer cancel()
	b, err := g.qmp.Do(ctx, "query-status", nil)
	if err != nil {
		return "QEMU's monitor does not answer", false
	}
	var st struct {
		Status string `json:"status"`
	}
	if json.Unmarshal(b, &st) != nil || st.Status == "" {
		st.Status = "unknown"
	}
	var looks [2]string
	for i := range looks {
		looks[i] = g.hmp(ctx, "info registers -a")
		time.Sleep(standsPause)
	}
	at = "QEMU: " + st.Status + processors(looks[0], looks[1])
	if places := placesOf(looks[1]); len(places) > 0 && strings.HasPrefix(places[0], halted) && timerGivenUp(g.hmp(ctx, "info lapic")) {
		return at + "; its kernel has no timer: it could not measure the processor's while this host was busy", true
	}
	return at, false
}

// hmp is what QEMU's monitor for people says; "" when it does not.
func (g *guest) hmp(ctx context.Context, command string) (said string) {
	b, err := g.qmp.Do(ctx, "human-monitor-command", map[string]any{"command-line": command})
	if err != nil || json.Unmarshal(b, &said) != nil {
		return ""
	}
	return said
}

var (
	lvttRE  = lazyre.New(`\bLVTT\s+0x([0-9a-f]+)`)
	countRE = lazyre.New(`\binitial_count = (\d+)`)
)

// timerGivenUp tells of "info lapic" of the first processor, which idles,
// whether Linux has given its timer up (agent/timer.go says why): it is left as
// it was being measured, periodic and masked with a count. One that has merely
// nothing to wait for has none.
func timerGivenUp(lapic string) bool {
	const masked, periodic = 1 << 16, 1 << 17
	m, c := lvttRE.FindStringSubmatch(lapic), countRE.FindStringSubmatch(lapic)
	if m == nil || c == nil {
		return false
	}
	lvtt, err := strconv.ParseUint(m[1], 16, 32)
	return err == nil && lvtt&masked != 0 && lvtt&periodic != 0 && c[1] != "0"
}

var ripRE = lazyre.New(`\b[RE]IP=([0-9a-f]+) [RE]FL=([0-9a-f]+) .*\bHLT=([01])`)

// processors words two looks at QEMU's "info registers -a".
func processors(first, second string) string {
	a, b := placesOf(first), placesOf(second)
	var out strings.Builder
	for i, p := range a {
		fmt.Fprintf(&out, "; CPU %d %s", i, p)
		if i < len(b) && b[i] != p {
			out.WriteString(", then " + b[i])
		}
	}
	return out.String()
}

// placesOf is where each processor is.
func placesOf(registers string) []string {
	var out []string
	for i, cpu := range strings.Split(registers, "CPU#") {
		if i > 0 {
			out = append(out, whereIs(ripRE.FindStringSubmatch(cpu)))
		}
	}
	return out
}

// halted begins the words for a processor that waits for an interrupt.
const halted = "halted at "

// whereIs words a match of ripRE.
func whereIs(m []string) string {
	if m == nil {
		return "unknown"
	}
	const interrupts = 1 << 9 // of RFLAGS
	how := "at "
	if m[3] == "1" {
		how = halted
	}
	where := how + m[1]
	if f, err := strconv.ParseUint(m[2], 16, 64); err == nil && f&interrupts == 0 {
		where += " without interrupts"
	}
	return where
}
