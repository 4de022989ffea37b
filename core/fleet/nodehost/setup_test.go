package nodehost_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fleet/nodehost"
)

func asRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("files are handed over by root alone: run it as root")
	}
}

// owner is whose a path is, links not followed.
func owner(t *testing.T, path string) (uid, gid int) {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	sys := st.Sys().(*syscall.Stat_t)
	return int(sys.Uid), int(sys.Gid)
}

func TestHandOver(t *testing.T) {
	asRoot(t)
	dir, outside := t.TempDir(), t.TempDir()
	root := filepath.Join(dir, "state")
	for _, p := range []string{"a/b/file", "a/two", "jobs/1/spec.json", "mine"} {
		write(t, filepath.Join(root, p), "", 0o600)
	}
	write(t, filepath.Join(outside, "secret"), "", 0o600)
	write(t, filepath.Join(outside, "shared"), "", 0o600)
	link := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	link(os.Link(filepath.Join(root, "a/two"), filepath.Join(root, "jobs/again")))
	link(os.Link(filepath.Join(outside, "shared"), filepath.Join(root, "a/shared")))
	link(os.Symlink(filepath.Join(outside, "secret"), filepath.Join(root, "to-file")))
	link(os.Symlink(outside, filepath.Join(root, "to-dir")))
	link(os.Chown(filepath.Join(root, "a"), 5, 7))
	link(os.Chown(filepath.Join(root, "mine"), 990, 9))
	link(os.Symlink(root, filepath.Join(dir, "state-link")))

	left, changed, err := nodehost.HandOver(filepath.Join(dir, "state-link"), 990)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 1 || left[0].Path != filepath.Join(root, "a/shared") || left[0].UID != 0 || left[0].Why != "also linked from outside" {
		t.Errorf("left %+v", left)
	}
	// The directory, a, a/b, a/b/file, a/two (once: its other name is the same
	// file), jobs, jobs/1, jobs/1/spec.json, and the two links themselves.
	if changed != 10 {
		t.Errorf("%d changed", changed)
	}
	for p, want := range map[string]int{
		".": 990, "a": 990, "a/b/file": 990, "a/two": 990, "jobs/again": 990, "to-file": 990, "to-dir": 990, "mine": 990, "a/shared": 0,
	} {
		if uid, _ := owner(t, filepath.Join(root, p)); uid != want {
			t.Errorf("%s belongs to %d, want %d", p, uid, want)
		}
	}
	for _, p := range []string{outside, filepath.Join(outside, "secret"), filepath.Join(dir, "state-link")} {
		if uid, _ := owner(t, p); uid != 0 {
			t.Errorf("%s was handed over, too: to %d", p, uid)
		}
	}
	if _, gid := owner(t, filepath.Join(root, "a")); gid != 7 {
		t.Errorf("the group changed to %d", gid)
	}
	if _, changed, err := nodehost.HandOver(root, 990); err != nil || changed != 0 {
		t.Errorf("again: %d changed, %v", changed, err)
	}
}

// A mount is not crossed, though it be of the same filesystem.
func TestHandOverMount(t *testing.T) {
	asRoot(t)
	root, other := t.TempDir(), t.TempDir()
	write(t, filepath.Join(other, "x"), "", 0o600)
	if err := os.MkdirAll(filepath.Join(root, "m"), 0o755); err != nil {
		t.Fatal(err)
	}
	type result struct {
		left []nodehost.Left
		err  error
		skip string
	}
	got := make(chan result)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
			got <- result{skip: fmt.Sprintf("no mount namespace can be made: %v", err)}
			return
		}
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount(other, filepath.Join(root, "m"), "", unix.MS_BIND, "")); err != nil {
			got <- result{skip: fmt.Sprintf("nothing can be mounted: %v", err)}
			return
		}
		left, _, err := nodehost.HandOver(root, 990)
		got <- result{left: left, err: err}
	}()
	r := <-got
	if r.skip != "" {
		t.Skip(r.skip)
	}
	if r.err != nil || len(r.left) != 1 || r.left[0].Path != filepath.Join(root, "m") || r.left[0].Why != "a mount point" {
		t.Errorf("%+v", r)
	}
	for _, p := range []string{other, filepath.Join(other, "x")} {
		if uid, _ := owner(t, p); uid != 0 {
			t.Errorf("%s behind the mount belongs to %d", p, uid)
		}
	}
}

func TestSetUp(t *testing.T) {
	asRoot(t)
	for _, tt := range []struct {
		name   string
		user   string
		state  string
		change func(nodehost.Root)
		run    []string // programs that are run
		want   string   // part of the error; "" = none
	}{
		{name: "a new user", user: "vk", run: []string{"useradd --system --create-home --shell /usr/sbin/nologin vk", "usermod --append --groups kvm vk"}},
		{name: "one in the group already", user: "ci"},
		{name: "one that is not", user: "other", run: []string{"usermod --append --groups kvm other"}},
		{name: "everybody may open it", user: "other", change: func(r nodehost.Root) { os.Chmod(r.Path("/dev/kvm"), 0o666) }},
		{name: "a device of root's group", user: "other", change: func(r nodehost.Root) { os.Chown(r.Path("/dev/kvm"), 0, 0) }, want: "the group of root"},
		{name: "a device of a group without a name", user: "other", change: func(r nodehost.Root) { os.Chown(r.Path("/dev/kvm"), 0, 77) }, want: "the group 77"},
		{name: "no name", user: "-x", want: "is no name of a user"},
		{name: "useradd fails", user: "vkfail", run: []string{"useradd --system --create-home --shell /usr/sbin/nologin vkfail"}, want: "creating the user vkfail"},
		{name: "homes in the state directory", user: "ci", state: "/home/other", want: "the home of other is in it"},
		{name: "the root", user: "ci", state: "/", want: "no directory of vk's own"},
		{name: "a program that it cannot run", user: "ci", change: func(r nodehost.Root) { os.Chmod(r.Path("/usr/local/bin"), 0o700) }, want: "ci cannot run /usr/local/bin/vk"},
		{name: "a configuration that it cannot read", user: "ci", change: func(r nodehost.Root) { os.Chmod(r.Path("/etc/virtkit/config.toml"), 0o600) }, want: "ci cannot read the configuration"},
		{name: "what is linked from outside", user: "ci", change: func(r nodehost.Root) {
			writeIn(r, "/etc/shadow", "")
			writeIn(r, "/var/lib/virtkit/x", "")
			os.Link(r.Path("/etc/shadow"), r.Path("/var/lib/virtkit/shadow"))
		}, want: "/var/lib/virtkit/shadow (also linked from outside, of root)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := tree(t, map[string]string{"etc/passwd": passwd, "etc/group": groups, "etc/virtkit/config.toml": "", "usr/local/bin/vk": "", "dev/kvm": ""})
			executables(t, root, "/usr/local/bin/vk", "/usr/sbin/nologin")
			os.Chown(root.Path("/dev/kvm"), 0, 108)
			os.Chmod(root.Path("/dev/kvm"), 0o660)
			for _, d := range []string{string(root), filepath.Dir(string(root))} {
				os.Chmod(d, 0o755)
			}
			if tt.change != nil {
				tt.change(root)
			}
			var run []string
			s := &nodehost.SetUp{
				Root: root, Name: tt.user, StateDir: "/var/lib/virtkit", Exe: "/usr/local/bin/vk", ConfigFile: "/etc/virtkit/config.toml",
				Note: func(string, ...any) {},
				Run: func(_ context.Context, argv ...string) error {
					run = append(run, strings.Join(argv, " "))
					switch {
					case strings.HasSuffix(argv[len(argv)-1], "fail"):
						return errors.New("exit status 9")
					case argv[0] == "useradd":
						writeIn(root, "/etc/passwd", passwd+"vk:x:800:800::/home/vk:/usr/sbin/nologin\n")
					}
					return nil
				},
			}
			if tt.state != "" {
				s.StateDir = tt.state
			}
			u, err := s.Do(t.Context())
			if (err != nil) != (tt.want != "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("%v (%s), want %q", err, fault.HintOf(err), tt.want)
			}
			if !slices.Equal(run, tt.run) && (err == nil || tt.run != nil) {
				t.Errorf("ran %q, want %q", run, tt.run)
			}
			if err != nil {
				return
			}
			if uid, _ := owner(t, root.Path("/var/lib/virtkit")); uid != u.UID || u.Name != tt.user {
				t.Errorf("the state directory belongs to %d, the user is %+v", uid, u)
			}
		})
	}
}

// A command runs as the user, with the user's groups and home, and none of this
// process's environment but what is named.
func TestAsUser(t *testing.T) {
	asRoot(t)
	root := tree(t, map[string]string{"etc/group": groups})
	u := nodehost.User{Name: "ci", UID: 990, GID: 980, Home: "/home/ci"}
	env := map[string]string{"VIRTKIT_CONFIG": "/c.toml", "SECRET": "x"}
	cmd, err := root.AsUser(t.Context(), u, func(k string) string { return env[k] }, []string{"VIRTKIT_CONFIG"},
		"/bin/sh", "-c", `echo $(id -u) $(id -g) $(id -G) $HOME $VIRTKIT_CONFIG "$SECRET" $(cat)`)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = strings.NewReader("token")
	out, err := cmd.CombinedOutput()
	if want := "990 980 980 108 /home/ci /c.toml  token\n"; err != nil || string(out) != want {
		t.Errorf("%q, %v; want %q", out, err, want)
	}
}
