package vkcmd

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"virtkit/applets/internal/wire"
	"virtkit/core/admit"
	"virtkit/core/conf"
	"virtkit/core/image"
	"virtkit/core/numa"
	"virtkit/core/ui"
	"virtkit/vmm/boot"
	"virtkit/vmm/qemu"
)

// featureGitlab is what `vk check --feature` knows.
const featureGitlab = "gitlab"

// gitlabFindings are about jobs alone. Guests may run although one of them
// fails.
func (a *app) gitlabFindings(ctx context.Context) []finding {
	h, err := wire.Open(a.env, a.overrides())
	if err != nil {
		return nil // findings has told
	}
	accel := a.accelOf(ctx, h)
	out := []finding{
		checkTools(h.Conf, systemdPath),
		checkNested(h.Conf.Executor.VM.Nested, accel, "/sys"),
		checkBudget(h, accel, admit.MemInfo),
		checkJobsRoom(h.Conf, h.Jobs.Dir()),
		checkNUMA(h.Conf.NUMA.Mode, numa.Sysfs),
	}
	if f, ok := checkMemoryBack(h.Conf); ok {
		out = append(out, f)
	}
	return out
}

// accelOf is what guests run under; "" when it cannot be told.
func (a *app) accelOf(ctx context.Context, h *wire.Host) string {
	k, err := boot.Find(h.StateDir, h.Conf.VMM.Kernel)
	if err != nil {
		return ""
	}
	mk, err := boot.Prepare(ctx, h.StateDir, k, boot.Options{})
	if err != nil {
		return ""
	}
	v, err := h.Driver("").Verdict(ctx, mk)
	if err != nil {
		return ""
	}
	return v.Accel
}

// checkUsage tells what of a job's cost this kernel accounts. proc is /proc.
func checkUsage(proc string) finding {
	var has, lacks []string
	if _, err := os.ReadFile(filepath.Join(proc, "self/io")); err == nil {
		has = append(has, "block I/O accounted")
	} else {
		lacks = append(lacks, "block I/O is not accounted (CONFIG_TASK_IO_ACCOUNTING), so jobs report no reads and writes")
	}
	if m, _ := filepath.Glob(filepath.Join(proc, "self/task/*/children")); len(m) > 0 {
		has = append(has, "process tree from the kernel's child lists")
	} else {
		has = append(has, "process tree from a scan of all processes (no CONFIG_PROC_CHILDREN)")
	}
	f := finding{"usage", checkOK, strings.Join(append(lacks, has...), ", "), ""}
	if len(lacks) > 0 {
		f.Verdict, f.Mend = checkWarn, "run a kernel that accounts it; jobs run all the same"
	}
	return f
}

// systemdPath is where a unit's programs are looked for (systemd.exec(5)).
var systemdPath = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"}

// runnerTool is the tool whose work a runner of this host leaves to jobs.
const runnerTool = "gitlab-runner"

// checkTools tells whether jobs find the tools that the runner's scripts call.
// path is where a runner of this host would be.
func checkTools(c *conf.Config, path []string) finding {
	const name = "tools"
	runner := ""
	if c.Node.Runner == "managed" {
		runner = "the gitlab-runner that vk node manages"
	}
	for _, d := range path {
		p := filepath.Join(d, runnerTool)
		if st, err := os.Stat(p); runner == "" && err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			runner = p
		}
	}
	dir := c.Executor.ToolsDir
	if dir == "" {
		if runner != "" {
			return finding{name, checkFail, "no [executor] tools_dir, and " + runner + " leaves artifacts, caches and dotenv reports to a gitlab-runner in the job: jobs transfer none in images without one",
				"set tools_dir to a directory with a static gitlab-runner (and git)"}
		}
		return finding{name, checkWarn, "no [executor] tools_dir: images without git cannot fetch a job's sources", "set tools_dir to a directory of static tools, or use images with git"}
	}
	_, tools, err := image.ToolsIn(dir)
	if err != nil {
		return broken(name, err)
	}
	names := image.ToolNames(tools)
	text := dir + ": " + strings.Join(names, ", ")
	switch {
	case runner != "" && !slices.Contains(names, runnerTool):
		return finding{name, checkFail, text + "; no " + runnerTool + ", to which " + runner + " leaves artifacts, caches and dotenv reports: jobs transfer none in images without one",
			"put a static " + runnerTool + " into " + dir}
	case !slices.Contains(names, "git"):
		return finding{name, checkWarn, text + "; no git: images without it cannot fetch a job's sources", "put a static git into " + dir}
	}
	var dynamic []string
	for _, t := range tools {
		if needsLoader(t.Path) {
			dynamic = append(dynamic, t.Name)
		}
	}
	if len(dynamic) > 0 {
		return finding{name, checkWarn, text + "; not static: " + strings.Join(dynamic, ", "), "images without the libraries of these cannot run them: link them statically"}
	}
	return finding{name, checkOK, text, ""}
}

// needsLoader reports whether a program asks for a dynamic loader.
func needsLoader(path string) bool {
	f, err := elf.Open(path)
	if err != nil {
		return false // a script
	}
	defer f.Close()
	return slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
}

func checkNested(wanted bool, accel, sys string) finding {
	const name = "nested"
	switch {
	case !wanted:
		return finding{name, checkOK, "off: jobs run no guests of their own", ""}
	case accel == "kvm":
		if err := qemu.CanNest(sys); err != nil {
			return broken(name, err)
		}
		return finding{name, checkOK, "every job may run guests of its own", ""}
	case accel == "":
		return finding{name, checkWarn, "cannot be told without a guest kernel", ""}
	}
	return finding{name, checkWarn, "every job may run guests of its own, emulated ones within emulated ones", "give this host /dev/kvm"}
}

func checkBudget(h *wire.Host, accel, meminfo string) finding {
	const name = "budget"
	mib, err := h.Budget()
	if err != nil {
		return broken(name, err)
	}
	switch mem := h.Conf.Executor.VM.Mem; {
	case mib == 0:
		return finding{name, checkWarn, "no [executor.schedule] mem_budget: the runner's concurrent alone keeps jobs within this host's memory", `set mem_budget = "80%", or less where more than jobs runs here`}
	case mem>>20 > mib:
		return finding{name, checkFail, fmt.Sprintf("[executor.vm] mem is %s, over the whole budget of %d MiB: every job that does not ask for less fails", conf.FormatSize(mem), mib), "lower mem or raise mem_budget"}
	default:
		return budgetFits(mib, mem>>20, accel, meminfo)
	}
}

// budgetFits looks whether the host has the budget's memory and what its guests'
// VMMs take beside it.
func budgetFits(mib, mem int64, accel, meminfo string) finding {
	jobs, own := mib/mem, qemu.OwnMiB(accel)
	f := finding{"budget", checkOK, fmt.Sprintf("%d MiB of guests' memory, %d jobs of the default size at once, and for each VMM up to %d MiB beside it", mib, jobs, own), ""}
	total, err := admit.HostMemory(meminfo, "MemTotal")
	if err != nil {
		return finding{"budget", checkWarn, f.Text + "; this host's memory cannot be read: " + err.Error(), ""}
	}
	if all := mib + jobs*own; all > total>>20 {
		f.Verdict = checkWarn
		f.Text += fmt.Sprintf(": %d MiB of this host's %d", all, total>>20)
		f.Mend = fmt.Sprintf("lower [executor.schedule] mem_budget to %dM or less, as far as guests use all that they declare", (total>>20)*mem/(mem+own))
	}
	return f
}

// checkJobsRoom is about the filesystem of the job directories: bytes and inodes.
func checkJobsRoom(c *conf.Config, dir string) finding {
	const name = "jobs-disk"
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return finding{name, checkFail, fmt.Sprintf("asking for the room at %s: %v", dir, err), "make the directory, or move the state directory with VIRTKIT_STATE_DIR"}
	}
	size, free := int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
	f := finding{name, checkOK, fmt.Sprintf("%s free of %s", ui.Size(free), ui.Size(size)), ""}
	if st.Files > 0 {
		f.Text += fmt.Sprintf(", %d of %d inodes", st.Ffree, st.Files)
	}
	switch want := c.Executor.Schedule.DiskDefault; {
	case !c.Executor.Schedule.DiskAdmission:
		f.Verdict, f.Text, f.Mend = checkWarn, f.Text+"; [executor.schedule] disk_admission is off: jobs can fill it together", "take disk_admission = false out"
	case want > size:
		f.Verdict, f.Text, f.Mend = checkFail, f.Text+"; [executor.schedule] disk_default is "+ui.Size(want)+", so that no job without a history is ever admitted", "lower disk_default, or leave it out"
	case free < enoughRoom || st.Files > 0 && st.Ffree < 10000:
		f.Verdict, f.Mend = checkWarn, "make room, or run vk gc"
	}
	return f
}

func checkNUMA(mode, sysfs string) finding {
	nodes, err := numa.Read(sysfs)
	if err != nil {
		f := broken("numa", err)
		f.Verdict = checkWarn // guests are not placed, and run
		return f
	}
	if len(nodes) < 2 {
		return finding{"numa", checkOK, "one memory node: nothing to place", ""}
	}
	var parts []string
	for _, n := range nodes {
		parts = append(parts, fmt.Sprintf("node %d: cpus %s, %d of %d MiB free", n.ID, first(n.CPUList, "none"), n.FreeMiB, n.TotalMiB))
	}
	return finding{"numa", checkOK, "mode " + mode + "; " + strings.Join(parts, "; "), ""}
}

// checkMemoryBack tells of what is configured of a guest's memory and has no
// effect.
func checkMemoryBack(c *conf.Config) (finding, bool) {
	if dax := askedDAX(c); dax != "" {
		return finding{"dax", checkWarn, fmt.Sprintf("[executor.vm] dax = %q has no effect: QEMU offers no window, and what jobs read of the host are disks", dax), `take the key out, or set it to "off"`}, true
	}
	return finding{}, false
}
