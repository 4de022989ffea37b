package vkcmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/fleet/nodehost"
	"virtkit/core/fsx"
	"virtkit/core/ui"
)

// serviceOptions are the flags of vk node service install.
type serviceOptions struct {
	noStart      bool
	stopTimeout  time.Duration
	user         string
	ignoreCIUser bool
}

// defaultStop is GitLab's default limit of a job.
const defaultStop = time.Hour

func newNodeService(a *app) *cli.Command {
	o := serviceOptions{stopTimeout: defaultStop}
	install := cliutil.Exits(&cli.Command{
		Name:  "install",
		Usage: "run the node under systemd",
		Description: "Writes vk-node.service, enables and starts it. As root it is a system unit that runs\n" +
			"vk node run as root or as --user; as any other user it is a unit of that user's own,\n" +
			"which lingering keeps running without a login session. Running it again rewrites\n" +
			"the unit and restarts the node, waiting for the jobs of a runner that the node runs.\n" +
			"The host must be enrolled by the user that the node runs as.",
		Flags: []cli.Flag{
			cliutil.Bool(&o.noStart, "no-start", "write and enable the unit, and start nothing"),
			cliutil.Custom("stop-timeout", "DURATION", "how long a stop, a shutdown too, waits for jobs: 90s, 10m, 1h or seconds; 0 = no limit", false, func(s string) (err error) {
				o.stopTimeout, err = parseStop(s)
				return err
			}).Default("1h"),
			cliutil.String(&o.user, "user", "NAME", "user of /etc/passwd that the node runs as; for root alone"),
			cliutil.Bool(&o.ignoreCIUser, "ignore-ci-user", "go on when the host's CI jobs run as another user"),
		},
		Action: func(ctx context.Context, _ *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			return a.serviceInstall(ctx, h, systemctl{a.env.Getenv}, os.Getuid(), o)
		},
	}, cliutil.Status{Code: "11", Means: "another vk node holds the state directory, or the unit is starting or stopping"},
		cliutil.Status{Code: "13", Means: "systemd's manager cannot be reached; the unit is written"})
	uninstall := cliutil.Exits(&cli.Command{
		Name:  "uninstall",
		Usage: "stop, disable and remove the node's unit",
		Description: "Stops the node, waiting for the jobs of a runner that it runs, then disables and\n" +
			"removes vk-node.service: the system unit as root, else this user's own. The host\n" +
			"stays enrolled.",
		Action: func(ctx context.Context, _ *cli.Command) error {
			s, err := a.nodeService(nil, systemctl{a.env.Getenv}, os.Getuid(), serviceOptions{})
			if err != nil {
				return err
			}
			return s.Uninstall(ctx)
		},
	}, cliutil.Status{Code: "10", Means: "there is no such unit"})
	return &cli.Command{
		Name:        "service",
		Usage:       "run the node under systemd",
		Description: "Any other supervisor does as well: vk node run stays in the foreground.",
		Commands:    []*cli.Command{install, uninstall},
	}
}

// newNodeRunnerExec is what a managed runner's process is before it is
// gitlab-runner. Only vk node run starts it.
func newNodeRunnerExec(a *app) *cli.Command {
	return cliutil.Takes(&cli.Command{
		Name:        "runner-exec",
		Usage:       "become a gitlab-runner; started by vk node run itself",
		ArgsUsage:   "PROGRAM [ARG...]",
		Hidden:      true,
		Description: "Waits until the node has kept this process's number, then becomes PROGRAM.",
		Action: func(_ context.Context, c *cli.Command) error {
			return nodehost.Gate(c.Args().Slice(), a.env.Environ())
		},
	}, cliutil.Arity{Min: 1, Max: -1})
}

func parseStop(s string) (time.Duration, error) {
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(n) * time.Second, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || d%time.Second != 0 {
		return 0, fmt.Errorf("is %q, expected a time such as 90s, 10m or 1h, a number of seconds, or 0", s)
	}
	return d, nil
}

// systemctl speaks to systemd's managers.
type systemctl struct{ getenv func(string) string }

var _ nodehost.Systemd = systemctl{}

// Ctl implements nodehost.Systemd.
func (s systemctl) Ctl(ctx context.Context, user bool, args ...string) (string, error) {
	if user {
		args = append([]string{"--user"}, args...)
	}
	return s.run(ctx, "systemctl", append([]string{"--no-ask-password", "--no-pager"}, args...)...)
}

// Linger implements nodehost.Systemd.
func (s systemctl) Linger(ctx context.Context, user string) error {
	_, err := s.run(ctx, "loginctl", "--no-ask-password", "enable-linger", user)
	return err
}

func (s systemctl) run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
	if s.getenv("XDG_RUNTIME_DIR") == "" { // as after su
		cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR=/run/user/"+strconv.Itoa(os.Getuid()))
	}
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		said := ui.CleanLine(strings.Join(strings.Fields(errOut.String()[:min(errOut.Len(), 1000)]), " "))
		return out.String(), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, said)
	}
	return out.String(), nil
}

// nodeService is the service of a node for whoever asks. h may be nil for what
// only needs to know where the unit is.
func (a *app) nodeService(h *wire.Host, systemd nodehost.Systemd, uid int, o serviceOptions) (*nodehost.Service, error) {
	s := &nodehost.Service{
		Systemd: systemd, Own: uid != 0, User: nodehost.Root("").UserOf(uid), ConfigHome: a.env.Getenv("XDG_CONFIG_HOME"),
		StopTimeout: o.stopTimeout, IgnoreCIUser: o.ignoreCIUser, Note: a.say, Warn: a.warn,
	}
	if s.Own && o.user != "" {
		return nil, fault.New(fault.Usage, "--user is for root alone: this user's node runs as this user").
			Hint("sudo vk node service install --user %s", o.user)
	}
	if o.user != "" {
		u, ok, err := s.Root.LookupUser(o.user)
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, fault.Newf(fault.Usage, "--user %s: /etc/passwd has no such user, and vk reads no other database", o.user).
				Hint("run the command as that user, which installs a unit of its own; or vk node join --user %s, which creates it", o.user)
		}
		s.User = u
	}
	if s.User.Name == "" { // not of /etc/passwd
		s.User.Name = first(a.env.Getenv("USER"), strconv.Itoa(uid))
	}
	if h == nil {
		return s, nil
	}
	if err := a.fillService(h, s, uid); err != nil {
		return nil, err
	}
	return s, nil
}

// fillService says what the unit runs, and beside which runner.
func (a *app) fillService(h *wire.Host, s *nodehost.Service, uid int) (err error) {
	if s.Exe, err = filepath.EvalSymlinks(a.env.Exe); err != nil {
		return fault.New(fault.System, "the file of this program is not known").Because(err).Hint("was it replaced just now? run the command again")
	}
	if h.Conf.File != "" {
		if s.ConfigFile, err = filepath.Abs(h.Conf.File); err != nil {
			return err
		}
	}
	switch h.Conf.Origin("state_dir").Source {
	case conf.FromFlag, conf.FromEnv:
		s.StateFlag = true
	}
	s.StateDir, s.RunnerProgram = h.StateDir, h.Conf.Node.GitlabRunner
	look := h.Look(uid)
	look.User = s.User
	if s.Detection, err = nodehost.DetectMode(look); err != nil {
		return err
	}
	if w := s.Detection.Warning; w != "" {
		a.warn("%s", w)
	}
	return nil
}

func (a *app) serviceInstall(ctx context.Context, h *wire.Host, systemd nodehost.Systemd, uid int, o serviceOptions) error {
	s, err := a.nodeService(h, systemd, uid, o)
	if err != nil {
		return err
	}
	held, err := nodeHeld(h.StateDir)
	if err != nil {
		return err
	}
	owner, err := nodeOwner(h.StateDir)
	if err != nil {
		return err
	}
	if err := s.Refuse(ctx, !o.noStart, held, owner); err != nil {
		return err
	}
	return s.Install(ctx, !o.noStart)
}

// nodeHeld says whether a vk node run holds the state directory.
func nodeHeld(stateDir string) (bool, error) {
	path := filepath.Join(stateDir, nodeLock)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return false, nil // and none is made, which would be this user's
	}
	l, err := fsx.TryLock(path, true)
	if errors.Is(err, fsx.ErrLocked) {
		return true, nil
	}
	l.Close()
	return false, err
}

// enrollmentFile is there once a hub has answered (core/fleet/node).
const enrollmentFile = "node/enrollment.json"

// nodeOwner is who enrolled this host; -1 = nobody did.
func nodeOwner(stateDir string) (int, error) {
	_, err := os.Lstat(filepath.Join(stateDir, enrollmentFile))
	if errors.Is(err, fs.ErrNotExist) {
		return -1, nil
	}
	if err != nil {
		return -1, err
	}
	st, err := os.Lstat(filepath.Dir(filepath.Join(stateDir, enrollmentFile)))
	if err != nil {
		return -1, err
	}
	return int(st.Sys().(*syscall.Stat_t).Uid), nil
}
