package supervise_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/supervise"
)

func TestConsoleFlood(t *testing.T) {
	const max, total = 64 << 10, 4 << 20
	path := filepath.Join(t.TempDir(), "console.log")
	l := supervise.NewBoundedLog(path, max)
	var all bytes.Buffer
	for i := 0; all.Len() < total; i++ {
		line := fmt.Sprintf("line %d of a flood\n", i)
		all.WriteString(line)
		l.Write([]byte(line))
		if i%5000 == 0 {
			var size int64
			ents, _ := os.ReadDir(filepath.Dir(path))
			for _, e := range ents {
				if fi, err := e.Info(); err == nil {
					size += fi.Size()
				}
			}
			if size > 2*max+max/4 {
				t.Fatalf("after %d bytes the files hold %d", all.Len(), size)
			}
		}
	}
	l.Close()
	head, err := os.ReadFile(path + ".1")
	if err != nil || !bytes.Equal(head, all.Bytes()[:max]) {
		t.Errorf("console.log.1 is not the first %d bytes (%d, %v)", max, len(head), err)
	}
	tail, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`^\[\.\.\. (\d+) bytes dropped \.\.\.\]\n`).FindSubmatch(tail)
	if m == nil {
		t.Fatalf("console.log begins with %.60q, want the mark", tail)
	}
	n, _ := strconv.Atoi(string(m[1]))
	if want := all.Bytes()[max+n:]; !bytes.Equal(tail[len(m[0]):], want) {
		t.Errorf("console.log holds %d bytes after the mark, want the %d that follow the %d dropped", len(tail)-len(m[0]), len(want), n)
	}
	if dropped, err := l.Lost(); dropped != int64(n) || err != nil {
		t.Errorf("Lost = %d, %v; want %d", dropped, err, n)
	}
	lines := l.Tail()
	if len(lines) != 40 || !strings.HasSuffix(all.String(), lines[39]+"\n") {
		t.Errorf("Tail = %d lines, last %q", len(lines), lines[len(lines)-1])
	}
}

// 1 GiB costs no more than two rotations' room.
func BenchmarkConsoleFlood(b *testing.B) {
	l := supervise.NewBoundedLog(filepath.Join(b.TempDir(), "console.log"), 0)
	buf := bytes.Repeat([]byte("x"), 4096)
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		l.Write(buf)
	}
}

func TestConsoleOnAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts a tmpfs of 64 KiB")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 32<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	fullDisk(t, filepath.Join(dir, "console.log"), func() { os.Remove(filler) })
}

// fullDisk writes more than fits, makes room, and writes again.
func fullDisk(t *testing.T, path string, makeRoom func()) {
	t.Helper()
	l := supervise.NewBoundedLog(path, 1<<20)
	line := bytes.Repeat([]byte("0123456789abcde\n"), 64) // 1 KiB
	for range 100 {
		if n, err := l.Write(line); n != len(line) || err != nil {
			t.Fatalf("Write = %d, %v; must never fail", n, err)
		}
	}
	dropped, err := l.Lost()
	if err == nil || dropped == 0 {
		t.Fatalf("Lost = %d, %v; want some", dropped, err)
	}
	makeRoom()
	l.Write([]byte("after\n"))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("\n[... %d bytes dropped ...]\nafter\n", dropped); !strings.HasSuffix(string(b), want) {
		t.Errorf("the file ends with %q, want %q", b[max(0, len(b)-80):], want)
	}
	if tail := l.Tail(); tail[len(tail)-1] != "after" {
		t.Errorf("Tail ends with %q", tail[len(tail)-1])
	}
}

// The same without root: the limit of a file's size, in a process of its own.
func TestConsoleOverTheFileSizeLimit(t *testing.T) {
	if path := os.Getenv("TEST_SUPERVISE_FSIZE"); path != "" {
		var old syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
			t.Fatal(err)
		}
		small := syscall.Rlimit{Cur: 32 << 10, Max: old.Max}
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &small); err != nil {
			t.Fatal(err)
		}
		fullDisk(t, path, func() { syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old) })
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestConsoleOverTheFileSizeLimit$")
	cmd.Env = append(os.Environ(), "TEST_SUPERVISE_FSIZE="+filepath.Join(t.TempDir(), "console.log"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"\x1b[1;31mred\x1b[0m text": "red text",
		"\x1b]0;title\x07x":         "x",
		"bell\x07 tab\tend  ":       "bell tab end",
		"bad \xff utf-8":            "bad  utf-8",
		"half \x1b[3":               "half",
		"\x9b31m":                   "31m",
	} {
		if got := supervise.Printable(in); got != want {
			t.Errorf("Printable(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestLastLinesOfACrash(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	log := "level=INFO msg=one\npanic: oh no\n\ngoroutine 1 [running]:\n" + strings.Repeat("main.f()\n", 100)
	if err := os.WriteFile(path, []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(supervise.LastLines(path, 2), "|")
	if want := "level=INFO msg=one|panic: oh no"; got != want {
		t.Errorf("LastLines = %q, want %q", got, want)
	}
}
