package vkcmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/conf"
)

// want checks a finding: its verdict, words of it, and that what is not ok can
// be mended.
func want(t *testing.T, f finding, verdict string, words ...string) {
	t.Helper()
	if f.Verdict != verdict || verdict == checkFail && f.Mend == "" {
		t.Errorf("%+v, want %s", f, verdict)
	}
	for _, w := range words {
		if !strings.Contains(f.Text, w) {
			t.Errorf("%s: %q lacks %q", f.Name, f.Text, w)
		}
	}
}

func TestCheckTools(t *testing.T) {
	dir, bin, empty := t.TempDir(), t.TempDir(), t.TempDir()
	put := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	put(filepath.Join(bin, "gitlab-runner"), "#!/bin/sh\n")
	c := conf.Default()
	want(t, checkTools(c, []string{empty}), checkWarn, "no [executor] tools_dir")
	want(t, checkTools(c, []string{empty, bin}), checkFail, "no [executor] tools_dir", bin+"/gitlab-runner")
	c.Node.Runner = "managed"
	want(t, checkTools(c, []string{empty}), checkFail, "that vk node manages")
	c.Executor.ToolsDir = filepath.Join(dir, "none")
	want(t, checkTools(c, nil), checkFail, "no such file")
	c.Executor.ToolsDir = dir
	want(t, checkTools(c, nil), checkFail, "has no program")
	put(filepath.Join(dir, "git"), "#!/bin/sh\n")
	want(t, checkTools(c, nil), checkFail, dir+": git; no gitlab-runner")
	c.Node.Runner = ""
	want(t, checkTools(c, []string{empty}), checkOK, dir+": git")
	want(t, checkTools(c, []string{bin}), checkFail, "no gitlab-runner")
	put(filepath.Join(dir, "gitlab-runner"), "#!/bin/sh\n")
	want(t, checkTools(c, []string{bin}), checkOK, "git, gitlab-runner")
	if err := os.Symlink("/bin/sh", filepath.Join(dir, "tool")); err != nil {
		t.Fatal(err)
	}
	want(t, checkTools(c, []string{bin}), checkWarn, "not static: tool")
	if err := os.Remove(filepath.Join(dir, "git")); err != nil {
		t.Fatal(err)
	}
	want(t, checkTools(c, []string{bin}), checkWarn, "no git")
}

func TestCheckUsage(t *testing.T) {
	proc := t.TempDir()
	want(t, checkUsage(proc), checkWarn, "block I/O is not accounted", "from a scan")
	if err := os.MkdirAll(filepath.Join(proc, "self/task/1"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"self/io", "self/task/1/children"} {
		if err := os.WriteFile(filepath.Join(proc, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f := checkUsage(proc)
	want(t, f, checkOK)
	if f.Text != "block I/O accounted, process tree from the kernel's child lists" {
		t.Errorf("%q", f.Text)
	}
}

func TestCheckNested(t *testing.T) {
	sys := t.TempDir()
	want(t, checkNested(false, "kvm", sys), checkOK, "off")
	want(t, checkNested(true, "kvm", sys), checkFail, "neither kvm_intel nor kvm_amd")
	want(t, checkNested(true, "tcg", sys), checkWarn, "emulated")
	want(t, checkNested(true, "", sys), checkWarn)
	dir := filepath.Join(sys, "module/kvm_amd/parameters")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for value, verdict := range map[string]string{"0": checkFail, "1": checkOK} {
		if err := os.WriteFile(filepath.Join(dir, "nested"), []byte(value+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		want(t, checkNested(true, "kvm", sys), verdict)
	}
}

func TestCheckJobsRoom(t *testing.T) {
	c := conf.Default()
	dir := t.TempDir()
	if f := checkJobsRoom(c, dir); f.Verdict == checkFail || !strings.Contains(f.Text, "free of") {
		t.Errorf("%+v", f)
	}
	c.Executor.Schedule.DiskDefault = 1 << 60
	want(t, checkJobsRoom(c, dir), checkFail, "disk_default")
	c.Executor.Schedule.DiskAdmission = false
	want(t, checkJobsRoom(c, dir), checkWarn, "disk_admission is off")
	want(t, checkJobsRoom(c, filepath.Join(dir, "none")), checkFail)
}

func TestCheckNUMA(t *testing.T) {
	sysfs := t.TempDir()
	want(t, checkNUMA("auto", sysfs), checkOK, "one memory node")
	for _, n := range []string{"node0", "node1"} {
		d := filepath.Join(sysfs, n)
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		for f, text := range map[string]string{"cpulist": "0-3\n", "meminfo": "Node 0 MemTotal: 4096 kB\nNode 0 MemFree: 2048 kB\n"} {
			if err := os.WriteFile(filepath.Join(d, f), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	want(t, checkNUMA("auto", sysfs), checkOK, "mode auto", "node 1: cpus 0-3, 2 of 4 MiB free")
	if err := os.Remove(filepath.Join(sysfs, "node1/meminfo")); err != nil {
		t.Fatal(err)
	}
	want(t, checkNUMA("auto", sysfs), checkWarn, "memory node 1")
}

func TestCheckDAX(t *testing.T) {
	c := conf.Default()
	if f, ok := checkMemoryBack(c); ok {
		t.Errorf("the default asks for nothing: %+v", f)
	}
	for value, asked := range map[string]bool{"off": false, "2G:always": true} {
		if err := c.Set("executor.vm.dax", value, conf.Origin{Source: conf.FromFile}); err != nil {
			t.Fatal(err)
		}
		if f, ok := checkMemoryBack(c); ok != asked || ok && (f.Verdict != checkWarn || !strings.Contains(f.Text, value)) {
			t.Errorf("%s: %+v, %v", value, f, ok)
		}
	}
}

// A budget that the host has, but not together with what its guests' VMMs take.
func TestCheckBudgetBesideVMMs(t *testing.T) {
	info := filepath.Join(t.TempDir(), "meminfo")
	if err := os.WriteFile(info, []byte("MemTotal: 16777216 kB\n"), 0o644); err != nil { // 16 GiB
		t.Fatal(err)
	}
	want(t, budgetFits(8192, 2048, "tcg", info), checkOK, "8192 MiB of guests' memory, 4 jobs of the default size at once, and for each VMM up to 320 MiB beside it")
	tight := budgetFits(14336, 2048, "tcg", info)
	want(t, tight, checkWarn, "up to 320 MiB beside it: 16576 MiB of this host's 16384")
	if !strings.Contains(tight.Mend, "mem_budget to 14169M or less") {
		t.Error(tight.Mend)
	}
	want(t, budgetFits(14168, 2048, "tcg", info), checkOK)
	want(t, budgetFits(14336, 2048, "kvm", info), checkOK, "up to 64 MiB")
	want(t, budgetFits(8192, 2048, "kvm", info+"-none"), checkWarn, "cannot be read")
}
