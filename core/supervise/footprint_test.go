package supervise

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestDroppable(t *testing.T) {
	const smaps = `00400000-00500000 r-xp 00000000 08:01 77 /bin/vk
Rss:                1024 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
00500000-00600000 r--p 00100000 08:01 77 /bin/vk
Private_Dirty:         4 kB
Anonymous:             4 kB
00600000-00700000 rw-p 00200000 08:01 77 /bin/vk
Anonymous:             0 kB
c000000000-c000400000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000000000-7f0000001000 r--s 00000000 00:05 9 /some/file
Anonymous:             0 kB
`
	want := []mapping{{0x400000, 0x100000}, {0x7f0000000000, 0x1000}}
	if d := cmp.Diff(want, droppable(strings.NewReader(smaps)), cmp.AllowUnexported(mapping{})); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if got := droppable(strings.NewReader("garbage\n1-\nx-y z 0 0 1\n")); len(got) != 0 {
		t.Errorf("garbage gives %v", got)
	}
}

// TestDropOwn drops this program's own pages for real: it must go on.
func TestDropOwn(t *testing.T) {
	// A program that was linked a moment ago is not on disk yet, and its pages
	// count as dirty until they are.
	exe, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer exe.Close()
	if err := exe.Sync(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	ms := droppable(strings.NewReader(string(raw)))
	if len(ms) == 0 {
		t.Fatal("nothing of this program can be dropped")
	}
	for _, m := range ms {
		if _, _, e := unix.Syscall(unix.SYS_MADVISE, m.start, m.size, unix.MADV_DONTNEED); e != 0 {
			t.Errorf("madvise(%#x, %#x): %v", m.start, m.size, e)
		}
	}
}
