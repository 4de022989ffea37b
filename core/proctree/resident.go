package proctree

import (
	"fmt"
	"os"
	"strconv"
)

// Resident is the memory that a process and its descendants hold now, in bytes.
// Pages that several processes share count in proportion (Pss of smaps_rollup);
// of a process whose share cannot be read, all that it has in memory counts
// (VmRSS). The kernel walks every page table for it: not for every second.
func Resident(root int) (int64, error) {
	if _, err := readStat(root); err != nil {
		return 0, fmt.Errorf("measuring process %d: %w", root, err)
	}
	pids, _, err := tree(root)
	if err != nil {
		return 0, fmt.Errorf("listing the children of process %d: %w", root, err)
	}
	sum := int64(0)
	for _, pid := range pids {
		n, err := residentOf(pid)
		if err != nil && !gone(err) {
			return 0, fmt.Errorf("measuring process %d: %w", pid, err)
		}
		sum += n
	}
	return sum, nil
}

func residentOf(pid int) (int64, error) {
	dir := "/proc/" + strconv.Itoa(pid)
	if b, err := os.ReadFile(dir + "/smaps_rollup"); err == nil {
		if kib, ok := field(b, "Pss:"); ok {
			return kib << 10, nil
		}
	}
	b, err := os.ReadFile(dir + "/status")
	if err != nil {
		return 0, err
	}
	kib, _ := field(b, "VmRSS:") // a zombie has none
	return kib << 10, nil
}
