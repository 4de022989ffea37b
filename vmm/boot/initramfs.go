package boot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"virtkit/core/fsx"
	"virtkit/core/lazyre"
)

// initramfsDir is where an initramfs is kept by its digest.
func initramfsDir(stateDir string) string { return filepath.Join(stateDir, "boot") }

// ModulesDir is where the guest finds the modules to load; the file "order" in
// it has one file name per line, dependencies first.
const ModulesDir = "lib/vk-modules"

// buildInitramfs makes the archive: the agent as /init, a console node (the
// kernel opens it for PID 1 before anything is mounted), mount points, and the
// modules. It is not compressed: the kernel then copies it instead of
// inflating it, and an emulated guest inflates slowly (docs/kernels.md).
func buildInitramfs(agent []byte, mods []module) []byte {
	size := len(agent) + 4096
	for _, m := range mods {
		size += len(m.data) + 512
	}
	a := &newc{}
	a.buf.Grow(size)
	for _, d := range []string{"dev", "proc", "sys", "run", "tmp", "lib", ModulesDir} {
		a.add(d, sIFDIR|0o755, 0, 0, nil)
	}
	a.add("dev/console", sIFCHR|0o600, 5, 1, nil)
	a.add("dev/null", sIFCHR|0o666, 1, 3, nil)
	a.add("init", sIFREG|0o755, 0, 0, agent)
	var order bytes.Buffer
	for _, m := range mods {
		f := m.name + ".ko"
		a.add(ModulesDir+"/"+f, sIFREG|0o644, 0, 0, m.data)
		order.WriteString(f + "\n")
	}
	a.add(ModulesDir+"/order", sIFREG|0o644, 0, 0, order.Bytes())
	return a.close()
}

// writeInitramfs keeps the archive by the digest of its parts and returns its
// path. One that is there already is used as it is: a name is only ever given
// to a whole file.
func writeInitramfs(stateDir string, a agent, mods []module) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "initramfs 2\nagent %s\n", a.id)
	for _, m := range mods {
		fmt.Fprintf(h, "\nmodule %s %d\n", m.name, len(m.data))
		h.Write(m.data)
	}
	dir := initramfsDir(stateDir)
	path := filepath.Join(dir, hex.EncodeToString(h.Sum(nil)[:16])+".cpio")
	if _, err := os.Stat(path); err == nil {
		now := time.Now()
		os.Chtimes(path, now, now) // for Sweep; a read-only directory loses nothing
		return path, nil
	}
	init, err := a.bytes()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("making a place for the initramfs: %w", err)
	}
	// 0644: QEMU reads it as a user of its own when vk runs as root.
	if err := fsx.WriteFile(path, buildInitramfs(init, mods), 0o644); err != nil {
		return "", fmt.Errorf("writing initramfs %s: %w", path, err)
	}
	return path, nil
}

// archiveForm are the names that writeInitramfs gives, also to a file that it is
// writing (fsx.WriteFile).
var archiveForm = lazyre.New(`^\.?[0-9a-f]{32}\.cpio(\.tmp-[0-9]+)?$`)

// Sweep removes what no guest was booted from for as long as idle: initramfs
// files and leftovers of writers that died, those of kernel fetches too. It
// returns the bytes of initramfs freed. With dryRun it tells and removes
// nothing.
func Sweep(stateDir string, idle time.Duration, dryRun bool) (int64, error) {
	var freed int64
	var errs []error
	if _, err := os.Stat(KernelsDir(stateDir)); err == nil && !dryRun {
		lock, err := fsx.TryLock(filepath.Join(KernelsDir(stateDir), ".fetch.lock"), false)
		if err == nil {
			errs = append(errs, sweepFetches(KernelsDir(stateDir)))
			lock.Close()
		} else if !errors.Is(err, fsx.ErrLocked) { // locked: it is being fetched
			errs = append(errs, err)
		}
	}
	entries, err := os.ReadDir(initramfsDir(stateDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil || time.Since(st.ModTime()) < idle || !archiveForm.MatchString(e.Name()) ||
			!e.Type().IsRegular() || fsx.NotOurs(filepath.Join(initramfsDir(stateDir), e.Name())) != nil {
			continue
		}
		if !dryRun {
			if err := os.Remove(filepath.Join(initramfsDir(stateDir), e.Name())); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		freed += st.Size()
	}
	return freed, errors.Join(errs...)
}

// File type bits of a cpio mode, as in stat(2).
const (
	sIFREG = 0o100000
	sIFDIR = 0o040000
	sIFCHR = 0o020000
)

// newc writes a cpio archive of the "newc" form (kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst): each header is
// a magic and 13 numbers of 8 hex digits, names and data padded to 4 bytes.
// Times are 0, so that equal content makes equal bytes.
type newc struct {
	buf bytes.Buffer
	ino uint32
}

func (a *newc) add(name string, mode uint32, major, minor uint32, data []byte) {
	a.ino++
	links := 1
	if mode&0o170000 == sIFDIR {
		links = 2
	}
	a.header(a.ino, mode, links, len(data), major, minor, name)
	a.buf.Write(data)
	a.pad()
}

func (a *newc) header(ino, mode uint32, links, size int, major, minor uint32, name string) {
	fmt.Fprintf(&a.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		ino, mode, 0, 0, links, 0, size, 0, 0, major, minor, len(name)+1, 0, name)
	a.pad()
}

func (a *newc) pad() {
	for a.buf.Len()%4 != 0 {
		a.buf.WriteByte(0)
	}
}

func (a *newc) close() []byte {
	a.header(0, 0, 1, 0, 0, 0, "TRAILER!!!")
	for a.buf.Len()%512 != 0 {
		a.buf.WriteByte(0)
	}
	return a.buf.Bytes()
}
