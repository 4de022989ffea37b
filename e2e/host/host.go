// Package host gives end-to-end tests a virtkit of their own: the built
// program, a configuration, and a state directory whose images and kernels are
// the host's but whose jobs are not, so that a test can prove that nothing of
// its jobs is left.
package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"virtkit/core/execdrv/runnerside"
	"virtkit/core/fsx"
)

// Host is one virtkit.
type Host struct {
	VK    string // absolute path of the program
	State string // state directory
	Conf  string // configuration file
	Base  string // the state directory that images and kernels come from
}

// Missing says why there can be no guests here; tests skip with it.
type Missing struct{ Why string }

func (m *Missing) Error() string { return m.Why }

// shared are the parts of a state directory that cost time to make.
var shared = []string{"images", "kernels", "boot", "vmm"}

// New makes a state directory below dir. root is the checkout; toml is added
// to the configuration.
func New(root, dir, toml string) (*Host, error) {
	h := &Host{VK: os.Getenv("VK_BIN"), State: filepath.Join(dir, "state"), Conf: filepath.Join(dir, "config.toml")}
	if h.VK == "" {
		h.VK = filepath.Join(root, "bin/vk")
	}
	var err error
	if h.VK, err = filepath.Abs(h.VK); err != nil {
		return nil, err
	}
	if _, err := os.Stat(h.VK); err != nil {
		return nil, &Missing{"needs bin/vk: make build"}
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return nil, &Missing{"needs qemu-system-x86_64: apt-get install qemu-system-x86"}
	}
	if h.Base, err = baseState(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(h.State, 0o700); err != nil {
		return nil, err
	}
	for _, name := range shared {
		from := filepath.Join(h.Base, name)
		if err := os.MkdirAll(from, 0o700); err != nil {
			return nil, &Missing{fmt.Sprintf("needs a state directory that can be written: %v", err)}
		}
		if err := os.Symlink(from, filepath.Join(h.State, name)); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(h.Conf, []byte(toml), 0o600); err != nil {
		return nil, err
	}
	return h, nil
}

// baseState is where the user's images and kernels are.
func baseState() (string, error) {
	if d := os.Getenv("VIRTKIT_STATE_DIR"); d != "" {
		return filepath.Abs(d)
	}
	if os.Getuid() == 0 {
		return "/var/lib/virtkit", nil
	}
	if d := os.Getenv("XDG_STATE_HOME"); d != "" {
		return filepath.Join(d, "virtkit"), nil
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".local/state/virtkit"), err
}

// Env is the environment of vk.
func (h *Host) Env() []string {
	out := []string{"VIRTKIT_CONFIG=" + h.Conf, "VIRTKIT_STATE_DIR=" + h.State}
	for _, k := range []string{"PATH", "HOME", "USER", "LANG", "VIRTKIT_ACCEL", "XDG_RUNTIME_DIR"} {
		if v, ok := os.LookupEnv(k); ok {
			out = append(out, k+"="+v)
		}
	}
	return out
}

// Run runs vk and returns its output; an error holds what it said.
func (h *Host) Run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, h.VK, args...)
	cmd.Env = h.Env()
	var out, errb strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errb
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("vk %s: %w: %s", strings.Join(args, " "), err, errb.String())
	}
	return out.String(), nil
}

// Import makes an image known, unless one of that name is there: the names of
// test images change with their content.
func (h *Host) Import(ctx context.Context, archive, name string) error {
	if _, err := h.Run(ctx, "image", "inspect", "local/"+name); err == nil {
		return nil
	}
	_, err := h.Run(ctx, "image", "import", archive, name)
	if err != nil && strings.Contains(err.Error(), "exists") {
		return nil
	}
	return err
}

// Driver is the custom executor on this host.
func (h *Host) Driver() runnerside.Driver {
	argv := func(word string) []string { return []string{h.VK, "gitlab", word} }
	return runnerside.Driver{Config: argv("config"), Prepare: argv("prepare"), Run: argv("run"), Cleanup: argv("cleanup"), Env: h.Env()}
}

// JobDirs lists the job directories, by name.
func (h *Host) JobDirs() []string {
	ents, _ := os.ReadDir(filepath.Join(h.State, "jobs"))
	var out []string
	for _, e := range ents {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out
}

// Processes lists what runs on behalf of this host's jobs: processes that name
// the state directory in their arguments, that have a file of a job open, or
// whose working directory is there.
func (h *Host) Processes() map[int]string {
	out := map[int]string{}
	ents, _ := os.ReadDir("/proc")
	for _, e := range ents {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if why := h.belongs(pid); why != "" {
			out[pid] = why
		}
	}
	return out
}

func (h *Host) belongs(pid int) string {
	base := "/proc/" + strconv.Itoa(pid)
	jobs := filepath.Join(h.State, "jobs") + "/"
	cmdline, _ := os.ReadFile(base + "/cmdline")
	args := strings.ReplaceAll(strings.TrimRight(string(cmdline), "\x00"), "\x00", " ")
	if strings.Contains(args, h.State) {
		return args
	}
	env, _ := os.ReadFile(base + "/environ")
	if strings.Contains("\x00"+string(env), "\x00VIRTKIT_STATE_DIR="+h.State+"\x00") {
		return args
	}
	fds, _ := os.ReadDir(base + "/fd")
	for _, fd := range fds {
		if l, err := os.Readlink(base + "/fd/" + fd.Name()); err == nil && strings.HasPrefix(l, jobs) {
			return args + " (has " + l + ")"
		}
	}
	return ""
}

// Left says what is left of this host's jobs, waiting for it to go until ctx
// ends: processes, mounts, sockets, directories.
func (h *Host) Left(ctx context.Context) []string {
	for {
		left := h.leftNow()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return left
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (h *Host) leftNow() []string {
	var out []string
	for pid, why := range h.Processes() {
		out = append(out, fmt.Sprintf("process %d: %s", pid, why))
	}
	for _, d := range h.JobDirs() {
		out = append(out, "directory "+d)
	}
	for _, f := range []string{"/proc/self/mounts", "/proc/net/unix"} {
		b, _ := os.ReadFile(f)
		for line := range strings.SplitSeq(string(b), "\n") {
			if strings.Contains(line, filepath.Join(h.State, "jobs")+"/") {
				out = append(out, f+": "+line)
			}
		}
	}
	for _, c := range h.Claims() {
		out = append(out, "claim "+c)
	}
	return out
}

// Claims are the reservations and jobs that the host's ledger counts now.
func (h *Host) Claims() []string {
	var out []string
	claims, _ := filepath.Glob(filepath.Join(h.State, "admit", "*"))
	for _, c := range claims {
		if l, err := fsx.TryLock(c, true); errors.Is(err, fsx.ErrLocked) {
			out = append(out, c)
		} else {
			l.Close()
		}
	}
	return out
}

// Supervisors maps the processes of one job by role: "supervisor" and "vmm", and
// "service supervisor" and "service vmm" of one of its services, if it has any.
func (h *Host) Supervisors(id string) map[string]int {
	out := map[string]int{}
	dir := filepath.Join(h.State, "jobs", id)
	for pid, args := range h.Processes() {
		role := ""
		switch {
		case strings.Contains(args, "supervise "+dir):
			role = "supervisor"
		case strings.Contains(args, "qemu") || strings.Contains(args, "vk:"):
			role = "vmm"
		default:
			continue
		}
		if strings.Contains(args+h.openFiles(pid), dir+"/services/") {
			role = "service " + role
		}
		out[role] = pid
	}
	return out
}

// openFiles are the files that a process has open, in one text.
func (h *Host) openFiles(pid int) string {
	var all strings.Builder
	fds, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/fd/*")
	for _, fd := range fds {
		l, _ := os.Readlink(fd)
		all.WriteString(" " + l)
	}
	return all.String()
}

// IsMissing tells a Missing from other errors.
func IsMissing(err error) bool { _, ok := errors.AsType[*Missing](err); return ok }
