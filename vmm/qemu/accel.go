package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/lazyre"
	"virtkit/core/machine"
)

// Info is what is known of the QEMU on this host.
type Info struct {
	Binary  string `json:"binary"`
	Version string `json:"version"` // such as "7.2.22"
}

// Verdict is the accelerator decided for a kernel, with the reason.
type Verdict struct {
	Accel string `json:"accel"` // "kvm" or "tcg"
	Why   string `json:"why"`   // for people
}

// AccelEnv forces the accelerator over the configuration.
const AccelEnv = "VIRTKIT_ACCEL"

// probeLimit is how long the KVM probe may take: a kernel under a working KVM
// is at its end in well under a second.
const probeLimit = 8 * time.Second

const installHint = "apt-get install qemu-system-x86"

// Info finds QEMU and its version. An error has a hint how to install it.
func (d *Driver) Info(ctx context.Context) (Info, error) {
	d.mu.Lock()
	known := d.info
	d.mu.Unlock()
	if known.Binary != "" {
		return known, nil
	}
	bin := d.cfg.Binary
	if bin == "" {
		bin = "qemu-system-x86_64"
	}
	path, err := exec.LookPath(bin)
	if err != nil {
		return Info{}, fault.Newf(fault.System, "there is no %s on this host, which runs the guests", bin).Because(err).Hint(installHint)
	}
	if path, err = filepath.Abs(path); err != nil {
		return Info{}, err
	}
	key, err := fileKey(path)
	if err != nil {
		return Info{}, err
	}
	var rec struct {
		Key  string `json:"key"`
		Info Info   `json:"info"`
	}
	if !d.cacheGet("qemu.json", &rec) || rec.Key != key || rec.Info.Binary != path {
		out, err := exec.CommandContext(ctx, path, "--version").Output()
		if err != nil {
			return Info{}, fault.Newf(fault.System, "asking %s for its version", path).Because(err).Hint(installHint)
		}
		v, err := parseVersion(string(out))
		if err != nil {
			return Info{}, fmt.Errorf("asking %s for its version: %w", path, err)
		}
		rec.Key, rec.Info = key, Info{path, v}
		d.cachePut("qemu.json", rec)
	}
	if !atLeast(rec.Info.Version, 7, 2) {
		return Info{}, fault.Newf(fault.System, "%s is QEMU %s; 7.2 or later is needed", path, rec.Info.Version).Hint(installHint)
	}
	d.mu.Lock()
	d.info = rec.Info
	d.mu.Unlock()
	return rec.Info, nil
}

var versionRE = lazyre.New(`version (\d+\.\d+(\.\d+)?)`)

func parseVersion(out string) (string, error) {
	m := versionRE.FindStringSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("%q has no version in it", printable([]byte(out[:min(len(out), 80)])))
	}
	return m[1], nil
}

func atLeast(v string, major, minor int) bool {
	a, b, _ := strings.Cut(v, ".")
	b, _, _ = strings.Cut(b, ".")
	x, _ := strconv.Atoi(a)
	y, _ := strconv.Atoi(b)
	return x > major || x == major && y >= minor
}

// fileKey changes when the file is replaced.
func fileKey(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s %d %d", path, st.Size(), st.ModTime().UnixNano()), nil
}

// Verdict decides how guests with kernel k run. "auto" trusts only a guest
// kernel that ran under KVM on this host, since this boot, with this QEMU: on
// some hosts /dev/kvm opens and guests then hang. The first call for a kernel
// may take probeLimit; later ones read the cache.
func (d *Driver) Verdict(ctx context.Context, k machine.Kernel) (Verdict, error) {
	want, why := d.cfg.Accel, "configured"
	if e := os.Getenv(AccelEnv); e != "" {
		want, why = e, "$"+AccelEnv
	}
	switch want {
	case "kvm", "tcg":
		return Verdict{want, why}, nil
	case "", "auto":
	default:
		return Verdict{}, fault.Newf(fault.Usage, "accelerator %q (%s) is not auto, kvm or tcg", want, why)
	}
	f, err := os.OpenFile(d.dev, os.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Verdict{"tcg", "this host has no " + d.dev}, nil
	case err != nil:
		return Verdict{"tcg", fmt.Sprintf("%s cannot be opened: %v", d.dev, errors.Unwrap(err))}, nil
	}
	f.Close()
	return d.probed(ctx, k)
}

// verdictRecord is what accel-HEX.json holds; Key is written out to be read.
type verdictRecord struct {
	Key     string    `json:"key"`
	Verdict Verdict   `json:"verdict"`
	At      time.Time `json:"at"`
}

// probed gives the verdict of the probe, from memory, from the cache, or by
// running it; one process at a time does.
func (d *Driver) probed(ctx context.Context, k machine.Kernel) (Verdict, error) {
	info, err := d.Info(ctx)
	if err != nil {
		return Verdict{}, err
	}
	id, err := bootID()
	if err != nil {
		return Verdict{}, fmt.Errorf("reading the host's boot id: %w", err)
	}
	kkey, err := fileKey(k.Image)
	if err != nil {
		return Verdict{}, fmt.Errorf("kernel: %w", err)
	}
	qkey, err := fileKey(info.Binary)
	if err != nil {
		return Verdict{}, err
	}
	key := strings.Join([]string{id, kkey, qkey, info.Version}, "\n")
	sum := sha256.Sum256([]byte(key))
	name := "accel-" + hex.EncodeToString(sum[:8]) + ".json"
	known := func() (Verdict, bool) {
		d.mu.Lock()
		v, ok := d.verdicts[key]
		d.mu.Unlock()
		var r verdictRecord
		if !ok && d.cacheGet(name, &r) && r.Key == key && (r.Verdict.Accel == "kvm" || r.Verdict.Accel == "tcg") {
			v, ok = r.Verdict, true
		}
		return v, ok
	}
	if v, ok := known(); ok {
		return v, nil
	}
	if d.cfg.CacheDir != "" && os.MkdirAll(d.cfg.CacheDir, 0o755) == nil {
		if lock, err := fsx.AcquireLock(ctx, filepath.Join(d.cfg.CacheDir, "accel.lock"), false); err == nil {
			defer lock.Close()
		} else if ctx.Err() != nil {
			return Verdict{}, err
		}
		if v, ok := known(); ok {
			return v, nil
		}
	}
	pctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	v := Verdict{"kvm", "a guest kernel ran under KVM"}
	if err := d.probe(pctx, k); err != nil {
		if ctx.Err() != nil { // stopped by our caller: that says nothing of KVM
			return Verdict{}, fmt.Errorf("probing KVM: %w", context.Cause(ctx))
		}
		v = Verdict{"tcg", fmt.Sprintf("KVM does not work here: %v", err)}
	}
	d.mu.Lock()
	d.verdicts[key] = v
	d.mu.Unlock()
	d.cachePut(name, verdictRecord{key, v, time.Now().UTC()})
	return v, nil
}

// probeKVM boots k under KVM with no root at all. A kernel that complains of
// that has come to the end of its own start-up: the processor, its clock, its
// interrupts and its console work.
func (d *Driver) probeKVM(ctx context.Context, k machine.Kernel) error {
	return d.probeWith(ctx, k, "kvm")
}

func (d *Driver) probeWith(ctx context.Context, k machine.Kernel, accel string) error {
	dir, err := os.MkdirTemp("", "vk-probe-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var seen tail
	k.Initrd, k.Cmdline = "", nil
	g, err := d.boot(ctx, machine.Spec{Name: "kvm-probe", CPUs: 1, MemMiB: 256, Dir: dir, Kernel: k, Console: &seen}, accel)
	if err != nil {
		return err
	}
	defer g.Kill()
	e, err := g.Wait(ctx)
	if err != nil {
		return fmt.Errorf("the kernel did not get through its start in %v; the console ends %q", probeLimit, seen.lines())
	}
	if e.Reason == machine.Panic && strings.Contains(e.Detail, "VFS: ") {
		return nil
	}
	return fmt.Errorf("the probe's guest ended by %s: %s", e.Reason, e.Detail)
}

// mapCovers says whether a uid_map or gid_map maps all of n ids from base.
func mapCovers(m string, base, n uint64) bool {
	for l := range strings.Lines(m) {
		f := strings.Fields(l)
		if len(f) != 3 {
			continue
		}
		start, err1 := strconv.ParseUint(f[0], 10, 64)
		size, err2 := strconv.ParseUint(f[2], 10, 64)
		if err1 == nil && err2 == nil && start <= base && start+size >= base+n {
			return true
		}
	}
	return false
}
