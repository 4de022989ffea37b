package nodehost

import "time"

// NextRestart is nextRestart.
func NextRestart(before, ran time.Duration) time.Duration { return nextRestart(before, ran) }

// MountOf is mountOf in the mount table of a root.
func MountOf(r Root, path string, dev Dev) (device, fstype string) {
	ms, err := r.mounts()
	if err != nil {
		panic(err)
	}
	return mountOf(ms, path, dev)
}

// Points are the mount points of a root's mount table.
func Points(r Root) (out []string) {
	ms, _ := r.mounts()
	for _, m := range ms {
		out = append(out, m.point)
	}
	return out
}

// Words splits a command of a unit.
func Words(s string) []string { return words(s) }

// ReadPID says whether the runner that a state directory records lives.
func ReadPID(stateDir string) (alive bool, err error) {
	p, err := readPID(stateDir)
	if err != nil {
		return false, err
	}
	boot, err := bootID()
	return err == nil && p.alive(boot), err
}

// Near says whether a figure is repeated instead of the one that was measured.
func Near(before, now int64) bool { return near(before, now) }
