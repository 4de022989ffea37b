// Package nodehost is what a node of a fleet is on its host: what it is made of
// (Inventory), how it is doing (Heartbeat), which guests run on it (Workloads),
// the gitlab-runner on it (DetectMode, Managed), what a drain can observe
// (Observe), the runner's concurrency (Tuner), and how the node gets a user and
// a service there (SetUp, Service).
//
// Vocabulary: the host's facts change when somebody changes the host, and are
// sent when they do; its readings change by themselves and ride on heartbeats.
// A runner is gitlab-runner. It is managed when the node runs it, external when
// something else does, none when the host has no runner.
//
// Everything here looks at the host through a Root, so that tests give it a
// tree of their own for /proc, /sys, /etc and systemd's directories, and at the
// ledger through Ledger. It speaks to no hub.
//
// Two rules hold everywhere: what cannot be read is left out and said, never
// guessed; and a reading never changes a fact.
package nodehost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/core/supervise"
)

// Root is the filesystem that is looked at; "" is the host's own.
type Root string

// Path is where a path of the host is. It does not keep links below the root:
// trees of tests have none that lead out.
func (r Root) Path(p string) string {
	if r == "" {
		return p
	}
	return filepath.Join(string(r), p)
}

// maxRead bounds what is read of one file of the host, in bytes.
const maxRead = 4 << 20

// read is a bounded read of a file of the host.
func (r Root) read(p string) ([]byte, error) {
	f, err := os.OpenFile(r.Path(p), os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRead+1))
	if err == nil && len(b) > maxRead {
		err = fmt.Errorf("%s is larger than %d bytes", p, maxRead)
	}
	return b, err
}

// Claim is one live claim of the admission ledger.
type Claim struct {
	ID      string // the job directory's name, or a reservation's
	Waiting bool
	Granted admit.Amounts
	Want    admit.Amounts
}

// Guest is one job directory: a CI job's, or a `vk run`'s.
type Guest struct {
	ID      string
	Name    string
	Kind    string // supervise.Spec.Kind
	Phase   supervise.Phase
	Live    bool // its supervisor, or somebody about to start one, is there
	PID     int  // of the supervisor; 0 when not known
	Start   uint64
	Image   string
	Created time.Time
	Since   time.Time // of the phase
	CPUs    int
	MemMiB  int // of the guest and its services
	Dir     string
}

// GitLab is the Kind of a CI job's guest.
const GitLab = "gitlab"

// Ledger is what the host remembers of its jobs. Problems are entries that
// could not be read; an error means that nothing is known.
type Ledger interface {
	// Claims are the live claims, at one moment.
	Claims(ctx context.Context) (claims []Claim, problems []error, err error)
	// Guests are the job directories, those of dead supervisors included.
	Guests(ctx context.Context) (guests []Guest, problems []error, err error)
	// Budget is the memory budget of jobs in MiB; 0 = there is none.
	Budget() (int64, error)
}

// denied says whether an error is the kernel's refusal, which on a node mostly
// means that it runs as another user than the host's jobs.
func denied(err error) bool { return errors.Is(err, fs.ErrPermission) }

// lines are the lines of a text without their ends.
func lines(b []byte) []string { return strings.Split(strings.TrimRight(string(b), "\n"), "\n") }
