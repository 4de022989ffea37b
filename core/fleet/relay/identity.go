package relay

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

// Names below a state dir.
const (
	LockFile       = "lock"
	SystemIDFile   = "system_id"
	HubDir         = "hub" // 0700, with the enrollment:
	KeyFile        = "key.pk8"
	EnrollmentFile = node.EnrollmentFile
	CAFile         = node.CAFile
)

// Enrollment is what a hub pinned, as its relay remembers it.
type Enrollment struct {
	URL   string    `json:"hub_url"`
	Hub   string    `json:"hub"`
	Relay string    `json:"relay"`
	At    time.Time `json:"enrolled_at"`

	Key ed25519.PrivateKey `json:"-"`
	CA  []byte             `json:"-"` // PEM that the hub is verified against alone; nil = the system's roots
}

// asRelay names a relay in the texts of refusals.
var asRelay = node.Peer{Name: "relay", Token: "vk-hub token create --kind gitlab", Join: "vk-gitlab join --replace"}

// own makes sure that the state dir belongs to this user and is closed to
// everyone else, and makes it when create says so.
func own(stateDir string, create bool) error {
	if create {
		if err := os.MkdirAll(filepath.Dir(stateDir), 0o755); err != nil {
			return cannotMake(stateDir, err)
		}
	}
	err := node.OwnDir(stateDir, create)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errNotEnrolled(stateDir)
	case errors.Is(err, fs.ErrPermission):
		return cannotMake(stateDir, err)
	}
	return err
}

func cannotMake(dir string, err error) error {
	return fault.Newf(fault.Denied, "the state dir %s cannot be made", dir).Because(err).
		Hint("as root: install -d -m 0700 -o USER -g GROUP %s, for the user that vk-gitlab runs as", dir)
}

func errNotEnrolled(path string) error {
	return fault.Newf(fault.NotFound, "this relay is not enrolled: there is no %s", path).
		Hint("enroll it with a token of its hub: vk-hub token create --kind gitlab | vk-gitlab join https://HUB --token -")
}

// hold takes the state dir's lock: there is one vk-gitlab on it.
func hold(ctx context.Context, stateDir string) (*fsx.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	l, err := fsx.AcquireLock(ctx, filepath.Join(stateDir, LockFile), false)
	if errors.Is(err, fsx.ErrLocked) {
		return nil, fault.Newf(fault.Busy, "another vk-gitlab holds %s", filepath.Join(stateDir, LockFile)).
			Hint("stop it first: systemctl stop vk-gitlab, or end the one in the foreground").WithExit(node.ExitBusy)
	}
	return l, err
}

// LoadEnrollment reads the identity below a state dir.
func LoadEnrollment(stateDir string) (*Enrollment, error) {
	dir := filepath.Join(stateDir, HubDir)
	if err := node.OwnDir(dir, false); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, errNotEnrolled(dir)
		}
		return nil, err
	}
	path := filepath.Join(dir, EnrollmentFile)
	b, err := node.ReadOwn(path)
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
	if !wire.IsHex(e.Relay, wire.IDLen) || !wire.IsHex(e.Hub, wire.IDLen) {
		return nil, fault.Newf(fault.System, "%s: the ids of relay and hub are not %d hex digits", path, 2*wire.IDLen)
	}
	if _, err := node.ParseHub(e.URL); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if e.Key, err = loadKey(filepath.Join(dir, KeyFile)); err != nil {
		return nil, err
	}
	if e.CA, err = node.ReadOwn(filepath.Join(dir, CAFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return &e, nil
}

// loadKey reads a key in PKCS #8. Its bytes are in no error.
func loadKey(path string) (ed25519.PrivateKey, error) {
	b, err := node.ReadOwn(path)
	if err != nil {
		return nil, err
	}
	k, err := x509.ParsePKCS8PrivateKey(b)
	key, ok := k.(ed25519.PrivateKey)
	if err != nil || !ok {
		return nil, fault.Newf(fault.System, "%s is not an ed25519 key in PKCS #8", path)
	}
	return key, nil
}

// makeKey is the relay's key, made at the first call.
func makeKey(path string) (ed25519.PrivateKey, error) {
	key, err := loadKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if _, key, err = ed25519.GenerateKey(nil); err != nil {
		return nil, err
	}
	b, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, fsx.WriteFile(path, b, 0o600)
}

// JoinOptions is one enrollment.
type JoinOptions struct {
	StateDir string
	Hub      string // URL
	Token    string // a secret
	CA       []byte // PEM; nil = the system's roots
	Replace  bool
	Hostname string
	VK       string
	Now      func() time.Time // nil = time.Now
	// Dial replaces a plain TCP dial, in tests.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Joined is what came of it.
type Joined struct {
	*Enrollment
	Again    bool   // the key was enrolled before
	OldRelay string // to remove from its hub
}

// Join enrolls: makes the key, signs the token with it and keeps what the hub
// answers. It is refused while a state file holds a job. An enrollment whose
// answer was lost is made again with the same key, and gets the same id.
func Join(ctx context.Context, o JoinOptions) (*Joined, error) {
	u, err := node.ParseHub(o.Hub)
	if err != nil {
		return nil, err
	}
	token := strings.TrimSpace(o.Token)
	if !wire.IsHex(token, wire.TokenLen) {
		return nil, fault.Newf(fault.Usage, "the token is not %d lowercase hex digits", 2*wire.TokenLen).
			Hint("%s, on the hub's host, prints one", asRelay.Token)
	}
	if _, err := node.TLSConfig(o.CA); err != nil {
		return nil, err
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if err := own(o.StateDir, true); err != nil {
		return nil, err
	}
	lock, err := hold(ctx, o.StateDir)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := noJobs(o.StateDir); err != nil {
		return nil, err
	}
	j := &Joined{}
	dir := filepath.Join(o.StateDir, HubDir)
	switch old, err := LoadEnrollment(o.StateDir); {
	case err == nil && !o.Replace:
		return nil, fault.Newf(fault.Conflict, "this is relay %s of %s already", old.Relay, old.URL).
			Hint("vk-gitlab join --replace enrolls it again, as a new relay")
	case err == nil || o.Replace && fault.KindOf(err) != fault.NotFound: // the latter is broken: it goes
		if old != nil {
			j.OldRelay = old.Relay
		}
		if err := remove(dir); err != nil {
			return nil, err
		}
	case fault.KindOf(err) != fault.NotFound:
		return nil, err
	}
	if err := node.OwnDir(dir, true); err != nil {
		return nil, err
	}
	return j, j.enroll(ctx, u, token, dir, o)
}

func (j *Joined) enroll(ctx context.Context, u *url.URL, token, dir string, o JoinOptions) error {
	key, err := makeKey(filepath.Join(dir, KeyFile))
	if err != nil {
		return err
	}
	b, err := node.Enroll(ctx, node.EnrollCall{Hub: u, Path: dispatch.EnrollPath, CA: o.CA, Dial: o.Dial, As: asRelay, Request: func(channel []byte) any {
		return dispatch.NewEnrollRequest(token, key, channel, o.Hostname, o.VK)
	}})
	if err != nil {
		return err
	}
	var r dispatch.EnrollReply
	if err := json.Unmarshal(b, &r); err != nil || r.Check() != nil {
		return fault.Newf(fault.Unavailable, "%s does not answer as a hub does", u).Because(errors.Join(err, r.Check()))
	}
	j.Enrollment = &Enrollment{URL: u.String(), Hub: r.Hub, Relay: r.Relay, At: o.Now().UTC().Truncate(time.Second), Key: key, CA: o.CA}
	j.Again = r.Again
	return node.SaveEnrollment(dir, j.CA, j.Enrollment)
}

// Leave deletes the enrollment. It is refused while a state file holds a job.
// What it returns is to be removed from its hub; nil when it could not be read.
func Leave(ctx context.Context, stateDir string) (*Enrollment, error) {
	if err := own(stateDir, false); err != nil {
		return nil, err
	}
	lock, err := hold(ctx, stateDir)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := noJobs(stateDir); err != nil {
		return nil, err
	}
	dir := filepath.Join(stateDir, HubDir)
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, errNotEnrolled(dir)
	}
	e, _ := LoadEnrollment(stateDir) // one that is broken goes all the same
	return e, remove(dir)
}

// remove deletes an enrollment, what makes it one first.
func remove(dir string) error {
	for _, f := range []string{EnrollmentFile, KeyFile, CAFile} {
		if err := os.Remove(filepath.Join(dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := fsx.RemoveTree(dir); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(dir))
}

func noJobs(stateDir string) error {
	held, err := HeldJobs(stateDir)
	if err != nil {
		return err
	}
	for _, file := range slices.Sorted(maps.Keys(held)) {
		return fault.Newf(fault.Conflict, "%s still holds %d jobs: this enrollment alone can finish them", filepath.Join(stateDir, file), held[file]).
			Hint("let vk-gitlab run finish them; removing the file gives them up to GitLab's timeout")
	}
	return nil
}

// SystemID is the daemon's name for GitLab, made at the first call: r_ and 12
// letters or digits, as gitlab-runner makes one where it has no machine id.
func SystemID(stateDir string) (string, error) {
	path := filepath.Join(stateDir, SystemIDFile)
	b, err := node.ReadOwn(path)
	if err == nil {
		if id := strings.TrimSpace(string(b)); len(id) >= 3 && len(id) <= 64 && !strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			return id, nil
		}
		return "", fault.Newf(fault.System, "%s holds no system id", path).Hint("remove it: a new one is made, and GitLab shows it as another runner manager")
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	const letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	id := []byte("r_")
	for len(id) < 14 {
		var c [1]byte
		rand.Read(c[:])
		if n := int(c[0] & 63); n < len(letters) { // 62 of 64: no letter is likelier
			id = append(id, letters[n])
		}
	}
	return string(id), fsx.WriteFile(path, append(id, '\n'), 0o600)
}
