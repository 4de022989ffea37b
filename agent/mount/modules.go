package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ModuleDir holds the kernel modules of an initramfs and their order.
const ModuleDir = "/lib/vk-modules"

// Modules loads what the file order in ModuleDir lists, one path a line
// (absolute, or below ModuleDir), and removes the files: the initramfs stays
// in memory. No such file is no modules. One that is there already, or that
// its hardware is missing for, is no error.
func Modules(order string) error {
	b, err := os.ReadFile(filepath.Join(ModuleDir, order))
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.Lines(string(b)) {
		path := strings.TrimSpace(line)
		if path == "" || path[0] == '#' {
			continue
		}
		if path[0] != '/' {
			path = filepath.Join(ModuleDir, path)
		}
		if err := load(path); err != nil {
			errs = append(errs, err)
		}
		os.Remove(path)
	}
	return errors.Join(errs...)
}

func load(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("module %s: %w", path, err)
	}
	defer unix.Close(fd)
	switch err := unix.FinitModule(fd, "", 0); err {
	case nil, unix.EEXIST, unix.ENODEV:
		return nil
	default:
		return fmt.Errorf("module %s: %w", path, err)
	}
}
