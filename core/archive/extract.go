package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of an extraction; zero is none.
type Limits struct {
	Bytes   int64 // of all files together
	Entries int
}

// ErrTooLarge is of a stream that is over the Limits.
var ErrTooLarge = errors.New("archive: more than may be extracted")

type extractor struct {
	root   *os.Root
	say    func(Note)
	dir    *os.File // of the last parent, whose name is at
	at     string
	late   []*tar.Header // directories, whose mode and time come last
	chown  bool
	strays int
}

// Extract makes the files of a tar stream below root. What is there is
// replaced, but a directory that is not empty. Modes and times are those of
// the stream; owners too where this process may give files away. Entries of
// other kinds, and those whose name leads out of the tree, are left out with a
// warning.
func Extract(r io.Reader, root string, l Limits, say func(Note)) error {
	dir, err := os.OpenRoot(root)
	if err != nil {
		return err
	}
	defer dir.Close()
	x := &extractor{root: dir, say: say, chown: os.Geteuid() == 0}
	defer x.leave()
	t := tar.NewReader(r)
	buf := make([]byte, 256<<10)
	var total int64
	for n := 1; ; n++ {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the archive: %w", err)
		}
		if l.Entries > 0 && n > l.Entries {
			return fmt.Errorf("%w: %d entries", ErrTooLarge, n)
		}
		if total += h.Size; l.Bytes > 0 && total > l.Bytes {
			return fmt.Errorf("%w: %d bytes", ErrTooLarge, total)
		}
		if err := x.entry(h, t, buf); err != nil {
			return fmt.Errorf("extracting %s: %w", h.Name, err)
		}
	}
	// What follows the end of a tar is read, so that its writer ends well.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("reading the archive: %w", err)
	}
	x.leave()
	slices.Reverse(x.late)
	for _, h := range x.late {
		if err := x.finishDir(h); err != nil {
			return fmt.Errorf("extracting %s: %w", h.Name, err)
		}
	}
	return nil
}

// maxStrays is how many entries that are left out are named.
const maxStrays = 20

func (x *extractor) stray(h *tar.Header, why string) error {
	if x.strays++; x.strays <= maxStrays {
		x.say(Note{Warning, fmt.Sprintf("%s: left out of what is extracted: %s", h.Name, why)})
	}
	return nil
}

func (x *extractor) leave() {
	if x.dir != nil {
		x.dir.Close()
		x.dir = nil
	}
}

// enter opens the directory dir, making it.
func (x *extractor) enter(dir string) error {
	if x.dir != nil && x.at == dir {
		return nil
	}
	x.leave()
	f, err := x.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) && dir != "." {
		if err = x.root.MkdirAll(dir, 0o777); err == nil {
			f, err = x.root.Open(dir)
		}
	}
	if err != nil {
		return err
	}
	x.dir, x.at = f, dir
	return nil
}

func (x *extractor) entry(h *tar.Header, r io.Reader, buf []byte) error {
	if !Below(h.Name) {
		return x.stray(h, "its name leads out of the directory")
	}
	name := path.Clean(h.Name)
	switch h.Typeflag {
	case tar.TypeDir:
		return x.mkdir(h, name)
	case tar.TypeReg, tar.TypeSymlink:
	default:
		return x.stray(h, fmt.Sprintf("it is of type %q", h.Typeflag))
	}
	if name == "." {
		return x.stray(h, "it is the directory itself")
	}
	if err := x.enter(path.Dir(name)); err != nil {
		return err
	}
	base, fd := path.Base(name), int(x.dir.Fd())
	if err := remove(fd, base); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeSymlink {
		if err := unix.Symlinkat(h.Linkname, fd, base); err != nil {
			return err
		}
		if x.chown {
			unix.Fchownat(fd, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW)
		}
		return x.times(fd, base, h.ModTime)
	}
	return x.file(fd, base, h, r, buf)
}

// remove makes place for a name.
func remove(fd int, base string) error {
	err := unix.Unlinkat(fd, base, 0)
	if err == unix.EISDIR || err == unix.EPERM {
		err = unix.Unlinkat(fd, base, unix.AT_REMOVEDIR)
	}
	if err == unix.ENOENT {
		return nil
	}
	return err
}

func (x *extractor) times(fd int, base string, at time.Time) error {
	ts := unix.NsecToTimespec(at.UnixNano())
	return unix.UtimesNanoAt(fd, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

func (x *extractor) file(fd int, base string, h *tar.Header, r io.Reader, buf []byte) error {
	n, err := unix.Openat(fd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(n), base)
	defer f.Close()
	if _, err := io.CopyBuffer(struct{ io.Writer }{f}, r, buf); err != nil {
		return err
	}
	if err := x.own(f, h); err != nil {
		return err
	}
	if err := x.times(fd, base, h.ModTime); err != nil {
		return err
	}
	return f.Close()
}

// own gives an open file its owner, where that is allowed, and then its mode,
// which a new owner would have cut.
func (x *extractor) own(f *os.File, h *tar.Header) error {
	if x.chown {
		f.Chown(h.Uid, h.Gid)
	}
	return unix.Fchmod(int(f.Fd()), uint32(h.Mode&0o7777))
}

func (x *extractor) mkdir(h *tar.Header, name string) error {
	if name == "." {
		return nil // the tree is there, and nobody's entry
	}
	if err := x.enter(path.Dir(name)); err != nil {
		return err
	}
	base, fd := path.Base(name), int(x.dir.Fd())
	switch err := unix.Mkdirat(fd, base, 0o700); err {
	case nil:
	case unix.EEXIST:
		var st unix.Stat_t
		if err := unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR { // a link to one, say: it was a directory where this comes from
			if err := remove(fd, base); err != nil {
				return err
			}
			if err := unix.Mkdirat(fd, base, 0o700); err != nil {
				return err
			}
		}
	default:
		return err
	}
	x.late = append(x.late, h)
	return nil
}

// finishDir gives a directory its mode and time. One whose place a later entry
// took is left alone.
func (x *extractor) finishDir(h *tar.Header) error {
	name := path.Clean(h.Name)
	if err := x.enter(path.Dir(name)); err != nil {
		return err
	}
	n, err := unix.Openat(int(x.dir.Fd()), path.Base(name), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch err {
	case nil:
	case unix.ELOOP, unix.ENOTDIR, unix.ENOENT:
		return nil
	default:
		return err
	}
	f := os.NewFile(uintptr(n), name)
	defer f.Close()
	if err := x.own(f, h); err != nil {
		return err
	}
	return x.times(n, ".", h.ModTime)
}
