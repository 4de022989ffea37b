package e2e_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/e2e/host"
)

const egressConfig = `
[net]
dns = ["` + farIP + `"]
[vmm]
disk = "2G"
[executor]
atop = false
[executor.vm]
cpus = 1
mem = "512M"
`

// egressHost is a virtkit whose resolver is the outside's, and a way to set its
// [egress].
func egressHost(t *testing.T) (h *host.Host, configure func(toml string)) {
	t.Helper()
	guests(t)
	h, err := host.New(root, filepath.Join(world.dir, "egress-"+t.Name()), egressConfig)
	if err != nil {
		t.Fatal(err)
	}
	once(t, "default in "+h.State, func() error {
		_, err := h.Run(context.Background(), "pull", "--policy", "missing", "local/default")
		return err
	})
	outside(t)
	return h, func(toml string) {
		t.Helper()
		if err := os.WriteFile(h.Conf, []byte(egressConfig+toml), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := h.Run(t.Context(), "config", "check", h.Conf); err != nil {
			t.Fatalf("%s\n%v", out, err)
		}
	}
}

// egressJob is a job's output as its trace has it.
type egressJob struct {
	id      string
	prepare string // without the lines that every job has
	build   runnerside.Result
	end     string // of cleanup_file_variables
}

// job runs a script as build_script, then cleanup_file_variables and cleanup.
// Jobs of one name have one standing list.
func runEgressJob(t *testing.T, h *host.Host, name, script string, vars map[string]string) egressJob {
	t.Helper()
	v := map[string]string{"MICROVM_IMAGE": "local/default", "CI_JOB_NAME": name, "CI_PROJECT_ID": "42"}
	for k, s := range vars {
		v[k] = s
	}
	s := plainJob(t, h.Driver(), v, nil)
	j := egressJob{id: s.Vars["CI_JOB_ID"]}
	if res, _, err := s.Config(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("config: %d %v\n%s", res.Exit, err, res.Stderr)
	}
	res, err := s.Prepare(t.Context())
	if err != nil || res.Exit != 0 {
		t.Fatalf("prepare: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
	}
	for line := range strings.Lines(string(res.Stdout)) {
		if f := strings.Fields(line); len(f) < 2 || !slices.Contains([]string{"image", "booted", "restored", "ready"}, f[1]) {
			j.prepare += line
		}
	}
	j.build = stage(t, s, execdrv.StageBuild, script)
	last := stage(t, s, execdrv.StageCleanFileVars, "true\n")
	// What the job cost comes right after what it reached.
	end, cost, _ := strings.Cut(string(last.Stderr), "virtkit: job resource usage: ")
	if strings.Contains(cost, "egress") || strings.Contains(cost, "contacted") {
		t.Errorf("what the job reached comes after what it cost:\n%s", last.Stderr)
	}
	j.end = end
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 || len(res.Stderr) > 0 {
		t.Errorf("cleanup: %d %v\n%s", res.Exit, err, res.Stderr)
	}
	return j
}

func want(t *testing.T, what, want, got string) {
	t.Helper()
	if d := cmp.Diff(strings.TrimLeft(want, "\n"), got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// fetches does what a job does: a request to an address, one to a name, and a
// lookup.
const fetches = `curl -sS -o /dev/null -m 20 http://` + farIP + `/x && echo address
curl -sS -o /dev/null -m 20 http://deb.web.test/x && echo name
getent ahostsv4 one.test >/dev/null && echo lookup
true
`

// From a first run without rules to rules that hold, by nothing but the trace
// and vk egress suggest.
func TestEgressFromAuditToAllowlist(t *testing.T) {
	h, configure := egressHost(t)
	configure("")
	j := runEgressJob(t, h, "fetch", fetches, map[string]string{"MICROVM_EGRESS_AUDIT": "1"})
	want(t, "the script's output", "address\nname\nlookup\n", string(j.build.Stdout))
	want(t, "what an unrestricted stage was refused", "", string(j.build.Stderr))
	want(t, "the end of the trace", `
virtkit: egress audit: what this run contacted:
virtkit:   dns deb.web.test (2 times)
virtkit:   dns one.test (once)
virtkit:   tcp 198.51.100.2:80 (once): no lookup behind it
virtkit: egress audit: for allowlists of it run on the host: vk egress suggest `+j.id+`
virtkit: names this job has contacted under unrestricted egress: deb.web.test, one.test
`, j.end)

	vars, err := h.Run(t.Context(), "egress", "suggest", "--vars", j.id)
	want(t, "vk egress suggest --vars", `
variables:
  MICROVM_EGRESS_ALLOW_NAME: |
    deb.web.test  # dns, 2 times
    one.test      # dns, once
  MICROVM_EGRESS_ALLOW_IP: |
    198.51.100.2/32:80  # tcp, once
`, vars)
	if err != nil {
		t.Fatal(err)
	}
	suggested, err := h.Run(t.Context(), "egress", "suggest", j.id)
	if err != nil {
		t.Fatal(err)
	}
	want(t, "vk egress suggest", `
[egress]
allow_name = [
  "deb.web.test", # dns, 2 times
  "one.test",     # dns, once
]
allow_ip = [
  "198.51.100.2/32:80", # tcp, once
]
`, suggested)

	// Pasted, it lets the same job pass, and nothing else.
	configure(suggested)
	j = runEgressJob(t, h, "fetch", fetches, nil)
	want(t, "the script's output under the suggested list", "address\nname\nlookup\n", string(j.build.Stdout))
	want(t, "what it was refused", "", string(j.build.Stderr))
	other := `getent ahostsv4 many.test || echo "no such name"
curl -sS -o /dev/null -m 20 http://` + farIP + `:81/ 2>/dev/null || echo refused
getent hosts 198.51.100.2 || echo "no reverse"
`
	j = runEgressJob(t, h, "fetch", other, nil)
	want(t, "another script's output", "no such name\nrefused\nno reverse\n", string(j.build.Stdout))
	want(t, "what that was refused", `
virtkit: egress blocked by the allowlist:
virtkit:   dns many.test (once): outside the node's [egress] allow_name
virtkit:   tcp 198.51.100.2:81 (once): outside the node's [egress] allow_ip
virtkit:   dns 2.100.51.198.in-addr.arpa (once): outside the node's [egress] allow_name
`, string(j.build.Stderr))
	if !strings.HasPrefix(j.end, "virtkit: names this job has contacted under egress policy ") || !strings.HasSuffix(j.end, ": deb.web.test, one.test\n") {
		t.Errorf("the standing list of the new policy: %q", j.end)
	}

	if again, err := h.Run(t.Context(), "egress", "suggest", "--vars", j.id); err != nil || !strings.Contains(again, "  MICROVM_EGRESS_ALLOW_NAME: |\n    deb.web.test  # in an earlier run\n") {
		t.Errorf("--vars: %v\n%s", err, again)
	}
	var doc struct {
		Live   bool          `json:"live"`
		Report policy.Report `json:"report"`
	}
	out, err := h.Run(t.Context(), "egress-report", "--json", j.id)
	if err == nil {
		err = json.Unmarshal([]byte(out), &doc)
	}
	if err != nil || doc.Live || doc.Report.Run == nil || doc.Report.Run.Coverage != policy.Complete || len(doc.Report.Blocked) != 3 {
		t.Fatalf("%v\n%s", err, out)
	}
	if b := doc.Report.Blocked[1]; b.Destination.IP != farIP || b.Destination.Port != 81 || b.Layer != policy.LayerNodeCap || b.Stage != execdrv.StageBuild {
		t.Errorf("%+v", b)
	}
	// The other way to write it: the job's own variables, made by --vars, comments
	// and all.
	configure("")
	j = runEgressJob(t, h, "fetch", other+fetches, blockScalars(vars)) // the other first: names open every port
	want(t, "the script's output under its own variables", "no such name\nrefused\nno reverse\naddress\nname\nlookup\n", string(j.build.Stdout))
	want(t, "what it was refused", `
virtkit: egress blocked by the allowlist:
virtkit:   dns many.test (once): outside the job's MICROVM_EGRESS_ALLOW_NAME
virtkit:   tcp 198.51.100.2:81 (once): outside the job's MICROVM_EGRESS_ALLOW_IP
virtkit:   dns 2.100.51.198.in-addr.arpa (once): outside the job's MICROVM_EGRESS_ALLOW_NAME
`, string(j.build.Stderr))
	nothingLeft(t, h)
}

// blockScalars is what YAML makes of a mapping of literal block scalars.
func blockScalars(yaml string) map[string]string {
	out, key := map[string]string{}, ""
	for line := range strings.Lines(yaml) {
		if k, ok := strings.CutSuffix(strings.TrimSpace(line), ": |"); ok {
			key = k
		} else if text, ok := strings.CutPrefix(line, "    "); ok {
			out[key] += text
		}
	}
	return out
}

func TestEgressLayersOfAJob(t *testing.T) {
	h, configure := egressHost(t)
	configure("[egress]\nallow_name = [\"web.test\", \"one.test\"]\n")
	t.Run("narrowed", func(t *testing.T) {
		j := runEgressJob(t, h, t.Name(), `getent ahostsv4 one.test || echo "narrowed away"
curl -sS -o /dev/null -m 20 http://web.test/x && echo reached
true
`, map[string]string{"MICROVM_EGRESS_ALLOW_NAME": "web.test # the mirror\npypi.org", "MICROVM_EGRESS_DRY_RUN": "1"})
		want(t, "prepare", `
virtkit: warning: MICROVM_EGRESS_DRY_RUN: not followed, as the node's [egress] sets a list of its own, which only its dry_run suspends
virtkit: warning: MICROVM_EGRESS_ALLOW_NAME pypi.org: outside the node's [egress] allow_name, its lookups will be refused
`, j.prepare)
		want(t, "the script's output", "narrowed away\nreached\n", string(j.build.Stdout))
		want(t, "the refusals", `
virtkit: egress blocked by the allowlist:
virtkit:   dns one.test (once): outside the job's MICROVM_EGRESS_ALLOW_NAME
`, string(j.build.Stderr))
	})
	t.Run("invalid", func(t *testing.T) {
		s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": "local/default", "MICROVM_EGRESS_ALLOW_IP": "10.0.0.0/8 fe80::/10"}, nil)
		job, err := s.RunJob(t.Context(), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if job.Verdict.Reason != "script_failure" {
			t.Errorf("%+v", job.Verdict)
		}
		c, _ := job.Find("config")
		want(t, "config", `
virtkit: MICROVM_EGRESS_ALLOW_IP: invalid entry "fe80::/10": IPv6, which guests do not have: write an IPv4 network
virtkit: hint: a name is a bare DNS suffix such as example.com; an address is an IPv4 network such as 192.0.2.0/24, or 192.0.2.7/32:443 for one port
`, string(c.Stderr))
	})
	t.Run("dry-run", func(t *testing.T) {
		configure("[egress]\nallow_name = []\ndry_run = true\n")
		j := runEgressJob(t, h, t.Name(), fetches, nil)
		want(t, "the script's output", "address\nname\nlookup\n", string(j.build.Stdout))
		want(t, "what it would be refused", `
virtkit: egress the allowlist would block (dry-run, not enforced):
virtkit:   tcp 198.51.100.2:80 (2 times): outside the node's [egress] allow_ip
virtkit:   dns deb.web.test (2 times): outside the node's [egress] allow_name
virtkit:   dns one.test (once): outside the node's [egress] allow_name
`, string(j.build.Stderr))
		want(t, "the end", "virtkit: names this job has contacted under unrestricted egress: deb.web.test, one.test\n", j.end)
	})
	t.Run("the hub's Fallback", func(t *testing.T) {
		configure("[egress]\ndry_run = true\n")
		fallback := filepath.Join(h.State, "node", "egress-fallback.json")
		if err := os.MkdirAll(filepath.Dir(fallback), 0o700); err != nil {
			t.Fatal(err)
		}
		rules := `{"rules":["default"],"run":{"names":["web.test"]},"build":{},"dry_run":[{"rule":"next","run":{"names":[]},"build":{}}]}`
		if err := os.WriteFile(fallback, []byte(rules), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Remove(fallback) })
		j := runEgressJob(t, h, t.Name(), fetches, nil)
		want(t, "prepare", `
virtkit: egress under the hub's rules: default (dry-run, not enforced: next)
virtkit:   run: node cap (dry-run, not enforced) unrestricted; hub names web.test, ips none; job not narrowed
virtkit:   build: node cap unrestricted; hub unrestricted; job not narrowed
`, j.prepare)
		want(t, "the script's output", "name\n", string(j.build.Stdout))
		lines := strings.SplitAfter(string(j.build.Stderr), "\n")
		want(t, "the refusals", `
virtkit: egress blocked by the hub's egress rules (default):
virtkit:   tcp 198.51.100.2:80 (once)
virtkit:   dns one.test (once)
virtkit: egress the hub's dry-run rule next would block (not enforced):
virtkit:   dns deb.web.test (2 times)
virtkit:   tcp 198.51.100.2:80 (once): outside the hub's egress rules (next), and no name it allows opened the address
`, strings.Join(lines[1:], "")) // behind what curl says
	})
	t.Run("strict names", func(t *testing.T) {
		configure("[egress]\nallow_name = [\"web.test\"]\nstrict_names = true\n")
		j := runEgressJob(t, h, t.Name(), `curl -sS -o /dev/null -m 20 http://deb.web.test/x && echo asked
curl -sS -o /dev/null -m 20 -H 'Host: shared.test' http://deb.web.test/x 2>/dev/null || echo refused
`, nil)
		want(t, "the script's output", "asked\nrefused\n", string(j.build.Stdout))
		want(t, "the refusals", `
virtkit: egress blocked by the allowlist:
virtkit:   tcp 198.51.100.2:80 (once): outside the node's [egress] allow_name: it asks for shared.test on an address that deb.web.test opened
`, string(j.build.Stderr))
	})
	nothingLeft(t, h)
}

// Each service is held to its own lists and the job's, by the socket that its
// traffic comes from, also when the job has a command run in it.
func TestEgressOfServices(t *testing.T) {
	h, configure := egressHost(t)
	configure("")
	s := jobWith(t, h, "local/default", map[string]string{"MICROVM_EGRESS_ALLOW_NAME": "web.test one.test", "CI_PROJECT_ID": "42", "CI_JOB_NAME": "services"},
		service("local/default", "shut", map[string]any{"command": []string{"sleep", "600"}, "variables": map[string]string{"MICROVM_EGRESS_ALLOW_NAME": ""}}),
		service("local/default", "own", map[string]any{"command": []string{"sleep", "600"}, "variables": map[string]string{"MICROVM_EGRESS_ALLOW_NAME": "one.test, many.test"}}))
	t.Cleanup(func() { nothingLeft(t, h) })
	prep := prepared(t, s)
	if w := "virtkit: warning: service own: MICROVM_EGRESS_ALLOW_NAME many.test: outside the job's MICROVM_EGRESS_ALLOW_NAME, its lookups will be refused\n"; !strings.Contains(string(prep.Stdout), w) {
		t.Errorf("the trace lacks %q:\n%s", w, prep.Stdout)
	}
	res := stage(t, s, execdrv.StageBuild, `try() { echo "$*: $("$@" >/dev/null 2>&1 && echo yes || echo no)"; }
try getent ahostsv4 web.test
try getent ahostsv4 one.test
for s in shut own; do
  try vk-agent exec --service $s -- getent ahostsv4 one.test
  try vk-agent exec --service $s -- getent ahostsv4 web.test
  try vk-agent exec --service $s -- getent ahostsv4 own
done
`)
	want(t, "who reaches what", `
getent ahostsv4 web.test: yes
getent ahostsv4 one.test: yes
vk-agent exec --service shut -- getent ahostsv4 one.test: no
vk-agent exec --service shut -- getent ahostsv4 web.test: no
vk-agent exec --service shut -- getent ahostsv4 own: yes
vk-agent exec --service own -- getent ahostsv4 one.test: yes
vk-agent exec --service own -- getent ahostsv4 web.test: no
vk-agent exec --service own -- getent ahostsv4 own: yes
`, string(res.Stdout))
	want(t, "the refusals", `
virtkit: egress blocked by the allowlist:
virtkit:   dns one.test (once) from service shut: outside service shut's MICROVM_EGRESS_ALLOW_NAME
virtkit:   dns web.test (once) from service shut: outside service shut's MICROVM_EGRESS_ALLOW_NAME
virtkit:   dns web.test (once) from service own: outside service own's MICROVM_EGRESS_ALLOW_NAME
`, string(res.Stderr))
}

// kill -9 of the supervisor, which is the switch's process: a system failure
// that says so; and what was recorded until then is kept.
func TestEgressOfAKilledSupervisor(t *testing.T) {
	h, configure := egressHost(t)
	configure("[egress]\nallow_name = []\n")
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": "local/default"}, nil)
	prepared(t, s)
	dirs := h.JobDirs()
	if len(dirs) != 1 {
		t.Fatalf("job directories %q", dirs)
	}
	onOutput(s, execdrv.StageBuild, "looked", func() {
		// What is written every few seconds has to be there first.
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			r, err := supervise.ReadEgress(filepath.Join(h.State, "jobs", dirs[0]))
			if err == nil && len(r.Record.Entries) > 0 {
				break
			}
		}
		if pid := h.Supervisors(dirs[0])["supervisor"]; pid > 1 {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	res := stage(t, s, execdrv.StageBuild, "getent ahostsv4 one.test; echo looked; sleep 600\n")
	if res.Exit != 2 || res.FileCode != "" || !strings.Contains(string(res.Stderr), "virtkit: the guest's supervisor was killed") ||
		!strings.HasPrefix(string(res.Stderr), "virtkit: egress blocked by the allowlist:\nvirtkit:   dns one.test (once): outside the node's [egress] allow_name\n") {
		t.Errorf("build_script: %d, code %q\n%s", res.Exit, res.FileCode, res.Stderr)
	}
	partial := func(when string) {
		t.Helper()
		var doc struct {
			Report policy.Report `json:"report"`
		}
		out, err := h.Run(t.Context(), "egress-report", "--json", s.Vars["CI_JOB_ID"])
		if err == nil {
			err = json.Unmarshal([]byte(out), &doc)
		}
		if err != nil || doc.Report.Run.Coverage != policy.Partial || len(doc.Report.Blocked) != 1 || doc.Report.Blocked[0].Destination.Domain != "one.test" {
			t.Errorf("the report %s: %v\n%s", when, err, out)
		}
	}
	partial("before cleanup")
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Errorf("cleanup: %d %v\n%s", res.Exit, err, res.Stderr)
	}
	partial("after cleanup")
	nothingLeft(t, h)
}

// The flags of vk run.
func TestEgressFlagsOfRun(t *testing.T) {
	h, configure := egressHost(t)
	configure("[egress]\nallow_name = []\n") // for jobs alone
	run := func(args ...string) (string, string) {
		t.Helper()
		cmd := vkCommand(t, h, append([]string{"run"}, args...)...)
		var out, errb strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &errb
		if err := cmd.Run(); err != nil {
			t.Errorf("vk run %v: %v\n%s", args, err, errb.String())
		}
		var said []string
		for line := range strings.Lines(errb.String()) {
			if strings.HasPrefix(line, "vk: egress") || strings.HasPrefix(line, "vk:   ") {
				said = append(said, line)
			}
		}
		return out.String(), strings.Join(said, "")
	}
	script := []string{"local/default", "bash", "-c", fetches}
	out, said := run(script...)
	want(t, "without a flag", "address\nname\nlookup\n", out)
	want(t, "without a flag", "", said)
	out, said = run(append([]string{"--egress-restrict"}, script...)...)
	want(t, "--egress-restrict", "", out)
	want(t, "--egress-restrict", `
vk: egress blocked by the allowlist:
vk:   tcp 198.51.100.2:80 (once): outside --allow-ip
vk:   dns deb.web.test (2 times): outside --allow-name
vk:   dns one.test (once): outside --allow-name
`, said)
	out, said = run(append([]string{"--audit-egress", "--allow-name", "web.test,one.test"}, script...)...)
	want(t, "--allow-name", "name\nlookup\n", out)
	said, suggest, _ := strings.Cut(said, "vk: egress audit: for allowlists of it run on the host: vk egress suggest ")
	want(t, "--allow-name", `
vk: egress blocked by the allowlist:
vk:   tcp 198.51.100.2:80 (once): outside --allow-ip
vk: egress audit: what this run contacted:
vk:   dns deb.web.test (2 times)
vk:   dns one.test (once)
`, said)
	if list, err := h.Run(t.Context(), "egress", "suggest", strings.TrimSpace(suggest)); err != nil || !strings.Contains(list, `"deb.web.test", # dns, 2 times`) {
		t.Errorf("vk egress suggest %s: %v\n%s", suggest, err, list)
	}
	if list, err := h.Run(t.Context(), "egress-report"); err != nil || strings.Count(list, "\nrun-") != 2 {
		t.Errorf("vk egress-report: %v\n%s", err, list)
	}
	nothingLeft(t, h)
}

// vkCommand is a call of vk whose streams the test reads apart.
func vkCommand(t *testing.T, h *host.Host, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), h.VK, args...)
	cmd.Env = h.Env()
	return cmd
}
