package atop

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A process that is about to sleep says that it sleeps before it has left its
// processor, and waits nowhere then. It is looked at again, though it does not
// run again; and not without end where the kernel does not tell.
func TestSettles(t *testing.T) {
	r := New(t.Logf)
	defer r.Close()
	root := t.TempDir() + "/"
	write := func(name, text string) {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for pid, threads := range map[string]string{"7": "1", "8": "2"} {
		f := strings.Fields("S 1 7 7 0 -1 4194304 10 0 0 0 1 1 0 0 20 0 " + threads + " 0 100 2920000 400 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 0")
		stat := pid + " (sh) " + strings.Join(f, " ") + "\n"
		for _, d := range []string{pid + "/", pid + "/task/" + pid + "/", pid + "/task/9/"} {
			if strings.HasSuffix(d, "/9/") && threads == "1" {
				continue
			}
			write(d+"stat", stat)
			write(d+"schedstat", "1000 0 3\n")
			write(d+"wchan", "0")
		}
	}
	r.root, r.forked = root, true
	wchans := func() string {
		r.Sample(nil)
		var out []string
		for i := range r.out.Procs {
			if p := &r.out.Procs[i]; !p.Ended() { // of this machine, where one may have
				out = append(out, p.WChan)
			}
		}
		return strings.Join(out, " ")
	}
	if got := wchans(); got != "- -" {
		t.Fatalf("at first: %q", got)
	}
	for _, d := range []string{"7/", "8/task/8/", "8/task/9/"} {
		write(d+"wchan", "pipe_read")
	}
	if got := wchans(); got != "pipe_read pipe_read" {
		t.Errorf("later, with no turn in between: %q", got)
	}
	for _, d := range []string{"7/", "8/task/8/", "8/task/9/"} {
		write(d+"wchan", "elsewhere")
	}
	if got := wchans(); got != "pipe_read pipe_read" {
		t.Errorf("who has not run is looked at again and again: %q", got)
	}
}

// The kernel tells of an end while the process still runs to it: it is not told
// to live then. Another one of its number is.
func TestStillEnding(t *testing.T) {
	r := New(t.Logf)
	defer r.Close()
	r.root = t.TempDir() + "/"
	if err := os.Mkdir(r.root+"7", 0o755); err != nil {
		t.Fatal(err)
	}
	alive := func(state, flags string) bool {
		f := state + " 1 7 7 0 -1 " + flags + " 10 0 0 0 1 1 0 0 20 0 1 0 100 2920000 400 18446744073709551615" + strings.Repeat(" 0", 26)
		if err := os.WriteFile(r.root+"7/stat", []byte("7 (cat) "+f+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		r.ended, r.forked = map[int]bool{7: true}, true
		r.Sample(nil)
		for i := range r.out.Procs {
			if p := &r.out.Procs[i]; p.PID == 7 && !p.Ended() {
				return true
			}
		}
		return false
	}
	for _, c := range []struct {
		state, flags string
		want         bool
	}{{"R", "4194308", false}, {"Z", "4227084", false}, {"R", "4194304", true}, {"S", "4194304", true}} {
		if got := alive(c.state, c.flags); got != c.want {
			t.Errorf("state %s, flags %s: told to live is %v", c.state, c.flags, got)
		}
	}
}
