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
func (g *guest) StandsAt(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, standsLimit)
	defer cancel()
	b, err := g.qmp.Do(ctx, "query-status", nil)
	if err != nil {
		return "QEMU's monitor does not answer"
	}
	var st struct {
		Status string `json:"status"`
	}
	if json.Unmarshal(b, &st) != nil || st.Status == "" {
		st.Status = "unknown"
	}
	var looks [2]string
	for i := range looks {
		if b, err = g.qmp.Do(ctx, "human-monitor-command", map[string]any{"command-line": "info registers -a"}); err != nil {
			break
		}
		if err = json.Unmarshal(b, &looks[i]); err != nil {
			break
		}
		time.Sleep(standsPause)
	}
	return "QEMU: " + st.Status + processors(looks[0], looks[1])
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

// whereIs words a match of ripRE.
func whereIs(m []string) string {
	if m == nil {
		return "unknown"
	}
	const interrupts = 1 << 9 // of RFLAGS
	how := "at "
	if m[3] == "1" {
		how = "halted at "
	}
	where := how + m[1]
	if f, err := strconv.ParseUint(m[2], 16, 64); err == nil && f&interrupts == 0 {
		where += " without interrupts"
	}
	return where
}
