package exec

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// User is who a program runs as.
type User struct {
	Name   string // "" when the id is not in /etc/passwd
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
	Home   string
	Shell  string
}

// users remembers the last user that was looked up: nearly all programs of a
// job run as the same one.
type users struct {
	mu    sync.Mutex
	spec  string
	stamp [2]stamp
	user  User
}

// stamp changes with a file's content.
type stamp struct {
	ino, size uint64
	mtime     unix.Timespec
}

func stampOf(path string) stamp {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return stamp{}
	}
	return stamp{st.Ino, uint64(st.Size), st.Mtim}
}

// lookup is LookupUser.
func (c *users) lookup(root, spec string) (User, error) {
	now := [2]stamp{stampOf(filepath.Join(root, "etc/passwd")), stampOf(filepath.Join(root, "etc/group"))}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.user.Home != "" && c.spec == spec && c.stamp == now {
		return c.user, nil
	}
	u, err := LookupUser(root, spec)
	if err != nil {
		return u, err
	}
	c.spec, c.stamp, c.user = spec, now, u
	return u, nil
}

// LookupUser resolves name|uid[:group|gid] through /etc/passwd and /etc/group
// below root, as the container tools do: a number need not exist, a name must;
// supplementary groups are those that list the user's name, unless a group is
// given. "" is uid 0.
func LookupUser(root, spec string) (User, error) {
	who, group, hasGroup := strings.Cut(spec, ":")
	if who == "" {
		who = "0"
	}
	u := User{Home: "/", Shell: "/bin/sh"}
	num, numeric := parseID(who)
	found := false
	err := eachLine(filepath.Join(root, "etc/passwd"), 7, func(f []string) bool {
		uid, ok := parseID(f[2])
		if !ok || !(f[0] == who || numeric && uid == num) {
			return true
		}
		gid, _ := parseID(f[3])
		u.Name, u.UID, u.GID, u.Home, u.Shell = f[0], uid, gid, f[5], f[6]
		found = true
		return false
	})
	if err != nil && !os.IsNotExist(err) {
		return u, err
	}
	if !found {
		if !numeric {
			return u, fmt.Errorf("user %q is not in /etc/passwd of the image", who)
		}
		u.UID = num
		if num == 0 {
			u.Name, u.Home = "root", "/root"
		}
	}
	if u.Home == "" {
		u.Home = "/"
	}
	if u.Shell == "" {
		u.Shell = "/bin/sh"
	}
	if hasGroup && group != "" {
		u.GID, err = lookupGroup(root, group)
		return u, err
	}
	if u.Name == "" {
		return u, nil
	}
	err = eachLine(filepath.Join(root, "etc/group"), 4, func(f []string) bool {
		if gid, ok := parseID(f[2]); ok && slices.Contains(strings.Split(f[3], ","), u.Name) {
			u.Groups = append(u.Groups, gid)
		}
		return true
	})
	if err != nil && !os.IsNotExist(err) {
		return u, err
	}
	return u, nil
}

func lookupGroup(root, name string) (uint32, error) {
	num, numeric := parseID(name)
	gid, found := num, false
	err := eachLine(filepath.Join(root, "etc/group"), 3, func(f []string) bool {
		id, ok := parseID(f[2])
		if ok && f[0] == name {
			gid, found = id, true
			return false
		}
		return true
	})
	if err != nil && !os.IsNotExist(err) {
		return 0, err
	}
	if !found && !numeric {
		return 0, fmt.Errorf("group %q is not in /etc/group of the image", name)
	}
	return gid, nil
}

func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	// The highest id means "leave it" to the kernel.
	return uint32(n), err == nil && n != 1<<32-1
}

// eachLine calls f with the fields of each line of a colon-separated file that
// has at least min of them, until f returns false.
func eachLine(path string, min int, f func([]string) bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	sc := bufio.NewScanner(file)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		fields := strings.Split(strings.TrimSpace(sc.Text()), ":")
		if len(fields) >= min && fields[0] != "" && !strings.HasPrefix(fields[0], "#") && !f(fields) {
			return nil
		}
	}
	if err := sc.Err(); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}
