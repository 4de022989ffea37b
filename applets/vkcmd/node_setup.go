package vkcmd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/fleet/nodehost"
	"virtkit/core/ui"
)

// hostJoin is what vk node join does to a host around an enrollment: --user,
// --service, and the checks of the host's runner that every join makes.
type hostJoin struct {
	user         string // --user; "" = who asks
	service      bool
	ignoreCIUser bool
	uid          int    // of who asks
	kvm          string // as in nodehost.SetUp
	systemd      nodehost.Systemd
	run          func(ctx context.Context, argv ...string) error // of useradd, usermod
	// enroll enrolls as who asks; as is how it is done as another user: the
	// arguments of vk that do it, with the token on standard input.
	enroll func(ctx context.Context) error
	as     []string
	token  string
}

// hostProgram runs a program of the host for set-up.
func hostProgram(ctx context.Context, argv ...string) error {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, ui.CleanLine(strings.TrimSpace(string(out[:min(len(out), 1000)]))))
	}
	return nil
}

// joinHost enrolls this host, and sets it up around that. The token has been
// read and vk check has passed.
func (a *app) joinHost(ctx context.Context, h *wire.Host, j hostJoin) error {
	if j.user != "" && j.uid != 0 {
		return fault.New(fault.Usage, "--user sets the host up, which takes root").Hint("sudo vk node join … --user %s", j.user)
	}
	if err := a.refuseRunner(h, j); err != nil {
		return err
	}
	failed := func() {}
	if j.service {
		restart, err := a.stopService(ctx, h, j)
		if err != nil {
			return err
		}
		failed = restart
	}
	err := a.joinStopped(ctx, h, j)
	if err != nil {
		failed()
	}
	return err
}

// joinStopped goes on once no service runs.
func (a *app) joinStopped(ctx context.Context, h *wire.Host, j hostJoin) (err error) {
	if held, herr := nodeHeld(h.StateDir); herr != nil {
		return herr
	} else if held {
		return fault.Newf(fault.Busy, "a running vk node holds %s", h.StateDir).
			Hint("stop it first; --service stops vk-node.service, and starts it again")
	}
	if j.user == "" {
		err = j.enroll(ctx)
	} else {
		err = a.joinAs(ctx, h, j)
	}
	if err != nil || !j.service {
		return err
	}
	if err := a.serviceInstall(ctx, h, j.systemd, j.uid, serviceOptions{stopTimeout: defaultStop, user: j.user, ignoreCIUser: j.ignoreCIUser}); err != nil {
		return fmt.Errorf("this host is enrolled; its service is not: %w", err)
	}
	return nil
}

// joinAs sets the host up for a user and enrolls as that user: its number, its
// groups and its home.
func (a *app) joinAs(ctx context.Context, h *wire.Host, j hostJoin) error {
	exe, err := filepath.EvalSymlinks(a.env.Exe)
	if err != nil {
		return fault.New(fault.System, "the file of this program is not known").Because(err)
	}
	config := h.Conf.File
	if config != "" {
		if config, err = filepath.Abs(config); err != nil {
			return err
		}
	}
	s := nodehost.SetUp{Name: j.user, StateDir: h.StateDir, Exe: exe, ConfigFile: config, KVM: j.kvm, Run: j.run, Note: a.say}
	u, err := s.Do(ctx)
	if err != nil {
		return err
	}
	argv := []string{exe, "--state-dir", h.StateDir}
	if config != "" {
		argv = append(argv, "--config", config)
	}
	cmd, err := nodehost.Root("").AsUser(ctx, u, a.env.Getenv, []string{"VIRTKIT_ACCEL", "NO_COLOR"}, append(argv, j.as...)...)
	if err != nil {
		return err
	}
	cmd.Stdin = strings.NewReader(j.token + "\n")
	cmd.Stdout, cmd.Stderr = a.env.Stdout, a.env.Stderr
	if err := cmd.Run(); err != nil {
		// It has told why, and its status is the answer.
		if e, ok := errors.AsType[*exec.ExitError](err); ok && e.ExitCode() > 0 {
			return fault.Newf(fault.System, "the enrollment as %s failed", u).WithExit(e.ExitCode())
		}
		return fmt.Errorf("enrolling as %s: %w", u, err)
	}
	return nil
}

// refuseRunner checks what the node would do beside the host's runner, before
// anything is changed: handing the state directory over would hide who wrote it.
func (a *app) refuseRunner(h *wire.Host, j hostJoin) error {
	look := h.Look(j.uid)
	if j.user != "" {
		u, ok, err := look.Root.LookupUser(j.user)
		if err != nil {
			return err
		}
		if !ok { // it is created; until then it is nobody
			u = nodehost.User{Name: j.user, UID: -1, GID: -1}
		}
		look.User = u
	}
	d, err := nodehost.DetectMode(look)
	if err != nil {
		return err
	}
	if d.Warning != "" {
		a.warn("%s", d.Warning)
	}
	if err := d.Refuse(); err != nil || d.Mode == nodehost.ModeManaged {
		return err // a managed runner runs as the node's user
	}
	c := nodehost.CICheck{StateDir: h.StateDir, User: look.User, Found: d.Found, Mode: d.Mode}
	ev, err := c.Evidence()
	if err != nil {
		return fmt.Errorf("looking for the user of this host's CI jobs: %w", err)
	}
	if len(ev) > 0 && j.ignoreCIUser {
		a.warn("%s", c.MismatchText(ev))
		return nil
	}
	return c.MismatchError(ev)
}

// stopService stops a running vk-node.service. restart starts it again, when its
// enrollment is in place still and it runs as the user that joins.
func (a *app) stopService(ctx context.Context, h *wire.Host, j hostJoin) (restart func(), err error) {
	s, err := a.nodeService(nil, j.systemd, j.uid, serviceOptions{})
	if err != nil {
		return nil, err
	}
	running, err := s.Running(ctx)
	if err != nil || !running {
		return func() {}, nil // no manager that could run it
	}
	a.say("stopping %s; this waits for the jobs of a runner that it manages", nodehost.ServiceUnit)
	if err := s.Stop(ctx); err != nil {
		return nil, fmt.Errorf("stopping %s: %w", nodehost.ServiceUnit, err)
	}
	return func() {
		owner, err := nodeOwner(h.StateDir)
		u, uerr := s.Root.FindUnit(nodehost.ServiceUnit)
		as := first(j.user, s.User.Name)
		if err != nil || owner < 0 || uerr != nil || !s.Own && (u == nil || first(u.User, "root") != as) {
			a.warn("%s stays stopped: the enrollment that it ran by is not in place, or it ran as another user than %s", nodehost.ServiceUnit, as)
			return
		}
		if err := s.Start(context.WithoutCancel(ctx)); err != nil {
			a.warn("starting %s again: %v", nodehost.ServiceUnit, err)
		}
	}, nil
}

// hostJoinOf is the part of a join that concerns the host, for who asks.
func (a *app) hostJoinOf(user string, service, ignoreCIUser bool) hostJoin {
	return hostJoin{user: user, service: service, ignoreCIUser: ignoreCIUser, uid: os.Getuid(), systemd: systemctl{a.env.Getenv}, run: hostProgram}
}
