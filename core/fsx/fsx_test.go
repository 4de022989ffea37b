package fsx_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
)

// TestMain makes this binary the other process of some tests.
func TestMain(m *testing.M) {
	what, path := os.Getenv("FSX_CHILD"), os.Getenv("FSX_PATH")
	switch what {
	case "":
		os.Exit(m.Run())
	case "write": // replaces path for ever, one line for each time
		for i := 0; ; i++ {
			if err := fsx.WriteFile(path, version(i), 0o600); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			fmt.Println("written")
		}
	case "lock":
		l, err := fsx.TryLock(path, false)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("locked")
		bufio.NewReader(os.Stdin).ReadString('\n')
		l.Close()
	case "wait":
		fmt.Println("here")
		bufio.NewReader(os.Stdin).ReadString('\n')
	}
	os.Exit(0)
}

// child starts this binary as another process and returns it with a reader of
// its output and its first line read.
func child(t *testing.T, exe, what, path, first string) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	if exe == "" {
		var err error
		if exe, err = os.Executable(); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "FSX_CHILD="+what, "FSX_PATH="+path)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); err != nil || line != first+"\n" {
		t.Fatalf("the child says %q (%v), want %q", line, err, first)
	}
	return cmd, r
}

// version is file contents that prove themselves whole: a hash and what it is of.
func version(i int) []byte {
	body := bytes.Repeat([]byte(fmt.Sprintf("%08d", i)), 20000+i%7*1000)
	sum := sha256.Sum256(body)
	return append(sum[:], body...)
}

func whole(b []byte) bool {
	if len(b) < 32 {
		return false
	}
	sum := sha256.Sum256(b[32:])
	return bytes.Equal(sum[:], b[:32])
}

func TestWriteFileSurvivesKill(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	const rounds = 12
	for i := range rounds {
		cmd, out := child(t, "", "write", path, "written")
		for range i % 4 { // kill at another moment each time
			if _, err := out.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
		if b, err := os.ReadFile(path); err != nil || !whole(b) {
			t.Fatalf("round %d: torn while the writer is at it: %d bytes, %v", i, len(b), err)
		}
		cmd.Process.Kill()
		cmd.Wait()
		if b, err := os.ReadFile(path); err != nil || !whole(b) {
			t.Fatalf("round %d: torn after the kill: %d bytes, %v", i, len(b), err)
		}
	}
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(names) > 1+rounds {
		t.Errorf("%d names are left, want at most one for each kill", len(names)-1)
	}
	for _, n := range names {
		if n.Name() != "state.json" && !strings.HasPrefix(n.Name(), ".state.json.tmp-") {
			t.Errorf("left behind under a name that no sweeper knows: %s", n.Name())
		}
	}
}

func TestWriteFileModeAndErrors(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, mode := range []fs.FileMode{0o600, 0o644} {
		if err := fsx.WriteFile(path, []byte("x"), mode); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(path); err != nil || st.Mode() != mode {
			t.Errorf("mode = %v (%v), want %v whatever the umask", st.Mode(), err, mode)
		}
	}
	if err := fsx.WriteFile(filepath.Join(dir, "no", "f"), nil, 0o600); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing directory gives %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := fsx.WriteFile(filepath.Join(dir, "d"), []byte("x"), 0o600); err == nil {
		t.Error("a directory was replaced by a file")
	}
	if names, _ := os.ReadDir(dir); len(names) != 2 {
		t.Errorf("a failed write leaves %v", names)
	}
}

func TestLockAcrossProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	cmd, _ := child(t, "", "lock", path, "locked")
	for _, shared := range []bool{false, true} {
		if l, err := fsx.TryLock(path, shared); !errors.Is(err, fsx.ErrLocked) || l != nil || !strings.Contains(err.Error(), path) {
			t.Errorf("TryLock(shared %v) = %v, %v; want ErrLocked naming the file", shared, l, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := fsx.AcquireLock(ctx, path, false); !errors.Is(err, fsx.ErrLocked) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("AcquireLock = %v, want both ErrLocked and the deadline", err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := fsx.AcquireLock(ctx, path, false)
	if err != nil {
		t.Fatalf("the lock outlives its holder: %v", err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	first, second := l.Close(), l.Close()
	if first != nil || second != nil || (*fsx.Lock)(nil).Close() != nil {
		t.Error("Close is not safe to call twice and on nil")
	}
	a, err1 := fsx.TryLock(path, true)
	b, err2 := fsx.TryLock(path, true)
	if err1 != nil || err2 != nil {
		t.Fatalf("two shared locks: %v, %v", err1, err2)
	}
	defer a.Close()
	if _, err := fsx.TryLock(path, false); !errors.Is(err, fsx.ErrLocked) {
		t.Errorf("exclusive beside shared: %v", err)
	}
	b.Close()
}

func TestLockFileReplaced(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "lock")
	old, err := fsx.TryLock(path, false)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := fsx.WriteFile(path, nil, 0o600); err != nil { // another file of that name
		t.Fatal(err)
	}
	l, err := fsx.TryLock(path, false)
	if err != nil {
		t.Fatalf("the lock is on the old file, not on what the path names: %v", err)
	}
	l.Close()

	if err := os.Symlink(filepath.Join(dir, "target"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := fsx.TryLock(filepath.Join(dir, "link"), false); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a link as lock file gives %v, want ELOOP", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "target")); err == nil {
		t.Error("the lock was made behind the link")
	}
}

// TestLockRemovedByHolder has each holder remove the file as its last act:
// nobody may then be in on a lock of the removed file.
func TestLockRemovedByHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var inside, total atomic.Int32
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for range 500 {
				l, err := fsx.TryLock(path, false)
				for errors.Is(err, fsx.ErrLocked) { // no wait: the window is narrow
					l, err = fsx.TryLock(path, false)
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n := inside.Add(1); n != 1 {
					t.Errorf("%d holders at once", n)
				}
				total.Add(1)
				os.Stat(path) // gives others time to come in
				inside.Add(-1)
				os.Remove(path)
				l.Close()
			}
		})
	}
	wg.Wait()
	if total.Load() != 3000 {
		t.Errorf("%d turns, want 3000", total.Load())
	}
}

func TestSparseCopy(t *testing.T) {
	dir := t.TempDir()
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	const size = 64 << 20
	f, err := os.Create(src)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, off := range []int64{0, 10<<20 + 3, 40 << 20} { // and a hole at the end
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(off>>20) + 1}, 300<<10), off); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if used(t, src) >= size {
		t.Skip("needs a filesystem with holes below TMPDIR")
	}
	if err := fsx.SparseCopy(dst, src, 0o640); err != nil {
		t.Fatal(err)
	}
	a, err1 := os.ReadFile(src)
	b, err2 := os.ReadFile(dst)
	if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
		t.Errorf("the bytes differ (%d and %d; %v, %v)", len(a), len(b), err1, err2)
	}
	if got := used(t, dst); got > used(t, src)+(1<<20) {
		t.Errorf("the copy holds %d bytes on disk, the source %d: the holes are filled", got, used(t, src))
	}
	if err := fsx.SparseCopy(dst, src, 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over an existing file: %v, want ErrExist", err)
	}
	if st, err := os.Stat(dst); err != nil || st.Size() != size || st.Mode().Perm() != 0o640 {
		t.Errorf("the existing file was touched: %v, %v", st, err)
	}
	if err := fsx.SparseCopy(filepath.Join(dir, "x"), filepath.Join(dir, "no"), 0o600); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a missing file: %v", err)
	}
	for name, content := range map[string]int64{"empty": 0, "hole": 1 << 20} {
		p := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(p, nil, 0o600), os.Truncate(p, content), fsx.SparseCopy(p+"2", p, 0o600)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if st, err := os.Stat(p + "2"); err != nil || st.Size() != content {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
}

func used(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func TestUnixSocketBelowALongPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 3)+strings.Repeat("d", 200))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sup.sock")
	l, err := fsx.ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if st, err := os.Stat(path); err != nil || st.Mode().Type() != fs.ModeSocket {
		t.Fatalf("no socket at the path: %v, %v", st, err)
	}
	go func() {
		if c, err := l.Accept(); err == nil {
			c.Write([]byte("hello\n"))
			c.Close()
		}
	}()
	c, err := fsx.DialUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "hello\n" {
		t.Errorf("read %q, %v", line, err)
	}
	if _, err := fsx.ListenUnix(path); !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), path) {
		t.Errorf("listening twice: %v", err)
	}
	// The listener's own name goes by a descriptor of that moment, whose number
	// may by now lead to a directory again.
	for range 16 {
		fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
	}
	l.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("closing removed the name, which may be another's by now: %v", err)
	}
	if _, err := fsx.DialUnix(path); !errors.Is(err, unix.ECONNREFUSED) || !strings.Contains(err.Error(), path) {
		t.Errorf("dialling a dead socket: %v", err)
	}
	if _, err := fsx.DialUnix(filepath.Join(dir, "no")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("dialling nothing: %v", err)
	}
	if _, err := fsx.DialUnix(filepath.Join(dir, "no", "no")); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), filepath.Join(dir, "no")) {
		t.Errorf("dialling below nothing: %v", err)
	}
}

// TestProcStartOfOddNames runs processes whose names try to pass for fields.
func TestProcStartOfOddNames(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, comm := range []string{"plain", "x) S 1 2 3 (", "a b c", ")))", "(", "new\nline) 7", "é"} {
		link := filepath.Join(t.TempDir(), comm)
		if err := os.Symlink(exe, link); err != nil {
			t.Fatal(err)
		}
		cmd, _ := child(t, link, "wait", "", "here")
		pid := cmd.Process.Pid
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		rest, ok := strings.CutPrefix(string(raw), fmt.Sprintf("%d (%s) ", pid, comm))
		if !ok {
			t.Fatalf("the process is not named %q: %s", comm, raw)
		}
		got, err := fsx.ProcStart(pid)
		if want := strings.Fields(rest)[19]; err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: ProcStart = %d, %v; want %s", comm, got, err, want)
		}
		if self, err := fsx.ProcStart(os.Getpid()); err != nil || got < self {
			t.Errorf("%q began at %d, before its parent at %d (%v)", comm, got, self, err)
		}
		cmd.Process.Kill()
		cmd.Wait()
		if _, err := fsx.ProcStart(pid); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: a process that is gone gives %v", comm, err)
		}
	}
}

func TestSweepWrites(t *testing.T) {
	dir := t.TempDir()
	if err := fsx.SweepWrites(filepath.Join(dir, "none")); err != nil {
		t.Error(err)
	}
	for _, name := range []string{".a.json.tmp-123", ".a.json.tmp-", ".a.json.tmp-x1", "a.json.tmp-5", ".hidden", "a.json", ".b.tmp-18446744073709551615"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, ".c.tmp-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := fsx.SweepWrites(dir); err != nil {
		t.Error(err)
	}
	var left []string
	list, _ := os.ReadDir(dir)
	for _, e := range list {
		left = append(left, e.Name())
	}
	if want := []string{".a.json.tmp-", ".a.json.tmp-x1", ".c.tmp-1", ".hidden", "a.json", "a.json.tmp-5"}; !slices.Equal(left, want) {
		t.Errorf("left: %q, want %q", left, want)
	}
}
