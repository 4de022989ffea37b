// Package reclaim gives a guest's idle file cache back: a page that the guest
// evicts is free, and what is free the balloon reports to the host
// ([executor.vm] reclaim).
//
// By age, it goes through the kernel's multi-gen LRU
// (Documentation/admin-guide/mm/multigen_lru.rst, "Proactive reclaim"). Pages
// are in at most four generations there. At each tick all generations but the
// three youngest are evicted, then a new one begins. A page that is read enters
// the second oldest of four generations and, unless something touches it,
// leaves two ticks later: idle for one tick at least and two at most. What is
// mapped and touched, or read again and again, moves to a younger generation.
// Only file pages are evicted.
//
// Above a floor, it asks the root control group to give up as much as the cache
// is above it.
//
// Neither is done while tasks wait for memory (PSI): the guest evicts by itself
// then, and knows better what.
package reclaim

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Files of the kernel.
const (
	generations = "/sys/kernel/debug/lru_gen"
	pressure    = "/proc/pressure/memory"
	meminfo     = "/proc/meminfo"
	groupFile   = "/sys/fs/cgroup/memory.reclaim"
)

// Ticks. A minute by age makes "idle for a minute or two".
const (
	ByAge   = time.Minute
	ByFloor = 10 * time.Second
)

// keep is how many generations stay.
const keep = 3

// pressed is the share of the last 10 s, in percent, that some task waited for
// memory, from which on the guest is left alone.
const pressed = 1.0

// slack is how far the cache may be above the floor, in bytes, before anything
// is done: each request costs a scan.
const slack = 4 << 20

// Reclaimer reclaims. Read and Write stand for the kernel's files in tests.
type Reclaimer struct {
	Keep  int64 // bytes of file cache that stay; 0 = by age
	Read  func(path string) ([]byte, error)
	Write func(path, text string) error
}

// New is a Reclaimer of this guest.
func New(keep int64) *Reclaimer {
	return &Reclaimer{Keep: keep, Read: os.ReadFile, Write: func(path, text string) error {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(text)
		return errors.Join(err, f.Close())
	}}
}

// Possible says why this kernel cannot do it; nil when it can.
func (r *Reclaimer) Possible() error {
	need := []string{pressure, generations}
	if r.Keep > 0 {
		need = []string{pressure, meminfo}
	}
	for _, p := range need {
		if _, err := r.Read(p); err != nil {
			return fmt.Errorf("this kernel cannot give idle file cache back: %w", err)
		}
	}
	return nil
}

// Every is the time between two ticks.
func (r *Reclaimer) Every() time.Duration {
	if r.Keep > 0 {
		return ByFloor
	}
	return ByAge
}

// Tick does what there is to do now. did says whether it did anything.
func (r *Reclaimer) Tick() (did bool, err error) {
	b, err := r.Read(pressure)
	if err != nil {
		return false, err
	}
	some, err := avg10(b)
	if err != nil || some >= pressed {
		return false, err
	}
	if r.Keep > 0 {
		return r.toFloor()
	}
	return r.byAge()
}

// avg10 reads "some avg10=0.00 avg60=0.00 avg300=0.00 total=0".
func avg10(b []byte) (float64, error) {
	for line := range strings.Lines(string(b)) {
		rest, ok := strings.CutPrefix(line, "some avg10=")
		if !ok {
			continue
		}
		word, _, _ := strings.Cut(rest, " ")
		return strconv.ParseFloat(word, 64)
	}
	return 0, errors.New(pressure + ": no line of some")
}

func (r *Reclaimer) byAge() (bool, error) {
	b, err := r.Read(generations)
	if err != nil {
		return false, err
	}
	var errs []error
	for _, l := range lists(b) {
		if last := l.newest - keep; l.oldest <= last {
			// Swappiness 0: no anonymous page.
			errs = append(errs, gone(r.Write(generations, fmt.Sprintf("- %d %d %d 0\n", l.group, l.node, last))))
		}
		// Not for anonymous pages (0), which nothing here evicts.
		errs = append(errs, gone(r.Write(generations, fmt.Sprintf("+ %d %d %d 0\n", l.group, l.node, l.newest))))
	}
	return true, errors.Join(errs...)
}

// gone drops the errors of a group that ended since, and of a generation that
// the kernel itself began or evicted since.
func gone(err error) error {
	if err == nil || errors.Is(err, errInvalid) || errors.Is(err, errRange) || errors.Is(err, errAgain) {
		return nil
	}
	return err
}

// list is the generations of one control group's memory on one node.
type list struct {
	group, node    int
	oldest, newest int64
}

// lists reads lru_gen:
//
//	memcg     1 /
//	 node     0
//	         13      80404      12304       9876
//	         14      20404        104        876
//
// The columns are a generation, its age in ms, and its anonymous and file
// pages.
func lists(b []byte) []list {
	var out []list
	group, open := -1, false
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
		case f[0] == "memcg" && len(f) >= 2:
			group, open = number(f[1]), false
		case f[0] == "node" && len(f) == 2:
			if n := number(f[1]); group >= 0 && n >= 0 {
				out = append(out, list{group: group, node: n, oldest: -1})
				open = true
			}
		case open && len(f) >= 4:
			gen, err := strconv.ParseInt(f[0], 10, 64)
			if err != nil {
				continue
			}
			l := &out[len(out)-1]
			if l.oldest < 0 {
				l.oldest = gen
			}
			l.oldest, l.newest = min(l.oldest, gen), max(l.newest, gen)
		}
	}
	kept := out[:0]
	for _, l := range out {
		if l.oldest >= 0 {
			kept = append(kept, l)
		}
	}
	return kept
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return -1
	}
	return n
}

func (r *Reclaimer) toFloor() (bool, error) {
	b, err := r.Read(meminfo)
	if err != nil {
		return false, err
	}
	kib := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 {
			kib[f[0]], _ = strconv.ParseInt(f[1], 10, 64)
		}
	}
	// Of the file pages on the LRU, so without tmpfs, which cannot be evicted.
	over := (kib["Active(file):"]+kib["Inactive(file):"])<<10 - r.Keep
	if over < slack {
		return false, nil
	}
	// Less than asked for (EAGAIN) is what there was.
	err = r.Write(groupFile, fmt.Sprintf("%d swappiness=0\n", over))
	if errors.Is(err, errInvalid) { // a kernel before 6.10
		err = r.Write(groupFile, fmt.Sprintf("%d\n", over))
	}
	if errors.Is(err, errAgain) {
		err = nil
	}
	return true, err
}
