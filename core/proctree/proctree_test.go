package proctree_test

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/proctree"
)

// A shell burns time in a child that it waits for, and leaves another one
// running that holds memory.
func TestMeasure(t *testing.T) {
	out := filepath.Join(t.TempDir(), "f")
	cmd := exec.Command("/bin/sh", "-c", `
		/bin/sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'
		dd if=/dev/zero of="$0" bs=1M count=3 conv=fsync 2>/dev/null
		sleep 1000 &
		echo ready; read line; kill $!`, out)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	words, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer in.Close()
	if line, err := bufio.NewReader(words).ReadString('\n'); line != "ready\n" {
		t.Fatal(line, err)
	}
	s, err := proctree.Measure(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", s)
	if s.Processes != 2 || s.CPU < 20*time.Millisecond || s.CPU > time.Minute || s.Memory < 256<<10 || s.Memory > 64<<20 {
		t.Errorf("%+v", s)
	}
	_, ioErr := os.Stat("/proc/self/io")
	if s.IO != (ioErr == nil) {
		t.Errorf("block I/O is accounted: %t, %v", s.IO, ioErr)
	}
	// A tmpfs reaches no disk.
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(out), &fs); err == nil && fs.Type != unix.TMPFS_MAGIC && s.IO && s.Written < 3<<20 {
		t.Errorf("written %d, want 3 MiB and more: of a child that was waited for", s.Written)
	}
	// Without the kernel's lists the same processes are found.
	a, _, err1 := proctree.Tree(cmd.Process.Pid)
	b, err2 := proctree.Search(cmd.Process.Pid)
	if err1 != nil || err2 != nil || !slices.Equal(a, b) || len(a) != 2 {
		t.Errorf("%v %v, %v %v", a, b, err1, err2)
	}
}

func TestMeasureOfNobody(t *testing.T) {
	cmd := exec.Command("/bin/true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if s, err := proctree.Measure(cmd.Process.Pid); err == nil {
		t.Errorf("%+v", s)
	}
}

// A process's memory counts, and its children's with it.
func TestResident(t *testing.T) {
	measure := func() int64 {
		n, err := proctree.Resident(os.Getpid())
		if err != nil || n < 1<<20 {
			t.Fatalf("%d bytes, %v", n, err)
		}
		return n
	}
	own := measure()
	block, err := unix.Mmap(-1, 0, 64<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	more := measure()
	unix.Munmap(block)
	// The collector may give some of its own back meanwhile.
	if more < own+32<<20 {
		t.Errorf("%d bytes after another 64 MiB, %d before", more, own)
	}
	if _, err := proctree.Resident(1 << 22); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of nobody: %v", err)
	}
}

func TestResidentTree(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", `sleep 1000 & echo ready; read line; kill $!; wait; echo done; read line`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	r := bufio.NewReader(pipe)
	measure := func(word string) int64 {
		if l, err := r.ReadString('\n'); err != nil || l != word+"\n" {
			t.Fatalf("%q, %v", l, err)
		}
		n, err := proctree.Resident(cmd.Process.Pid)
		if err != nil || n <= 0 {
			t.Fatal(n, err)
		}
		in.Write([]byte("\n"))
		return n
	}
	if with, without := measure("ready"), measure("done"); with <= without {
		t.Errorf("%d bytes with a child, %d without", with, without)
	}
}
