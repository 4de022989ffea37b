package agent

import (
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/guestwire"
)

// records gives one record a read, as /dev/kmsg does.
type records []string

func (r *records) Read(p []byte) (int, error) {
	if len(*r) == 0 {
		return 0, io.EOF
	}
	n := copy(p, (*r)[0])
	*r = (*r)[1:]
	return n, nil
}

func TestVictimsOfTheKernelsLog(t *testing.T) {
	r := records{
		"6,1,100,-;Linux version 6.12.0\n",
		"4,900,48100000,-;cc1plus invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=0\n",
		"6,940,48900500,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/vk/exec-1,task=cc1plus,pid=1234,uid=0\n",
		"3,941,48901000,-;Out of memory: Killed process 1234 (cc1plus) total-vm:2143216kB, anon-rss:1992294kB, file-rss:256kB, shmem-rss:0kB, UID:0 pgtables:4020kB oom_score_adj:0\n SUBSYSTEM=x\n",
		"6,942,48999000,-;oom_reaper: reaped process 1234 (cc1plus), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB\n",
		"3,950,61000000,-;Memory cgroup out of memory: Killed process 77 (a (b) c) total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:4kB oom_score_adj:0\n",
		// A program that writes to the log is not believed.
		"12,951,62000000,-;Out of memory: Killed process 1 (init) total-vm:1kB, anon-rss:1kB, file-rss:0kB\n",
		"3,952,62000000,-;Killed process x (y) total-vm:1kB, anon-rss:1kB\n",
		"3,953,62000000,-;Killed process 5 (y\n",
		"garbage\n",
	}
	got, err := readVictims(&r)
	want := guestwire.Victims{Total: 2, List: []guestwire.Victim{
		{Name: "cc1plus", PID: 1234, RSS: 1992294 << 10, UptimeMS: 48901},
		{Name: "a (b) c", PID: 77, RSS: 8 << 10, UptimeMS: 61000},
	}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(d, err)
	}
}
