package nodehost

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/tune"
)

// Options are what a Host is made of.
type Options struct {
	Root      Root
	StateDir  string
	Jobs      string // directory of the job directories
	Checkouts string // of host checkouts
	// JobsSpeed and CheckoutsSpeed are what [node] declares; "" = nothing.
	JobsSpeed, CheckoutsSpeed string
	Labels                    []string
	// Features are what the node does for placed jobs beyond its version, Egress
	// its own caps (policy.Caps as JSON); nil = it takes no placed jobs.
	Features   []string
	Egress     []byte
	Version    string // of vk
	Exe        string // this program's file
	ConfigHash string // of the effective configuration
	// Kernel is the version of the guests' kernel, Checks what `vk check` finds of
	// what gates enrollment. They are called at each look and keep what is dear
	// to find out themselves.
	Kernel func(ctx context.Context) string
	Checks func(ctx context.Context) []wire.Check
	// RunnerConfig is the configuration to report; "" = none. RunnerVersion is
	// what the runner's program says of itself; nil = not asked.
	RunnerConfig  func() string
	RunnerVersion func(ctx context.Context) string
	Ledger        Ledger
	MemEvery      time.Duration // between two measurements of guests ([node] workload_mem_secs)
	StatFS        func(path string) (Usage, error)
	Hostname      func() (string, error)
	Now           func() time.Time
	// Resident measures the memory of a process and all below it; nil = proctree.
	Resident func(pid int) (int64, error)
	Log      *slog.Logger
}

// Host is this machine as a node sees it. Its methods may be called by several
// goroutines.
type Host struct {
	o     Options
	meter *Meter

	exe func() string // its sha256

	mu    sync.Mutex
	disks map[string]diskSeen
}

// diskSeen is what a filesystem's disk had done at the last look.
type diskSeen struct {
	dev Dev
	io  diskIO
	at  time.Time
}

// New makes a Host.
func New(o Options) *Host {
	if o.StatFS == nil {
		o.StatFS = StatFS
	}
	if o.Hostname == nil {
		o.Hostname = os.Hostname
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	h := &Host{o: o, disks: map[string]diskSeen{}}
	h.meter = NewMeter(o.MemEvery, o.Now, o.Resident)
	h.exe = sync.OnceValue(func() string { return fileHash(o.Exe) })
	return h
}

type place struct{ role, path, speed string }

func (h *Host) filesystems() []place {
	return []place{{wire.RoleJobs, h.o.Jobs, h.o.JobsSpeed}, {wire.RoleCheckouts, h.o.Checkouts, h.o.CheckoutsSpeed}}
}

// Inventory looks at the host's facts. What could not be found out is left out,
// and said by the problems.
func (h *Host) Inventory(ctx context.Context) (i wire.Inventory, problems []error) {
	i = wire.Inventory{VK: h.o.Version, VKSHA256: h.exe(), ConfigHash: h.o.ConfigHash, Labels: cut(h.o.Labels), Features: cut(h.o.Features), Egress: h.o.Egress}
	bad := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	var err error
	i.Hostname, err = h.o.Hostname()
	bad(err)
	i.CPUs, i.CPUModel, err = h.o.Root.CPUs()
	bad(err)
	i.RAM, _, err = h.o.Root.Memory()
	bad(err)
	nodes, err := h.o.Root.MemoryNodes()
	bad(err)
	i.MemoryNodes = cut(nodes)
	if b, err := h.o.Root.read("/proc/sys/kernel/osrelease"); err == nil {
		i.HostKernel = strings.TrimSpace(string(b))
	}
	if h.o.Checks != nil {
		i.Checks = cut(h.o.Checks(ctx))
	}
	if h.o.Kernel != nil {
		i.GuestKernel = h.o.Kernel(ctx)
	}
	ms, err := h.o.Root.mounts()
	bad(err)
	for _, p := range h.filesystems() {
		u, err := h.o.StatFS(p.path)
		if err != nil {
			bad(err)
			continue
		}
		device, fstype := mountOf(ms, p.path, u.Dev)
		i.Filesystems = append(i.Filesystems, wire.Filesystem{
			Role: p.role, Path: p.path, Device: device, FSType: fstype, Size: u.Size, Tmpfs: u.Tmpfs, Speed: p.speed,
		})
	}
	i.Runner, err = h.runner(ctx)
	bad(err)
	return i, problems
}

// cut holds a list to what a message may carry.
func cut[T any](list []T) []T { return list[:min(len(list), wire.MaxList)] }

// runner reads the configuration of the host's gitlab-runner.
func (h *Host) runner(ctx context.Context) (*wire.Runner, error) {
	if h.o.RunnerConfig == nil {
		return nil, nil
	}
	path := h.o.RunnerConfig()
	if path == "" {
		return nil, nil
	}
	c, err := h.o.Root.ReadRunnerConfig(path, h.o.Exe)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the runner's configuration: %w", err)
	}
	f := &wire.Runner{Config: path, Concurrent: c.Concurrent, Names: cut(c.Names)}
	if h.o.RunnerVersion != nil {
		f.Version = h.o.RunnerVersion(ctx)
	}
	return f, nil
}

// desired is the concurrency that was asked for last.
func (h *Host) desired(bad func(error)) int {
	n, _, err := tune.ReadDesired(filepath.Join(h.o.StateDir, tune.DesiredFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		bad(err)
	}
	return n
}

// fileHash is the sha256 of a file, "" when it cannot be read.
func fileHash(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return ""
	}
	return hex.EncodeToString(sum.Sum(nil))
}
