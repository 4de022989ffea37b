package runner_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/policy"
	"virtkit/core/runner"
	"virtkit/core/supervise"
)

type hub struct {
	egress *policy.HubEgress
	err    error
}

func (h hub) Fallback() (*policy.HubEgress, error) { return h.egress, h.err }

type sites map[string]*policy.Standing

func (s sites) Contacted(site, fp string, names []string) (*policy.Standing, error) {
	if s[site] == nil {
		s[site] = &policy.Standing{Version: 1}
	}
	s[site].Add(fp, names, time.Unix(1, 0))
	return s[site], nil
}

// lines is the trace without prepare's own lines.
func (w *world) egressLines() string {
	var out []string
	for line := range strings.Lines(w.trace.String()) {
		for _, own := range []string{"virtkit: image ", "virtkit: booted ", "virtkit: ready ", "virtkit: looking at "} {
			if strings.HasPrefix(line, own) {
				line = ""
			}
		}
		out = append(out, line)
	}
	w.trace.Reset()
	return strings.Join(out, "")
}

func (w *world) wantLines(when, want string) {
	w.t.Helper()
	if d := cmp.Diff(strings.TrimLeft(want, "\n"), w.egressLines()); d != "" {
		w.t.Errorf("%s (-want +got):\n%s", when, d)
	}
}

// switchboard records what tests do on the switch of the latest guest.
func (w *world) switchboard() (do func(policy.Flow)) {
	var e *policy.Engine
	w.host.Recorded = func(s supervise.Spec, stage string) supervise.EgressRecord {
		if e == nil {
			e = policy.NewEngine(policy.EngineConfig{Policy: &s.Net.Egress.Policy, JobPort: s.Hostname})
		}
		if stage != "" {
			e.Recorder().SetStage(stage)
		}
		return supervise.EgressRecord{ID: s.ID, Egress: *s.Net.Egress, Record: e.Recorder().Snapshot()}
	}
	return func(f policy.Flow) {
		f.Port = "runner"
		e.Decide(f)
	}
}

func dns(name string) policy.Flow { return policy.Flow{Proto: policy.DNS, Name: name} }

func tcp(dst string) policy.Flow {
	return policy.Flow{Proto: policy.TCP, Dst: netip.MustParseAddrPort(dst)}
}

// does makes the next stage's script do something on the network.
func (w *world) does(f ...func()) {
	w.host.Shell = func(_ context.Context, _ guestwire.ExecRequest, _ string, _, _ io.Writer, _ <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		for _, g := range f {
			g()
		}
		return guestwire.ExecEvent{Exited: true, Code: 3}, nil
	}
}

// A job's whole life in its trace, byte for byte.
func TestEgressInTheTrace(t *testing.T) {
	w := newWorld(t)
	w.response(`{"id":77,"job_info":{"name":"test unit","project_id":42,"project_full_path":"acme/web"}}`)
	names := sites{}
	w.run.Sites = names
	w.run.Set.Egress.Run = policy.Lists{Names: []string{"debian.org", "corp.example.com"}}
	do := w.switchboard()
	w.env = append(w.env, "CUSTOM_ENV_MICROVM_EGRESS_ALLOW_NAME=debian.org pypi.org # mirrors\n", "CUSTOM_ENV_MICROVM_EGRESS_ALLOW_IP=192.0.2.0/24",
		"CUSTOM_ENV_MICROVM_EGRESS_AUDIT=yes", "CUSTOM_ENV_MICROVM_EGRESS_DRY_RUN=1")
	w.prepare()
	w.wantLines("prepare", `
virtkit: warning: MICROVM_EGRESS_DRY_RUN: not followed, as the node's [egress] sets a list of its own, which only its dry_run suspends
virtkit: warning: MICROVM_EGRESS_ALLOW_NAME pypi.org: outside the node's [egress] allow_name, its lookups will be refused
virtkit: warning: MICROVM_EGRESS_ALLOW_IP 192.0.2.0/24: outside the node's [egress] allow_ip, reachable only as an address of a name it allows
`)
	stage := func(name string, f ...func()) {
		t.Helper()
		w.does(f...)
		if code, _, err := w.stage(name, "x", nil); code != 1 || err != nil {
			t.Fatalf("%s: %d %v", name, code, err)
		}
	}
	stage("get_sources", func() { do(dns("deb.debian.org.")) })
	w.wantLines("a stage without a refusal", "")
	stage("build_script", func() { do(dns("PyPI.org")); do(dns("pypi.org")) }, func() { do(tcp("192.0.2.9:22")) })
	w.wantLines("build_script", `
virtkit: egress blocked by the allowlist:
virtkit:   dns pypi.org (2 times): outside the node's [egress] allow_name
virtkit:   tcp 192.0.2.9:22 (once): outside the node's [egress] allow_ip
`)
	do(dns("between.example")) // by what a stage left running
	stage("after_script", func() { do(dns("pypi.org")) })
	w.wantLines("the same again is told by its own stage", `
virtkit: egress blocked by the allowlist:
virtkit:   dns pypi.org (once): outside the node's [egress] allow_name
virtkit:   dns between.example (once): outside the node's [egress] allow_name
`)
	stage("cleanup_file_variables")
	fp := w.host.Launched[0].Net.Egress.Policy.Fingerprint()
	w.wantLines("the end", `
virtkit: egress audit: what this run contacted:
virtkit:   dns deb.debian.org (once)
virtkit: egress audit: for allowlists of it run on the host: vk egress suggest 77
virtkit: names this job has contacted under egress policy `+fp+`: deb.debian.org
`)
	if s := names["42-acme-web/test_unit-"+digest8("test unit")]; s == nil || !cmp.Equal(s.Names(fp), []string{"deb.debian.org"}) {
		t.Errorf("standing lists %v", names)
	}
}

// A job that nothing restricts: the one line that the specification quotes.
func TestUnrestrictedJobNamesWhatItContacted(t *testing.T) {
	w := newWorld(t)
	w.run.Sites = sites{}
	do := w.switchboard()
	for _, name := range []string{"github.com", "deb.debian.org"} {
		w.prepare()
		w.does(func() { do(dns(name)) })
		w.egressLines()
		w.stage("build_script", "x", nil)
		w.wantLines("nothing is refused", "")
	}
	w.stage("cleanup_file_variables", "x", nil)
	w.wantLines("the end", "virtkit: names this job has contacted under unrestricted egress: deb.debian.org, github.com\n")
}

func TestEgressUnderTheHubsRules(t *testing.T) {
	w := newWorld(t)
	w.run.Hub = hub{egress: &policy.HubEgress{Rules: []string{"default"}, Run: policy.Lists{Names: []string{"corp.example.com"}, IPs: []policy.IPRule{}},
		DryRun: []policy.HubDryRule{{Rule: "next", Run: policy.Lists{Names: []string{}}}}}}
	do := w.switchboard()
	w.run.Set.Egress.Build = policy.Lists{Names: []string{"debian.org", "crates.io"}}
	w.env = append(w.env, "CUSTOM_ENV_MICROVM_EGRESS_DRY_RUN=on", "CUSTOM_ENV_MICROVM_EGRESS_ALLOW_NAME=b.example",
		"CUSTOM_ENV_MICROVM_BUILD_EGRESS_ALLOW_NAME=deb.debian.org pypi.org")
	w.prepare()
	w.wantLines("prepare", `
virtkit: warning: MICROVM_BUILD_EGRESS_ALLOW_NAME is not obeyed yet: images are not built from Dockerfiles yet
virtkit: egress under the hub's rules: default (dry-run, not enforced: next)
virtkit:   run: node cap (dry-run, not enforced) unrestricted; hub names corp.example.com, ips none; job names b.example, ips none
virtkit:   build: node cap names debian.org crates.io, ips none; hub unrestricted; job names deb.debian.org pypi.org, ips none
virtkit: warning: MICROVM_EGRESS_ALLOW_NAME b.example: outside the hub's egress rules (default), its lookups will be refused
virtkit: warning: MICROVM_BUILD_EGRESS_ALLOW_NAME pypi.org: outside the node's [egress.build] allow_name, its lookups will be refused
`)
	if f := w.host.Launched[0].Net.Egress.Refusals; len(f) != 2 || f[1].Phase != policy.Build || f[1].Layer != policy.LayerNodeCap {
		t.Errorf("for the report: %+v", f)
	}
	w.does(func() { do(dns("x.example")) }, func() { do(dns("git.corp.example.com")) })
	w.stage("build_script", "x", nil)
	w.wantLines("build_script", `
virtkit: egress blocked by the hub's egress rules (default):
virtkit:   dns x.example (once)
virtkit: egress the allowlist would block (dry-run, not enforced):
virtkit:   dns git.corp.example.com (once): outside the job's MICROVM_EGRESS_ALLOW_NAME
virtkit: egress the hub's dry-run rule next would block (not enforced):
virtkit:   dns git.corp.example.com (once)
`)

	// The rules are those of prepare, whatever the hub sends meanwhile; and ones
	// that cannot be read stop the job, as the host's fault.
	w.run.Hub = hub{err: fault.New(fault.System, "unreadable rules")}
	c := w.call()
	if err := w.run.Prepare(context.Background(), c); runner.Status(c, err) != 2 || !strings.Contains(err.Error(), "unreadable rules") {
		t.Errorf("Prepare = %v", err)
	}
	for _, mode := range []string{"tap", "pool"} {
		w.run.Hub = hub{egress: &policy.HubEgress{Rules: []string{"default"}, Run: policy.Lists{Names: []string{}}}}
		w.run.Set.Net.Mode = mode
		if err := w.run.Prepare(context.Background(), c); runner.Status(c, err) != 2 || !strings.Contains(err.Error(), mode) {
			t.Errorf("%s: Prepare = %v", mode, err)
		}
	}
}

func TestInvalidEgressFailsTheJobBeforeAnythingBoots(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct{ env, want string }{
		{"MICROVM_EGRESS_ALLOW_NAME=a.example *.b.example", `MICROVM_EGRESS_ALLOW_NAME: invalid entry "*.b.example": a pattern`},
		{"MICROVM_EGRESS_ALLOW_IP=2001:db8::/32", `MICROVM_EGRESS_ALLOW_IP: invalid entry "2001:db8::/32": IPv6`},
		{"MICROVM_BUILD_EGRESS_ALLOW_NAME=https://x.example/y", `MICROVM_BUILD_EGRESS_ALLOW_NAME: invalid entry "https://x.example/y": a URL`},
		{"MICROVM_EGRESS_AUDIT=maybe", `MICROVM_EGRESS_AUDIT: "maybe" is neither on nor off`},
		{"MICROVM_BUILD_EGRESS_AUDIT=2", `MICROVM_BUILD_EGRESS_AUDIT: "2" is neither on nor off`},
		{"MICROVM_EGRESS_DRY_RUN=x", `MICROVM_EGRESS_DRY_RUN: "x" is neither on nor off`},
	} {
		c := w.call("CUSTOM_ENV_" + tt.env)
		_, cerr := w.run.Config(c)
		for _, err := range []error{cerr, w.run.Prepare(context.Background(), c)} {
			if runner.Status(c, err) != 1 || !strings.Contains(err.Error(), tt.want) || fault.HintOf(err) == "" {
				t.Errorf("%s: status %d, %v, hint %q", tt.env, runner.Status(c, err), err, fault.HintOf(err))
			}
		}
	}
	if len(w.host.Launched) != 0 {
		t.Error("a guest was booted")
	}
}

func TestModesWithoutASwitchRefuseWhatNeedsOne(t *testing.T) {
	for _, mode := range []string{"tap", "pool"} {
		w := newWorld(t)
		w.run.Set.Net.Mode = mode
		refused := func(what, want string, status int, env ...string) {
			t.Helper()
			c := w.call(env...)
			err := w.run.Prepare(context.Background(), c)
			if runner.Status(c, err) != status || !strings.Contains(err.Error(), want) || !strings.Contains(fault.HintOf(err), "switch") {
				t.Errorf("%s under %s: status %d, %v, hint %q", what, mode, runner.Status(c, err), err, fault.HintOf(err))
			}
		}
		refused("the job's list", "MICROVM_EGRESS_ALLOW_NAME", 1, "CUSTOM_ENV_MICROVM_EGRESS_ALLOW_NAME=a.example")
		w.run.Set.Egress.Run = policy.Lists{Names: []string{}}
		refused("the host's list", "[egress]", 2)
		if len(w.host.Launched) != 0 {
			t.Errorf("%s: a guest was booted", mode)
		}
		w.run.Set.Egress.Run = policy.Lists{}
		w.prepare("CUSTOM_ENV_MICROVM_EGRESS_AUDIT=1")
		w.wantLines(mode, "\nvirtkit: warning: MICROVM_EGRESS_AUDIT lists nothing under [net] mode \""+mode+"\" of this runner\n")
	}
	w := newWorld(t)
	w.run.Set.Egress.Run = policy.Lists{Names: []string{}}
	w.run.Set.Net.Mode = "none"
	w.prepare("CUSTOM_ENV_MICROVM_EGRESS_ALLOW_NAME=a.example")
	w.wantLines("none", "")
	for _, s := range w.host.Launched {
		if s.Net.Egress != nil {
			t.Errorf("mode %s has a policy", s.Net.Mode)
		}
	}
}

// What was refused is told when the guest dies under the stage, too.
func TestRefusalsOfAGuestThatDied(t *testing.T) {
	w := newWorld(t)
	w.run.Set.Egress.Run = policy.Lists{Names: []string{}}
	do := w.switchboard()
	w.host.EndWith = &supervise.Exit{Reason: "panic"}
	w.prepare()
	w.egressLines()
	w.does(func() { do(dns("x.example")); w.host.KillGuest(w.id()); select {} })
	if code, _, err := w.stage("build_script", "x", nil); code != 2 || err == nil {
		t.Errorf("%d %v", code, err)
	}
	w.wantLines("build_script", `
virtkit: egress blocked by the allowlist:
virtkit:   dns x.example (once): outside the node's [egress] allow_name
`)
}

// A list that cannot be kept is said, and is not the job's failure.
func TestStandingListThatCannotBeKept(t *testing.T) {
	w := newWorld(t)
	w.run.Sites = brokenSites{}
	w.switchboard()
	w.prepare()
	w.egressLines()
	w.host.Shell = nil
	if code, _, err := w.stage("cleanup_file_variables", "x", nil); code != 0 || err != nil {
		t.Errorf("%d %v", code, err)
	}
	w.wantLines("the end", "virtkit: warning: disk full\n")
}

type brokenSites struct{}

func (brokenSites) Contacted(string, string, []string) (*policy.Standing, error) {
	return nil, errors.New("disk full")
}

func TestCleanupOfALostRecord(t *testing.T) {
	w := newWorld(t)
	w.prepare()
	w.egressLines()
	w.host.RemoveErr = fault.New(fault.Partial, "what the guest reached is not kept")
	if err := w.run.Cleanup(context.Background(), w.call()); err != nil {
		t.Errorf("Cleanup = %v", err)
	}
	w.wantLines("cleanup", "virtkit: warning: what the guest reached is not kept\n")
}

func TestSiteOf(t *testing.T) {
	w := newWorld(t)
	of := func(resp string, more ...string) string {
		t.Helper()
		w.response(resp)
		w.host.Launched = nil
		w.prepare(more...)
		return w.host.Launched[0].Net.Egress.Site
	}
	a := of(`{"id":77,"job_info":{"name":"test:unit","project_id":42,"project_full_path":"acme/web"}}`)
	b := of(`{"id":77,"job_info":{"name":"test_unit","project_id":42,"project_full_path":"acme/web"}}`)
	if !strings.HasPrefix(a, "42-acme-web/test_unit-") || a == b {
		t.Errorf("%q and %q", a, b)
	}
	// Variables, which a pipeline can set, do not name another job's list.
	if got := of(`{"id":77,"job_info":{"name":"test:unit","project_id":42,"project_full_path":"acme/web"}}`, "CUSTOM_ENV_CI_PROJECT_ID=1", "CUSTOM_ENV_CI_JOB_NAME=x"); got != a {
		t.Errorf("%q is not %q", got, a)
	}
	if got := of(`{"id":77}`, "CUSTOM_ENV_CI_PROJECT_ID=7", "CUSTOM_ENV_CI_PROJECT_PATH=../..", "CUSTOM_ENV_CI_JOB_NAME=../../x"); strings.Contains(got, "..") && strings.Contains(got, "/..") || strings.Count(got, "/") != 1 {
		t.Errorf("%q", got)
	}
	if _, err := os.Stat(filepath.Join(w.host.Root, w.id())); err != nil {
		t.Error(err)
	}
}

func digest8(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:4])
}
