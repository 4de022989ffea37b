package conf

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// SystemFile is the configuration of the whole host, the last place looked at.
const SystemFile = "/etc/virtkit/config.toml"

// Find names the file that Load reads, "" when there is none. home may be
// empty. A $VIRTKIT_CONFIG that cannot be found is an error.
func Find(getenv func(string) string, home string) (string, error) {
	file, _, err := find(getenv, home, SystemFile)
	return file, err
}

// find also returns what to warn of.
func find(getenv func(string) string, home, system string) (file string, warnings []string, err error) {
	if f := getenv("VIRTKIT_CONFIG"); f != "" {
		if _, err := os.Stat(f); err != nil {
			return "", nil, fault.New(fault.Usage, "reading the configuration that --config or $VIRTKIT_CONFIG names").Because(err).
				Hint("correct the name, or leave it out to use ~/.config/virtkit/config.toml or %s", system)
		}
		return f, nil, nil
	}
	own := filepath.Join(home, ".config/virtkit/config.toml")
	places := []string{system}
	if home != "" {
		places = []string{own, system}
	}
	for _, f := range places {
		_, err := os.Stat(f)
		switch {
		case err == nil:
			return f, warnings, nil
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		case f == own && errors.Is(err, fs.ErrPermission):
			// HOME is another user's (su, setpriv, a service): nothing in it
			// was meant for this one.
			warnings = append(warnings, own+": cannot be looked at ("+unix.EACCES.Error()+"), so it is not used; is HOME right?")
		default: // must not choose another file
			return "", nil, fault.New(fault.Usage, "looking for the configuration").Because(err).
				Hint("make %s readable, or name another file in VIRTKIT_CONFIG", f)
		}
	}
	return "", warnings, nil
}

// Load finds and reads the configuration and applies the environment:
// VIRTKIT_STATE_DIR and VIRTKIT_ACCEL override their keys.
func Load(getenv func(string) string, home string) (*Config, error) {
	return load(getenv, home, SystemFile)
}

func load(getenv func(string) string, home, system string) (*Config, error) {
	file, warnings, err := find(getenv, home, system)
	if err != nil {
		return nil, err
	}
	c := Default()
	if file != "" {
		if c, err = read(file); err != nil {
			return nil, err
		}
	}
	c.Warnings = append(warnings, c.Warnings...)
	if err := c.applyEnv(getenv); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Config) applyEnv(getenv func(string) string) error {
	var errs []error
	for _, r := range table {
		if r.env == "" {
			continue
		}
		if text := getenv(r.env); text != "" {
			errs = append(errs, c.Set(r.name, text, Origin{Source: FromEnv, Name: r.env}))
		}
	}
	return errors.Join(errs...)
}

func read(file string) (*Config, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fault.New(fault.Usage, "reading the configuration").Because(err).Hint("make it readable to this user, or name another file in VIRTKIT_CONFIG")
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fault.New(fault.Usage, "reading the configuration").Because(err).Hint("a TOML file is expected; correct --config or VIRTKIT_CONFIG if one of them names it")
	}
	return Parse(file, data)
}

// Check reads one file as Load would and only that: it looks at nothing else
// and changes nothing.
func Check(path string) (warnings []string, err error) {
	c, err := read(path)
	if err != nil {
		return nil, err
	}
	return c.Warnings, nil
}

// Live holds a configuration that can be reloaded while it is in use.
type Live struct{ p atomic.Pointer[Config] }

// NewLive holds c.
func NewLive(c *Config) *Live { l := &Live{}; l.p.Store(c); return l }

// Get is the configuration in force. It must not be changed.
func (l *Live) Get() *Config { return l.p.Load() }

// Reload puts what load returns in force. On its error the old configuration
// stays, and the error says so.
func (l *Live) Reload(load func() (*Config, error)) error {
	c, err := load()
	if err != nil {
		return fmt.Errorf("reloading the configuration (the old one stays in force): %w", err)
	}
	l.p.Store(c)
	return nil
}

// systemState is the state directory of a host.
const systemState = "/var/lib/virtkit"

// ResolveStateDir makes the state directory and returns it with why it was
// chosen. One that was asked for (flag, VIRTKIT_STATE_DIR, state_dir) must be
// writable; else /var/lib/virtkit, or the user's XDG state directory where
// that cannot be written. A directory made here is 0700.
func ResolveStateDir(c *Config, getenv func(string) string, home string) (dir, why string, err error) {
	return resolveStateDir(c, getenv, home, systemState)
}

func resolveStateDir(c *Config, getenv func(string) string, home, system string) (string, string, error) {
	if c.StateDir != "" {
		why := "set by " + c.Origin("state_dir").String()
		if err := writableDir(c.StateDir); err != nil {
			return "", "", fault.Newf(fault.System, "using the state directory (%s)", why).Because(err).
				Hint("make it writable to this user, or name another one with --state-dir or in VIRTKIT_STATE_DIR")
		}
		return c.StateDir, why, nil
	}
	first := writableDir(system)
	if first == nil {
		return system, "the default", nil
	}
	// A full disk must not move a host's state elsewhere.
	if !errors.Is(first, fs.ErrPermission) && !errors.Is(first, unix.EROFS) {
		return "", "", fault.New(fault.System, "using the state directory").Because(first).
			Hint("name another directory in VIRTKIT_STATE_DIR or state_dir")
	}
	base := userState(getenv, home)
	second := errors.New("neither HOME nor XDG_STATE_HOME is set")
	if base != "" {
		dir := filepath.Join(base, "virtkit")
		if second = writableDir(dir); second == nil {
			return dir, fmt.Sprintf("the user's, because of: %v", first), nil
		}
	}
	return "", "", fault.New(fault.System, "finding a state directory").Because(errors.Join(first, second)).
		Hint("name a writable directory in VIRTKIT_STATE_DIR")
}

// StateDirThere returns the directory that ResolveStateDir would use, and whether
// it is there already. It makes nothing: for who has nothing to do without one.
func StateDirThere(c *Config, getenv func(string) string, home string) (dir string, there bool) {
	return stateDirThere(c, getenv, home, systemState)
}

func stateDirThere(c *Config, getenv func(string) string, home, system string) (string, bool) {
	is := func(dir string) bool {
		_, err := os.Stat(dir)
		return !errors.Is(err, fs.ErrNotExist)
	}
	if c.StateDir != "" {
		return c.StateDir, is(c.StateDir)
	}
	at := system
	if !is(system) {
		at = filepath.Dir(system) // in which it would be made
	}
	if err := unix.Faccessat(unix.AT_FDCWD, at, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err == nil {
		return system, is(system)
	}
	if base := userState(getenv, home); base != "" {
		dir := filepath.Join(base, "virtkit")
		return dir, is(dir)
	}
	return system, is(system)
}

// userState is what the XDG specification calls the user's state directory; ""
// where nobody says.
func userState(getenv func(string) string, home string) string {
	if base := getenv("XDG_STATE_HOME"); filepath.IsAbs(base) { // it has relative ones ignored
		return base
	}
	if home == "" {
		return ""
	}
	return filepath.Join(home, ".local/state")
}

// writableDir makes dir if need be and asks whether this process may make
// names in it.
func writableDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return &fs.PathError{Op: "writing to", Path: dir, Err: err}
	}
	return nil
}
