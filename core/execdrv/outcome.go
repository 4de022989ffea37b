package execdrv

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"virtkit/core/policy"
)

// EnvOutcome names a file in which the calls tell more of their end than an
// exit status can hold. A runner does not set it; virtkit's own driver of
// placed jobs does (core/cijob). The names of it that a job can see are none.
const EnvOutcome = "VIRTKIT_OUTCOME_FILE"

// EnvJobServer tells prepare the GitLab that a placed job is from. It comes
// from the node's driver: unlike CI_SERVER_URL, no job can set it.
const EnvJobServer = "VK_JOB_SERVER_URL"

// EnvEgressLayer names the file with what the hub's egress rules make for a
// placed job (policy.HubEgress); a placed job without one is held to none. It
// comes from the node's driver, as the others here.
const EnvEgressLayer = "VIRTKIT_EGRESS_LAYER"

// Outcome is what the file holds, of the last call that wrote it.
type Outcome struct {
	// Step is prepare's step that failed: image, sources, boot …
	Step string `json:"step,omitempty"`
	// Refused are the entries of the job's MICROVM_*EGRESS_ALLOW_* variables that
	// failed it.
	Refused []policy.Refusal `json:"refused,omitempty"`
	// Job says that the job is at fault, not the host.
	Job bool `json:"job,omitempty"`
	// Signal ended the script's shell; 0 when it exited by itself.
	Signal int `json:"signal,omitempty"`
}

// Tell writes the file, where the caller asks for one. It is in place of an
// exit status: an error is not worth another one.
func (c *Call) Tell(o Outcome) {
	path := c.rest[EnvOutcome]
	if path == "" {
		return
	}
	b, err := json.Marshal(o)
	if err != nil {
		return
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".outcome-*")
	if err != nil {
		return
	}
	_, err = f.Write(b)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
}

// TakeOutcome reads the file and removes it; the zero Outcome when there is
// none.
func TakeOutcome(path string) (Outcome, error) {
	var o Outcome
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	return o, errors.Join(err, os.Remove(path))
}
