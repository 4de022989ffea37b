package supervise

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

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
00580000-00600000 r--p 00180000 08:01 77 /bin/vk
Private_Dirty:        64 kB
Anonymous:             0 kB
00600000-00700000 rw-p 00200000 08:01 77 /bin/vk
Anonymous:             0 kB
c000000000-c000400000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000000000-7f0000001000 r--s 00000000 00:05 9 /some/file
Anonymous:             0 kB
`
	want := []mapping{{0x400000, 0x100000}, {0x580000, 0x80000}, {0x7f0000000000, 0x1000}}
	if d := cmp.Diff(want, droppable(strings.NewReader(smaps)), cmp.AllowUnexported(mapping{})); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if got := droppable(strings.NewReader("garbage\n1-\nx-y z 0 0 1\n")); len(got) != 0 {
		t.Errorf("garbage gives %v", got)
	}
}

// TestDropOwn drops this program's own pages for real: it must go on.
func TestDropOwn(t *testing.T) {
	raw, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	ms := droppable(strings.NewReader(string(raw)))
	if len(ms) == 0 {
		t.Fatal("nothing of this program can be dropped")
	}
	for _, m := range ms {
		split(m)
		if err := advise(m, unix.MADV_DONTNEED); err != nil {
			t.Errorf("madvise(%#x, %#x): %v", m.start, m.size, err)
		}
	}
}

// A mapping that was split is made of pieces, none larger than the grain, and
// holds what it held.
func TestSplit(t *testing.T) {
	const size = 5*grain + 4096
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := bytes.Repeat([]byte("what it held "), size/13+1)[:size]
	if _, err := f.Write(want); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	m := mapping{uintptr(unsafe.Pointer(unsafe.SliceData(b))), size}
	split(m)
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	var got []uintptr
	for line := range strings.Lines(string(maps)) {
		var lo, hi uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x", &lo, &hi); n == 2 && lo >= m.start && hi <= m.start+m.size {
			got = append(got, hi-lo)
		}
	}
	if d := cmp.Diff([]uintptr{grain, grain, grain, grain, grain, 4096}, got); d != "" {
		t.Errorf("sizes of the pieces (-want +got):\n%s", d)
	}
	if err := advise(m, unix.MADV_DONTNEED); err != nil {
		t.Errorf("madvise: %v", err)
	}
	if !bytes.Equal(b, want) {
		t.Error("the file's bytes are not there any more")
	}
}

// A supervisor trims itself after its start, twice after each client, and
// seldom while nobody comes: a trim costs more than all that it does then.
func TestTrimmer(t *testing.T) {
	tr := trimmer{left: 1}
	due := func(came int64, looks int) (n int) {
		for range looks {
			if tr.due(came) {
				n++
			}
		}
		return n
	}
	for _, c := range []struct {
		what  string
		came  int64
		looks int
		want  int
	}{
		{"the start", 0, 2, 1},
		{"nobody", 0, idleTrims - 2, 0},
		{"nobody for long", 0, 1, 1},
		{"nobody again", 0, idleTrims - 1, 0},
		{"a client", 1, 1, 1},
		{"its end", 1, 1, 1},
		{"nobody", 1, 5, 0},
		{"two clients", 3, 5, 2},
	} {
		if got := due(c.came, c.looks); got != c.want {
			t.Errorf("%s: %d trims in %d looks, want %d", c.what, got, c.looks, c.want)
		}
	}
}
