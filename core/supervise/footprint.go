package supervise

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Waiting before the first trim keeps a short run from faulting its program
// in again; later trims take back what clients made a supervisor touch.
const (
	firstTrim = 2 * time.Second
	nextTrims = 10 * time.Second
	idleTrims = 30 // of nextTrims, without a client
)

// trim keeps an idle supervisor small until ctx ends. A start touches most of
// the program once (20 MB and more of file pages), and of it only a few pages
// are needed while a guest just runs. A trim costs ten times what that does, so
// that it is done when there was a client, and now and then. came counts them.
func trim(ctx context.Context, came *atomic.Int64) {
	wait := firstTrim
	var files []mapping
	trims := trimmer{left: 1}
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		wait = nextTrims
		if !trims.due(came.Load()) {
			continue
		}
		debug.FreeOSMemory()
		if files == nil {
			if raw, err := os.ReadFile("/proc/self/smaps"); err == nil {
				files = droppable(bytes.NewReader(raw))
			}
			for _, m := range files {
				split(m)
			}
		}
		for _, m := range files {
			// The page cache keeps them: touching one again is a minor fault.
			_ = advise(m, unix.MADV_DONTNEED)
		}
	}
}

// trimmer says when to trim. A client that comes shortly before a look may still
// be at work: two looks in a row are due then.
type trimmer struct {
	came int64
	left int // due ones
	idle int // looks since the last that was due
}

func (t *trimmer) due(came int64) bool {
	if came != t.came {
		t.came, t.left = came, 2
	}
	if t.idle++; t.left == 0 && t.idle < idleTrims {
		return false
	}
	t.left, t.idle = max(t.left-1, 0), 0
	return true
}

// grain is how much of a file one touched page may bring back.
const grain = 256 << 10

// split cuts a mapping into pieces of grain bytes. Linux 6.18 maps all of a
// large folio of the page cache at a fault in it, 2 MiB for one page, but never
// beyond the mapping. Pieces with the same flags would be joined again, so every
// second one is left out of core dumps, which have no pages of files anyway.
func split(m mapping) {
	for off := uintptr(grain); off < m.size; off += 2 * grain {
		_ = advise(mapping{m.start + off, min(grain, m.size-off)}, unix.MADV_DONTDUMP)
	}
}

// advise is madvise(2). A kernel that knows no better keeps the process larger,
// which is all that its errors mean.
func advise(m mapping, advice int) error {
	if _, _, e := unix.Syscall(unix.SYS_MADVISE, m.start, m.size, uintptr(advice)); e != 0 {
		return e
	}
	return nil
}

type mapping struct{ start, size uintptr }

// droppable lists the mappings of files, in the format of proc_pid_smaps(5),
// that hold nothing but what their file holds: not writable, and no page of
// them was ever changed, which makes it anonymous. MADV_DONTNEED would lose
// changed pages (a static program's relocations, say), so a mapping with any is
// left alone.
func droppable(smaps io.Reader) []mapping {
	var out []mapping
	var cur mapping
	clean := false
	keep := func() {
		if clean {
			out = append(out, cur)
		}
	}
	sc := bufio.NewScanner(smaps)
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) >= 5 && strings.Contains(f[0], "-") && !strings.HasSuffix(f[0], ":") {
			keep()
			lo, hi, _ := strings.Cut(f[0], "-")
			a, err1 := strconv.ParseUint(lo, 16, 64)
			b, err2 := strconv.ParseUint(hi, 16, 64)
			cur = mapping{uintptr(a), uintptr(b - a)}
			clean = err1 == nil && err2 == nil && b > a && !strings.Contains(f[1], "w") && f[4] != "0"
			continue
		}
		if len(f) >= 2 && f[1] != "0" {
			switch f[0] {
			case "Anonymous:", "Locked:", "Swap:":
				clean = false
			}
		}
	}
	keep()
	return out
}
