package fleet_test

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"virtkit/e2e/fleetup"
	"virtkit/e2e/gitlabtest"
)

// longLog is how much the job of TestLongLog prints, in bytes; VK_LOG_BYTES is
// another figure.
const longLog = 96 << 20

// traceLimit is the highest output_limit: a hub keeps no more (fleet-reference,
// "past 64 MiB whatever the limit").
const traceLimit = 64 << 20

// maxRSS is more than any part of a fleet may come to need for one job's log, in
// bytes: a few of its chunks, and what the program is by itself (40 to 60 MiB). A
// part that kept the whole trace in memory would pass it.
const maxRSS = 100 << 20

// TestLongLog has a job print more than the highest limit of a trace. GitLab has
// all of it up to the limit, byte for byte, the job ends as it would have, and no
// part of the fleet has more of it in memory than a few pieces.
func TestLongLog(t *testing.T) {
	n := number(t, "VK_LOG_BYTES", longLog)
	l := newLight(t, func(o *fleetup.Options) { o.Relay = "output_limit = \"64M\"\n" })
	l.patience = 20 * time.Minute
	line := "a line of a long log, of sixty-four bytes with what ends it 0123"
	l.add(1, fmt.Sprintf("set +o pipefail; yes '%s' | head -c %d", line[:63], n), "exit 7")
	peaks := map[string]int64{}
	l.until("the job has ended", func() bool {
		l.peaks(peaks)
		j, _ := l.GitLab.Job(1)
		return j.Final != nil
	})
	got, e := l.ends(1)
	if e.State != "failed" || e.ExitCode != 7 || e.Output.Checksum != gitlabtest.Checksum(got.Trace) || e.Output.Bytesize != len(got.Trace) {
		t.Errorf("it ended as %+v, with %d bytes of trace", e, len(got.Trace))
	}
	lines := bytes.Count(got.Trace, []byte("\n"+line[:63]))
	if len(got.Trace) < traceLimit || len(got.Trace) > traceLimit+(64<<10) || lines < traceLimit/64-100 {
		t.Errorf("GitLab has %d bytes, %d lines of the log", len(got.Trace), lines)
	}
	if end := string(got.Trace[len(got.Trace)-1000:]); !strings.Contains(end, "log") {
		t.Errorf("its end tells nothing of the limit: %q", end)
	}
	var text []string
	for who, rss := range peaks {
		text = append(text, fmt.Sprintf("%s %d MiB", who, rss>>20))
		if rss > maxRSS {
			t.Errorf("%s came to need %d MiB", who, rss>>20)
		}
	}
	slices.Sort(text)
	t.Logf("%d MiB printed, %d MiB of trace; peak memory: %s", n>>20, len(got.Trace)>>20, strings.Join(text, ", "))
	if len(peaks) < 4 {
		t.Errorf("not all were measured")
	}
	l.left()
}

var hwmRE = regexp.MustCompile(`VmHWM:\s+(\d+) kB`)

// peaks adds the most memory that each part of the fleet has had at once.
func (l *light) peaks(to map[string]int64) {
	for pid, args := range processesOf("VIRTKIT_STATE_DIR=" + l.state) {
		who := ""
		switch all := " " + strings.Join(args, " ") + " "; {
		case strings.Contains(all, " gitlabd "):
			who = "vk-gitlab"
		case strings.Contains(all, " hub ") && strings.Contains(all, " serve "):
			who = "vk-hub"
		case strings.Contains(all, " node run "):
			who = "node"
		case strings.Contains(all, " node job "):
			who = "driver"
		case strings.Contains(all, " gitlab run "):
			who = "executor"
		default:
			continue
		}
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if m := hwmRE.FindSubmatch(b); m != nil {
			kb, _ := strconv.ParseInt(string(m[1]), 10, 64)
			to[who] = max(to[who], kb<<10)
		}
	}
}
