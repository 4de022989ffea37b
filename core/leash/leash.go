// Package leash runs tools of the host that start processes of their own, and
// sees to it that none of them outlives this process, whatever ends it.
//
// A parent-death signal reaches the direct child alone, and a tool as
// mmdebstrap then goes on until its own children are done. So the whole
// process group is ended by a watcher that waits for this process to go.
package leash

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// Grace is how long a group has between SIGTERM and SIGKILL.
const Grace = 15 * time.Second

// watch waits for the end of its input, which is the end of the process that
// wrote the group's number there, then ends that group.
const watch = `read -r group || exit 0
read -r never
kill -s TERM -- "-$group" || exit 0
i=0
while [ "$i" -lt "$1" ] && kill -s 0 -- "-$group"; do sleep 1; i=$((i+1)); done
kill -s KILL -- "-$group"
`

// Run is cmd.Run with a process group of its own for the command: the end of
// the command's context and the end of this process, also by SIGKILL, send
// SIGTERM to the group, and SIGKILL after Grace.
func Run(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if cmd.Cancel != nil {
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
		cmd.WaitDelay = Grace
	}
	w := exec.Command("/bin/sh", "-c", watch, "vk-watch", strconv.Itoa(int(Grace/time.Second)))
	w.Dir, w.Env = "/", []string{"PATH=/usr/bin:/bin"}
	w.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A pipe that is open as long as we are: no child of ours inherits it.
	r, tell, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("running %s: %w", cmd.Path, err)
	}
	defer tell.Close()
	w.Stdin = r
	err = w.Start()
	r.Close()
	if err != nil {
		return fmt.Errorf("running %s: starting its watcher: %w", cmd.Path, err)
	}
	defer func() {
		w.Process.Kill()
		w.Wait()
	}()
	if err := tells(cmd, tell); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	err = cmd.Wait()
	if err != nil {
		// The main process is gone; what of its group is left has no purpose.
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	return err
}

// tells makes the command tell the watcher its own number before it becomes the
// tool: were it told by this process after the start, there would be a moment in
// which this one can be killed and the tool has no watcher.
func tells(cmd *exec.Cmd, tell *os.File) error {
	fd := 3 + len(cmd.ExtraFiles)
	if fd > 9 {
		return fmt.Errorf("running %s: %d more files than a shell can number", cmd.Path, fd-9)
	}
	cmd.ExtraFiles = append(cmd.ExtraFiles, tell)
	script := fmt.Sprintf(`echo "$$" >&%d; exec %d>&-; exec "$@"`, fd, fd)
	cmd.Args = append([]string{"/bin/sh", "-c", script, "vk-leash", cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
	return nil
}
