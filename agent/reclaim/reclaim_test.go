package reclaim_test

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"

	"virtkit/agent/reclaim"
)

const calm = "some avg10=0.00 avg60=3.00 avg300=1.00 total=123\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"

// kernel is a fake of the files.
type kernel struct {
	files map[string]string
	wrote []string
	fail  func(path, text string) error
}

func (k *kernel) reclaimer(keep int64) *reclaim.Reclaimer {
	return &reclaim.Reclaimer{
		Keep: keep,
		Read: func(p string) ([]byte, error) {
			s, ok := k.files[p]
			if !ok {
				return nil, &fs.PathError{Op: "open", Path: p, Err: fs.ErrNotExist}
			}
			return []byte(s), nil
		},
		Write: func(p, text string) error {
			k.wrote = append(k.wrote, p[strings.LastIndexByte(p, '/')+1:]+": "+strings.TrimSpace(text))
			if k.fail != nil {
				return k.fail(p, text)
			}
			return nil
		},
	}
}

func TestByAge(t *testing.T) {
	gens := "memcg     1 /\n node     0\n" +
		"         10     180404      12304       9876\n         11     120404       0       876\n         12      60404        104        876\n         13       1404        104        876\n" +
		"memcg    23 /vk/x\n node     0\n          0      80404      1       2 \n          1      20404        3        4\n" +
		" node     1\n          4      80404      1       2 \n          5      20404        3        4\n          6      20404        3        4\n          7      20        3        4\n" +
		"memcg    24 /vk/empty\n node     0\n"
	k := &kernel{files: map[string]string{"/proc/pressure/memory": calm, "/sys/kernel/debug/lru_gen": gens}}
	r := k.reclaimer(0)
	if err := r.Possible(); err != nil || r.Every() != reclaim.ByAge {
		t.Fatalf("Possible = %v, every %v", err, r.Every())
	}
	did, err := r.Tick()
	want := []string{
		"lru_gen: - 1 0 10 0", "lru_gen: + 1 0 13 0", // all but the three youngest, then a new one
		"lru_gen: + 23 0 1 0",
		"lru_gen: - 23 1 4 0", "lru_gen: + 23 1 7 0",
	}
	if !did || err != nil || !slices.Equal(k.wrote, want) {
		t.Errorf("Tick = %v, %v, wrote\n%q\nwant\n%q", did, err, k.wrote, want)
	}
}

func TestNotUnderPressure(t *testing.T) {
	for avg, want := range map[string]bool{"0.00": true, "0.99": true, "1.00": false, "35.12": false} {
		k := &kernel{files: map[string]string{
			"/proc/pressure/memory":     "some avg10=" + avg + " avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00\n",
			"/sys/kernel/debug/lru_gen": "memcg     1 /\n node     0\n 1 5000 1 1\n 2 1 1 1\n",
			"/proc/meminfo":             "Active(file):  900000 kB\nInactive(file): 100000 kB\n",
		}}
		for _, keep := range []int64{0, 1 << 20} {
			if did, err := k.reclaimer(keep).Tick(); did != want || err != nil {
				t.Errorf("avg10 %s, floor %d: did %v, %v; want %v", avg, keep, did, err, want)
			}
		}
		if (len(k.wrote) > 0) != want {
			t.Errorf("avg10 %s: wrote %q", avg, k.wrote)
		}
	}
}

func TestAFloorIsKept(t *testing.T) {
	k := &kernel{files: map[string]string{
		"/proc/pressure/memory": calm,
		"/proc/meminfo":         "Cached:         2000000 kB\nActive(file):   100000 kB\nInactive(file): 200000 kB\nShmem: 1700000 kB\n",
	}}
	r := k.reclaimer(100000 << 10)
	if err := r.Possible(); err != nil || r.Every() != reclaim.ByFloor {
		t.Fatalf("Possible = %v, every %v", err, r.Every())
	}
	if did, err := r.Tick(); !did || err != nil || !slices.Equal(k.wrote, []string{"memory.reclaim: 204800000 swappiness=0"}) {
		t.Errorf("did %v, %v, wrote %q", did, err, k.wrote)
	}
	k.wrote, k.fail = nil, func(_, text string) error {
		if strings.Contains(text, "swappiness") {
			return fmt.Errorf("write: %w", syscall.EINVAL)
		}
		return fmt.Errorf("write: %w", syscall.EAGAIN)
	}
	if did, err := r.Tick(); !did || err != nil || !slices.Equal(k.wrote, []string{"memory.reclaim: 204800000 swappiness=0", "memory.reclaim: 204800000"}) {
		t.Errorf("an older kernel: did %v, %v, wrote %q", did, err, k.wrote)
	}
	k.wrote, k.files["/proc/meminfo"] = nil, "Active(file):   100000 kB\nInactive(file): 4000 kB\n"
	if did, err := r.Tick(); did || err != nil || len(k.wrote) > 0 {
		t.Errorf("just above the floor: did %v, %v, wrote %q", did, err, k.wrote)
	}
}

func TestWhatTheKernelLacksOrRefuses(t *testing.T) {
	k := &kernel{files: map[string]string{"/proc/pressure/memory": calm}}
	if err := k.reclaimer(0).Possible(); err == nil || !strings.Contains(err.Error(), "lru_gen") {
		t.Errorf("no multi-gen LRU: %v", err)
	}
	delete(k.files, "/proc/pressure/memory")
	if err := k.reclaimer(1).Possible(); err == nil || !strings.Contains(err.Error(), "pressure") {
		t.Errorf("no PSI: %v", err)
	}
	k.files["/proc/pressure/memory"] = calm
	k.files["/sys/kernel/debug/lru_gen"] = "memcg     1 /\n node     0\n 1 5000 1 1\n 2 1 1 1\nmemcg     9 /gone\n node     0\n 1 5000 1 1\n 2 1 1 1\n"
	for _, e := range []error{syscall.EINVAL, syscall.ERANGE} { // the group went, or the kernel was faster
		k.wrote, k.fail = nil, func(string, string) error { return e }
		if did, err := k.reclaimer(0).Tick(); !did || err != nil || len(k.wrote) != 2 {
			t.Errorf("%v: did %v, %v, wrote %q", e, did, err, k.wrote)
		}
	}
	k.fail = func(string, string) error { return syscall.EACCES }
	if _, err := k.reclaimer(0).Tick(); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a refusal is not told: %v", err)
	}
}
