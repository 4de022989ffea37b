package nodehost

import (
	"fmt"
	"strconv"
	"strings"
)

// User is a line of /etc/passwd (passwd(5)).
type User struct {
	Name  string
	UID   int
	GID   int
	Home  string
	Shell string
}

// String names a user for people.
func (u User) String() string {
	if u.Name == "" {
		return fmt.Sprintf("user %d", u.UID)
	}
	return u.Name
}

// users reads /etc/passwd, the only database of users that vk reads.
func (r Root) users() ([]User, error) {
	b, err := r.read("/etc/passwd")
	if err != nil {
		return nil, err
	}
	var out []User
	for _, l := range lines(b) {
		f := strings.Split(l, ":")
		if len(f) < 7 || f[0] == "" {
			continue
		}
		uid, err1 := strconv.ParseUint(f[2], 10, 31)
		gid, err2 := strconv.ParseUint(f[3], 10, 31)
		if err1 != nil || err2 != nil {
			continue
		}
		out = append(out, User{Name: f[0], UID: int(uid), GID: int(gid), Home: f[5], Shell: f[6]})
	}
	return out, nil
}

// LookupUser finds a user of /etc/passwd by name; ok is false when it has none.
func (r Root) LookupUser(name string) (u User, ok bool, err error) {
	us, err := r.users()
	for _, u := range us {
		if u.Name == name {
			return u, true, nil
		}
	}
	return User{}, false, err
}

// UserOf is the user of a number; one that /etc/passwd does not know has no
// name.
func (r Root) UserOf(uid int) User {
	us, _ := r.users()
	for _, u := range us {
		if u.UID == uid {
			return u
		}
	}
	return User{UID: uid, GID: -1}
}

// group is a line of /etc/group (group(5)).
type group struct {
	name    string
	gid     int
	members []string
}

func (r Root) groups() ([]group, error) {
	b, err := r.read("/etc/group")
	if err != nil {
		return nil, err
	}
	var out []group
	for _, l := range lines(b) {
		f := strings.Split(l, ":")
		if len(f) < 4 || f[0] == "" {
			continue
		}
		gid, err := strconv.ParseUint(f[2], 10, 31)
		if err != nil {
			continue
		}
		g := group{name: f[0], gid: int(gid)}
		for m := range strings.SplitSeq(f[3], ",") {
			if m != "" {
				g.members = append(g.members, m)
			}
		}
		out = append(out, g)
	}
	return out, nil
}

// GroupsOf are the groups of a user, its own first.
func (r Root) GroupsOf(u User) ([]int, error) {
	gs, err := r.groups()
	if err != nil {
		return nil, err
	}
	out := []int{u.GID}
	for _, g := range gs {
		for _, m := range g.members {
			if m == u.Name && g.gid != u.GID {
				out = append(out, g.gid)
			}
		}
	}
	return out, nil
}
