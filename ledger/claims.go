package ledger

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/core/fsx"
	"virtkit/core/numa"
	"virtkit/core/supervise"
)

// The claims of a host are the files of <state_dir>/admit, 0600, one a claim,
// named by the job's directory (or "reservation-" and an id):
//
//	.lock    held over each decision, and shared by who reads all
//	.new-*   a claim being written, locked already
//	<id>     a claim; it lives while its lock is held
//
// A claim is written whole under another name, locked, and then renamed, so
// that no reader ever meets half of one or a live one unlocked. A change
// replaces it in the same way. The kernel drops the lock with the last process
// that holds the descriptor; whoever decides next removes the file. None of it
// is synced: after the host's own end every claim is dead.

const (
	admitDir    = "admit"
	claimSchema = "vk.claim/1"
	// ReservationPrefix begins the id of a claim that no job stands behind yet.
	ReservationPrefix = "reservation-"
	maxClaim          = 64 << 10 // bytes of a claim's file
)

// entry is a claim's file.
type entry struct {
	Schema  string        `json:"schema"` // "vk.claim/1"
	ID      string        `json:"id"`
	Seq     uint64        `json:"seq"`
	Asked   time.Time     `json:"asked"` // for people; Seq decides
	PID     int           `json:"pid"`   // of who wrote it, for people
	Waiting bool          `json:"waiting"`
	Granted admit.Amounts `json:"granted"`
	Want    admit.Amounts `json:"want"`
	// Place is the memory node of a granted claim, chosen with the claims of
	// that moment.
	Place *numa.Placement `json:"place,omitempty"`
}

// found is an entry that was read.
type found struct {
	entry
	version
}

// version tells a claim's file from the one that replaced it. An inode's number
// may be given again, and the time has the grain of the kernel's clock: who
// waits by it looks again now and then all the same.
type version struct {
	ino   uint64
	mtime unix.Timespec
}

// Claims are the claims of one state directory.
type Claims struct {
	dir  string // <state_dir>/admit
	jobs string // <state_dir>/jobs
	// read are the texts of claims that were decoded before, by name.
	read map[string]decoded
}

type decoded struct {
	text []byte
	found
}

// openClaims opens <state_dir>/admit, made 0700 when missing.
func openClaims(stateDir, jobs string) (*Claims, error) {
	dir, err := filepath.Abs(filepath.Join(stateDir, admitDir))
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the ledger of admissions: %w", err)
	}
	return &Claims{dir: dir, jobs: jobs, read: map[string]decoded{}}, nil
}

// decideWait bounds how long the lock over decisions is waited for, beyond
// which its holder is not at work but stopped. A minute was not enough for 64
// that ask at once, and are killed, on two cores with 90 others that want to run.
const decideWait = 5 * time.Minute

// decide takes the lock over decisions. Its holders need it for milliseconds,
// and 64 of them may come at once, so that the waits between tries are short.
func (c *Claims) decide(ctx context.Context, shared bool) (*fsx.Lock, error) {
	end := time.Now().Add(decideWait)
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 4*time.Millisecond) {
		l, err := fsx.TryLock(filepath.Join(c.dir, lockName), shared)
		switch {
		case err == nil:
			return l, nil
		case !errors.Is(err, fsx.ErrLocked):
			return nil, fmt.Errorf("locking the ledger of admissions: %w", err)
		case time.Now().After(end):
			return nil, fmt.Errorf("the ledger of admissions is locked for more than %v: %w", decideWait, err)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(wait/2 + rand.N(wait)):
		}
	}
}

// scan reads all live claims. With sweep, which needs the lock over decisions
// held alone, it removes dead ones. Problems are files that are no claims; they
// are left where they are.
func (c *Claims) scan(sweep bool) (live []found, problems []error, err error) {
	d, err := os.Open(c.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the ledger of admissions: %w", err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the ledger of admissions: %w", err)
	}
	if len(c.read) > 2*len(names) {
		clear(c.read)
	}
	for _, n := range names {
		if n == lockName {
			continue
		}
		f, alive, err := c.look(int(d.Fd()), n)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			problems = append(problems, err)
		case !alive:
			if sweep {
				if err := os.Remove(filepath.Join(c.dir, n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
					problems = append(problems, fmt.Errorf("removing a dead claim: %w", err))
				}
			}
		case strings.HasPrefix(n, supervise.NewPrefix):
			// Between two system calls of who holds the lock over decisions.
		default:
			live = append(live, f)
		}
	}
	return live, problems, nil
}

// look reads one claim in the directory that dir is, and whether it lives.
func (c *Claims) look(dir int, name string) (f found, alive bool, err error) {
	path := filepath.Join(c.dir, name)
	fd, err := openRead(dir, name)
	if err != nil {
		return f, false, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return f, false, fmt.Errorf("looking at %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return f, false, fmt.Errorf("%s is no claim: not a regular file", path)
	}
	free, err := lockFree(fd)
	if err != nil {
		return f, false, fmt.Errorf("looking at %s: %w", path, err)
	}
	if strings.HasPrefix(name, supervise.NewPrefix) {
		return f, !free, nil
	}
	b, err := readFD(fd, st.Size)
	if err != nil {
		return f, false, fmt.Errorf("reading %s: %w", path, err)
	}
	if old, ok := c.read[name]; ok && bytes.Equal(old.text, b) {
		old.version = version{st.Ino, st.Mtim}
		return old.found, !free, nil
	}
	f.version = version{st.Ino, st.Mtim}
	if free && len(bytes.Trim(b, "\x00")) == 0 {
		return f, false, nil // what a host that lost power made of a claim
	}
	if jerr := json.Unmarshal(b, &f.entry); jerr != nil || f.Schema != claimSchema {
		if jerr == nil {
			jerr = fmt.Errorf("its schema is %q, expected %q", f.Schema, claimSchema)
		}
		return f, false, fmt.Errorf("%s is no claim: %w", path, jerr)
	}
	f.ID = name
	c.read[name] = decoded{b, f}
	return f, !free, nil
}

// lookAlone is look of one name.
func (c *Claims) lookAlone(name string) (f found, alive bool, err error) {
	d, err := os.Open(c.dir)
	if err != nil {
		return f, false, err
	}
	defer d.Close()
	return c.look(int(d.Fd()), name)
}

// openRead is a plain open(2): through os.File a thousand looks cost twice as
// much.
func openRead(dir int, name string) (int, error) {
	for {
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

func lockFree(fd int) (bool, error) {
	for {
		switch err := unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB); err {
		case nil:
			return true, nil
		case unix.EWOULDBLOCK:
			return false, nil
		case unix.EINTR:
		default:
			return false, err
		}
	}
}

// readFD reads a file of that size, which nobody changes.
func readFD(fd int, size int64) ([]byte, error) {
	if size > maxClaim {
		return nil, fmt.Errorf("it has %d bytes, a claim at most %d", size, maxClaim)
	}
	b := make([]byte, size)
	for n := 0; n < len(b); {
		m, err := unix.Pread(fd, b[n:], int64(n))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case m == 0:
			return b[:n], nil
		default:
			n += m
		}
	}
	return b, nil
}

// write puts a claim's file in place, in the place of an older one of the name
// that is ours or dead. The lock over decisions must be held.
func (c *Claims) write(e entry) (*os.File, error) {
	e.Schema, e.PID = claimSchema, os.Getpid()
	b, err := json.Marshal(e)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(c.dir, supervise.NewPrefix+newID()), os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("writing a claim: %w", err)
	}
	fail := func(err error) (*os.File, error) {
		os.Remove(f.Name())
		f.Close()
		return nil, fmt.Errorf("writing a claim: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fail(err)
	}
	if _, err := f.Write(append(b, '\n')); err != nil {
		return fail(err)
	}
	if err := os.Rename(f.Name(), filepath.Join(c.dir, e.ID)); err != nil {
		return fail(err)
	}
	return f, nil
}

// adopt reads the claim that a descriptor holds.
func (c *Claims) adopt(f *os.File) (entry, error) {
	var e entry
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxClaim))
	if err == nil {
		err = json.Unmarshal(b, &e)
	}
	if err == nil && e.Schema != claimSchema {
		err = fmt.Errorf("its schema is %q, expected %q", e.Schema, claimSchema)
	}
	if err != nil {
		return e, fmt.Errorf("the claim that was handed over cannot be used: %w", err)
	}
	var a, b2 unix.Stat_t
	path := filepath.Join(c.dir, e.ID)
	if err := unix.Fstat(int(f.Fd()), &a); err != nil {
		return e, err
	}
	if err := unix.Lstat(path, &b2); err != nil || a.Ino != b2.Ino || a.Dev != b2.Dev {
		return e, fmt.Errorf("the claim that was handed over is not %s any more", path)
	}
	return e, nil
}

// nextSeq is later than every claim's that is there.
func nextSeq(live []found) uint64 {
	n := uint64(0)
	for _, f := range live {
		n = max(n, f.Seq)
	}
	return n + 1
}
