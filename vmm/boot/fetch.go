package boot

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/leash"
)

func isNotFound(err error) bool { return fault.KindOf(err) == fault.NotFound }

// Fetch gets Debian's kernel for clouds through the host's apt, without root
// and without installing it, keeps its image and the modules a guest needs
// under <state_dir>/kernels/debian-VERSION/, and returns it. One that is there
// is not fetched again. Concurrent callers wait for the first.
func Fetch(ctx context.Context, stateDir string, progress func(string)) (Kernel, error) {
	if progress == nil {
		progress = func(string) {}
	}
	dir := KernelsDir(stateDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Kernel{}, fmt.Errorf("making a place for kernels: %w", err)
	}
	lock, err := fsx.TryLock(filepath.Join(dir, ".fetch.lock"), false)
	if errors.Is(err, fsx.ErrLocked) {
		progress("waiting for another process that fetches a kernel")
		lock, err = fsx.AcquireLock(ctx, filepath.Join(dir, ".fetch.lock"), false)
	}
	if err != nil {
		return Kernel{}, fmt.Errorf("fetching a kernel: %w", err)
	}
	defer lock.Close()

	if err := sweepFetches(dir); err != nil {
		return Kernel{}, err
	}
	pkg, err := newestPackage(ctx)
	if err != nil {
		return Kernel{}, err
	}
	version := strings.TrimPrefix(pkg, "linux-image-")
	final := filepath.Join(dir, "debian-"+version)
	if k, err := fromDir("debian", final); err == nil {
		return k, nil
	}
	tmp, err := os.MkdirTemp(dir, ".fetch-*")
	if err != nil {
		return Kernel{}, fmt.Errorf("fetching a kernel: %w", err)
	}
	defer os.RemoveAll(tmp)
	progress("fetching " + pkg + " from the host's package archive")
	if err := download(ctx, tmp, pkg); err != nil {
		return Kernel{}, err
	}
	progress("unpacking " + pkg)
	out := filepath.Join(tmp, "out")
	if err := unpack(ctx, tmp, out, version, pkg, progress); err != nil {
		return Kernel{}, err
	}
	if err := os.RemoveAll(final); err != nil { // what fromDir did not understand
		return Kernel{}, err
	}
	if err := os.Rename(out, final); err != nil {
		return Kernel{}, fmt.Errorf("keeping kernel %s: %w", version, err)
	}
	if err := fsx.SyncDir(dir); err != nil {
		return Kernel{}, err
	}
	return fromDir("debian", final)
}

// sweepFetches removes what fetches that were killed left in dir, whose lock
// is held.
func sweepFetches(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, ".fetch-*"))
	if err != nil {
		return err
	}
	for _, d := range left {
		if err := os.RemoveAll(d); err != nil {
			return fmt.Errorf("removing what an interrupted fetch left: %w", err)
		}
	}
	return nil
}

// newestPackage is the package of the newest kernel of the series 6.12 that
// apt knows, else what Debian's current one for clouds depends on.
func newestPackage(ctx context.Context) (string, error) {
	out, err := run(ctx, "", "apt-cache", "pkgnames", "linux-image-6.12")
	if err != nil {
		return "", err
	}
	if p := pickPackage(out); p != "" {
		return p, nil
	}
	out, err = run(ctx, "", "apt-cache", "depends", "--important", "linux-image-cloud-amd64")
	if err == nil {
		for l := range strings.Lines(string(out)) {
			if p, ok := strings.CutPrefix(strings.TrimSpace(l), "Depends: "); ok && strings.HasPrefix(p, "linux-image-") {
				return p, nil
			}
		}
	}
	return "", fault.New(fault.Unavailable, "apt knows no kernel for clouds (linux-image-cloud-amd64)").Because(err).
		Hint("run apt-get update as root to get the package lists, or run make kernel")
}

// pickPackage chooses the newest signed kernel of a list of package names.
func pickPackage(names []byte) string {
	best := ""
	s := bufio.NewScanner(bytes.NewReader(names))
	for s.Scan() {
		n := strings.TrimSpace(s.Text())
		v, ok := strings.CutPrefix(n, "linux-image-")
		// "6.12-cloud-amd64" is a name for the newest, without files.
		if !ok || !strings.HasSuffix(v, "-cloud-amd64") || strings.Count(v, ".") < 2 {
			continue
		}
		if best == "" || compareVersions(n, best) > 0 {
			best = n
		}
	}
	return best
}

func download(ctx context.Context, dir, pkg string) error {
	// Not sandboxed: the download user of apt may not write into our directory.
	_, err := run(ctx, dir, "apt-get", "-q", "-o", "APT::Sandbox::User=", "-o", "Dpkg::Use-Pty=0", "download", pkg)
	if errors.Is(err, syscall.ENOSPC) {
		return err
	}
	if err != nil {
		return fault.Newf(fault.Unavailable, "fetching %s by apt-get", pkg).Because(err).
			Hint("check the host's network, run apt-get update as root, or run make kernel")
	}
	return nil
}

// unpack takes image, config and modules out of the package in dir into out.
func unpack(ctx context.Context, dir, out, version, pkg string, progress func(string)) error {
	debs, _ := filepath.Glob(filepath.Join(dir, "linux-image-*.deb"))
	if len(debs) != 1 {
		return fmt.Errorf("fetching %s: apt-get left %d packages in %s, not one", pkg, len(debs), dir)
	}
	root := filepath.Join(dir, "root")
	if _, err := run(ctx, dir, "dpkg-deb", "-x", debs[0], root); err != nil {
		return fmt.Errorf("unpacking %s: %w", filepath.Base(debs[0]), err)
	}
	modsIn := filepath.Join(root, "lib/modules", version)
	if _, err := os.Stat(modsIn); err != nil {
		modsIn = filepath.Join(root, "usr/lib/modules", version)
	}
	mods, err := closure(ctx, modsIn, slices.Concat(needed, nested), func(n string) bool { return optional[n] || strings.HasPrefix(n, "kvm") })
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(out, "modules"), 0o755); err != nil {
		return err
	}
	sums := map[string]string{}
	put := func(rel string, data []byte) error {
		sum := sha256.Sum256(data)
		sums[rel] = hex.EncodeToString(sum[:])
		return writeSynced(filepath.Join(out, rel), data)
	}
	for _, m := range mods {
		if err := put(filepath.Join("modules", m.name+".ko"), m.data); err != nil {
			return err
		}
	}
	for rel, src := range map[string]string{
		"vmlinuz":                 filepath.Join(root, "boot/vmlinuz-"+version),
		"config":                  filepath.Join(root, "boot/config-"+version),
		"modules/modules.builtin": filepath.Join(modsIn, "modules.builtin"),
	} {
		b, err := os.ReadFile(src)
		if err != nil {
			return fmt.Errorf("package %s has not what a kernel has: %w", pkg, err)
		}
		if err := put(rel, b); err != nil {
			return err
		}
	}
	image := "vmlinuz"
	bz, err := os.ReadFile(filepath.Join(out, "vmlinuz"))
	if err != nil {
		return err
	}
	// The guest would decompress the kernel at each boot; done here once, it
	// starts a second sooner under emulation.
	if elfImage, err := extractVmlinux(bz); err == nil {
		image = "vmlinux"
		if err := put(image, elfImage); err != nil {
			return err
		}
	} else {
		progress(fmt.Sprintf("keeping the compressed kernel: %v", err))
	}
	m := Manifest{Version: version, Source: filepath.Base(debs[0]), Image: image, BzImage: "vmlinuz", Modules: "modules", SHA256: sums}
	b, err := json.MarshalIndent(m, "", "\t")
	if err != nil {
		return err
	}
	return writeSynced(filepath.Join(out, "kernel.json"), append(b, '\n'))
}

// writeSynced writes a new file to stable storage; its directory gets its name
// by a rename later.
func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

// run runs a tool of the host and returns its output; an error carries the
// last lines it printed to stderr.
func run(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive")
	var out, errb bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errb
	err := leash.Run(cmd)
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fault.Newf(fault.System, "there is no %s on this host", name).Because(err).
			Hint("Debian's kernel is fetched with it; elsewhere run make kernel, or name a kernel file")
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		err = fmt.Errorf("%s %s: %w%s", name, args[0], err, lastWords(errb.String()))
		if full(errb.String()) {
			return nil, fault.Newf(fault.System, "no room for the guest's kernel on the filesystem of %s", filepath.Dir(dir)).
				Because(fmt.Errorf("%w: %w", syscall.ENOSPC, err)).
				Hint("it takes about 200 MB while it is unpacked; free some, or name another place with --state-dir or VIRTKIT_STATE_DIR")
		}
		return nil, err
	}
	return out.Bytes(), nil
}

// full tells whether a Debian tool ended for want of space: dpkg-deb and tar
// say it in the C library's words, apt-get in its own before it downloads.
func full(stderr string) bool {
	return strings.Contains(stderr, syscall.ENOSPC.Error()) || strings.Contains(stderr, "No space left on device") ||
		strings.Contains(stderr, "enough free space")
}

func lastWords(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	if n := len(lines); n > 3 {
		lines = lines[n-3:]
	}
	if len(lines) == 1 && lines[0] == "" {
		return ""
	}
	return ": " + strings.Join(lines, "; ")
}
