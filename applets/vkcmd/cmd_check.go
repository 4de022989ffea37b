package vkcmd

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/image"
	"virtkit/core/ui"
	"virtkit/core/version"
	"virtkit/vmm/boot"
	"virtkit/vmm/virtiofs"
)

// Verdicts of a finding.
const (
	checkOK   = "ok"
	checkWarn = "warn" // works, but less well
	checkFail = "fail" // guests cannot run
)

// finding is what was found out about one thing.
type finding struct {
	Name    string `json:"name"`
	Verdict string `json:"verdict"`
	Text    string `json:"text"`
	Mend    string `json:"mend,omitempty"`
}

func newCheck(a *app) *cli.Command {
	var asJSON bool
	var feature string
	return cliutil.Exits(&cli.Command{
		Name:  "check",
		Usage: "tell what this host has and lacks for guests",
		Description: "Looks at everything that guests need, and tells what is wrong and how to mend it.\n" +
			"KVM is tried by booting a kernel under it, because a device that opens proves\n" +
			"nothing. --feature gitlab looks at what GitLab jobs need besides: the tools that\n" +
			"images lack, nesting, memory budget and room, as they are configured.",
		Flags: []cli.Flag{
			cliutil.String(&feature, "feature", "NAME", "also check what a feature needs: gitlab"),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.check/1)"),
		},
		Action: func(ctx context.Context, _ *cli.Command) error {
			if feature != "" && feature != featureGitlab {
				return fault.Newf(fault.Usage, "--feature %q is not known", feature).Hint("there is: %s", featureGitlab)
			}
			return a.check(ctx, feature, asJSON)
		},
	}, cliutil.Status{Code: "1", Means: "guests cannot run on this host"})
}

func (a *app) check(ctx context.Context, feature string, asJSON bool) error {
	found := a.findings(ctx)
	if feature == featureGitlab {
		found = append(found, a.gitlabFindings(ctx)...)
	}
	failed := 0
	for _, f := range found {
		if f.Verdict == checkFail {
			failed++
		}
	}
	t := a.terminal()
	if asJSON {
		if err := t.Document("check", struct {
			OK       bool      `json:"ok"`
			Build    string    `json:"build"`
			Findings []finding `json:"findings"`
		}{failed == 0, version.Build, found}); err != nil {
			return err
		}
		if failed > 0 {
			return cliutil.Exit(1)
		}
		return nil
	}
	for _, f := range found {
		style := map[string]ui.Style{checkOK: ui.Green, checkWarn: ui.Yellow, checkFail: ui.Red}[f.Verdict]
		t.Printf("%s  %-13s %s\n", t.PaintOut(style, fmt.Sprintf("%-4s", f.Verdict)), f.Name, ui.CleanLine(f.Text))
		if f.Mend != "" {
			t.Printf("      %-13s %s\n", "", ui.CleanLine("→ "+f.Mend))
		}
	}
	if failed > 0 {
		return fault.Newf(fault.System, "%d of %d checks failed: guests cannot run here yet", failed, len(found)).
			Hint("the lines marked fail say what to do")
	}
	return nil
}

// findings looks at everything; one that needs what another found broken says
// so instead of being left out.
func (a *app) findings(ctx context.Context) []finding {
	var out []finding
	out = append(out, a.checkConfig())
	h, err := wire.Open(a.env, a.overrides())
	if err != nil {
		out = append(out, broken("state", err))
		return append(out, checkAgent(), tool("mkfs.ext4", checkFail, "writable layers", "apt-get install e2fsprogs"))
	}
	out = append(out, finding{"state", checkOK, h.StateDir + " (" + h.StateWhy + ")", ""}, checkRoom(h.StateDir))
	out = append(out, checkQEMU(ctx, h))
	k, kf := checkKernel(h)
	out = append(out, kf)
	if k == nil {
		out = append(out, tool("xz", checkFail, "unpacks the modules of Debian's kernel", "apt-get install xz-utils"))
	}
	out = append(out, checkAgent(), checkAccel(ctx, h, k))
	out = append(out, checkNet(ctx, h)...)
	out = append(out, checkUsage("/proc"))
	out = append(out,
		tool("mkfs.ext4", checkFail, "makes writable layers", "apt-get install e2fsprogs"),
		checkDefault(),
		checkVirtiofs())
	return out
}

// broken turns an error into a finding, its hint being the mend.
func broken(name string, err error) finding {
	return finding{name, checkFail, err.Error(), fault.HintOf(err)}
}

func (a *app) checkConfig() finding {
	file, err := conf.Find(a.overrides().Getenv(a.env), wire.Home(a.env))
	if err != nil {
		return broken("config", err)
	}
	if file == "" {
		return finding{"config", checkOK, "no file: defaults hold", ""}
	}
	warnings, err := conf.Check(file)
	if err != nil {
		return broken("config", err)
	}
	if len(warnings) > 0 {
		return finding{"config", checkWarn, fmt.Sprintf("%s: %d keys have no effect yet", file, len(warnings)), "vk config check names them"}
	}
	return finding{"config", checkOK, file, ""}
}

// enoughRoom is what pulling and booting one image of some size needs.
const enoughRoom = 4 << 30

func checkRoom(dir string) finding {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return broken("disk", fmt.Errorf("asking for the room at %s: %w", dir, err))
	}
	free := int64(st.Bavail) * st.Bsize
	f := finding{"disk", checkOK, ui.Size(free) + " free", ""}
	if free < enoughRoom {
		f.Verdict, f.Mend = checkWarn, "make room, run vk gc, or move the state directory with VIRTKIT_STATE_DIR"
	}
	return f
}

func checkQEMU(ctx context.Context, h *wire.Host) finding {
	info, err := h.Driver("").Info(ctx)
	if err != nil {
		return broken("qemu", err)
	}
	return finding{"qemu", checkOK, info.Version + " (" + info.Binary + ")", ""}
}

func checkKernel(h *wire.Host) (*boot.Kernel, finding) {
	k, err := boot.Find(h.StateDir, h.Conf.VMM.Kernel)
	if err != nil {
		if fault.KindOf(err) == fault.NotFound && h.Conf.VMM.Kernel == "" {
			return nil, finding{"kernel", checkWarn, "none yet; the first guest fetches Debian's", "make kernel builds the tuned one; vk kernel fetch gets Debian's now"}
		}
		return nil, broken("kernel", err)
	}
	text := fmt.Sprintf("%s: %s", k.Name, k.Version)
	if k.Tuned {
		return &k, finding{"kernel", checkOK, text + "; everything a guest needs is built in", ""}
	}
	return &k, finding{"kernel", checkWarn, text + "; loads modules at each boot",
		"make kernel builds the tuned one, which reaches a guest's first program two to three times sooner"}
}

func checkAgent() finding {
	b, err := boot.Agent()
	if err != nil {
		return broken("agent", err)
	}
	return finding{"agent", checkOK, fmt.Sprintf("build %s, %s", first(version.Build, "unknown"), ui.Size(int64(len(b)))), ""}
}

func checkAccel(ctx context.Context, h *wire.Host, k *boot.Kernel) finding {
	if k == nil {
		return finding{"accel", checkWarn, "cannot be tried without a guest kernel", ""}
	}
	mk, err := boot.Prepare(ctx, h.StateDir, *k, boot.Options{})
	if err != nil {
		return broken("accel", err)
	}
	v, err := h.Driver("").Verdict(ctx, mk)
	if err != nil {
		return broken("accel", err)
	}
	if v.Accel == "kvm" {
		return finding{"accel", checkOK, "kvm: " + v.Why, ""}
	}
	return finding{"accel", checkWarn, v.Accel + ": " + v.Why + "; guests are emulated, which is many times slower",
		"give this host /dev/kvm: virtualization on in its firmware, nested virtualization if it is a guest itself, and the right to open the device (group kvm)"}
}

// checkNet tells whether the configured [net] mode works.
func checkNet(ctx context.Context, h *wire.Host) []finding {
	text, warn, err := h.NetReady(ctx)
	if err != nil {
		return []finding{broken("net", err)}
	}
	out := []finding{{"net", checkOK, text, ""}}
	for _, w := range warn {
		out = append(out, finding{"net", checkWarn, w, "docs/network.md, Modes, says what a guest's device needs"})
	}
	return out
}

// tool looks for a program as the engines do, which also look where root's
// programs are.
func tool(name, missing, purpose, mend string) finding {
	path, err := exec.LookPath(name)
	if err != nil {
		for _, dir := range []string{"/usr/sbin", "/sbin"} {
			p := filepath.Join(dir, name)
			if st, serr := os.Stat(p); serr == nil && st.Mode().IsRegular() {
				path, err = p, nil
				break
			}
		}
	}
	if err != nil {
		return finding{name, missing, "missing; it " + strings.TrimSpace(purpose), mend}
	}
	return finding{name, checkOK, path, ""}
}

// checkDefault tells whether this user can make local/default.
func checkDefault() finding {
	if err := image.CanMakeDefault(); err != nil {
		f := broken("local/default", err)
		f.Verdict = checkWarn // other images need nothing of it
		return f
	}
	return finding{"local/default", checkOK, "can be made", ""}
}

func checkVirtiofs() finding {
	path, err := virtiofs.Binary()
	if err != nil {
		f := broken("virtiofsd", err)
		f.Verdict = checkWarn // only --share needs it
		return f
	}
	return finding{"virtiofsd", checkOK, path, ""}
}
