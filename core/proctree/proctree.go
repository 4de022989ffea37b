// Package proctree measures what a process and its descendants have cost the
// host, from proc(5). It needs no rights beyond those over the processes.
package proctree

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Sum is what a tree of processes has cost.
type Sum struct {
	// CPU is the processor time of all of them, of threads that ended and of
	// children that were waited for.
	CPU time.Duration
	// Memory is the sum of the high-water marks of what runs now, in bytes. Pages
	// that two processes share count in each, and marks that never coincided
	// both count.
	Memory int64
	// Read and Written are bytes that went through the block layer, children that
	// were waited for included; they mean something only with IO set.
	Read, Written int64
	IO            bool // the kernel accounts block I/O, and lets us read it
	Processes     int
	Lists         bool // the kernel lists children; else all processes were searched
}

// tick is the unit of times in /proc/PID/stat, the same on every Linux machine
// of today.
const tick = time.Second / 100

// Measure walks the tree below root, itself included. Processes that end
// meanwhile count with their parents once those have waited for them.
func Measure(root int) (Sum, error) {
	s := Sum{IO: true}
	if _, err := readStat(root); err != nil {
		return Sum{}, fmt.Errorf("measuring process %d: %w", root, err)
	}
	pids, lists, err := tree(root)
	if err != nil {
		return Sum{}, fmt.Errorf("listing the children of process %d: %w", root, err)
	}
	s.Lists = lists
	for _, pid := range pids {
		if err := s.add(pid); err != nil {
			return Sum{}, err
		}
	}
	return s, nil
}

func (s *Sum) add(pid int) error {
	st, err := readStat(pid)
	if gone(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("measuring process %d: %w", pid, err)
	}
	s.Processes++
	s.CPU += time.Duration(st.ticks) * tick
	dir := "/proc/" + strconv.Itoa(pid)
	b, err := os.ReadFile(dir + "/status")
	if err != nil && !gone(err) {
		return fmt.Errorf("measuring process %d: %w", pid, err)
	}
	if kib, ok := field(b, "VmHWM:"); ok { // kernel threads and zombies have none
		s.Memory += kib << 10
	}
	if b, err = os.ReadFile(dir + "/io"); err != nil {
		if _, err2 := readStat(pid); !gone(err2) {
			s.IO = false
		}
		return nil
	}
	r, ok1 := field(b, "read_bytes:")
	w, ok2 := field(b, "write_bytes:")
	c, _ := field(b, "cancelled_write_bytes:") // of files that were removed before they were written out
	s.Read += r
	s.Written += max(0, w-c)
	s.IO = s.IO && ok1 && ok2
	return nil
}

func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

// field is the number after a name at the beginning of a line.
func field(b []byte, name string) (int64, bool) {
	for line := range bytes.Lines(b) {
		rest, ok := bytes.CutPrefix(line, []byte(name))
		if !ok {
			continue
		}
		f := bytes.Fields(rest)
		if len(f) == 0 {
			return 0, false
		}
		n, err := strconv.ParseInt(string(f[0]), 10, 64)
		return n, err == nil
	}
	return 0, false
}

type stat struct {
	ppid  int
	ticks int64 // user and system, own and of children waited for
}

// readStat reads /proc/PID/stat, whose second field may hold anything.
func readStat(pid int) (stat, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, err
	}
	i := bytes.LastIndexByte(b, ')')
	f := strings.Fields(string(b[i+1:]))
	if i < 0 || len(f) < 15 {
		return stat{}, fmt.Errorf("/proc/%d/stat has too few fields", pid)
	}
	var st stat
	if st.ppid, err = strconv.Atoi(f[1]); err != nil {
		return stat{}, err
	}
	for _, s := range f[11:15] {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return stat{}, err
		}
		st.ticks += n
	}
	return st, nil
}

// tree lists root and its descendants.
func tree(root int) (pids []int, lists bool, err error) {
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d/children", root, root)); err != nil {
		pids, err = search(root)
		return pids, false, err
	}
	pids = []int{root}
	for i := 0; i < len(pids); i++ {
		tasks, err := os.ReadDir("/proc/" + strconv.Itoa(pids[i]) + "/task")
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, true, err
		}
		for _, t := range tasks { // a child is its thread's
			b, err := os.ReadFile("/proc/" + strconv.Itoa(pids[i]) + "/task/" + t.Name() + "/children")
			if err != nil && !gone(err) {
				return nil, true, err
			}
			for _, f := range strings.Fields(string(b)) {
				if n, err := strconv.Atoi(f); err == nil {
					pids = append(pids, n)
				}
			}
		}
	}
	return pids, true, nil
}

// search lists root and its descendants by looking at all processes.
func search(root int) ([]int, error) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			if st, err := readStat(pid); err == nil {
				children[st.ppid] = append(children[st.ppid], pid)
			}
		}
	}
	out := []int{root}
	for i := 0; i < len(out); i++ {
		out = append(out, children[out[i]]...)
	}
	return out, nil
}
