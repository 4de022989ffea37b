package boot

import (
	"bytes"
	"compress/gzip"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"virtkit/core/fault"
)

// module is one kernel module as it goes into the initramfs.
type module struct {
	name string // canonical: underscores
	data []byte // the ELF file, decompressed
}

// What a distribution's kernel needs to be a guest of the microvm machine, in
// the order it is asked for. A name may be built into the kernel.
var (
	needed = []string{
		"virtio_mmio", "virtio_console", "virtio_blk", "virtio_net", "virtio_rng", "virtio_balloon",
		"ext4", "erofs", "overlay", "fuse", "virtiofs",
		"vmw_vsock_virtio_transport", "crc32c_intel",
	}
	// optional ones are left out without a word where a kernel has none.
	optional = map[string]bool{"crc32c_intel": true, "erofs": true, "virtio_rng": true, "virtio_balloon": true, "virtiofs": true, "vmw_vsock_virtio_transport": true}
	nested   = []string{"kvm", "kvm_intel", "kvm_amd"}
)

// modulesFor reads what k needs from its module directory, dependencies first.
func modulesFor(ctx context.Context, k Kernel, nest bool) ([]module, error) {
	var want []string
	if !k.Tuned {
		want = append(want, needed...)
	}
	if nest {
		want = append(want, nested...)
	}
	if len(want) == 0 {
		return nil, nil
	}
	if k.Modules == "" {
		if k.Tuned { // nesting asked of a kernel that has it built in, or not at all
			return nil, nil
		}
		return nil, fault.Newf(fault.System, "kernel %s needs modules, and there are none beside it", k.Name).
			Hint("install its modules, or use another kernel: run make kernel")
	}
	return closure(ctx, k.Modules, want, func(name string) bool { return optional[name] || nest && strings.HasPrefix(name, "kvm") })
}

// closure reads the wanted modules and all that they depend on from dir, each
// once, in an order in which they load.
func closure(ctx context.Context, dir string, want []string, optional func(string) bool) ([]module, error) {
	paths, err := index(dir)
	if err != nil {
		return nil, err
	}
	builtin, err := builtins(dir)
	if err != nil {
		return nil, err
	}
	var out []module
	state := map[string]int{} // 1 = being visited, 2 = done
	var visit func(name string, soft bool) error
	visit = func(name string, soft bool) error {
		switch state[name] {
		case 1:
			return fmt.Errorf("modules in %s: %s depends on itself", dir, name)
		case 2:
			return nil
		}
		p, ok := paths[name]
		if !ok {
			if soft || builtin[name] || len(builtin) == 0 && optional(name) {
				return nil
			}
			return fmt.Errorf("modules in %s: there is no %s, neither as a file nor built in", dir, name)
		}
		state[name] = 1
		data, err := readModule(ctx, p)
		if err != nil {
			return err
		}
		deps, soft1, err := dependsOf(data)
		if err != nil {
			return fmt.Errorf("module %s: %w", p, err)
		}
		for _, d := range soft1 {
			if state[d] == 1 {
				continue // a soft dependency may go in circles
			}
			if err := visit(d, true); err != nil {
				return err
			}
		}
		for _, d := range deps {
			if err := visit(d, false); err != nil {
				return err
			}
		}
		state[name] = 2
		out = append(out, module{name, data})
		return nil
	}
	for _, w := range want {
		if err := visit(canonical(w), optional(w)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// canonical is the kernel's own spelling of a module's name.
func canonical(s string) string { return strings.ReplaceAll(s, "-", "_") }

var suffixes = []string{".ko", ".ko.xz", ".ko.zst", ".ko.gz"}

// index maps canonical names to the module files below dir.
func index(dir string) (map[string]string, error) {
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		for _, s := range suffixes {
			if n, ok := strings.CutSuffix(d.Name(), s); ok && d.Type().IsRegular() {
				out[canonical(n)] = p
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("looking for kernel modules: %w", err)
	}
	return out, nil
}

// builtins is the set of modules that modules.builtin in dir names; empty when
// there is no such file.
func builtins(dir string) (map[string]bool, error) {
	b, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	out := map[string]bool{}
	for l := range strings.Lines(string(b)) {
		n := strings.TrimSuffix(filepath.Base(strings.TrimSpace(l)), ".ko")
		out[canonical(n)] = true
	}
	return out, nil
}

// maxModule bounds a decompressed module, in bytes.
const maxModule = 64 << 20

// readModule reads a module file, decompressing by its name's end.
func readModule(ctx context.Context, path string) ([]byte, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading kernel module: %w", err)
	}
	var r io.Reader
	switch filepath.Ext(path) {
	case ".ko":
		return raw, nil
	case ".xz":
		cmd := exec.CommandContext(ctx, "xz", "-dc")
		cmd.Stdin = bytes.NewReader(raw)
		out, err := cmd.Output()
		if errors.Is(err, exec.ErrNotFound) {
			return nil, fault.Newf(fault.System, "kernel module %s is compressed and there is no xz", path).Hint("apt-get install xz-utils").Because(err)
		}
		if err != nil {
			return nil, fmt.Errorf("decompressing %s: %w", path, err)
		}
		return out, nil
	case ".gz":
		r, err = gzip.NewReader(bytes.NewReader(raw))
	case ".zst":
		var d *zstd.Decoder
		if d, err = zstd.NewReader(bytes.NewReader(raw)); err == nil {
			defer d.Close()
			r = d
		}
	}
	if err != nil {
		return nil, fmt.Errorf("decompressing %s: %w", path, err)
	}
	out, err := io.ReadAll(io.LimitReader(r, maxModule))
	if err != nil {
		return nil, fmt.Errorf("decompressing %s: %w", path, err)
	}
	return out, nil
}

// dependsOf reads the names a module depends on, and those its "pre" soft
// dependencies name, from its .modinfo section.
func dependsOf(data []byte) (deps, soft []string, err error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, nil, errors.New("it has no .modinfo section")
	}
	info, err := s.Data()
	if err != nil {
		return nil, nil, fmt.Errorf("reading .modinfo: %w", err)
	}
	deps, soft = parseModinfo(info)
	return deps, soft, nil
}

func parseModinfo(info []byte) (deps, soft []string) {
	for kv := range bytes.SplitSeq(info, []byte{0}) {
		k, v, ok := strings.Cut(string(kv), "=")
		if !ok {
			continue
		}
		switch k {
		case "depends":
			for d := range strings.SplitSeq(v, ",") {
				if d != "" {
					deps = append(deps, canonical(d))
				}
			}
		case "softdep":
			pre := false
			for w := range strings.FieldsSeq(v) {
				if strings.HasSuffix(w, ":") {
					pre = w == "pre:"
				} else if pre {
					soft = append(soft, canonical(w))
				}
			}
		}
	}
	return deps, soft
}
