package wire

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"virtkit/applets/internal/appenv"
	"virtkit/core/conf"
	"virtkit/core/logx"
	"virtkit/core/machine"
	"virtkit/core/supervise"
	"virtkit/netsw"
	"virtkit/vmm/boot"
	"virtkit/vmm/disk"
	"virtkit/vmm/qemu"
	"virtkit/vmm/template"
)

// Supervise is the body of a supervisor's process: it runs the guest of a job
// directory to its end. Its log goes to stderr, which the launcher has joined
// to the directory's sup.log.
func Supervise(ctx context.Context, env appenv.Env, o Overrides, jobdir string) error {
	o.Log = logx.New(env.Stderr, slog.LevelInfo, false)
	h, err := Open(env, o)
	if err != nil {
		return err
	}
	return supervise.Run(ctx, jobdir, h.SupervisorDeps())
}

// SupervisorDeps are the engines as a supervisor knows them.
func (h *Host) SupervisorDeps() supervise.Deps {
	// The kernel is asked for twice, by the choice of a driver and by the boot.
	var mu sync.Mutex
	var known *machine.Kernel
	kernel := func(ctx context.Context, s supervise.Spec) (machine.Kernel, error) {
		mu.Lock()
		defer mu.Unlock()
		if known == nil {
			k, err := h.machineKernel(ctx, s)
			if err != nil {
				return machine.Kernel{}, err
			}
			known = &k
		}
		return *known, nil
	}
	return supervise.Deps{
		NewDriver: func(ctx context.Context, s supervise.Spec) (machine.Driver, string, error) {
			k, err := kernel(ctx, s)
			if err != nil {
				return nil, "", err
			}
			d := h.Driver(s.Accel)
			v, err := d.Verdict(ctx, k)
			if err != nil {
				return nil, "", err
			}
			h.Log.Info("accelerator", "accel", v.Accel, "why", v.Why)
			return d, v.Accel, nil
		},
		Kernel: kernel,
		Place:  h.place,
		Disk: func(path string, size int64) error {
			return disk.Upper(context.Background(), h.StateDir, path, size)
		},
		NewNetwork: func(ctx context.Context, _ string, s supervise.Spec) (supervise.Network, error) {
			if s.Net.Tap() {
				return h.newTap(ctx, s)
			}
			return h.newNetwork(s)
		},
		Argv:       h.supervisorArgv(),
		Env:        h.supervisorEnv(),
		Templates:  h.templates(),
		Recordings: h.Recordings(),
		KeepEgress: h.Egress.Keep,
		Log:        h.Log,
	}
}

// templates is where guests' saved states are; nil where there are to be none.
func (h *Host) templates() supervise.Templates {
	if h.Conf.VMM.Templates == "off" {
		return nil
	}
	s, err := template.Open(templatesDir(h.StateDir))
	if err != nil {
		h.Log.Warn("guests boot without templates", logx.Err, err)
		return nil
	}
	return s
}

func templatesDir(stateDir string) string { return filepath.Join(stateDir, "templates", "guests") }

// SweepTemplates removes guests' saved states that no guest started from for as
// long as idle. It returns the bytes freed; with dryRun it tells and removes
// nothing.
func (h *Host) SweepTemplates(idle time.Duration, dryRun bool) (int64, error) {
	dir := templatesDir(h.StateDir)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	s, err := template.Open(dir)
	if err != nil {
		return 0, err
	}
	return s.Sweep(idle, dryRun)
}

// Driver is QEMU as it is configured; accel "" is the configuration's.
func (h *Host) Driver(accel string) *qemu.Driver {
	if accel == "" {
		accel = h.Conf.VMM.Accel
	}
	return qemu.New(qemu.Config{
		Binary: h.Conf.VMM.QEMU, Accel: accel, CacheDir: filepath.Join(h.StateDir, "vmm"),
		Log: h.Log.With(logx.Comp, "qemu"),
	})
}

// machineKernel is the kernel of a guest with its initramfs.
func (h *Host) machineKernel(ctx context.Context, s supervise.Spec) (machine.Kernel, error) {
	k, err := boot.Find(h.StateDir, s.Kernel)
	if err != nil {
		return machine.Kernel{}, err
	}
	return boot.Prepare(ctx, h.StateDir, k, boot.Options{Nested: s.Nested})
}

// newNetwork makes a job's switch.
func (h *Host) newNetwork(s supervise.Spec) (supervise.Network, error) {
	ups, err := resolvers(h.Conf)
	if err != nil {
		return nil, err
	}
	var subnet netip.Prefix // zero = a free one
	if t := h.Conf.Net.Subnet; t != "" {
		if subnet, err = netip.ParsePrefix(t); err != nil {
			return nil, fmt.Errorf("reading [net] subnet: %w", err)
		}
	}
	cfg := netsw.Config{
		Subnet: subnet, PcapPath: h.Env.Getenv("VIRTKIT_PCAP"),
		Upstreams: ups, HostLoopback: s.Net.HostLoopback, HostPorts: s.Net.Loopback,
		Log: h.Log.With(logx.Comp, "netsw"),
	}
	e := engine(s)
	if e != nil {
		cfg.Policy = e
	}
	sw, err := netsw.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("making the guest's network: %w", err)
	}
	if e == nil {
		return &network{sw: sw}, nil
	}
	return egressNetwork{&network{sw: sw, record: e.Recorder()}}, nil
}

// resolvers are [net] dns as addresses; nil leaves the choice to netsw.
func resolvers(c *conf.Config) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	for _, s := range c.Net.DNS {
		if ap, err := netip.ParseAddrPort(s); err == nil {
			out = append(out, ap)
			continue
		}
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("[net] dns: %q is neither an IP address nor IP:port", s)
		}
		out = append(out, netip.AddrPortFrom(a, 53))
	}
	return out, nil
}
