package e2e_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"virtkit/core/execdrv"
)

// A job with two services under a hub's rules: it reaches both by alias, is
// refused a third name, and its trace has the lines that the specification
// quotes, byte for byte.
func TestNetworkOfAJob(t *testing.T) {
	h, configure := egressHost(t)
	client, web, redis := clientImage(t, h), webImage(t, h), redisImage(t, h)
	configure("[egress.build]\nallow_name = [\"debian.org\", \"crates.io\"]\n")
	fallback := filepath.Join(h.State, "node", "egress-fallback.json")
	if err := os.MkdirAll(filepath.Dir(fallback), 0o700); err != nil {
		t.Fatal(err)
	}
	rules := `{"rules":["wab","wab-branches"],"run":{"names":["corp.example.com"],"ips":["10.10.140.49/32"]},"build":{"names":["debian.org"]},
		"dry_run":[{"rule":"wab-release","run":{"names":[]},"build":{}}]}`
	if err := os.WriteFile(fallback, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(fallback) })
	s := jobWith(t, h, client, map[string]string{"CI_PROJECT_ID": "42", "CI_JOB_NAME": "network", "MICROVM_EGRESS_AUDIT": "yes"},
		service(web, "www", nil), service(redis, "db", nil))
	t.Cleanup(func() { nothingLeft(t, h) })
	prep := prepared(t, s)
	trace := serviceTrace(string(prep.Stdout))
	for _, want := range []string{`
virtkit: egress under the hub's rules: wab, wab-branches (dry-run, not enforced: wab-release)
virtkit:   run: node cap unrestricted; hub names corp.example.com, ips 10.10.140.49/32; job not narrowed
virtkit:   build: node cap names debian.org crates.io, ips none; hub names debian.org, ips none; job not narrowed
`, `
virtkit: service www: accepts connections on port 80 after 0.00s
`, `
virtkit: service db: accepts connections on port 6379 after 0.00s
`} {
		if !strings.Contains("\n"+trace, want) {
			t.Errorf("the trace lacks %q:\n%s", want, prep.Stdout)
		}
	}
	res := stage(t, s, execdrv.StageBuild, `wget -q -O - http://www/
redis-cli -h db set key value
redis-cli -h db get key
nslookup -type=a github.com. >/dev/null 2>&1 || echo no github.com
nslookup -type=a git.corp.example.com. >/dev/null 2>&1
wget -q -O - http://169.254.169.254/ 2>/dev/null || echo no metadata
true
`)
	want(t, "the script's output", "hello from the web service\nOK\nvalue\nno github.com\nno metadata\n", string(res.Stdout))
	want(t, "its refusals", `
virtkit: egress blocked by the hub's egress rules (wab, wab-branches):
virtkit:   dns github.com (once)
virtkit: egress blocked by the switch (addresses of the host, and those that are nobody's):
virtkit:   tcp 169.254.169.254:80 (once): a link-local address (169.254.0.0/16)
virtkit: egress the hub's dry-run rule wab-release would block (not enforced):
virtkit:   dns git.corp.example.com (once)
`, string(res.Stderr))
	res = stage(t, s, execdrv.StageCleanFileVars, "true\n")
	end, _, _ := strings.Cut(string(res.Stderr), "virtkit: job resource usage: ")
	end = regexp.MustCompile(`egress policy [0-9a-f]{16}:`).ReplaceAllString(end, "egress policy a379a6f61c4b8e02:")
	want(t, "the end of the trace", `
virtkit: egress audit: what this run contacted:
virtkit:   dns git.corp.example.com (once)
virtkit: egress audit: for allowlists of it run on the host: vk egress suggest `+s.Vars["CI_JOB_ID"]+`
virtkit: names this job has contacted under egress policy a379a6f61c4b8e02: git.corp.example.com
`, end)
	// What services say to the job and to each other is not traffic of the outside's.
	out, err := h.Run(t.Context(), "egress-report", s.Vars["CI_JOB_ID"])
	if err != nil || !strings.Contains(out, "hub names corp.example.com, ips 10.10.140.49/32") || strings.Contains(out, "6379") {
		t.Errorf("vk egress-report: %v\n%s", err, out)
	}
}
