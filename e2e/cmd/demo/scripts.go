package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
)

// before, script and after are the demo's .gitlab-ci.yml.
var (
	before = []string{
		`curl -fsS "$CI_SERVER_URL/toolchain/` + archive + `" | tar -x -C /`,
		`tcc -v`,
	}
	script = []string{
		`make CC=tcc`,
		`make check`,
		`./wordcount < test.sh | sed -n 1,5p`,
	}
	after = []string{`echo "this runs whatever happened before"; ls`}

	ciYAML = "build and test:\n  before_script:\n" + yamlList(before) + "  script:\n" + yamlList(script) + "  after_script:\n" + yamlList(after)
)

func yamlList(lines []string) string {
	var b strings.Builder
	for _, l := range lines {
		fmt.Fprintf(&b, "    - '%s'\n", strings.ReplaceAll(l, "'", "''"))
	}
	return b.String()
}

func replace(s, old, with string) string { return strings.ReplaceAll(s, old, with) }

// quote makes one word of s for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func green(s string) string { return "printf '\\033[32;1m%s\\033[0;m\\n' " + quote(s) + "\n" }

// stages are the job's scripts: what a runner would generate for it, in words
// of our own.
func (j *job) stages(vars map[string]string) []runnerside.Stage {
	head := "set -eo pipefail 2>/dev/null || set -e\n" + exports(vars)
	dir := vars["CI_PROJECT_DIR"]
	repo := j.url + "/" + project + ".git"
	withToken := strings.Replace(repo, "http://", "http://gitlab-ci-token:"+j.token+"@", 1)
	get := head + green("Fetching changes with git depth set to 20...") +
		"git -c init.defaultBranch=none init " + quote(dir) + "\ncd " + quote(dir) + "\n" +
		"git config --global --add safe.directory " + quote(dir) + "\n" +
		"git remote add origin " + quote(repo) + "\n" +
		"git -c " + quote("url."+withToken+".insteadOf="+repo) + " fetch origin +refs/heads/main:refs/remotes/origin/main --depth 20 --prune --quiet\n" +
		green("Checking out "+j.sha[:8]+" as detached HEAD (ref is main)...") +
		"git checkout -f -q " + j.sha + "\n"
	return []runnerside.Stage{
		{Name: execdrv.StagePrepare, Script: []byte("echo \"Running on $(hostname 2>/dev/null || cat /proc/sys/kernel/hostname), kernel $(uname -r), as $(id -un)\"\n")},
		{Name: execdrv.StageSources, Script: []byte(get)},
		{Name: execdrv.StageBuild, Script: []byte(head + "cd " + quote(dir) + "\n" + commands(slices.Concat(before, script)))},
		{Name: execdrv.StageAfter, Script: []byte(head + "cd " + quote(dir) + "\n" + green("Running after script...") + commands(after))},
		{Name: execdrv.StageCleanFileVars, Script: []byte("rm -rf " + quote(dir+".tmp") + "\n")},
	}
}

func exports(vars map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		fmt.Fprintf(&b, "export %s=%s\n", k, quote(vars[k]))
	}
	return b.String()
}

func commands(lines []string) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(green("$ " + l))
		b.WriteString(l + "\n")
	}
	return b.String()
}
