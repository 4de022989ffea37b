package admit

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"virtkit/core/conf"
	"virtkit/core/fault"
)

// MemInfo is the host's memory as the kernel tells it.
const MemInfo = "/proc/meminfo"

// HostMemory reads a field of a file like /proc/meminfo, in bytes.
func HostMemory(path, field string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) == 3 && f[0] == field+":" && f[2] == "kB" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil || n < 0 || n > 1<<53 {
				return 0, fmt.Errorf("%s: %s is %q", path, field, f[1])
			}
			return n << 10, nil
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, field)
}

const gib = 1 << 30

// Budget is [executor.schedule] mem_budget in MiB; 0 when it is not set. A share
// of the host's memory is rounded up to the GiB that jobs' sizes come in, because
// a host reports somewhat less than its nominal size, and held to the whole GiB
// that the host does report.
func Budget(a conf.Amount, meminfo string) (int64, error) {
	if a.Percent == 0 {
		return a.Bytes >> 20, nil
	}
	total, err := HostMemory(meminfo, "MemTotal")
	if err != nil {
		return 0, fault.Newf(fault.System, "[executor.schedule] mem_budget is %s of a memory that cannot be read", a).Because(err).
			Hint(`give mem_budget as a size, such as "16G"`)
	}
	whole := total / gib
	if whole == 0 {
		return 0, fault.Newf(fault.System, "[executor.schedule] mem_budget is %s, and this host has less than 1 GiB", a).
			Hint(`give mem_budget as a size, such as "512M"`)
	}
	return min((a.Of(total)+gib-1)/gib, whole) << 10, nil
}
