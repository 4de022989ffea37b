package netsw

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"virtkit/core/policy"
)

// ownProcess is holder's word for the process that asks.
const ownProcess = "this very process"

// holder names a process of this host that listens on a port, as far as this
// user may see: "pid 123 (nginx)"; "" when none is found.
func holder(port uint16, proto policy.Proto) string {
	want := fmt.Sprintf(":%04X", port)
	inodes := make(map[string]bool)
	for _, f := range []string{"/proc/net/" + string(proto), "/proc/net/" + string(proto) + "6"} {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			w := strings.Fields(line)
			// State 0A is "listening" for TCP; a UDP socket without a peer has 07.
			if len(w) > 9 && strings.HasSuffix(w[1], want) && (w[3] == "0A" || w[3] == "07") {
				inodes["socket:["+w[9]+"]"] = true
			}
		}
	}
	if len(inodes) == 0 {
		return ""
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	for _, fd := range procs {
		if l, err := os.Readlink(fd); err != nil || !inodes[l] {
			continue
		}
		pid := strings.Split(fd, "/")[2]
		if pid == strconv.Itoa(os.Getpid()) {
			return ownProcess
		}
		name, _ := os.ReadFile("/proc/" + pid + "/comm")
		return fmt.Sprintf("pid %s (%s)", pid, strings.TrimSpace(string(name)))
	}
	return ""
}
