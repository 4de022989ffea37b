package nodehost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// SetUp makes a host ready for a node that runs as User: what `vk node join
// --user NAME` does as root, once the token is read, the checks pass and no node
// holds the state directory.
type SetUp struct {
	Root       Root
	KVM        string // the device whose group the user needs; "" = /dev/kvm
	Name       string // of the user
	StateDir   string
	Exe        string // that the user is to run
	ConfigFile string // that it is to read; "" = none
	// Run runs a program of the host ("useradd") and returns its error with what
	// it said.
	Run  func(ctx context.Context, argv ...string) error
	Note func(format string, a ...any)
}

// Do creates the user when /etc/passwd has none, adds it to the group of
// /dev/kvm, makes the state directory and hands it over, and checks that the
// user can use it, run vk and read the configuration.
func (s *SetUp) Do(ctx context.Context) (User, error) {
	u, err := s.user(ctx)
	if err != nil {
		return u, err
	}
	if err := s.kvm(ctx, u); err != nil {
		return u, err
	}
	if err := s.state(u); err != nil {
		return u, err
	}
	a := Access{Root: s.Root, User: u}
	for _, c := range []struct {
		path string
		what int
		verb string
	}{{s.StateDir, accessRead | accessWrite | accessExec, "use the state directory"}, {s.Exe, accessExec, "run"}, {s.ConfigFile, accessRead, "read the configuration"}} {
		if c.path == "" {
			continue
		}
		if err := a.Can(c.path, c.what); err != nil {
			return u, fault.Newf(fault.Denied, "%s cannot %s %s", u, c.verb, c.path).Because(err).
				Hint("give it the right to, by mode bits: lists of access control are not looked at")
		}
	}
	return u, nil
}

// validUser is what useradd takes.
func validUser(name string) bool {
	if name == "" || len(name) > 32 || name[0] == '-' {
		return false
	}
	for i, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c == '_':
		case i > 0 && (c >= '0' && c <= '9' || c == '-' || c == '.'):
		default:
			return false
		}
	}
	return true
}

func (s *SetUp) user(ctx context.Context) (User, error) {
	if !validUser(s.Name) {
		return User{}, fault.Newf(fault.Usage, "--user %q is no name of a user", s.Name)
	}
	u, ok, err := s.Root.LookupUser(s.Name)
	if err != nil || ok {
		return u, err
	}
	shell := "/usr/sbin/nologin"
	if !s.Root.executable(shell) && s.Root.executable("/sbin/nologin") {
		shell = "/sbin/nologin"
	}
	if err := s.Run(ctx, "useradd", "--system", "--create-home", "--shell", shell, s.Name); err != nil {
		return u, fmt.Errorf("creating the user %s: %w", s.Name, err)
	}
	if u, ok, err = s.Root.LookupUser(s.Name); err == nil && !ok {
		err = fault.Newf(fault.System, "useradd made the user %s, and /etc/passwd does not have it", s.Name)
	}
	if err == nil {
		s.Note("created the user %s (%d)", u, u.UID)
	}
	return u, err
}

// kvm adds the user to the group that may open /dev/kvm.
func (s *SetUp) kvm(ctx context.Context, u User) error {
	device := "/dev/kvm"
	if s.KVM != "" {
		device = s.KVM
	}
	st, err := os.Stat(s.Root.Path(device))
	if errors.Is(err, fs.ErrNotExist) || u.UID == 0 {
		return nil // the check of KVM has told
	}
	if err != nil {
		return err
	}
	gid := gidOf(st)
	groups, err := s.Root.GroupsOf(u)
	if err != nil {
		return err
	}
	if slices.Contains(groups, gid) || st.Mode().Perm()&0o006 == 0o006 {
		return nil
	}
	if gid == 0 {
		return fault.New(fault.Denied, "/dev/kvm belongs to the group of root, which a node's user is not put into").
			Hint("give it a group of its own: a udev rule KERNEL==\"kvm\", GROUP=\"kvm\", MODE=\"0660\"")
	}
	gs, err := s.Root.groups()
	if err != nil {
		return err
	}
	for _, g := range gs {
		if g.gid == gid {
			if err := s.Run(ctx, "usermod", "--append", "--groups", g.name, u.Name); err != nil {
				return fmt.Errorf("adding %s to the group %s of /dev/kvm: %w", u, g.name, err)
			}
			s.Note("added %s to the group %s, of /dev/kvm", u, g.name)
			return nil
		}
	}
	return fault.Newf(fault.System, "/dev/kvm belongs to the group %d, which /etc/group does not name", gid)
}

func gidOf(st fs.FileInfo) int {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		return int(sys.Gid)
	}
	return -1
}

// state makes the state directory and hands it to the user.
func (s *SetUp) state(u User) error {
	if err := s.guard(u); err != nil {
		return err
	}
	at := s.Root.Path(s.StateDir)
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	left, changed, err := HandOver(at, u.UID)
	if err != nil {
		return fmt.Errorf("handing %s over to %s: %w", s.StateDir, u, err)
	}
	if changed > 0 {
		s.Note("handed %d files of %s over to %s", changed, s.StateDir, u)
	}
	var foreign []string
	for _, l := range left {
		s.Note("left as it is: %s (%s)", l.Path, l.Why)
		if l.UID != u.UID {
			foreign = append(foreign, fmt.Sprintf("%s (%s, of %s)", l.Path, l.Why, s.Root.UserOf(l.UID)))
		}
	}
	if len(foreign) > 0 {
		return fault.Newf(fault.Conflict, "%s has what could not be handed over to %s: %s", s.StateDir, u, strings.Join(foreign, "; ")).
			Hint("move it out of there, or chown it yourself, and join again")
	}
	return nil
}

// guard refuses to hand over what is more than a state directory.
func (s *SetUp) guard(u User) error {
	dir := filepath.Clean(s.StateDir)
	if !filepath.IsAbs(dir) || strings.Count(dir, "/") < 2 {
		return fault.Newf(fault.Usage, "the state directory %s is not handed over to a user: it is no directory of vk's own", dir).
			Hint("name one such as /var/lib/virtkit")
	}
	us, err := s.Root.users()
	if err != nil {
		return err
	}
	for _, o := range us {
		if home := filepath.Clean(o.Home); o.UID != u.UID && o.Home != "" && (home == dir || strings.HasPrefix(home, dir+"/")) {
			return fault.Newf(fault.Usage, "the state directory %s is not handed over to %s: the home of %s is in it", dir, u, o).
				Hint("name one such as /var/lib/virtkit")
		}
	}
	return nil
}

// Left is what HandOver did not change.
type Left struct {
	Path string
	Why  string
	UID  int // whose it is
}

// HandOver gives a directory and all below it to a user. Groups stay. It follows
// no symbolic link, crosses no mount point and changes no file that is linked
// from outside of the tree as well: those are returned.
//
// Whoever owns the tree may change it meanwhile, so that each entry is opened,
// looked at and changed by that descriptor.
func HandOver(root string, uid int) (left []Left, changed int, err error) {
	root, err = filepath.EvalSymlinks(root)
	if err != nil {
		return nil, 0, err
	}
	w := walk{uid: uid, links: map[inode]uint64{}}
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, &fs.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(fd)
	if w.top, err = look(fd); err != nil {
		return nil, 0, err
	}
	// How many names a file has in the tree is known only after all were seen.
	if err := w.dir(fd, root, w.count); err != nil {
		return nil, 0, err
	}
	if err := w.change(fd, root, w.top); err != nil {
		return w.left, w.changed, err
	}
	err = w.dir(fd, root, w.change)
	return w.left, w.changed, err
}

type inode struct {
	major, minor uint32
	ino          uint64
}

type walk struct {
	uid     int
	top     unix.Statx_t
	links   map[inode]uint64
	left    []Left
	changed int
}

func look(fd int) (st unix.Statx_t, err error) {
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
	return st, err
}

func inodeOf(st unix.Statx_t) inode { return inode{st.Dev_major, st.Dev_minor, st.Ino} }

// elsewhere says whether an entry is on another mount than the tree's top.
func (w *walk) elsewhere(st unix.Statx_t) bool {
	if st.Dev_major != w.top.Dev_major || st.Dev_minor != w.top.Dev_minor {
		return true
	}
	// A directory that is mounted again has the same device.
	return st.Mask&w.top.Mask&unix.STATX_MNT_ID != 0 && st.Mnt_id != w.top.Mnt_id
}

// dir visits the entries of a directory and of those below it, each before what
// it holds.
func (w *walk) dir(fd int, path string, visit func(fd int, path string, st unix.Statx_t) error) error {
	// fd is O_PATH: reading takes another descriptor of the same directory.
	r, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(r), path)
	names, err := f.Readdirnames(-1)
	f.Close()
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if err := w.entry(fd, filepath.Join(path, n), visit); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) entry(dir int, path string, visit func(fd int, path string, st unix.Statx_t) error) error {
	fd, err := unix.Openat(dir, filepath.Base(path), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil // it went meanwhile
	}
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	st, err := look(fd)
	if err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if err := visit(fd, path, st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR && !w.elsewhere(st) {
		return w.dir(fd, path, visit)
	}
	return nil
}

func (w *walk) count(_ int, _ string, st unix.Statx_t) error {
	if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 && !w.elsewhere(st) {
		w.links[inodeOf(st)]++
	}
	return nil
}

func (w *walk) change(fd int, path string, st unix.Statx_t) error {
	leave := func(why string) error {
		w.left = append(w.left, Left{path, why, int(st.Uid)})
		return nil
	}
	switch {
	case w.elsewhere(st):
		return leave("a mount point")
	case st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 && uint64(st.Nlink) != w.links[inodeOf(st)]:
		return leave("also linked from outside")
	case int(st.Uid) == w.uid:
		return nil
	}
	if err := unix.Fchownat(fd, "", w.uid, -1, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "chown", Path: path, Err: err}
	}
	w.changed++
	return nil
}

// AsUser makes a command run as a user: its number, its groups and its home.
// Of this process's environment it keeps what is named.
func (r Root) AsUser(ctx context.Context, u User, getenv func(string) string, keep []string, argv ...string) (*exec.Cmd, error) {
	groups, err := r.GroupsOf(u)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = []string{"HOME=" + u.Home, "USER=" + u.Name, "LOGNAME=" + u.Name, "SHELL=/bin/sh", "PATH=" + systemdPath}
	for _, k := range keep {
		if v := getenv(k); v != "" {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	cred := &syscall.Credential{Uid: uint32(u.UID), Gid: uint32(u.GID)}
	for _, g := range groups {
		cred.Groups = append(cred.Groups, uint32(g))
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	return cmd, nil
}
