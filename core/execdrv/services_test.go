package execdrv_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
)

var serviceLimits = execdrv.Limits{CPUs: 2, MaxCPUs: 4, MemMiB: 2048, MaxMemMiB: 4096}

func services(t *testing.T, response string, env ...string) (execdrv.Services, error) {
	t.Helper()
	r, err := execdrv.DecodeResponse([]byte(response))
	if err != nil {
		t.Fatal(err)
	}
	for i := range env {
		env[i] = "CUSTOM_ENV_" + env[i]
	}
	c := execdrv.ReadCall(append(env, "JOB_RESPONSE_FILE=/r"))
	return execdrv.ReadServices(&c, r, serviceLimits, "runner")
}

func TestDefaultNames(t *testing.T) {
	for image, want := range map[string][]string{
		"redis":                                {"redis"},
		"redis:7":                              {"redis"},
		"postgres@sha256:00ff":                 {"postgres"},
		"postgres:16@sha256:00ff":              {"postgres"},
		"group/db:1":                           {"group__db", "group-db"},
		"registry.example:5000/a/b/db:1.2":     {"registry.example__a__b__db", "registry.example-a-b-db"},
		"registry.example:5000/db":             {"registry.example__db", "registry.example-db"},
		"registry.example:5000/db@sha256:00ff": {"registry.example__db", "registry.example-db"},
		"localhost:5000":                       {"localhost"}, // a tag, without a slash
		"virtkit/db:nightly":                   {"virtkit__db", "virtkit-db"},
	} {
		if got := execdrv.DefaultNames(image); !slices.Equal(got, want) {
			t.Errorf("DefaultNames(%q) = %q, want %q", image, got, want)
		}
	}
}

// S10: variables in names and aliases are replaced before use, every alias
// counts, and one that is not set is told.
func TestServiceNames(t *testing.T) {
	s, err := services(t, `{"variables":[],"services":[{"name":"$IMG","alias":"$HOST1,db2 db3"},{"name":"group/web:1","alias":null}]}`,
		"IMG=registry.example:5000/postgres:16", "HOST1=db")
	if err != nil {
		t.Fatal(err)
	}
	if a := s.All[0]; a.Image != "registry.example:5000/postgres:16" || a.Name != "db" || a.Hostname != "db" ||
		!slices.Equal(a.Names, []string{"db", "db2", "db3", "registry.example__postgres", "registry.example-postgres"}) {
		t.Errorf("first = %+v", a)
	}
	if a := s.All[1]; a.Name != "group__web" || a.Hostname != "group--web" || !slices.Equal(a.Names, []string{"group__web", "group-web"}) {
		t.Errorf("second = %+v", a)
	}
	if !slices.Equal(s.JobNames, []string{"runner", "build"}) || len(s.Warnings) > 0 {
		t.Errorf("JobNames = %q, warnings %q", s.JobNames, s.Warnings)
	}
	_, err = services(t, `{"services":[{"name":"$IMG:1","alias":"x"},{"name":"a","alias":"$HOST1,db2"},{"name":"b","alias":"a/b"},{"name":""}]}`)
	if fault.KindOf(err) != fault.JobFailed {
		t.Fatalf("error = %v", err)
	}
	for _, want := range []string{`name "$IMG:1": variable IMG is not set`, `alias "$HOST1,db2" of a: variable HOST1 is not set`, `alias "a/b" of b is no host name`, "one of them has no name"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v, want %q in it", err, want)
		}
	}
}

// A name is the first's; who is left without one is not started. The job's guest
// gives way to a service of its name.
func TestServiceNamesCollide(t *testing.T) {
	s, err := services(t, `{"services":[{"name":"redis:6"},{"name":"redis:7","alias":"cache"},{"name":"redis:5"},{"name":"a","alias":"build"},{"name":"b","alias":"Runner"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, a := range s.All {
		names = append(names, a.Name+"="+strings.Join(a.Names, ","))
	}
	if want := []string{"redis=redis", "cache=cache", "build=build,a", "Runner-2=Runner,b"}; !slices.Equal(names, want) {
		t.Errorf("names = %q, want %q", names, want)
	}
	if len(s.JobNames) != 0 {
		t.Errorf("JobNames = %q, want none", s.JobNames)
	}
	want := []string{"service redis:5 is not called redis: that is service redis",
		"service redis:5 is not started: it has no name of its own, give it an alias"}
	if !slices.Equal(s.Warnings, want) {
		t.Errorf("warnings = %q, want %q", s.Warnings, want)
	}
}

// The job's secrets stay out of a service; its own variables come over the job's.
func TestServiceEnv(t *testing.T) {
	s, err := services(t, `{"variables":[{"key":"TOKEN","value":"s3cret","public":false},{"key":"OPEN","value":"o","public":true},{"key":"F","value":"text","public":true,"file":true}],
	  "services":[{"name":"db","variables":[{"key":"OPEN","value":"mine $NAME $$1"},{"key":"RAW","value":"$NAME","raw":true},{"key":"NEXT","value":"${RAW} $NOTSET."},
	   {"key":"MICROVM_MEM","value":"512M"},{"key":"MICROVM_CPUS","value":"1"},{"key":"HEALTHCHECK_TCP_PORT","value":"81"},{"key":"MICROVM_EGRESS_ALLOW_NAME","value":""}]}]}`,
		"TOKEN=s3cret", "OPEN=o", "F=text", "NAME=n", "CI_PROJECT_DIR=/builds/g/p")
	if err != nil {
		t.Fatal(err)
	}
	a := s.All[0]
	want := []string{"CI_PROJECT_DIR=/builds/g/p", "HEALTHCHECK_TCP_PORT=81", "MICROVM_CPUS=1", "MICROVM_EGRESS_ALLOW_NAME=", "MICROVM_MEM=512M", "NAME=n",
		"NEXT=$NAME .", "OPEN=mine n $1", "RAW=$NAME"}
	if d := cmp.Diff(want, a.Env); d != "" {
		t.Error(d)
	}
	if a.CPUs != 1 || a.MemMiB != 512 || !slices.Equal(a.Ports, []int{81}) {
		t.Errorf("%+v", a)
	}
	if v, set := a.Lookup("MICROVM_EGRESS_ALLOW_NAME"); v != "" || !set {
		t.Errorf("an empty list is %q, %v; want set", v, set)
	}
	if _, set := a.Lookup("MICROVM_EGRESS_ALLOW_IP"); set {
		t.Error("a list that is not there is set")
	}
}

func TestServiceSizes(t *testing.T) {
	s, err := services(t, `{"services":[{"name":"plain"},{"name":"big","variables":[{"key":"MICROVM_MEM","value":"64G"},{"key":"MICROVM_CPUS","value":"9"},{"key":"MICROVM_IMAGE","value":"x"}]}]}`)
	if err != nil {
		t.Fatal(err)
	}
	if a := s.All[0]; a.CPUs != 2 || a.MemMiB != 1024 || a.Ports != nil {
		t.Errorf("plain = %+v", a)
	}
	if a := s.All[1]; a.CPUs != 4 || a.MemMiB != 4096 {
		t.Errorf("big = %+v", a)
	}
	if want := []string{"service big: MICROVM_CPUS 9 is over this runner's ceiling: using 4", "service big: MICROVM_MEM 64G is over this runner's ceiling: using 4G"}; !slices.Equal(s.Notes, want) {
		t.Errorf("notes = %q", s.Notes)
	}
	if len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0], "service big: MICROVM_IMAGE is no variable of a service's") {
		t.Errorf("warnings = %q", s.Warnings)
	}
	_, err = services(t, `{"services":[{"name":"x","variables":[{"key":"MICROVM_MEM","value":"1"},{"key":"MICROVM_CPUS","value":"0"},{"key":"HEALTHCHECK_TCP_PORT","value":"http"},{"key":"MICROVM_USER","value":"a b"}]}]}`)
	for _, want := range []string{"MICROVM_MEM of x is", "MICROVM_CPUS of x is", "HEALTHCHECK_TCP_PORT of x is", "the user of x is"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v, want %q in it", err, want)
		}
	}
}

// A runner without a job response tells of services in a variable.
func TestServicesOfVariable(t *testing.T) {
	list, _ := json.Marshal([]map[string]any{{"name": "redis:7", "alias": "cache", "entrypoint": []string{""}, "command": []string{"redis-server"}, "variables": map[string]string{"RV": "v-$x"}}})
	c := execdrv.ReadCall([]string{"CUSTOM_ENV_CI_JOB_SERVICES=" + string(list), "CUSTOM_ENV_SECRET=s"})
	s, err := execdrv.ReadServices(&c, execdrv.Response{}, serviceLimits, "runner")
	if err != nil || len(s.All) != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	if a := s.All[0]; a.Name != "cache" || !slices.Equal(a.Command, []string{"redis-server"}) || !slices.Equal(a.Env, []string{"RV=v-$x"}) {
		t.Errorf("%+v", a)
	}
	c = execdrv.ReadCall([]string{"CUSTOM_ENV_CI_JOB_SERVICES=hunter2"})
	if _, err := execdrv.ReadServices(&c, execdrv.Response{}, serviceLimits, "runner"); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%v", err)
	}
}

func TestServiceArgv(t *testing.T) {
	entry, cmd := []string{"/entry"}, []string{"serve", "-x"}
	for _, c := range []struct{ entrypoint, command, want []string }{
		{nil, nil, []string{"/entry", "serve", "-x"}},
		{nil, []string{"other"}, []string{"/entry", "other"}},
		{[]string{"/mine"}, nil, []string{"/mine"}},
		{[]string{"/mine", "-a"}, []string{"b"}, []string{"/mine", "-a", "b"}},
		{[]string{""}, []string{"b"}, []string{"b"}},
		{[]string{""}, nil, nil},
	} {
		got, err := execdrv.ServiceArgv(execdrv.Service{Name: "x", Entrypoint: c.entrypoint, Command: c.command}, entry, cmd)
		if !slices.Equal(got, c.want) || (err != nil) != (c.want == nil) {
			t.Errorf("%q %q = %q, %v; want %q", c.entrypoint, c.command, got, err, c.want)
		}
	}
}
