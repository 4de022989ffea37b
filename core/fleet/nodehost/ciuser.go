package nodehost

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"virtkit/core/fault"
)

// A node reads the ledger's entries (0600) and the job directories that the
// host's CI jobs write, so it must be their user. Evidence is what shows that
// the jobs run as another one.

// Evidence is a sign of a user of CI jobs that is not the node's.
type Evidence struct {
	User User
	Sign string // what shows it, for people
}

// CICheck is what the evidence is looked for by.
type CICheck struct {
	Root     Root
	StateDir string
	User     User // that the node runs as
	Found    *Runner
	Mode     Mode
	// OwnIDs are job directories that count as the node's whoever owns them: the
	// placed jobs, still running, of a user that the node had before.
	OwnIDs func(id string) bool
}

// Evidence looks for signs of another user: entries of the ledger or job
// directories that are another's; and with an external runner, its service
// running as another user with a configuration whose custom executor runs vk.
// Of one user and kind, one sign is given.
func (c CICheck) Evidence() ([]Evidence, error) {
	var out []Evidence
	for _, d := range []struct{ dir, what string }{{"admit", "the claim"}, {"jobs", "the job directory"}} {
		got, err := c.owners(filepath.Join(c.StateDir, d.dir), d.what)
		if err != nil {
			return nil, err
		}
		out = append(out, got...)
	}
	// A managed runner is the node's own child, and runs as its user.
	if r := c.Found; c.Mode == ModeExternal && r != nil && r.Unit != nil && r.User.UID != c.User.UID && len(r.vk()) > 0 {
		as := fmt.Sprintf("has User=%s", r.Unit.User)
		if r.Unit.User == "" {
			as = "sets no User= and so runs as root"
		}
		out = append(out, Evidence{r.User, fmt.Sprintf("%s %s, and %s has a custom executor that runs vk", r.Unit.Name, as, r.ConfigPath)})
	}
	return out, nil
}

// ledgerFiles are names of the ledger that say nothing about who runs jobs.
func ledgerFile(name string) bool {
	return name == ".lock" || name == ".sweep" || strings.HasPrefix(name, "reservation-")
}

// owners finds entries of a directory that belong to other users. The
// directory itself says nothing.
func (c CICheck) owners(dir, what string) ([]Evidence, error) {
	ents, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if denied(err) {
		st, serr := os.Lstat(dir)
		if serr != nil {
			return nil, err
		}
		if u := c.Root.UserOf(uidOf(st)); u.UID != c.User.UID {
			return []Evidence{{u, fmt.Sprintf("%s is closed to %s", dir, c.User)}}, nil
		}
		return nil, err
	}
	if err != nil {
		return nil, err
	}
	var out []Evidence
	for _, e := range ents {
		if ledgerFile(e.Name()) || c.OwnIDs != nil && c.OwnIDs(e.Name()) {
			continue
		}
		st, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		uid := uidOf(st)
		if uid == c.User.UID || slices.ContainsFunc(out, func(v Evidence) bool { return v.User.UID == uid }) {
			continue
		}
		out = append(out, Evidence{c.Root.UserOf(uid), fmt.Sprintf("%s %s belongs to %s", what, filepath.Join(dir, e.Name()), c.Root.UserOf(uid))})
	}
	return out, nil
}

func uidOf(st fs.FileInfo) int {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		return int(sys.Uid)
	}
	return -1
}

// MismatchError refuses a node whose user is not that of the host's CI jobs. nil
// without evidence.
func (c CICheck) MismatchError(ev []Evidence) error {
	if len(ev) == 0 {
		return nil
	}
	return fault.New(fault.Conflict, c.mismatch(ev)).Hint("%s; --ignore-ci-user goes on all the same", c.remedies(ev))
}

// MismatchText is the same as one line, for a warning and a log.
func (c CICheck) MismatchText(ev []Evidence) string {
	return c.mismatch(ev) + ": " + c.remedies(ev)
}

func (c CICheck) mismatch(ev []Evidence) string {
	var signs []string
	for _, e := range ev {
		signs = append(signs, e.Sign)
	}
	return fmt.Sprintf("this node would run as %s, and the host's CI jobs run as %s (%s)", c.User, others(ev), strings.Join(signs, "; "))
}

// remedies are both ways out.
func (c CICheck) remedies(ev []Evidence) string {
	ci := others(ev)
	return fmt.Sprintf("run the node as the jobs' user (vk node join … --user %s, vk node service install --user %s), or run gitlab-runner as %s (User=%s in a drop-in from `systemctl edit gitlab-runner`, with `chown -R %s: /etc/gitlab-runner`) and hand what the state directory %s has of the other user to %s (chown)",
		ci, ci, c.User, c.User, c.User, c.StateDir, c.User)
}

// others names the users of the evidence.
func others(ev []Evidence) string {
	var names []string
	for _, e := range ev {
		if n := e.User.String(); !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return strings.Join(names, " and ")
}
