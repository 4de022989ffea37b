package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"virtkit/agent/exec"
)

// linkTools links the programs of dir into bin, the last directory of every
// program's PATH, unless the root has one of that name on the PATH of env.
// Paths are below root. It returns the names that it linked, sorted.
func linkTools(root, dir, bin string, env []string) ([]string, error) {
	path := exec.DefaultPath
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v // the last one counts
		}
	}
	ents, err := os.ReadDir(filepath.Join(root, dir))
	if err != nil {
		return nil, fmt.Errorf("tools: %w", err)
	}
	var linked []string
	for _, e := range ents {
		if !runnable(filepath.Join(root, dir, e.Name())) || has(root, path, e.Name()) {
			continue
		}
		at := filepath.Join(root, bin, e.Name())
		if _, err := os.Lstat(at); err == nil {
			continue // ours, such as vk-agent
		}
		if err := os.Symlink(filepath.Join(dir, e.Name()), at); err != nil {
			return nil, fmt.Errorf("tools: %w", err)
		}
		linked = append(linked, e.Name())
	}
	return linked, nil
}

// has reports whether path leads to a program of that name.
func has(root, path, name string) bool {
	for _, d := range filepath.SplitList(path) {
		if filepath.IsAbs(d) && runnable(filepath.Join(root, d, name)) {
			return true
		}
	}
	return false
}

func runnable(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0
}
