package image_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/image"
)

// The test binary is also the other processes of these tests: with
// IMAGE_TEST_PULL set to "dir ref" it resolves, prints the digest and ends.
func TestMain(m *testing.M) {
	if v := os.Getenv("IMAGE_TEST_PULL"); v != "" {
		dir, ref, _ := strings.Cut(v, " ")
		os.Exit(pullProcess(dir, ref))
	}
	os.Exit(m.Run())
}

func pullProcess(dir, text string) int {
	s, err := image.Open(dir, image.Options{})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	ref, err := s.Parse(text)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	img, err := s.Resolve(context.Background(), ref, image.ResolveOptions{Platform: "linux/amd64", Progress: func(p image.Progress) {
		if p.Stage == "wait" {
			fmt.Println("waited")
		}
	}})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("digest", img.Digest)
	return 0
}

func otherProcess(t testing.TB, s *image.Store, ref string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "IMAGE_TEST_PULL="+s.Dir()+" "+ref)
	return cmd
}

func TestManyProcessesPullOnce(t *testing.T) {
	reg := newRegistry(t)
	l := gz(t, layer(t, f{name: "x", body: strings.Repeat("z", 1<<20)}))
	want := reg.push(t, "r", "1", ociManifest, nil, l)
	s := openStore(t, image.Options{})
	reg.misbehave(nil)
	const n = 6
	outs := make(chan string, n)
	for range n {
		cmd := otherProcess(t, s, reg.host()+"/r:1")
		go func() {
			out, err := cmd.CombinedOutput()
			outs <- fmt.Sprintf("%s%v", out, err)
		}()
	}
	for range n {
		if got := <-outs; !strings.HasSuffix(got, "digest "+want+"\n<nil>") {
			t.Errorf("a process says %q", got)
		}
	}
	if c := reg.count("GET /v2/r/blobs/" + sum(l.body)); c != 1 {
		t.Errorf("the layer was fetched %d times", c)
	}
	list, err := s.List()
	if err != nil || len(list) != 1 {
		t.Errorf("List = %v, %v; want one image", list, err)
	}
}

// TestKill kills a pulling process at many moments; what it leaves is swept,
// and the next one succeeds.
func TestKill(t *testing.T) {
	reg := newRegistry(t)
	var ls []sent
	for i := range 4 {
		ls = append(ls, gz(t, layer(t, f{name: fmt.Sprint("x", i), body: strings.Repeat(fmt.Sprint(i), 2<<20)})))
	}
	reg.push(t, "r", "1", ociManifest, nil, ls...)
	s := openStore(t, image.Options{})
	var killed int
	for i := range 12 {
		// Each round kills at the i-th request, or a while after the last.
		var n, pid atomic.Int32
		reg.misbehave(func(w http.ResponseWriter, r *http.Request, next http.Handler) bool {
			if int(n.Add(1)) == i+1 {
				_ = syscall.Kill(int(pid.Load()), syscall.SIGKILL)
				<-r.Context().Done()
				return true
			}
			return false
		})
		cmd := otherProcess(t, s, reg.host()+"/r:1")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		pid.Store(int32(cmd.Process.Pid))
		if i > 7 {
			// While it writes the filesystem: as soon as one is there.
			stop := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
			for {
				if m, _ := filepath.Glob(filepath.Join(s.Dir(), "staging", "*", "img", "root.ext4")); len(m) > 0 {
					_ = cmd.Process.Kill()
					break
				}
				if m, _ := filepath.Glob(filepath.Join(s.Dir(), "images", "*", "image.json")); len(m) > 0 {
					break
				}
				time.Sleep(time.Millisecond) // polls a real process
			}
			stop.Stop()
		}
		if cmd.Wait() != nil {
			killed++
		}
	}
	if killed < 5 {
		t.Errorf("only %d processes were killed", killed)
	}
	reg.misbehave(nil)
	if _, err := s.GC(t.Context(), time.Hour, false); err != nil {
		t.Fatal(err)
	}
	for _, l := range leftovers(t, s) {
		if strings.HasPrefix(l, "staging/") {
			t.Errorf("left after gc: %s", l)
		}
	}
	img, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := cat(t, img.Path, "/x3"); got != strings.Repeat("3", 2<<20) {
		t.Errorf("/x3 has %d other bytes", len(got))
	}
}

func TestGC(t *testing.T) {
	reg := newRegistry(t)
	shared := gz(t, layer(t, f{name: "x", body: "shared"}))
	one := gz(t, layer(t, f{name: "y", body: "1"}))
	two := gz(t, layer(t, f{name: "y", body: "2"}))
	reg.push(t, "r", "1", ociManifest, nil, shared, one)
	reg.push(t, "r", "2", ociManifest, nil, shared, two)
	s := openStore(t, image.Options{})
	a, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := resolve(t, s, reg.host()+"/r:2", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// Foreign things that must stay.
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("v"), 0o600); err != nil {
		t.Fatal(err)
	}
	hex := strings.Repeat("0", 64)
	if err := os.Symlink(filepath.Dir(victim), filepath.Join(s.Dir(), "images", "sha256-"+hex)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(s.Dir(), "blobs", "sha256-"+hex)); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"images/notes", "blobs/notes", "staging/notes", "refs/notes", "locks/notes"} {
		if err := os.WriteFile(filepath.Join(s.Dir(), p), []byte("n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	gc := func(idle time.Duration, dry bool) image.Report {
		t.Helper()
		r, err := s.GC(t.Context(), idle, dry)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := json.Marshal(r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := gc(0, false); len(r.Images) != 0 || r.Held != 2 || r.Blobs != 0 {
		t.Errorf("with both held: %+v", r)
	}
	a.Close()
	if r := gc(time.Hour, false); len(r.Images) != 0 || r.Blobs != 0 {
		t.Errorf("used just now: %+v", r)
	}
	if r := gc(0, true); len(r.Images) != 1 || r.Blobs != 1 || r.Bytes == 0 {
		t.Errorf("dry run: %+v", r)
	}
	if _, err := s.Inspect(a.Digest); err != nil {
		t.Errorf("a dry run removed something: %v", err)
	}
	if r := gc(0, false); len(r.Images) != 1 || r.Images[0].Digest != a.Digest || r.Blobs != 1 || r.Refs != 1 || r.Held != 1 {
		t.Errorf("one not held: %+v", r)
	}
	if _, err := s.Inspect(a.Digest); fault.KindOf(err) != fault.NotFound {
		t.Errorf("Inspect of a removed image: %v", err)
	}
	if cat(t, b.Path, "/x") != "shared" {
		t.Error("the held image changed")
	}
	// Another process's hold counts as well.
	b.Close()
	l, err := fsx.TryLock(b.LockPath, true)
	if err != nil {
		t.Fatal(err)
	}
	if r := gc(0, false); r.Held != 1 {
		t.Errorf("held by a lock of another: %+v", r)
	}
	if err := s.Remove(t.Context(), b.Digest); fault.KindOf(err) != fault.Busy {
		t.Errorf("Remove of a held image: %v; want %s", err, fault.Busy)
	}
	l.Close()
	if err := s.Remove(t.Context(), b.Digest[7:19]); err != nil {
		t.Errorf("Remove: %v", err)
	}
	if r := gc(0, false); r.Blobs != 2 {
		t.Errorf("after Remove: %+v", r)
	}
	for _, p := range []string{"images/notes", "blobs/notes", "staging/notes", "refs/notes", "locks/notes", "images/sha256-" + hex, "blobs/sha256-" + hex} {
		if _, err := os.Lstat(filepath.Join(s.Dir(), p)); err != nil {
			t.Errorf("something foreign is gone: %v", err)
		}
	}
	if _, err := os.Stat(victim); err != nil {
		t.Error("gc followed a symlink")
	}
}

func TestOpenWithoutRoom(t *testing.T) {
	ro := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(ro, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := image.Open(filepath.Join(ro, "images"), image.Options{})
	if fault.KindOf(err) != fault.System || fault.HintOf(err) == "" || !strings.Contains(err.Error(), ro) {
		t.Errorf("error = %v", err)
	}
}

// TestDiskFull fills a small filesystem at many sizes, so that every write
// meets the wall once.
func TestDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small tmpfs")
	}
	reg := newRegistry(t)
	reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x", body: strings.Repeat("0123456789abcdef", 64<<10)}, f{name: "y", body: strings.Repeat("z", 100000)})))
	mnt := t.TempDir()
	ok := false
	for kib := 8; kib < 8192 && !ok; kib += 24 + kib/8 {
		if err := syscall.Mount("tmpfs", mnt, "tmpfs", 0, "size="+strconv.Itoa(kib)+"k"); err != nil {
			t.Skipf("needs to mount a tmpfs: %v", err)
		}
		s, err := image.Open(filepath.Join(mnt, "images"), image.Options{})
		if err == nil {
			_, err = resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
			if ok = err == nil; !ok {
				for _, l := range leftovers(t, s) {
					if !strings.HasPrefix(l, "blobs/") {
						t.Errorf("%d KiB: left: %s", kib, l)
					}
				}
			}
		}
		if err != nil && (!strings.Contains(err.Error(), "is full") || !strings.Contains(err.Error(), mnt) || !strings.Contains(fault.HintOf(err), "vk gc")) {
			t.Errorf("%d KiB: error = %v, hint %q", kib, err, fault.HintOf(err))
		}
		if err := syscall.Unmount(mnt, syscall.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
	if !ok {
		t.Error("never enough room")
	}
}
