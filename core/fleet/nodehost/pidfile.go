package nodehost

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"virtkit/core/fsx"
	"virtkit/core/supervise"
)

// PIDFile is where a node keeps which process its runner is, below the state
// directory.
const PIDFile = "node/runner.pid"

const pidSchema = "vk.runner/1"

// runnerPID is that file. A runner outlives a node that is killed; the next one
// follows the runner that it finds there rather than start a second.
type runnerPID struct {
	Schema string `json:"schema"` // "vk.runner/1"
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"`   // start time, in clock ticks since boot
	BootID string `json:"boot_id"` // of the kernel: a time is of one boot
	Since  int64  `json:"since"`   // Unix seconds
	// Quit is set before the runner is told to end: it has no way back, whatever
	// is wanted of it later.
	Quit bool `json:"quit,omitempty"`
}

func (p runnerPID) owner() supervise.Owner { return supervise.Owner{PID: p.PID, Start: p.Start} }

// alive says whether the very process still runs.
func (p runnerPID) alive(boot string) bool {
	return p.PID > 1 && p.Start != 0 && p.BootID == boot && p.owner().Alive()
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

func readPID(stateDir string) (runnerPID, error) {
	var p runnerPID
	path := filepath.Join(stateDir, PIDFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(b, &p); err != nil || p.Schema != pidSchema {
		return runnerPID{}, fmt.Errorf("%s is no record of a runner: remove it once no gitlab-runner of this node runs", path)
	}
	return p, nil
}

func writePID(stateDir string, p runnerPID) error {
	p.Schema = pidSchema
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return fsx.WriteFile(filepath.Join(stateDir, PIDFile), append(b, '\n'), 0o600)
}

func removePID(stateDir string) error {
	err := os.Remove(filepath.Join(stateDir, PIDFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
