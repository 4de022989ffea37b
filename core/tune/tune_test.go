package tune_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	toml "github.com/pelletier/go-toml/v2"

	"virtkit/core/fault"
	"virtkit/core/tune"
)

func TestDecide(t *testing.T) {
	const gib = 1024
	base := tune.Input{Budget: 8 * gib, Committed: 6 * gib, Running: 1, Typical: 2 * gib, Total: 32 * gib, Available: 23040, Last: 1}
	for _, tc := range []struct {
		name   string
		change func(*tune.Input)
		want   int
		est    int
	}{
		{"as the manual has it", func(*tune.Input) {}, 2, 2},
		{"full", func(in *tune.Input) { in.Committed = 8 * gib; in.Running = 4; in.Last = 4 }, 4, 4},
		{"over the budget", func(in *tune.Input) { in.Committed = 9 * gib; in.Running = 4; in.Last = 9 }, 4, 4},
		{"falls at once", func(in *tune.Input) { in.Last = 12 }, 2, 2},
		{"rises by one", func(in *tune.Input) { in.Committed, in.Running, in.Last = 0, 0, 2 }, 3, 3},
		{"rises by one from what runs at first", func(in *tune.Input) { in.Committed, in.Running, in.Last = 0, 0, 0 }, 1, 1},
		{"host below its headroom", func(in *tune.Input) { in.Available = 4915; in.Committed = 2 * gib; in.Last = 9 }, 1, 1},
		{"host below its headroom, nothing runs", func(in *tune.Input) { in.Available, in.Committed, in.Running = 0, 0, 0 }, 1, 1},
		{"host has room for one", func(in *tune.Input) { in.Committed, in.Running, in.Last, in.Available = 0, 3, 9, 4915+2*gib }, 4, 4},
		{"host unreadable", func(in *tune.Input) { in.Total, in.Available, in.Committed, in.Last = 0, 0, 0, 9 }, 5, 5},
		{"ceiling", func(in *tune.Input) { in.Committed, in.Last, in.Ceilings = 0, 3, []int{0, 3, 7} }, 3, 4},
		{"ceilings: the smallest", func(in *tune.Input) { in.Committed, in.Last, in.Ceilings = 0, 9, []int{3, 2} }, 2, 5},
		{"ceiling alone", func(in *tune.Input) { in.Budget, in.Ceilings = 0, []int{6} }, 6, 0},
		{"no typical size", func(in *tune.Input) { in.Typical, in.Last = 0, 3 }, 4, 4},
	} {
		in := base
		tc.change(&in)
		d, ok := tune.Decide(in)
		if !ok || d.Concurrency != tc.want || d.Estimate != tc.est {
			t.Errorf("%s: %+v, want %d (estimate %d)", tc.name, d, tc.want, tc.est)
		}
	}
	if d, ok := tune.Decide(tune.Input{Running: 3, Total: 1, Available: 1}); ok {
		t.Errorf("with nothing to go by: %+v", d)
	}
	d, _ := tune.Decide(base)
	if want := "virtkit: runner concurrency 2 (estimate 2, ceiling none); 6144 of 8192 MiB committed by 1 job(s), typical job 2048 MiB, 23040 of 32768 MiB host memory available"; d.Line() != want {
		t.Errorf("%s\nwant\n%s", d.Line(), want)
	}
	base.Total, base.Ceilings = 0, []int{1}
	d, _ = tune.Decide(base)
	if want := "virtkit: runner concurrency 1 (estimate 2, ceiling 1); 6144 of 8192 MiB committed by 1 job(s), typical job 2048 MiB, host memory unreadable"; d.Line() != want {
		t.Errorf("%s\nwant\n%s", d.Line(), want)
	}
}

// Without a budget the line says so, and what holds the number.
func TestLineWithoutABudget(t *testing.T) {
	d, ok := tune.Decide(tune.Input{Running: 3, Total: 32768, Available: 1024, Ceilings: []int{0, 7, 5}})
	if want := "virtkit: runner concurrency 5 (estimate none, ceiling 5); no memory budget, 3 job(s), 1024 of 32768 MiB host memory available"; !ok || d.Line() != want {
		t.Errorf("%s\nwant\n%s", d.Line(), want)
	}
}

// TestDecideHolds: whatever the input, the number is at least 1, within the
// ceilings, and at most one above the last one.
func TestDecideHolds(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		in := tune.Input{Budget: r.Int64N(1 << 20), Committed: r.Int64N(1 << 21), Running: r.IntN(50), Typical: r.Int64N(1 << 14),
			Total: r.Int64N(1 << 20), Available: r.Int64N(1 << 20), Last: r.IntN(60), Ceilings: []int{r.IntN(20), r.IntN(20)}}
		d, ok := tune.Decide(in)
		if !ok {
			continue
		}
		for _, c := range in.Ceilings {
			if c > 0 && d.Concurrency > c {
				t.Fatalf("%+v from %+v is above a ceiling", d, in)
			}
		}
		if d.Concurrency < 1 || in.Budget > 0 && in.Last > 0 && d.Estimate > in.Last+1 {
			t.Fatalf("%+v from %+v", d, in)
		}
		if in.Budget > 0 && in.Total > 0 && in.Available*100 < in.Total*15 && d.Estimate > max(1, in.Running) {
			t.Fatalf("%+v from %+v adds to a host that is full", d, in)
		}
	}
}

// parts of configurations, in which the key and its like stand in all places.
var heads = []string{
	"concurrent = 4\n", "concurrent=4", "  concurrent\t=  4   # jobs at once\n", "\"concurrent\" = 4\r\n", "'concurrent' = 0x0F # hex\n",
	"concurrent = 1_000\n", "concurrent = +7\n", "\ufeffconcurrent = 4\n", "concurrent = 0b101\r\n",
}

var befores = []string{
	"# concurrent = 9\n", "check_interval = 0\r\n", "log_level = 'concurrent = 3'\n", "note = \"\"\"\nconcurrent = 3\n\"\"\"\n",
	"x = '''\nconcurrent = 8\n[runners]\n'''\n", "list = [\n  1, # concurrent = 2\n  2,\n]\n", "nan = nan\ninf = -inf\n",
	"when = 1979-05-27T07:32:00Z\nday = 1979-05-27\nlocal = 07:32:00\n", "a.concurrent = 5\n", "concurrent_max = 11\n", "\n\n", "tok = \"glrt-\\u00e9\\n\"\n",
	"inline = { concurrent = 6, b = [1.5, 2] }\n", "multi = [\n\"\"\"\nconcurrent = 77\n\"\"\",\n]\n",
}

var afters = []string{
	"[session_server]\n  session_timeout = 1800\n", "[[runners]]\n  name = \"a\"\n  token = \"secret\"\nconcurrent = 10\n  [runners.custom]\n    config_args = [\"concurrent = 4\"]\n",
	"[[runners]]\r\n  limit = 3\r\n  'concurrent' = 4\r\n", "# end", "[\"concurrent = 4\"]\nconcurrent = 4\n",
}

// TestEdit is the property: only that number differs, in the text and in what
// it means.
func TestEdit(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	pick := func(from []string, most int) (out string) {
		seen := map[int]bool{}
		for range r.IntN(most + 1) {
			i := r.IntN(len(from))
			if !seen[i] {
				seen[i] = true
				out += from[i]
			}
		}
		return out
	}
	for range 3000 {
		head := heads[r.IntN(len(heads))]
		before := pick(befores, 4)
		if strings.HasPrefix(head, "\ufeff") {
			before = ""
		}
		if !strings.HasSuffix(head, "\n") {
			head += "\n"
		}
		text := before + head + pick(befores, 0) + pick(afters, 3)
		var old map[string]any
		if err := toml.Unmarshal([]byte(strings.TrimPrefix(text, "\ufeff")), &old); err != nil {
			continue // a combination that is no TOML
		}
		n := 1 + r.IntN(99999)
		out, err := tune.Edit([]byte(text), n)
		if err != nil {
			t.Fatalf("%v in %q", err, text)
		}
		if got, err := tune.Concurrent(out); err != nil || got != n {
			t.Fatalf("%d, %v, want %d, in %q", got, err, n, out)
		}
		// In the text: what is before and behind the number is what it was.
		num := fmt.Sprint(n)
		at := len(before) + strings.IndexAny(head, "=") + 1
		at += len(text[at:]) - len(strings.TrimLeft(text[at:], " \t"))
		end := at + strings.IndexFunc(text[at:], func(c rune) bool { return !strings.ContainsRune("+-_0123456789abcdefxABCDEF", c) })
		if want := text[:at] + num + text[end:]; string(out) != want {
			t.Fatalf("edited %q\nto     %q\nwant   %q", text, out, want)
		}
	}
}

func TestEditRefuses(t *testing.T) {
	for text, part := range map[string]string{
		"":                                   "has no concurrent",
		"[a]\nconcurrent = 3\n":              "has no concurrent",
		"x = '''\nconcurrent = 3\n'''\n":     "has no concurrent",
		"concurrent = \"3\"\n":               "expected a number",
		"concurrent = -3\n":                  "expected a number",
		"concurrent = 3.0\n":                 "expected a number",
		"concurrent = 3\nconcurrent = 4\n":   "TOML",
		"concurrent = \n":                    "TOML",
		"\xff\xfe":                           "TOML",
		"conc\\u0075rrent = 3\n":             "TOML",
		"\"conc\\u0075rrent\" = 3\n":         "line of its own",
		"concurrent . x = 3\nconcurrent = 2": "TOML",
	} {
		if out, err := tune.Edit([]byte(text), 5); err == nil || !strings.Contains(err.Error(), part) || fault.KindOf(err) != fault.Usage {
			t.Errorf("%q: %q, %v, want an error with %q", text, out, err, part)
		}
	}
}

func FuzzEdit(f *testing.F) {
	for _, h := range heads {
		f.Add([]byte(befores[3] + h + afters[1]))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		out, err := tune.Edit(b, 123)
		if err != nil {
			return
		}
		back, err := tune.Edit(out, 4)
		again, err2 := tune.Edit(b, 4)
		if err != nil || err2 != nil || string(back) != string(again) {
			t.Errorf("%q → %q → %q (%v); at once %q (%v)", b, out, back, err, again, err2)
		}
	})
}

const conf = "# the runner\nconcurrent = 4 # jobs\ncheck_interval = 0\n\n[[runners]]\n  token = \"glrt-secret\"\n"

// site is a host with a runner and vk-runnerctl's configuration.
type site struct {
	t                     *testing.T
	ctl, config, desired  string
	now                   time.Time
	min, max, cool, stale int
	more                  string
}

func newSite(t *testing.T) *site {
	d := t.TempDir()
	s := &site{t: t, ctl: filepath.Join(d, "runnerctl.toml"), config: filepath.Join(d, "config.toml"), desired: filepath.Join(d, "state", tune.DesiredFile),
		now: time.Now().Add(time.Hour), min: 1, max: 12, cool: 60, stale: 300}
	s.write(s.config, conf, 0o640)
	return s
}

func (s *site) write(path, text string, mode os.FileMode) {
	s.t.Helper()
	os.Remove(path)
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		s.t.Fatal(err)
	}
	os.Chmod(path, mode)
}

func (s *site) ask(n int) {
	s.t.Helper()
	if err := tune.WriteDesired(filepath.Dir(filepath.Dir(s.desired)), n); err != nil {
		s.t.Fatal(err)
	}
	os.Chtimes(s.desired, s.now, s.now)
}

func (s *site) control() (string, error) {
	s.t.Helper()
	s.write(s.ctl, fmt.Sprintf("runner_config = %q\ndesired_file = %q\nmin = %d\nmax = %d\ncooldown_secs = %d\nstale_secs = %d\n%s",
		s.config, s.desired, s.min, s.max, s.cool, s.stale, s.more), 0o644)
	return tune.Control(context.Background(), s.ctl, os.Getuid(), s.now)
}

func (s *site) concurrent() int {
	s.t.Helper()
	b, err := os.ReadFile(s.config)
	if err != nil {
		s.t.Fatal(err)
	}
	if want := strings.Replace(conf, "4", "N", 1); strings.Replace(string(b), strings.Fields(string(b))[5], "N", 1) != want {
		s.t.Errorf("%q is more than the number changed", b)
	}
	n, err := tune.Concurrent(b)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *site) is(want int, part string) {
	s.t.Helper()
	line, err := s.control()
	if err != nil || s.concurrent() != want || !strings.Contains(line, part) {
		s.t.Errorf("concurrent %d, %q, %v; want %d, %q", s.concurrent(), line, err, want, part)
	}
	os.Chtimes(s.config, s.now, s.now) // as if it had been written now
}

func TestControl(t *testing.T) {
	s := newSite(t)
	s.ask(7)
	s.is(7, "concurrent 4 → 7: 7 asked for, range 1 to 12")
	st, err := os.Stat(s.config)
	if err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("mode %v", st.Mode())
	}
	orig, err := os.ReadFile(s.config + ".vk-orig")
	if err != nil || string(orig) != conf {
		t.Errorf("the original is %q, %v", orig, err)
	}
	// Not again so soon; the same is no change.
	s.ask(3)
	s.is(7, "stays 7")
	s.now = s.now.Add(61 * time.Second)
	s.ask(3)
	s.is(3, "7 → 3")
	s.is(3, "stays 3")
	// The range holds.
	s.now = s.now.Add(61 * time.Second)
	s.ask(50000)
	s.is(12, "3 → 12: 50000 asked for")
	s.min = 2
	s.now = s.now.Add(61 * time.Second)
	s.ask(1)
	s.is(2, "12 → 2")
	// What is asked for no longer counts: up, a step at a time.
	s.now = s.now.Add(301 * time.Second)
	s.is(3, "the request is 5m1s old")
	s.now = s.now.Add(61 * time.Second)
	os.Remove(s.desired)
	s.is(4, "nothing is asked for")
	s.max = 4
	s.now = s.now.Add(61 * time.Second)
	s.is(4, "stays 4")
	if orig, err := os.ReadFile(s.config + ".vk-orig"); err != nil || string(orig) != conf {
		t.Errorf("the original is %q, %v", orig, err)
	}
	left, _ := filepath.Glob(filepath.Dir(s.config) + "/.config*")
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestControlDistrusts: the file with the number is somebody else's.
func TestControlDistrusts(t *testing.T) {
	for name, make := range map[string]func(s *site){
		"a word":      func(s *site) { s.write(s.desired, "twelve", 0o644) },
		"0":           func(s *site) { s.write(s.desired, "0", 0o644) },
		"negative":    func(s *site) { s.write(s.desired, "-5", 0o644) },
		"huge":        func(s *site) { s.write(s.desired, strings.Repeat("1", 60), 0o644) },
		"long":        func(s *site) { s.write(s.desired, strings.Repeat(" ", 5000)+"9", 0o644) },
		"two numbers": func(s *site) { s.write(s.desired, "3\nmax = 99", 0o644) },
		"symlink": func(s *site) {
			os.Remove(s.desired)
			s.write(s.desired+".other", "9", 0o600)
			os.Symlink(s.desired+".other", s.desired)
		},
		"pipe":      func(s *site) { os.Remove(s.desired); syscall.Mkfifo(s.desired, 0o644) },
		"directory": func(s *site) { os.Remove(s.desired); os.Mkdir(s.desired, 0o755) },
		"tomorrow":  func(s *site) { s.ask(9); os.Chtimes(s.desired, s.now.Add(24*time.Hour), s.now.Add(24*time.Hour)) },
	} {
		s := newSite(t)
		s.ask(9)
		make(s)
		line, err := s.control()
		if err != nil || s.concurrent() != 5 || strings.Contains(line, "twelve") {
			t.Errorf("%s: concurrent %d, %q, %v; want a step up", name, s.concurrent(), line, err)
		}
	}
}

func TestControlRefuses(t *testing.T) {
	for part, change := range map[string]func(s *site){
		"min is 0":                func(s *site) { s.min = 0 },
		"max is 2, expected 3":    func(s *site) { s.min, s.max = 3, 2 },
		"stale_secs is 0":         func(s *site) { s.stale = 0 },
		"runner_config is \"\"":   func(s *site) { s.config = "" },
		"absolute path":           func(s *site) { s.desired = "here/x" },
		"maxx":                    func(s *site) { s.more = "maxx = 3\n" },
		"reload_command is empty": func(s *site) { s.more = "reload_command = []\n" },
	} {
		s := newSite(t)
		config := s.config
		change(s)
		if line, err := s.control(); err == nil || !strings.Contains(err.Error(), part) || fault.KindOf(err) != fault.Usage {
			t.Errorf("%q, %v, want %q", line, err, part)
		}
		if b, _ := os.ReadFile(config); string(b) != conf {
			t.Errorf("%s: changed to %q", part, b)
		}
	}
	s := newSite(t)
	s.ask(9)
	if _, err := s.control(); err != nil {
		t.Fatal(err)
	}
	os.Chmod(s.ctl, 0o664)
	if _, err := tune.Control(context.Background(), s.ctl, os.Getuid(), s.now); fault.KindOf(err) != fault.Denied {
		t.Errorf("a file that others may write: %v", err)
	}
	os.Chmod(s.ctl, 0o644)
	if _, err := tune.Control(context.Background(), s.ctl, os.Getuid()+1, s.now); fault.KindOf(err) != fault.Denied {
		t.Errorf("a file of another user: %v", err)
	}
	os.Rename(s.ctl, s.ctl+"2")
	os.Symlink(s.ctl+"2", s.ctl)
	if _, err := tune.Control(context.Background(), s.ctl, os.Getuid(), s.now); err == nil {
		t.Error("a symlink is followed")
	}
	// Mistyped TOML of the runner: nothing happens.
	s = newSite(t)
	s.ask(9)
	s.write(s.config, "concurrent = 4\n[[", 0o600)
	if _, err := s.control(); err == nil || !strings.Contains(err.Error(), s.config) {
		t.Errorf("broken configuration: %v", err)
	}
}

func TestControlReloads(t *testing.T) {
	s := newSite(t)
	s.ask(9)
	mark := filepath.Join(t.TempDir(), "reloaded")
	s.more = fmt.Sprintf("reload_command = [\"sh\", \"-c\", \"echo $PATH > %s\"]\n", mark)
	s.is(9, "4 → 9")
	if _, err := os.Stat(mark); err != nil {
		t.Error(err)
	}
	os.Remove(mark)
	s.is(9, "stays")
	if _, err := os.Stat(mark); err == nil {
		t.Error("reloaded without a change")
	}
	s.now = s.now.Add(time.Minute)
	s.ask(8)
	s.more = "reload_command = [\"sh\", \"-c\", \"echo no such runner; exit 3\"]\n"
	line, err := s.control()
	if err == nil || !strings.Contains(err.Error(), "no such runner") || s.concurrent() != 8 || line == "" {
		t.Errorf("%q, %v, concurrent %d", line, err, s.concurrent())
	}
	// What it says is told in part, however much that is.
	s.now = s.now.Add(time.Hour)
	s.ask(7)
	s.more = "reload_command = [\"sh\", \"-c\", \"head -c 100000 /dev/zero | tr '\\\\0' x; exit 1\"]\n"
	if _, err := s.control(); err == nil || !strings.Contains(err.Error(), "xxxx") || len(err.Error()) > 1000 {
		t.Errorf("of a talkative command: %.2000v", err)
	}
}

// The file keeps its group when that alone is another's, as its owner.
func TestGroupStays(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to give a file to a group")
	}
	for _, who := range [][2]int{{0, 12345}, {12345, 0}, {12345, 54321}} {
		s := newSite(t)
		if err := os.Chown(s.config, who[0], who[1]); err != nil {
			t.Fatal(err)
		}
		s.ask(9)
		s.is(9, "4 → 9")
		for _, p := range []string{s.config, s.config + tune.OrigSuffix} {
			var st syscall.Stat_t
			if err := syscall.Stat(p, &st); err != nil || int(st.Uid) != who[0] || int(st.Gid) != who[1] || st.Mode&0o777 != 0o640 {
				t.Errorf("%s of %v is %d:%d, mode %o, %v", filepath.Base(p), who, st.Uid, st.Gid, st.Mode, err)
			}
		}
	}
}

func TestSet(t *testing.T) {
	s := newSite(t)
	was, err := tune.Set(s.config, 6)
	if err != nil || was != 4 || s.concurrent() != 6 {
		t.Errorf("%d, %v, concurrent %d", was, err, s.concurrent())
	}
	if was, err := tune.Set(s.config, 6); err != nil || was != 6 {
		t.Errorf("again: %d, %v", was, err)
	}
	// A link stays one.
	link := filepath.Join(t.TempDir(), "link.toml")
	os.Symlink(s.config, link)
	if _, err := tune.Set(link, 7); err != nil || s.concurrent() != 7 {
		t.Errorf("%v, concurrent %d", err, s.concurrent())
	}
	if st, _ := os.Lstat(link); st.Mode()&os.ModeSymlink == 0 {
		t.Error("the link was replaced")
	}
	if os.Getuid() == 0 {
		os.Chown(s.config, 12345, 12345)
		if _, err := tune.Set(s.config, 8); fault.KindOf(err) != fault.Denied || s.concurrent() != 7 {
			t.Errorf("another user's file: %v, concurrent %d", err, s.concurrent())
		}
	}
}

// TestKill: kill -9 at any moment leaves the old file or the new one, and a
// whole original.
func TestKill(t *testing.T) {
	if path := os.Getenv("TUNE_TEST_CONFIG"); path != "" {
		for n := 1; ; n++ {
			tune.Set(path, 1+n%9)
		}
	}
	s := newSite(t)
	r := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		c := exec.Command(os.Args[0], "-test.run=^TestKill$")
		c.Env = append(os.Environ(), "TUNE_TEST_CONFIG="+s.config)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		// At some moment after it has begun to write.
		before, _ := os.Stat(s.config)
		for {
			now, err := os.Stat(s.config)
			if err != nil {
				t.Fatal(err)
			}
			if !os.SameFile(before, now) {
				break
			}
		}
		for range r.IntN(2000) {
			os.Stat(s.config)
		}
		c.Process.Kill()
		c.Wait()
		s.concurrent()
		if orig, err := os.ReadFile(s.config + ".vk-orig"); err != nil || string(orig) != conf {
			t.Fatalf("the original is %q, %v", orig, err)
		}
	}
}
