package nodejobs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"virtkit/core/fleet/jobdir"
	"virtkit/core/logx"
)

// Processes are Drivers that run `vk node job`.
type Processes struct {
	Argv []string // the program and what goes before the directory
	// Cleanup is what goes before the directory to clean up after a driver.
	CleanupArgv []string
	Env         []string // of this host's configuration; the descriptors' are added
	Log         *slog.Logger
}

var _ Drivers = (*Processes)(nil)

// command is one of them, its output in the job's driver.log. It gets the
// descriptors as 3 and up, those that are nil left out.
func (p *Processes) command(ctx context.Context, argv []string, dir *jobdir.Dir, lock, claim *os.File) (*exec.Cmd, *os.File, error) {
	out, err := dir.Log()
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, argv[0], append(slices.Clone(argv[1:]), dir.Path())...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, dir.Path()
	cmd.Env = slices.DeleteFunc(slices.Clone(p.Env), func(e string) bool {
		return strings.HasPrefix(e, EnvLock+"=") || strings.HasPrefix(e, EnvClaim+"=")
	})
	for _, f := range []struct {
		name string
		file *os.File
	}{{EnvLock, lock}, {EnvClaim, claim}} {
		if f.file != nil {
			cmd.ExtraFiles = append(cmd.ExtraFiles, f.file)
			cmd.Env = append(cmd.Env, f.name+"="+strconv.Itoa(2+len(cmd.ExtraFiles)))
		}
	}
	// A session of its own: what ends this process's does not end it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd, out, nil
}

// Start implements Drivers.
func (p *Processes) Start(dir *jobdir.Dir, lock, claim *os.File) (<-chan struct{}, error) {
	cmd, out, err := p.command(context.Background(), p.Argv, dir, lock, claim)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if err := cmd.Wait(); err != nil && p.Log != nil {
			p.Log.Warn("a job's driver has ended", logx.Job, dir.ID(), logx.Err, err)
		}
	}()
	return gone, nil
}

// killTime is between the SIGTERM and the SIGKILL of a clean-up.
const killTime = 10 * time.Second

// Cleanup implements Drivers. The end of ctx stops all that the clean-up
// started.
func (p *Processes) Cleanup(ctx context.Context, dir *jobdir.Dir, lock *os.File) error {
	cmd, out, err := p.command(ctx, p.CleanupArgv, dir, lock, nil)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = killTime
	err = cmd.Run()
	if ctx.Err() != nil {
		if cmd.Process != nil {
			syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		}
		return errors.Join(context.Cause(ctx), err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; %s tells more", strings.Join(p.CleanupArgv, " "), err, dir.LogPath())
	}
	return nil
}
