// Package wire joins the engines: it builds what applets need from the
// configuration, and adapts engines to the interfaces by which core knows
// them. It is the one place that knows them all.
package wire

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"sync"

	"virtkit/applets/internal/appenv"
	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/image"
	"virtkit/core/logx"
	"virtkit/core/supervise"
	"virtkit/ledger"
	"virtkit/vmm/boot"
)

// Overrides are what flags say over the configuration; "" = nothing.
type Overrides struct {
	ConfigFile string // instead of those that conf.Load looks for
	StateDir   string
	Log        *slog.Logger // nil = discard
}

// Host is this machine as it is configured.
type Host struct {
	Env      appenv.Env
	Conf     *conf.Config
	StateDir string
	StateWhy string // why it is this directory, for people
	Jobs     *ledger.Jobs
	Egress   *ledger.Egress
	History  *ledger.History
	Log      *slog.Logger
	// LookOnly leaves what crashed processes left in the store of images. It is
	// set before the first call of Store.
	LookOnly bool

	store func() (*image.Store, error)
}

// Home is the user's home directory: $HOME, else the user database's, else "".
func Home(env appenv.Env) string {
	if h := env.Getenv("HOME"); h != "" {
		return h
	}
	if u, err := user.Current(); err == nil {
		return u.HomeDir
	}
	return ""
}

// Getenv is env.Getenv with --config laid over it.
func (o Overrides) Getenv(env appenv.Env) func(string) string {
	return func(key string) string {
		if key == "VIRTKIT_CONFIG" && o.ConfigFile != "" {
			return o.ConfigFile
		}
		return env.Getenv(key)
	}
}

// LoadConf reads the configuration with the overrides over it.
func LoadConf(env appenv.Env, o Overrides) (*conf.Config, error) {
	c, err := conf.Load(o.Getenv(env), Home(env))
	if err != nil {
		return nil, err
	}
	if o.StateDir != "" {
		dir, err := filepath.Abs(o.StateDir)
		if err != nil {
			return nil, err
		}
		if err := c.Set("state_dir", dir, conf.Origin{Source: conf.FromFlag, Name: "--state-dir"}); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Open reads the configuration and opens the state directory, which it makes
// when missing.
func Open(env appenv.Env, o Overrides) (*Host, error) {
	c, err := LoadConf(env, o)
	if err != nil {
		return nil, err
	}
	dir, why, err := conf.ResolveStateDir(c, o.Getenv(env), Home(env))
	if err != nil {
		return nil, err
	}
	h := &Host{Env: env, Conf: c, StateDir: dir, StateWhy: why, Log: o.Log}
	if h.Log == nil {
		h.Log = logx.Discard()
	}
	if h.Jobs, err = ledger.Open(dir); err != nil {
		return nil, err
	}
	h.Egress = ledger.OpenEgress(dir)
	h.History = ledger.OpenHistory(dir)
	h.store = sync.OnceValues(h.openStore)
	return h, nil
}

// StateDirThere is conf.StateDirThere of this host's configuration.
func StateDirThere(env appenv.Env, o Overrides) (dir string, there bool, err error) {
	c, err := LoadConf(env, o)
	if err != nil {
		return "", false, err
	}
	dir, there = conf.StateDirThere(c, o.Getenv(env), Home(env))
	return dir, there, nil
}

// Store is the host's store of images, opened at the first call.
func (h *Host) Store() (*image.Store, error) { return h.store() }

func (h *Host) openStore() (*image.Store, error) {
	return image.Open(filepath.Join(h.StateDir, "images"), image.Options{
		Log:          h.Log.With(logx.Comp, "image"),
		LocalDir:     h.LocalDir(),
		RegistryRepo: h.Conf.Registry.Repo,
		DockerRepo:   h.Conf.Docker.Repo,
		Getenv:       h.Env.Getenv,
		NoSweep:      h.LookOnly,
	})
}

// LocalDir is where local/<name> bundles are.
func (h *Host) LocalDir() string {
	if d := h.Conf.Local.Dir; d != "" {
		return d
	}
	return filepath.Join(h.StateDir, "local")
}

// Auth is where a user's own credentials of registries are.
func (h *Host) Auth() image.Auth {
	return image.Auth{ConfigFile: image.DefaultConfigFile(h.Env.Getenv)}
}

// Kernel is the kernel that want names ("" = the configuration's, else the best
// one), fetched when the host has none at all.
func (h *Host) Kernel(ctx context.Context, want string, progress func(string)) (boot.Kernel, error) {
	if want == "" {
		want = h.Conf.VMM.Kernel
	}
	return boot.Ensure(ctx, h.StateDir, want, progress)
}

// RootOf describes a held image to a supervisor.
func RootOf(i *image.Image) supervise.Image {
	return supervise.Image{Ref: i.Ref, Digest: i.Digest, Path: i.Path, FSType: i.FSType, Lock: i.LockPath}
}

// Self is this process, as the owner of a guest.
func Self() (supervise.Owner, error) {
	pid := os.Getpid()
	start, err := fsx.ProcStart(pid)
	return supervise.Owner{PID: pid, Start: start}, err
}

// Launch starts the supervisor of a reserved job directory and returns when
// its guest runs. The supervisor keeps hold open for its life; nil ones are left
// out.
func (h *Host) Launch(ctx context.Context, r *ledger.Reservation, progress func(supervise.State), hold ...*os.File) (*supervise.Client, error) {
	if h.Conf.VMM.Channel == "vsock" {
		err := fault.New(fault.Usage, "[vmm] channel = \"vsock\" is not built yet").
			Hint("set channel to auto or serial, or leave it out")
		return nil, errors.Join(err, r.Release())
	}
	return supervise.Launch(ctx, supervise.LaunchOptions{
		Dir: r.Dir, Lock: r.Lock, Spec: r.Spec,
		Argv:     h.supervisorArgv(),
		Env:      h.supervisorEnv(),
		Progress: progress,
		Hold:     slices.DeleteFunc(hold, func(f *os.File) bool { return f == nil }),
	})
}

func (h *Host) supervisorArgv() []string { return []string{h.Env.Exe, "supervise"} }

// supervisorEnv makes the supervisor read the same configuration.
func (h *Host) supervisorEnv() []string {
	out := []string{"VIRTKIT_STATE_DIR=" + h.StateDir}
	if h.Conf.File != "" {
		file, err := filepath.Abs(h.Conf.File) // its working directory is another
		if err != nil {
			file = h.Conf.File
		}
		out = append(out, "VIRTKIT_CONFIG="+file)
	}
	for _, k := range []string{"VIRTKIT_ACCEL", "VIRTKIT_TEMPLATES", "VIRTKIT_PCAP", boot.AgentEnv} {
		if v := h.Env.Getenv(k); v != "" {
			out = append(out, k+"="+v)
		}
	}
	return out
}
