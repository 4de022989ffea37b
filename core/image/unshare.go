package image

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strings"
	"syscall"

	"virtkit/core/fault"
)

// CanMakeDefault tells why this user cannot make local/default on this host,
// with what to do about it, or nil. It explains beforehand what mmdebstrap
// would fail at obscurely.
func CanMakeDefault() error {
	// Who may not, or has no Debian, brings an image made elsewhere.
	elsewhere := "or, where mmdebstrap runs as root: mmdebstrap --include=" + strings.Join(defaultPackages, ",") + " " + hostSuite() +
		" default.tar, and here: vk image import default.tar default"
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		return fault.New(fault.Unavailable, "making it needs mmdebstrap, which is not installed").Hint("apt-get install mmdebstrap; %s", elsewhere)
	}
	if os.Geteuid() == 0 {
		return nil
	}
	if _, err := exec.LookPath("newuidmap"); err != nil {
		return fault.New(fault.Unavailable, "making it without root needs newuidmap, which is not installed").
			Hint("apt-get install uidmap; %s", elsewhere)
	}
	uid := fmt.Sprint(os.Geteuid())
	name := uid
	if u, err := user.LookupId(uid); err == nil {
		name = u.Username
	}
	for _, f := range []string{"/etc/subuid", "/etc/subgid"} {
		if !hasSubIDs(f, uid, name) {
			return fault.Newf(fault.Unavailable, "making it without root needs a line for %s in %s", name, f).
				Hint("as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 %s; %s", name, elsewhere)
		}
	}
	for _, f := range []string{"/proc/sys/kernel/unprivileged_userns_clone", "/proc/sys/user/max_user_namespaces"} {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == "0" {
			return fault.Newf(fault.Unavailable, "making it without root needs user namespaces, which are off (%s is 0)", f).
				Hint("as root: sysctl -w %s=1; %s", strings.ReplaceAll(strings.TrimPrefix(f, "/proc/sys/"), "/", "."), elsewhere)
		}
	}
	if err := tryUserNamespace(); err != nil {
		return fault.New(fault.Unavailable, "making it without root needs user namespaces, which this host refuses").Because(err).
			Hint("a container, a chroot or a security module may forbid them (try: unshare --user true); %s", elsewhere)
	}
	return nil
}

// tryUserNamespace starts a process in a namespace of its own: whether that is
// allowed cannot be read anywhere, as in a chroot.
func tryUserNamespace() error {
	cmd := exec.Command("true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
	return cmd.Run()
}

// hasSubIDs tells whether a file such as /etc/subuid has a line for the user.
func hasSubIDs(file, uid, name string) bool {
	b, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	for l := range strings.Lines(string(b)) {
		if who, _, ok := strings.Cut(l, ":"); ok && (who == uid || who == name) {
			return true
		}
	}
	return false
}
