package exec

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
)

// DefaultPath is PATH where neither the image nor the request sets it.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// buildEnv joins the base environment and the request's, later entries
// winning, and fills in what a program may expect of its user.
func buildEnv(base []string, req *guestwire.ExecRequest, u User, hostname, lastPath string) []string {
	var e envList
	if !req.Clear {
		e.add(base)
	}
	e.add(req.Env)
	e.fill("PATH", DefaultPath)
	if !req.Clear {
		e.fill("HOME", u.Home)
		if u.Name != "" {
			e.fill("USER", u.Name)
			e.fill("LOGNAME", u.Name)
		}
		e.fill("SHELL", u.Shell)
		if hostname != "" {
			e.fill("HOSTNAME", hostname)
		}
		if req.TTY {
			e.fill("TERM", "xterm")
		}
	}
	if lastPath != "" {
		p := e.get("PATH")
		if !slices.Contains(filepath.SplitList(p), lastPath) {
			e.set("PATH", strings.TrimPrefix(p+":"+lastPath, ":"))
		}
	}
	return e.kv
}

// envList is an environment in the order of first mention.
type envList struct{ kv []string }

func (e *envList) add(kv []string) {
	for _, s := range kv {
		if k, v, ok := strings.Cut(s, "="); ok && k != "" && !strings.ContainsRune(s, 0) {
			e.set(k, v)
		}
	}
}

func (e *envList) index(k string) int {
	return slices.IndexFunc(e.kv, func(s string) bool { return strings.HasPrefix(s, k+"=") })
}

func (e *envList) get(k string) string {
	if i := e.index(k); i >= 0 {
		return e.kv[i][len(k)+1:]
	}
	return ""
}

func (e *envList) set(k, v string) {
	if i := e.index(k); i >= 0 {
		e.kv[i] = k + "=" + v
		return
	}
	e.kv = append(e.kv, k+"="+v)
}

func (e *envList) fill(k, v string) {
	if e.index(k) < 0 {
		e.kv = append(e.kv, k+"="+v)
	}
}

// startError is why a program was never started, with the exit status that
// shells give for it.
type startError struct {
	code int
	text string
}

func (e *startError) Error() string { return e.text }

func notStarted(code int, format string, a ...any) error {
	return &startError{code, fmt.Sprintf(format, a...)}
}

// lookPath finds the program as the kernel will be asked for it, below root
// (a path outside the chroot; "/" in a guest).
func lookPath(root, name, dir, path string) (string, error) {
	if name == "" {
		return "", notStarted(127, "no program was named")
	}
	if strings.Contains(name, "/") {
		full := name
		if !filepath.IsAbs(full) {
			full = filepath.Join(dir, name)
		}
		fi, err := os.Stat(filepath.Join(root, full))
		switch {
		case err != nil && isMissing(err):
			return "", notStarted(127, "%s: no such file", name)
		case err != nil:
			return "", notStarted(126, "%s: %v", name, underlying(err))
		case fi.IsDir():
			return "", notStarted(126, "%s: is a directory", name)
		case fi.Mode()&0o111 == 0:
			return "", notStarted(126, "%s: is not executable", name)
		}
		return full, nil
	}
	denied := ""
	for _, d := range filepath.SplitList(path) {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		full := filepath.Join(d, name)
		fi, err := os.Stat(filepath.Join(root, full))
		if err != nil || fi.IsDir() {
			continue
		}
		if fi.Mode()&0o111 != 0 {
			return full, nil
		}
		denied = full
	}
	if denied != "" {
		return "", notStarted(126, "%s: is not executable", denied)
	}
	return "", notStarted(127, "%s: not found in PATH (%s)", name, path)
}

// explainStart says what the failure of the fork and exec means.
func explainStart(err error, path, dir string, u User) error {
	switch err {
	case unix.ENOENT, unix.ENOTDIR:
		return notStarted(127, "%s: the kernel does not find it or its interpreter (the first line of a script, or the dynamic loader)", path)
	case unix.EACCES, unix.EPERM:
		return notStarted(126, "%s: uid %d may not execute it, or not enter %s: %v", path, u.UID, dir, err)
	case unix.ENOEXEC:
		return notStarted(126, "%s: is not a program for this machine, nor a script with an interpreter line", path)
	case unix.E2BIG:
		return notStarted(126, "%s: arguments and environment are over the kernel's limit", path)
	}
	return notStarted(126, "%s: %v", path, err)
}

func isMissing(err error) bool {
	return os.IsNotExist(err) || underlying(err) == syscall.ENOTDIR
}

func underlying(err error) error {
	if pe, ok := err.(*os.PathError); ok {
		return pe.Err
	}
	return err
}

// makeDirs makes path and its missing parents, each owned by u.
func makeDirs(root, path string, mode os.FileMode, u User) error {
	full := filepath.Join(root, path)
	if fi, err := os.Stat(full); err == nil {
		if !fi.IsDir() {
			return fmt.Errorf("%s: exists and is no directory", path)
		}
		return nil
	}
	if parent := filepath.Dir(path); parent != path {
		if err := makeDirs(root, parent, mode, u); err != nil {
			return err
		}
	}
	if err := os.Mkdir(full, mode); err != nil {
		if os.IsExist(err) {
			return nil
		}
		return err
	}
	if err := os.Chmod(full, mode); err != nil {
		return err
	}
	if int(u.UID) == os.Getuid() && int(u.GID) == os.Getgid() {
		return nil
	}
	return os.Chown(full, int(u.UID), int(u.GID))
}
