package checkout

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/logx"
)

// Options say where trees are.
type Options struct {
	// Root is the private directory that trees are below. It is made 0700 when
	// it is missing; its parent must exist and may be written by nobody else.
	Root string
	// Mirrors is the directory of the mirrors; "" = there are none.
	Mirrors string
	// Idle is how long an unused tree is kept, MirrorIdle a mirror.
	Idle, MirrorIdle time.Duration

	Log *slog.Logger     // nil discards
	Now func() time.Time // nil = time.Now
	// Hook, when set, is called before each step of Take and Sweep with its
	// name. For tests.
	Hook func(step string)
}

// Store is the trees and mirrors of a host.
type Store struct {
	o Options
}

// Open checks the root. fault.System when others than this user could put
// something in the place of a tree.
func Open(o Options) (*Store, error) {
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Hook == nil {
		o.Hook = func(string) {}
	}
	s := &Store{o}
	if err := s.checkRoot(); err != nil {
		return nil, err
	}
	return s, nil
}

// Exists says whether there is anything below root yet: a sweep of nothing need
// not make it.
func Exists(root string) bool {
	fi, err := os.Lstat(root)
	return err == nil && fi.IsDir()
}

func (s *Store) checkRoot() error {
	bad := func(path, what string) error {
		return fault.Newf(fault.System, "checkouts below %s: %s %s", s.o.Root, path, what).
			Hint("who can write there can put another tree in the place of a job's: give it to the user that vk runs as, mode 0700, or set [executor] checkout_dir to another directory")
	}
	parent := filepath.Dir(s.o.Root)
	var st unix.Stat_t
	if err := unix.Stat(parent, &st); err != nil {
		return fault.Newf(fault.System, "the directory %s that checkouts are to be in", parent).Because(err).
			Hint("make it, or set [executor] checkout_dir to a directory that exists")
	}
	me := uint32(os.Geteuid())
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return bad(parent, "is not a directory")
	case st.Uid != me && st.Uid != 0:
		return bad(parent, fmt.Sprintf("belongs to user %d", st.Uid))
	case st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0:
		return bad(parent, fmt.Sprintf("can be written by others (mode %04o)", st.Mode&0o7777))
	}
	if err := os.Mkdir(s.o.Root, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fault.New(fault.System, "making the directory of checkouts").Because(err).
			Hint("set [executor] checkout_dir to a directory that vk may write to")
	}
	if err := unix.Lstat(s.o.Root, &st); err != nil {
		return &os.PathError{Op: "stat", Path: s.o.Root, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return bad(s.o.Root, "is not a directory")
	case st.Uid != me:
		return bad(s.o.Root, fmt.Sprintf("belongs to user %d", st.Uid))
	case st.Mode&0o022 != 0:
		return bad(s.o.Root, fmt.Sprintf("can be written by others (mode %04o)", st.Mode&0o7777))
	}
	return nil
}

// place is where one tree and its bookkeeping are.
type place struct{ slot, tree, record, lock string }

func (s *Store) place(slot, project string) place {
	dir := filepath.Join(s.o.Root, slot)
	return place{dir, filepath.Join(dir, project), filepath.Join(dir, "."+project+".json"), filepath.Join(dir, "."+project+".lock")}
}

// States of a tree.
const (
	stateBusy  = "busy"  // a process works in it, or died in it
	stateClean = "clean" // it is what git made of it
	stateGoing = "going" // it is being removed
)

const recordSchema = "vk.checkout/1"

// record says which directory a tree is and what is known of it.
type record struct {
	Schema string    `json:"schema"`
	Dir    identity  `json:"dir"`
	State  string    `json:"state"`
	Boot   string    `json:"boot"` // of the host, when it was written
	URL    string    `json:"url"`  // without credentials
	SHA    string    `json:"sha,omitempty"`
	Format string    `json:"format,omitempty"`
	Used   time.Time `json:"used"`
	// Modules are the places of submodules, below the tree: all that have, or
	// may have, something in them.
	Modules []string `json:"modules,omitempty"`
}

// identity tells a directory from any other that may be at its path later.
type identity struct {
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
	Born  int64  `json:"born,omitempty"` // nanoseconds; 0 where the filesystem does not tell
}

func identityOf(path string) (identity, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	if err != nil {
		return identity{}, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return identity{}, &os.PathError{Op: "statx", Path: path, Err: unix.ENOTDIR}
	}
	if st.Uid != uint32(os.Geteuid()) {
		return identity{}, &os.PathError{Op: "statx", Path: path, Err: fmt.Errorf("it belongs to user %d", st.Uid)}
	}
	id := identity{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Inode: st.Ino}
	if st.Mask&unix.STATX_BTIME != 0 {
		id.Born = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	return id, nil
}

func readRecord(path string) (record, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return record{}, err
	}
	var r record
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&r); err != nil {
		return record{}, fmt.Errorf("decoding %s: %w", path, err)
	}
	if r.Schema != recordSchema {
		return record{}, fmt.Errorf("%s has schema %q, expected %q", path, r.Schema, recordSchema)
	}
	return r, nil
}

func (r record) write(path string) error {
	r.Schema, r.Boot = recordSchema, bootID()
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(path, append(b, '\n'), 0o600)
}

// replaceFile replaces a file in one step, for whoever looks while this host
// runs. It is not made durable, which costs more than all else of a small
// checkout: after a crash of the host, trees are looked at anew (record.Boot),
// and a file that is not whole is of no tree of ours.
func replaceFile(path string, data []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// bootID tells one boot of the host from another; "" where /proc does not.
func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(b))
}
