package boot

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/fault"
)

// SystemDir holds kernels installed for the whole host by a package.
const SystemDir = "/usr/lib/virtkit/kernels"

// Manifest is kernel.json beside a kernel's files.
type Manifest struct {
	Version string            `json:"version"`           // uname -r
	Source  string            `json:"source,omitempty"`  // what it was made from, for people
	Image   string            `json:"image"`             // file to boot, relative to the manifest
	BzImage string            `json:"bzimage,omitempty"` // the same kernel for loaders without PVH
	Modules string            `json:"modules,omitempty"` // directory of .ko files, "" = none
	Tuned   bool              `json:"tuned,omitempty"`   // all that a guest needs is built in
	SHA256  map[string]string `json:"sha256,omitempty"`  // of each file, by relative path
}

// Kernel is a kernel found on this host.
type Kernel struct {
	Name    string `json:"name"`    // the directory's, or the path it was given by
	Origin  string `json:"origin"`  // "given", "tuned", "system", "debian" or "host"
	Version string `json:"version"` // uname -r, as far as it is known
	Image   string `json:"image"`   // file to boot: bzImage or PVH vmlinux
	Modules string `json:"modules,omitempty"`
	Tuned   bool   `json:"tuned"` // needs no module to be a guest
}

// KernelsDir is where a host's own kernels are kept.
func KernelsDir(stateDir string) string { return filepath.Join(stateDir, "kernels") }

// List finds all kernels, the best first: tuned ones of the state directory,
// those installed for the whole host, Debian's fetched by Fetch, and the
// host's own cloud kernels where they can be read. Directories that are not
// understood are skipped and reported in the second result.
func List(stateDir string) ([]Kernel, []error) { return listIn(stateDir, SystemDir, "/boot") }

func listIn(stateDir, systemDir, bootDir string) ([]Kernel, []error) {
	var out []Kernel
	var errs []error
	add := func(origin, pattern string) {
		dirs, _ := filepath.Glob(pattern)
		slices.SortFunc(dirs, func(a, b string) int { return compareVersions(filepath.Base(b), filepath.Base(a)) })
		for _, d := range dirs {
			k, err := fromDir(origin, d)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			out = append(out, k)
		}
	}
	add("tuned", filepath.Join(KernelsDir(stateDir), "tuned-*"))
	add("system", filepath.Join(systemDir, "*"))
	add("debian", filepath.Join(KernelsDir(stateDir), "debian-*"))
	images, _ := filepath.Glob(filepath.Join(bootDir, "vmlinuz-*-cloud-amd64"))
	slices.SortFunc(images, func(a, b string) int { return compareVersions(b, a) })
	for _, im := range images {
		if f, err := os.Open(im); err != nil {
			errs = append(errs, fmt.Errorf("the host's kernel: %w", err))
			continue
		} else {
			f.Close()
		}
		k := Kernel{Name: "host-" + strings.TrimPrefix(filepath.Base(im), "vmlinuz-"), Origin: "host", Image: im,
			Version: strings.TrimPrefix(filepath.Base(im), "vmlinuz-")}
		k.Modules = modulesOf(bootDir, k.Version)
		out = append(out, k)
	}
	return out, errs
}

func modulesOf(bootDir, version string) string {
	dir := filepath.Join(filepath.Dir(bootDir), "lib/modules", version)
	if st, err := os.Stat(dir); err == nil && st.IsDir() {
		return dir
	}
	return ""
}

func fromDir(origin, dir string) (Kernel, error) {
	b, err := os.ReadFile(filepath.Join(dir, "kernel.json"))
	if err != nil {
		return Kernel{}, fmt.Errorf("kernel in %s: %w", dir, err)
	}
	var m Manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return Kernel{}, fmt.Errorf("kernel in %s: reading kernel.json: %w", dir, err)
	}
	if !filepath.IsLocal(m.Image) || (m.Modules != "" && !filepath.IsLocal(m.Modules)) {
		return Kernel{}, fmt.Errorf("kernel in %s: kernel.json names a file outside of the directory", dir)
	}
	k := Kernel{Name: filepath.Base(dir), Origin: origin, Version: m.Version, Tuned: m.Tuned, Image: filepath.Join(dir, m.Image)}
	if m.Modules != "" {
		k.Modules = filepath.Join(dir, m.Modules)
	}
	if _, err := os.Stat(k.Image); err != nil {
		return Kernel{}, fmt.Errorf("kernel in %s: %w", dir, err)
	}
	return k, nil
}

// Find is the kernel that want names: "" is the best one of List, a name is
// that of List, anything with a slash is a kernel image or a directory with a
// kernel.json. The error for none at all has the kind NotFound.
func Find(stateDir, want string) (Kernel, error) {
	if strings.Contains(want, "/") {
		return given(want)
	}
	all, errs := List(stateDir)
	for _, k := range all {
		if want == "" || want == k.Name || want == k.Version || want == k.Origin {
			return k, nil
		}
	}
	if want != "" {
		var names []string
		for _, k := range all {
			names = append(names, k.Name)
		}
		e := fault.Newf(fault.NotFound, "no kernel is called %q", want).Because(errors.Join(errs...))
		if len(names) == 0 {
			return Kernel{}, e.Hint("there is none in %s yet: run make kernel, or leave the name out to fetch Debian's", KernelsDir(stateDir))
		}
		return Kernel{}, e.Hint("there are %s", strings.Join(names, ", "))
	}
	return Kernel{}, fault.Newf(fault.NotFound, "there is no guest kernel in %s or %s", KernelsDir(stateDir), SystemDir).
		Because(errors.Join(errs...)).Hint("run make kernel for the tuned one, or vk check --fetch for Debian's")
}

func given(path string) (Kernel, error) {
	st, err := os.Stat(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return Kernel{}, fault.Newf(fault.NotFound, "there is no kernel %s", path).Because(err)
		}
		return Kernel{}, fmt.Errorf("kernel %s: %w", path, err)
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return Kernel{}, err
	}
	if st.IsDir() {
		k, err := fromDir("given", abs)
		k.Name = abs
		return k, err
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(abs), "kernel.json")); err == nil {
		if k, err := fromDir("given", filepath.Dir(abs)); err == nil {
			k.Name, k.Image = abs, abs
			return k, nil
		}
	}
	k := Kernel{Name: abs, Origin: "given", Image: abs}
	if v, ok := strings.CutPrefix(filepath.Base(abs), "vmlinuz-"); ok {
		k.Version = v
		k.Modules = modulesOf(filepath.Dir(abs), v)
	}
	// Without modules beside it, a kernel can only be one that needs none.
	k.Tuned = k.Modules == ""
	return k, nil
}

// compareVersions orders names with numbers in them: 6.9 before 6.12.
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		na, nb := digits(a), digits(b)
		if na > 0 && nb > 0 {
			x, _ := strconv.ParseUint(a[:na], 10, 64)
			y, _ := strconv.ParseUint(b[:nb], 10, 64)
			if x != y {
				if x < y {
					return -1
				}
				return 1
			}
			a, b = a[na:], b[nb:]
			continue
		}
		if a[0] != b[0] {
			return int(a[0]) - int(b[0])
		}
		a, b = a[1:], b[1:]
	}
	return len(a) - len(b)
}

func digits(s string) int {
	n := 0
	for n < len(s) && n < 18 && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
