package runner_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/runner"
	"virtkit/core/supervise"
)

// withServices is a job with a web server and a database.
func withServices(t *testing.T) *world {
	w := newWorld(t)
	w.host.Images["web:1"] = runner.Image{Root: supervise.Image{Ref: "web:1", Digest: "sha256:w"}, Cmd: []string{"serve"}, Ports: []int{80, 443}, Env: []string{"W=1"}, From: "cached"}
	w.host.Images["registry.example:5000/sql/db:2"] = runner.Image{
		Root: supervise.Image{Ref: "db", Digest: "sha256:d"}, Entrypoint: []string{"/entry"}, Cmd: []string{"dbd"}, User: "db", Workdir: "/data", Volumes: []string{"/var/db"}, Ports: []int{5432}}
	w.run.Set.ServiceWait, w.run.Set.GuestServiceExec = 30*time.Second, true
	w.response(`{"id":77,"job_info":{"name":"test unit"},"variables":[{"key":"CI_JOB_TOKEN","value":"glcbt-s3cr3t","public":false}],"services":[
	  {"name":"web:1","alias":"$ALIAS"},
	  {"name":"registry.example:5000/sql/db:2","command":["dbd","-v"],"pull_policy":["never"],"variables":[{"key":"PGDB","value":"x $CI_JOB_NAME"},{"key":"MICROVM_EGRESS_ALLOW_NAME","value":""}]}]}`)
	w.env = append(w.env, "CUSTOM_ENV_ALIAS=www,front")
	return w
}

func TestServices(t *testing.T) {
	w := withServices(t)
	w.host.Services = func(s supervise.Spec) []supervise.ServiceState {
		return []supervise.ServiceState{
			{Name: "www", Phase: supervise.Running, Addr: "10.0.0.3/24", Start: 1500 * time.Millisecond, NUMA: "NUMA: node 1 (cpus 24-47) of 2", Waited: true, Ready: 250 * time.Millisecond},
			{Name: "sql__db", Phase: supervise.Running, Retried: []string{"it gave no sign of life for 40s"}},
		}
	}
	w.prepare()
	s := w.host.Launched[0]
	if len(s.Services) != 2 || s.ServiceExec != supervise.ServiceExecOn || !slices.Equal(s.Net.Names, []string{"runner", "build"}) {
		t.Fatalf("spec = %+v", s)
	}
	web, db := s.Services[0], s.Services[1]
	if web.Spec.ID != "www" || !slices.Equal(web.Spec.Net.Names, []string{"www", "front", "web"}) || !slices.Equal(web.Spec.Command.Argv, []string{"serve"}) ||
		!slices.Equal(web.Ports, []int{80, 443}) || web.Wait != 30*time.Second || web.Spec.CPUs != 2 || web.Spec.MemMiB != 1024 || web.Spec.Image.Ref != "web:1" {
		t.Errorf("web = %+v, %+v", web, web.Spec.Command)
	}
	if !slices.Equal(db.Spec.Command.Argv, []string{"/entry", "dbd", "-v"}) || db.Spec.Command.User != "db" || db.Spec.Command.Dir != "/data" ||
		!slices.Contains(db.Spec.Command.Env, "PGDB=x test unit") || !slices.Equal(db.Spec.Dirs, []supervise.Dir{{Path: "/data"}, {Path: "/var/db"}}) {
		t.Errorf("db = %+v, %+v", db, db.Spec.Command)
	}
	if e := fmt.Sprint(web.Spec.Command.Env, db.Spec.Command.Env); strings.Contains(e, "s3cr3t") || !strings.Contains(e, "CI_JOB_NAME=test unit") {
		t.Errorf("environments = %s", e)
	}
	// The database's own list denies all names, to it alone.
	if p := s.Net.Egress.Policy; len(p.Services) != 2 || p.Services[0].Lists.Restricted() || p.Services[1].VM != db.Spec.ID || p.Services[1].Lists.Names == nil || len(p.Services[1].Lists.Names) != 0 {
		t.Errorf("lists = %+v", p.Services)
	}
	w.wantTrace("virtkit: service www: image web:1 (sha256:w, cached) in 0.00s\n",
		"virtkit: service registry.example__sql__db: image registry.example:5000/sql/db:2 (sha256:d) in 0.00s\n",
		"virtkit: service www: started in 1.50s as 10.0.0.3\n", "virtkit: service www: NUMA: node 1 (cpus 24-47) of 2\n", "virtkit: warning: service sql__db was booted again: it gave no sign of life for 40s\n",
		"virtkit: service www: accepts connections on ports 80, 443 after 0.25s\n")
	rec, err := runner.ReadRecord(w.host.Dir(w.id()))
	if err != nil || len(rec.Services) != 2 || rec.TotalMemMiB() != 4096 {
		t.Errorf("record = %+v, %v", rec, err)
	}
	for _, q := range w.host.Queries {
		if q.Service == db.Spec.ID && !slices.Equal(q.PullPolicies, []string{"never"}) {
			t.Errorf("query = %+v", q)
		}
	}
}

// A job whose guest was booted again goes on, and its trace says so, once.
func TestBootedAgainIsTold(t *testing.T) {
	w := withServices(t)
	w.host.Services = func(s supervise.Spec) []supervise.ServiceState {
		return []supervise.ServiceState{{Name: "www", Retried: []string{"it reset"}}, {Name: "db"}}
	}
	w.host.State = func(s *supervise.State) { s.Retried = []string{"QEMU \x1b[31mended", "it reset"} }
	w.prepare()
	for _, line := range []string{
		"virtkit: warning: the guest was booted again: QEMU \\x1b[31mended\n",
		"virtkit: warning: the guest was booted again: it reset\n",
		"virtkit: warning: service www was booted again: it reset\n",
	} {
		if n := strings.Count(w.trace.String(), line); n != 1 {
			t.Errorf("the trace has %q %d times:\n%s", line, n, w.trace.String())
		}
	}
}

// A guest that fell silent before the job began is another one; which is told,
// and in which the job's preparations are made again. It is not done for ever.
func TestSilentGuestOnTrial(t *testing.T) {
	w := newWorld(t)
	w.host.Silent = 1
	w.prepare()
	if line := "virtkit: warning: the guest was booted again: it was silent\n"; strings.Count(w.trace.String(), line) != 1 {
		t.Errorf("the trace lacks %q once:\n%s", line, w.trace.String())
	}
	w = newWorld(t)
	w.host.Silent, w.host.EndWith = 9, &supervise.Exit{Reason: supervise.ReasonHang}
	err := w.run.Prepare(context.Background(), w.call())
	if err == nil || fault.KindOf(err) == fault.JobFailed || w.host.Alive() != 0 {
		t.Errorf("Prepare = %v with %d guests left, want a failure of the system and none", err, w.host.Alive())
	}
}

func TestServicesAreRefusedEarly(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*world)
		kind   fault.Kind
		text   string
	}{
		"net none":  {func(w *world) { w.run.Set.Net.Mode = "none" }, fault.System, "they need the per-job LAN"},
		"net tap":   {func(w *world) { w.run.Set.Net.Mode = "tap" }, fault.System, "they need the per-job LAN"},
		"bad alias": {func(w *world) { w.response(`{"services":[{"name":"a","alias":"$NOPE"}]}`) }, fault.JobFailed, "NOPE is not set"},
		"bad list": {func(w *world) {
			w.response(`{"services":[{"name":"web:1","variables":[{"key":"MICROVM_EGRESS_ALLOW_IP","value":"10.0.0.0/33"}]}]}`)
		}, fault.JobFailed, "10.0.0.0/33"},
	} {
		t.Run(name, func(t *testing.T) {
			w := withServices(t)
			c.change(w)
			if _, err := w.run.Config(w.call()); fault.KindOf(err) != c.kind || !strings.Contains(err.Error(), c.text) {
				t.Errorf("Config = %v (%s)", err, fault.KindOf(err))
			}
			if err := w.run.Prepare(t.Context(), w.call()); fault.KindOf(err) != c.kind || len(w.host.Launched) != 0 {
				t.Errorf("Prepare = %v (%s)", err, fault.KindOf(err))
			}
		})
	}
	w := withServices(t)
	delete(w.host.Images, "web:1")
	if err := w.run.Prepare(t.Context(), w.call()); err == nil || !strings.Contains(err.Error(), "image: service www: web:1: ") || w.host.Alive() != 0 {
		t.Errorf("Prepare without an image = %v", err)
	}
	w = withServices(t)
	w.host.Images["web:1"] = runner.Image{}
	if err := w.run.Prepare(t.Context(), w.call()); fault.KindOf(err) != fault.JobFailed || !strings.Contains(err.Error(), "image web:1 has no command to run") {
		t.Errorf("Prepare without a command = %v", err)
	}
	w = withServices(t)
	w.run.Set.GuestServiceExec = false
	w.prepare()
	if w.host.Launched[0].ServiceExec != supervise.ServiceExecRefused {
		t.Error("guest_service_exec = false is not passed on")
	}
}

// serviceLogs makes what a supervisor leaves of services.
func (w *world) serviceLog(name, text string) {
	dir := supervise.ServiceDir(w.host.Dir(w.id()), name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		w.t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, supervise.CommandFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		w.t.Fatal(err)
	}
}

// A service that died is told of once, with its exit code and its last words; one
// that does not accept is warned of, and the job goes on.
func TestServicesThatFail(t *testing.T) {
	w := withServices(t)
	code := 3
	dead := false
	w.host.Services = func(s supervise.Spec) []supervise.ServiceState {
		w.serviceLog("www", "")
		out := []supervise.ServiceState{
			{Name: "www", Phase: supervise.Running, Start: time.Second, Waited: true, Closed: []int{443}, Limit: 30 * time.Second},
			{Name: s.Services[1].Spec.ID, Phase: supervise.Running, Start: time.Second},
		}
		if dead {
			out[0].Phase, out[0].Exit = supervise.Ended, &supervise.Exit{Reason: supervise.ReasonExited, Code: &code}
		}
		return out
	}
	w.prepare()
	w.wantTrace("virtkit: warning: service www does not accept connections on port 443 after 30s; the job goes on without waiting for it; its log is empty\n")
	w.trace.Reset()
	w.host.Shell = func(context.Context, guestwire.ExecRequest, string, io.Writer, io.Writer, <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		dead = true
		return guestwire.ExecEvent{Exited: true}, nil
	}
	w.serviceLog("www", "first\n\x1b[31mlast words\n")
	if code, _, err := w.stage(execdrv.StageBuild, "true", nil); code != 0 || err != nil {
		t.Errorf("stage = %d, %v", code, err)
	}
	want := "virtkit: warning: service www has ended: exit code 3; last lines of its log:\n  first\n  \\x1b[31mlast words\n"
	if got := w.trace.String(); got != want {
		t.Errorf("trace = %q, want %q", got, want)
	}
	w.trace.Reset()
	if _, _, err := w.stage(execdrv.StageAfter, "true", nil); err != nil || w.trace.Len() != 0 {
		t.Errorf("told again: %q, %v", w.trace.String(), err)
	}
}

// CI_DEBUG_SERVICES shows what services print, each line once, over all stages,
// also when the log was replaced because it was full.
func TestDebugServices(t *testing.T) {
	w := withServices(t)
	w.host.Services = func(supervise.Spec) []supervise.ServiceState { w.serviceLog("www", ""); return nil }
	w.serviceLogAtLaunch(t, "booting\n")
	on := "CUSTOM_ENV_CI_DEBUG_SERVICES=true"
	w.prepare(on)
	w.wantTrace("[service:www] booting\n")
	w.trace.Reset()
	stage := func(text string, more ...string) string {
		w.host.Shell = func(context.Context, guestwire.ExecRequest, string, io.Writer, io.Writer, <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
			w.serviceLog("www", text)
			return guestwire.ExecEvent{Exited: true}, nil
		}
		w.trace.Reset()
		if _, _, err := w.stage(execdrv.StageBuild, "true", nil, more...); err != nil {
			t.Fatal(err)
		}
		return w.trace.String()
	}
	if got := stage("GET /\nunfini", on); got != "[service:www] GET /\n[service:www] unfini\n" {
		t.Errorf("first stage: %q", got)
	}
	if got := stage("quiet\n"); got != "" {
		t.Errorf("without it: %q", got)
	}
	if got := stage("third\n", on); got != "[service:www] quiet\n[service:www] third\n" {
		t.Errorf("third stage: %q", got)
	}
	log := filepath.Join(supervise.ServiceDir(w.host.Dir(w.id()), "www"), supervise.CommandFile)
	w.host.Services = nil
	if err := os.Rename(log, log+".1"); err != nil {
		t.Fatal(err)
	}
	if got := stage("after\n", on); got != "[service:www] after\n" {
		t.Errorf("replaced log: %q", got)
	}
	if got := stage("", "CUSTOM_ENV_CI_DEBUG_SERVICES=maybe"); !strings.Contains(got, `CI_DEBUG_SERVICES is "maybe", expected true or false`) {
		t.Errorf("no wish at all: %q", got)
	}
}

// serviceLogAtLaunch is what the services print before prepare ends.
func (w *world) serviceLogAtLaunch(t *testing.T, text string) {
	said := false
	before := w.host.Services
	w.host.Services = func(s supervise.Spec) []supervise.ServiceState {
		out := before(s)
		if !said {
			said = true
			w.serviceLog("www", text)
		}
		return out
	}
}
