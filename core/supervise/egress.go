package supervise

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/logx"
	"virtkit/core/policy"
)

// Egress is what the guests of a switch may reach in the run phase, decided
// once before they boot. It holds no secret.
type Egress struct {
	// Policy has a list of lists for each service, by the name of its port.
	Policy policy.Policy `json:"policy"`
	// StrictNames holds flows to the name that they ask for.
	StrictNames bool `json:"strict_names,omitempty"`
	// Audit says that what was contacted is to be listed, not only kept.
	Audit bool `json:"audit,omitempty"`
	// Site is the key of the job's standing list of names (policy.Standing);
	// "" has none.
	Site string `json:"site,omitempty"`
	// Cap is the fingerprint of the node's cap (policy.CapReport).
	Cap string `json:"cap,omitempty"`
	// Refusals are the declared entries that a layer above leaves nothing of.
	Refusals []policy.Refusal `json:"refusals,omitempty"`
}

// EgressFile is the name of the EgressRecord in a job's directory.
const EgressFile = "egress.json"

const egressSchema = "vk.egress-record/1"

// EgressRecord is what a guest's switch has recorded, with all that is needed
// to read it once the guest is gone.
type EgressRecord struct {
	Schema  string    `json:"schema"` // "vk.egress-record/1"
	ID      string    `json:"id"`     // the guest's directory
	Name    string    `json:"name"`
	Kind    string    `json:"kind"` // Spec.Kind
	Created time.Time `json:"created"`
	Updated time.Time `json:"updated"`
	// Ended says that the switch was closed before this was written, so that
	// nothing is missing.
	Ended    bool          `json:"ended"`
	Egress   Egress        `json:"egress"`
	Record   policy.Record `json:"record"`
	Sent     uint64        `json:"sent"` // bytes, as EgressNetwork.Traffic
	Received uint64        `json:"received"`
}

// ReadEgress reads the record of a job's directory, which is at most a few
// seconds old (Times.Record). fs.ErrNotExist when there is none.
func ReadEgress(dir string) (EgressRecord, error) {
	return ReadEgressFile(filepath.Join(dir, EgressFile))
}

// ReadEgressFile is ReadEgress of a file by its own name.
func ReadEgressFile(path string) (EgressRecord, error) {
	var r EgressRecord
	if err := readJSON(path, &r); err != nil {
		return r, err
	}
	if r.Schema != egressSchema {
		return r, fmt.Errorf("%s has schema %q, expected %q", path, r.Schema, egressSchema)
	}
	return r, nil
}

// egressKeeper writes egress.json: when asked, every few seconds while it
// changes, and at the end.
type egressKeeper struct {
	path string
	base EgressRecord
	net  EgressNetwork // nil: there is no record
	log  *slog.Logger

	mu      sync.Mutex
	written bool
	saved   uint64 // revision of what is in the file
	ended   bool
	failed  bool // the last write did
}

// begin makes the file, so that a guest with a record always has one.
func (k *egressKeeper) begin(dir string, spec Spec, n Network, log *slog.Logger) error {
	if spec.Net.Egress == nil {
		return nil
	}
	en, ok := n.(EgressNetwork)
	if !ok {
		return fault.Newf(fault.System, "this program's network of mode %q cannot hold guests to an egress policy", spec.Net.Mode).
			Hint(`set [net] mode = "switch"`)
	}
	k.path, k.log = filepath.Join(dir, EgressFile), log
	k.base = EgressRecord{Schema: egressSchema, ID: spec.ID, Name: spec.Name, Kind: spec.Kind, Created: spec.Created, Egress: *spec.Net.Egress}
	k.mu.Lock()
	k.net = en
	k.mu.Unlock()
	return k.save(false)
}

// save brings the file up to date.
func (k *egressKeeper) save(ended bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.net == nil || k.ended {
		return nil
	}
	r := k.base
	r.Record, r.Updated, r.Ended = k.net.Recorder().Snapshot(), time.Now().UTC(), ended
	if k.written && k.saved == r.Record.Revision && !ended {
		return nil
	}
	r.Sent, r.Received = k.net.Traffic()
	b, err := json.Marshal(r)
	if err == nil {
		err = fsx.WriteFile(k.path, append(b, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("writing the egress record: %w", err)
	}
	k.written, k.saved, k.ended = true, r.Record.Revision, ended
	return nil
}

// ask is a client's request.
func (k *egressKeeper) ask(stage string) error {
	k.mu.Lock()
	n := k.net
	k.mu.Unlock()
	if n == nil {
		return fault.New(fault.NotFound, "no record is kept of what this guest reaches").
			Hint("jobs are recorded always, guests of vk run with --audit-egress")
	}
	if stage != "" {
		n.Recorder().SetStage(stage)
	}
	return k.save(false)
}

// follow saves every so often until ctx ends: less often when that takes long,
// so that a guest that fills its record does not keep a processor or a disk
// busy with it.
func (k *egressKeeper) follow(ctx context.Context, every time.Duration) {
	next := every
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(next):
			start := time.Now()
			k.tell(k.save(false))
			next = max(every, 50*time.Since(start))
		}
	}
}

// end saves the last of it; the network is closed.
func (k *egressKeeper) end() { k.tell(k.save(true)) }

// tell logs the first of a row of failed writes.
func (k *egressKeeper) tell(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil && !k.failed {
		k.log.Warn("the egress record is not up to date", logx.Err, err)
	}
	k.failed = err != nil
}

// keepEgress hands the record of a directory that is about to be removed on.
func (s *supervisor) keepEgress() {
	if s.d.KeepEgress == nil {
		return
	}
	r, err := ReadEgress(s.dir)
	if err == nil {
		err = s.d.KeepEgress(r)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("the egress record is lost", logx.Err, err)
	}
}
