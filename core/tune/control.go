package tune

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	toml "github.com/pelletier/go-toml/v2"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// ControlConfig is where vk-runnerctl's configuration is.
const ControlConfig = "/etc/virtkit/runnerctl.toml"

// Range is vk-runnerctl's configuration: all that it may touch.
type Range struct {
	RunnerConfig string   `toml:"runner_config"`
	DesiredFile  string   `toml:"desired_file"`
	Min          int      `toml:"min"`
	Max          int      `toml:"max"`
	Cooldown     int      `toml:"cooldown_secs"` // shortest interval between two writes
	Stale        int      `toml:"stale_secs"`    // a request older than this is treated as gone
	Reload       []string `toml:"reload_command"`
}

// ParseRange reads vk-runnerctl's configuration; every mistake is told.
func ParseRange(file string, data []byte) (Range, error) {
	r := Range{Cooldown: 60, Stale: 300}
	dec := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		text := err.Error()
		if strict, ok := errors.AsType[*toml.StrictMissingError](err); ok {
			text = strict.String()
		}
		return r, fault.Newf(fault.Usage, "%s: %s", file, text).
			Hint("its keys are runner_config, desired_file, min, max, cooldown_secs, stale_secs and reload_command")
	}
	var errs []error
	bad := func(key, format string, a ...any) {
		errs = append(errs, fmt.Errorf("%s: %s "+format, append([]any{file, key}, a...)...))
	}
	for _, p := range []struct{ key, path string }{{"runner_config", r.RunnerConfig}, {"desired_file", r.DesiredFile}} {
		if !filepath.IsAbs(p.path) || filepath.Clean(p.path) != p.path {
			bad(p.key, "is %q, expected an absolute path", p.path)
		}
	}
	if r.Min < 1 || r.Min > maxConcurrent {
		bad("min", "is %d, expected 1 to %d", r.Min, maxConcurrent)
	}
	if r.Max < r.Min || r.Max > maxConcurrent {
		bad("max", "is %d, expected %d (min) to %d", r.Max, max(r.Min, 1), maxConcurrent)
	}
	if r.Cooldown < 0 || r.Cooldown > 1<<30 {
		bad("cooldown_secs", "is %d, expected 0 or more", r.Cooldown)
	}
	if r.Stale < 1 || r.Stale > 1<<30 {
		bad("stale_secs", "is %d, expected 1 or more", r.Stale)
	}
	if r.Reload != nil && (len(r.Reload) == 0 || r.Reload[0] == "") {
		bad("reload_command", "is empty, expected a program and its arguments, or no such line")
	}
	if len(errs) > 0 {
		return r, fault.New(fault.Usage, "").Because(errors.Join(errs...)).Hint("docs/tune.md has an example")
	}
	return r, nil
}

// Request is what was found of the number that is asked for.
type Request struct {
	N  int // 0 = there is none
	At time.Time
}

// Next is the value that `concurrent` is to have now, and why. now is the time,
// current the value that it has, and changed when the file was changed last.
//
// What is asked for is held in the range. A request that is gone, or older than
// Stale, does not leave the runner throttled: the value walks up to Max, a step
// at a time. Two writes are Cooldown apart. A time in the future is none.
func (r Range) Next(current int, q Request, changed, now time.Time) (next int, why string) {
	age := func(t time.Time) time.Duration { return now.Sub(t) }
	switch {
	case q.N < 1:
		next, why = current+1, "nothing is asked for"
	case age(q.At) > time.Duration(r.Stale)*time.Second || age(q.At) < -time.Minute:
		next, why = current+1, fmt.Sprintf("the request is %v old", age(q.At).Round(time.Second))
	default:
		next, why = q.N, fmt.Sprintf("%d asked for", q.N)
	}
	next = min(max(next, r.Min), r.Max)
	if next != current && age(changed) >= 0 && age(changed) < time.Duration(r.Cooldown)*time.Second {
		return current, why + fmt.Sprintf("; changed %v ago, not again before %ds", age(changed).Round(time.Second), r.Cooldown)
	}
	return next, why
}

// reloadLimit is how long a reload_command may take.
const reloadLimit = time.Minute

// Control is vk-runnerctl: it reads its configuration at path, which must be
// owner's alone to write, and does what it says, once. The line tells what.
func Control(ctx context.Context, path string, owner int, now time.Time) (line string, err error) {
	r, f, err := openRange(path, owner)
	if err != nil {
		return "", err
	}
	defer f.Close() // and the lock
	c, err := readConfig(r.RunnerConfig)
	if err != nil {
		return "", fault.Newf(fault.System, "reading runner_config").Because(err)
	}
	current, err := Concurrent(c.data)
	if err != nil {
		return "", fmt.Errorf("%s: %w", r.RunnerConfig, err)
	}
	var q Request
	warning := ""
	q.N, q.At, err = ReadDesired(r.DesiredFile)
	if err != nil {
		q = Request{}
		if !errors.Is(err, fs.ErrNotExist) {
			warning = " (" + err.Error() + ")"
		}
	}
	next, why := r.Next(current, q, c.st.ModTime(), now)
	tail := fmt.Sprintf("%s, range %d to %d%s", why, r.Min, r.Max, warning)
	if next == current {
		return fmt.Sprintf("virtkit: concurrent stays %d: %s", current, tail), nil
	}
	data, err := Edit(c.data, next)
	if err != nil {
		return "", fmt.Errorf("%s: %w", r.RunnerConfig, err)
	}
	if err := c.replace(data); err != nil {
		return "", fmt.Errorf("replacing %s: %w", r.RunnerConfig, err)
	}
	line = fmt.Sprintf("virtkit: concurrent %d → %d: %s", current, next, tail)
	if len(r.Reload) > 0 {
		rctx, cancel := context.WithTimeout(ctx, reloadLimit)
		defer cancel()
		cmd := exec.CommandContext(rctx, r.Reload[0], r.Reload[1:]...)
		cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"}
		cmd.Dir = "/"
		if out, err := cmd.CombinedOutput(); err != nil {
			return line, fault.Newf(fault.System, "reload_command %q: %v: %s", r.Reload, err, bytes.TrimSpace(out[:min(len(out), 500)])).
				Hint("concurrent is %d in the file all the same", next)
		}
	}
	return line, nil
}

// openRange reads the configuration and locks it: one run at a time.
func openRange(path string, owner int) (Range, *os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return Range{}, nil, fault.New(fault.Usage, "reading the configuration of vk-runnerctl").Because(err).
			Hint("an administrator makes it: docs/tune.md has an example")
	}
	fail := func(err error) (Range, *os.File, error) { f.Close(); return Range{}, nil, err }
	st, err := f.Stat()
	if err != nil {
		return fail(err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || !st.Mode().IsRegular() || int(sys.Uid) != owner || st.Mode().Perm()&0o022 != 0 {
		return fail(fault.Newf(fault.Denied, "%s must be a file of user %d that nobody else may write", path, owner).
			Hint("chown %d %s; chmod 0644 %s", owner, path, path))
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fail(fault.New(fault.Busy, "another vk-runnerctl is at work").Hint("try again in a moment"))
	}
	data := make([]byte, maxRange+1)
	n, err := f.ReadAt(data, 0)
	if n > maxRange {
		return fail(fault.Newf(fault.Usage, "%s is larger than %d bytes", path, maxRange))
	}
	if n == 0 && err != nil && st.Size() > 0 {
		return fail(err)
	}
	r, err := ParseRange(path, data[:n])
	if err != nil {
		return fail(err)
	}
	return r, f, nil
}

const maxRange = 64 << 10
