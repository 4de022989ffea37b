package e2e_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Guests of a kind: the first boots and leaves its state, the next ones start
// from that and share nothing that must be a guest's own. A state that went bad
// costs a boot.
func TestGuestsFromTemplates(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	on := h
	vk := func(args ...string) string {
		t.Helper()
		out, err := on.Run(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	states := func() []string {
		t.Helper()
		s, err := filepath.Glob(filepath.Join(h.State, "templates", "guests", "*.state"))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	// A size that no other test asks for.
	guest := func(name string) (own []string, restored bool) {
		t.Helper()
		vk("run", "-d", "--mem", "230M", "--name", name, img, "sleep", "1000")
		defer vk("stop", name)
		out := vk("exec", name, "sh", "-c", "cat /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | od -An -tx1; hostname; ip -4 -o addr show eth0; ping -c 1 -W 20 $(ip route | sed -n 's/^default via \\([0-9.]*\\).*/\\1/p') | grep '1 packets received'")
		return strings.Split(strings.TrimSpace(out), "\n"), regexp.MustCompile(`\[guest restored from template [0-9a-f]+\]\n($|[^\[])`).MatchString(vk("logs", name))
	}
	before := states()
	first, restored := guest("first")
	if restored {
		t.Error("the first of a kind was not booted")
	}
	made := newOnes(states(), before)
	if len(made) != 1 {
		t.Fatalf("it left %q beside %q", made, before)
	}
	whole, err := os.Stat(made[0])
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	note := func(name string, own []string) {
		for i, v := range own[:3] {
			if other := seen[v]; other != "" {
				t.Errorf("%s and %s share %q (value %d)", name, other, v, i)
			}
			seen[v] = name
		}
	}
	note("first", first)
	for _, name := range []string{"second", "third"} {
		if name == "third" {
			// At another place of another network: its card has another address.
			other := *h
			other.Conf = filepath.Join(t.TempDir(), "config.toml")
			if err := os.WriteFile(other.Conf, []byte(strings.Replace(config, "[net]\n", "[net]\nsubnet = \"10.200.77.0/24\"\n", 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			on = &other
		}
		own, restored := guest(name)
		if on = h; name == "third" && !strings.Contains(own[3], "10.200.77.") {
			t.Errorf("its address: %q", own[3])
		}
		if !restored {
			t.Errorf("%s was booted", name)
		}
		note(name, own)
	}
	for what, spoil := range map[string]func() error{
		"cut":   func() error { return os.Truncate(made[0], whole.Size()*2/3) },
		"empty": func() error { return os.Truncate(made[0], 0) },
		"other": func() error { return os.WriteFile(made[0], make([]byte, 1<<20), 0o600) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if _, restored := guest("after-" + what); restored {
			t.Errorf("%s: restored", what)
		}
		if fi, err := os.Stat(made[0]); err != nil || fi.Size() < whole.Size()/2 {
			t.Errorf("%s: no new state came: %v %v", what, fi, err)
		}
		if _, restored := guest("anew-" + what); !restored {
			t.Errorf("%s: the new state is not used", what)
		}
	}
	nothingLeft(t, h)
}

// newOnes are those of all that are not in old.
func newOnes(all, old []string) (out []string) {
	for _, s := range all {
		if !strings.Contains("\n"+strings.Join(old, "\n")+"\n", "\n"+s+"\n") {
			out = append(out, s)
		}
	}
	return out
}
