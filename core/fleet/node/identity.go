package node

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

// Names below a state dir, and below the node's directory in it.
const (
	Dir            = "node"
	LockFile       = "lock"
	KeyFile        = "key"
	EnrollmentFile = "enrollment.json"
	CAFile         = "ca.pem"
)

// ExitBusy is the exit status of a run that finds another one: sysexits'
// EX_TEMPFAIL, which the unit's supervisor tries again.
const ExitBusy = 75

// Enrollment is what a hub pinned, as its node remembers it.
type Enrollment struct {
	URL  string    `json:"hub_url"`
	Hub  string    `json:"hub"`
	Node string    `json:"node"`
	At   time.Time `json:"enrolled_at"`

	Key ed25519.PrivateKey `json:"-"`
	CA  []byte             `json:"-"` // PEM that the hub is verified against alone; nil = the system's roots
}

// Own makes sure that a node's directory belongs to this user and is closed to
// everyone else, and makes it when create says so. The key in it is the host's
// identity.
func Own(stateDir string, create bool) (dir string, err error) {
	dir = filepath.Join(stateDir, Dir)
	err = OwnDir(dir, create)
	if errors.Is(err, fs.ErrNotExist) && !create {
		return "", errNotEnrolled(dir)
	}
	if err != nil {
		return "", err
	}
	return dir, nil
}

// OwnDir makes sure that a directory belongs to this user and is closed to
// everyone else, and makes it when create says so.
func OwnDir(dir string, create bool) error {
	if create {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	return owned(dir, &st, unix.S_IFDIR, "a directory")
}

func errNotEnrolled(dir string) error {
	return fault.Newf(fault.NotFound, "this host is not enrolled: there is no %s", dir).
		Hint("enroll it with a token of its hub: vk node join https://HUB --token -")
}

func owned(path string, st *unix.Stat_t, kind uint32, what string) error {
	bad := func(format string, a ...any) error {
		return fault.Newf(fault.Denied, "%s %s", path, fmt.Sprintf(format, a...)).
			Hint("it holds secrets of this host: only the user that this program runs as may reach it; chmod go-rwx, or chown it")
	}
	switch {
	case st.Mode&unix.S_IFMT != kind:
		return bad("is not %s", what)
	case int(st.Uid) != os.Geteuid():
		return bad("belongs to user %d, this is user %d", st.Uid, os.Geteuid())
	case st.Mode&0o077 != 0:
		return bad("has mode %#o: it must be closed to group and others", st.Mode&0o7777)
	}
	return nil
}

// ReadOwn reads a file of such a directory, of at most 4 MiB, held to the same
// rule.
func ReadOwn(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, &fs.PathError{Op: "fstat", Path: path, Err: err}
	}
	if err := owned(path, &st, unix.S_IFREG, "a file"); err != nil {
		return nil, err
	}
	if st.Size > 4<<20 {
		return nil, fault.Newf(fault.System, "%s has %d bytes, which is more than such a file has", path, st.Size)
	}
	b := make([]byte, st.Size)
	n, err := f.Read(b)
	if st.Size == 0 {
		return nil, nil
	}
	return b[:n], err
}

// LoadEnrollment reads the identity below a node's directory that Own made
// sure of.
func LoadEnrollment(dir string) (*Enrollment, error) {
	path := filepath.Join(dir, EnrollmentFile)
	b, err := ReadOwn(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errNotEnrolled(path)
	}
	if err != nil {
		return nil, err
	}
	var e Enrollment
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, fault.Newf(fault.System, "%s: not an enrollment", path).Because(err)
	}
	if !wire.IsHex(e.Node, wire.IDLen) || !wire.IsHex(e.Hub, wire.IDLen) {
		return nil, fault.Newf(fault.System, "%s: the ids of node and hub are not %d hex digits", path, 2*wire.IDLen)
	}
	if _, err := ParseHub(e.URL); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if e.Key, err = loadKey(filepath.Join(dir, KeyFile)); err != nil {
		return nil, err
	}
	if e.CA, err = ReadOwn(filepath.Join(dir, CAFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return &e, nil
}

func loadKey(path string) (ed25519.PrivateKey, error) {
	b, err := ReadOwn(path)
	if err != nil {
		return nil, err
	}
	text := strings.TrimSuffix(string(b), "\n")
	if !wire.IsHex(text, ed25519.SeedSize) {
		// Its text is the secret, and stays out of the error.
		return nil, fault.Newf(fault.System, "%s is not an ed25519 seed of %d hex digits", path, 2*ed25519.SeedSize)
	}
	seed, err := hex.DecodeString(text)
	if err != nil {
		return nil, err
	}
	return ed25519.NewKeyFromSeed(seed), nil
}

// makeKey is the node's key, made at the first call.
func makeKey(path string) (ed25519.PrivateKey, error) {
	key, err := loadKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	_, key, err = ed25519.GenerateKey(nil)
	if err != nil {
		return nil, err
	}
	return key, fsx.WriteFile(path, []byte(hex.EncodeToString(key.Seed())+"\n"), 0o600)
}

// SaveEnrollment keeps an identity in dir, as JSON, beside the certificates
// that its hub is verified against; none takes those away that are there.
func SaveEnrollment(dir string, ca []byte, identity any) error {
	file := filepath.Join(dir, CAFile)
	if len(ca) > 0 {
		if err := fsx.WriteFile(file, ca, 0o600); err != nil {
			return err
		}
	} else if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	b, err := json.MarshalIndent(identity, "", "\t")
	if err != nil {
		return err
	}
	// Last: an enrollment that can be read is whole.
	return fsx.WriteFile(filepath.Join(dir, EnrollmentFile), append(b, '\n'), 0o600)
}

// Hold takes the node's lock. A pass of vk tune holds it shared for a moment:
// wait is how long to wait for that.
func Hold(ctx context.Context, dir string, wait time.Duration) (*fsx.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	l, err := fsx.AcquireLock(ctx, filepath.Join(dir, LockFile), false)
	if errors.Is(err, fsx.ErrLocked) {
		return nil, fault.Newf(fault.Busy, "another vk node holds %s", filepath.Join(dir, LockFile)).
			Hint("stop it first: systemctl stop vk-node, or end the vk node run in the foreground").WithExit(ExitBusy)
	}
	return l, err
}
