package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/core/supervise"
	"virtkit/e2e/host"
	"virtkit/e2e/testimage"
)

// webImage is an HTTP server.
func webImage(t *testing.T, h *host.Host) string {
	return image(t, h, "svc-web", testimage.Spec{
		Files:  map[string]string{"www/index.html": "hello from the web service\n", "www/cgi-bin/env": "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'; printf '%s|' \"$FROM_IMAGE\" \"$GREETING\" \"$CI_PROJECT_PATH\" \"$CI_JOB_TOKEN\"\n"},
		Config: v1.Config{Entrypoint: []string{"/bin/httpd"}, Cmd: []string{"-f", "-v", "-p", "80", "-h", "/www"}, ExposedPorts: map[string]struct{}{"80/tcp": {}, "53/udp": {}}, Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}},
	})
}

// redisImage is Debian's redis-server, run by a user of its own.
func redisImage(t *testing.T, h *host.Host) string {
	t.Helper()
	// One program, which is what its name says; redis-tools has it too, and
	// starts no server on this host.
	if _, err := exec.LookPath("redis-check-rdb"); err != nil {
		t.Skip("needs redis: apt-get install redis-tools")
	}
	return image(t, h, "svc-redis", testimage.Spec{
		Programs: map[string]string{"usr/bin/redis-server": "/usr/bin/redis-check-rdb", "usr/bin/redis-cli": "/usr/bin/redis-cli"},
		Config: v1.Config{Cmd: []string{"redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--dir", "/home/build"}, User: "build", WorkingDir: "/home/build",
			ExposedPorts: map[string]struct{}{"6379/tcp": {}}},
	})
}

// clientImage is a job's: busybox and a client of the database.
func clientImage(t *testing.T, h *host.Host) string {
	t.Helper()
	if _, err := exec.LookPath("redis-cli"); err != nil {
		t.Skip("needs redis: apt-get install redis-tools")
	}
	return image(t, h, "svc-client", testimage.Spec{Programs: map[string]string{"usr/bin/redis-cli": "/usr/bin/redis-cli"}})
}

func service(name, alias string, more map[string]any) map[string]any {
	vars := []any{map[string]any{"key": "MICROVM_CPUS", "value": "1"}, map[string]any{"key": "MICROVM_MEM", "value": "256M"}}
	out := map[string]any{"name": name, "alias": alias}
	for k, v := range more {
		out[k] = v
	}
	if own, ok := more["variables"].(map[string]string); ok {
		for k, v := range own {
			vars = append(vars, map[string]any{"key": k, "value": v})
		}
	}
	out["variables"] = vars
	return out
}

func jobWith(t *testing.T, h *host.Host, image string, vars map[string]string, services ...any) *runnerside.Session {
	v := map[string]string{"MICROVM_IMAGE": image, "CI_JOB_TOKEN": "glcbt-s3cr3t"}
	for k, val := range vars {
		v[k] = val
	}
	return plainJob(t, h.Driver(), v, map[string]any{
		"variables": []any{map[string]any{"key": "CI_JOB_TOKEN", "value": "glcbt-s3cr3t", "public": false, "masked": true}},
		"services":  services,
	})
}

// serviceTrace is the trace of prepare with what differs from run to run
// replaced.
func serviceTrace(out string) string {
	for _, r := range []struct{ from, to string }{
		{`\d+\.\d\ds`, "0.00s"}, {`sha256:[0-9a-f]{12}`, "sha256:0"}, {`kernel [^,]*, `, "kernel K, "}, {` as 10\.[0-9.]+`, " as 10.0.0.0"},
		{`(?m)^virtkit: booted in`, "virtkit: restored from a booted template in"},
	} {
		out = regexp.MustCompile(r.from).ReplaceAllString(out, r.to)
	}
	return out
}

// A job with two services, one of them a database of Debian's, reaches both by
// every name they have, and they reach the job.
func TestServices(t *testing.T) {
	h := guests(t)
	client, web, redis := clientImage(t, h), webImage(t, h), redisImage(t, h)
	s := jobWith(t, h, client, map[string]string{"DB_ALIAS": "db"},
		service(web, "www", map[string]any{"variables": map[string]string{"GREETING": "of $CI_JOB_ID"}}), service(redis, "$DB_ALIAS,cache", nil))
	t.Cleanup(func() { nothingLeft(t, h) })
	prep := prepared(t, s)
	trace := serviceTrace(string(prep.Stdout))
	for _, want := range []string{
		"virtkit: service www: image local/svc-web (sha256:0, cached) in 0.00s\n",
		"virtkit: service db: image local/svc-redis (sha256:0, cached) in 0.00s\n",
		"virtkit: service www: started in 0.00s as 10.0.0.0\n",
		"virtkit: service db: started in 0.00s as 10.0.0.0\n",
		"virtkit: service www: accepts connections on port 80 after 0.00s\n",
		"virtkit: service db: accepts connections on port 6379 after 0.00s\n",
	} {
		if !strings.Contains(trace, want) {
			t.Errorf("the trace lacks %q:\n%s", want, prep.Stdout)
		}
	}
	t.Logf("%s", prep.Stdout)
	res := stage(t, s, execdrv.StageBuild, `set -e
for n in www local__svc-web local-svc-web; do wget -q -O - http://$n/; done
wget -q -O - http://www/cgi-bin/env; echo
for n in db cache local__svc-redis local-svc-redis; do redis-cli -h $n set key "by $n"; redis-cli -h $n get key; done
nslookup nosuchservice >/dev/null 2>&1 && echo found || echo not found
a=$(nslookup db | awk '/^Address/ {x=$NF} END {print x}'); nslookup $a | grep -c 'name = db'
`)
	id := s.Vars["CI_JOB_ID"]
	want := strings.Repeat("hello from the web service\n", 3) + "yes|of " + id + "|group/e2e||\n" +
		"OK\nby db\nOK\nby cache\nOK\nby local__svc-redis\nOK\nby local-svc-redis\nnot found\n1\n"
	if res.Exit != 0 || string(res.Stdout) != want {
		t.Errorf("build_script: %d\n%s\nwant\n%s\n%s", res.Exit, res.Stdout, want, res.Stderr)
	}
	// From a service to the job, by both of its names.
	res = stage(t, s, execdrv.StageBuild, "mkdir -p /w; echo from the job > /w/f; httpd -p 8000 -h /w; for n in build vm; do vk-agent exec --service db -- wget -q -O - http://$n:8000/f; done\n")
	if res.Exit != 0 || string(res.Stdout) != "from the job\nfrom the job\n" {
		t.Errorf("the job from its service: %d %q\n%s", res.Exit, res.Stdout, res.Stderr)
	}
}

// commandPID finds the process of a service's supervisor.
func servicePID(t *testing.T, h *host.Host, name string) int {
	t.Helper()
	for _, d := range h.JobDirs() {
		if st, err := supervise.ReadState(supervise.ServiceDir(filepath.Join(h.State, "jobs", d), name)); err == nil {
			return st.PID
		}
	}
	t.Fatalf("no service %s", name)
	return 0
}

// A service that dies, and one that never listens, are told of with their last
// words; the job goes on.
func TestServicesThatFail(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	s := jobWith(t, h, img, map[string]string{"CI_DEBUG_SERVICES": "true"},
		service(img, "early", map[string]any{"command": []string{"sh", "-c", "echo cannot find my disk; exit 3"}, "variables": map[string]string{"HEALTHCHECK_TCP_PORT": "81"}}),
		service(img, "deaf", map[string]any{"command": []string{"sh", "-c", "echo listening to nobody; httpd -p 127.0.0.1:81; sleep 1000"}, "variables": map[string]string{"HEALTHCHECK_TCP_PORT": "81"}}),
		service(img, "later", map[string]any{"command": []string{"sh", "-c", "while ! [ -e /die ]; do sleep 0.2; done; echo told to die; exit 5"}}))
	t.Cleanup(func() { nothingLeft(t, h) })
	prep := prepared(t, s)
	for _, want := range []string{
		"virtkit: warning: service early has ended: exit code 3; last lines of its log:\n  cannot find my disk\n",
		"virtkit: warning: service deaf does not accept connections on port 81 after 20s; the job goes on without waiting for it; last lines of its log:\n  listening to nobody\n",
		"[service:early] cannot find my disk\n", "[service:deaf] listening to nobody\n",
	} {
		if !strings.Contains(string(prep.Stdout), want) {
			t.Errorf("the trace lacks %q:\n%s", want, prep.Stdout)
		}
	}
	res := stage(t, s, execdrv.StageBuild, "vk-agent exec --service later -- touch /die; while nslookup later >/dev/null 2>&1; do sleep 0.2; done; echo script goes on\n")
	if res.Exit != 0 || string(res.Stdout) != "script goes on\n" || !strings.Contains(string(res.Stderr), "virtkit: warning: service later has ended: exit code 5; last lines of its log:\n  told to die\n") ||
		!strings.Contains(string(res.Stderr), "[service:later] told to die\n") || strings.Contains(string(res.Stderr), "early has ended") {
		t.Errorf("build_script: %d %q\n%s", res.Exit, res.Stdout, res.Stderr)
	}
	res = stage(t, s, execdrv.StageAfter, "true\n")
	if res.Exit != 0 || len(res.Stderr) != 0 && strings.Contains(string(res.Stderr), "service") {
		t.Errorf("after_script: %d\n%s", res.Exit, res.Stderr)
	}
}

// SIGKILL of the job's supervisor, and of a service's: the verdict is right and
// nothing is left.
func TestServicesKilled(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	for _, victim := range []string{"job", "service"} {
		t.Run(victim, func(t *testing.T) {
			s := jobWith(t, h, img, nil, service(img, "idle", map[string]any{"command": []string{"sleep", "1000"}}))
			t.Cleanup(func() { nothingLeft(t, h) })
			prepared(t, s)
			pid := servicePID(t, h, "idle")
			if victim == "job" {
				st, err := supervise.ReadState(filepath.Join(h.State, "jobs", h.JobDirs()[0]))
				if err != nil {
					t.Fatal(err)
				}
				pid = st.PID
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if victim == "job" {
				res := stage(t, s, execdrv.StageBuild, "echo here\n")
				if res.Exit != 2 || !strings.Contains(string(res.Stderr), "supervisor") {
					t.Errorf("build_script: %d %q\n%s", res.Exit, res.Stdout, res.Stderr)
				}
				// Before any cleanup: the service ends with its job.
				for end := time.Now().Add(time.Minute); len(h.Processes()) > 0; time.Sleep(50 * time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("left: %v", h.Processes())
					}
				}
				return
			}
			var all string
			for end := time.Now().Add(time.Minute); time.Now().Before(end) && !strings.Contains(all, "idle"); {
				res := stage(t, s, execdrv.StageBuild, "echo here\n")
				if res.Exit != 0 || string(res.Stdout) != "here\n" {
					t.Fatalf("build_script: %d %q\n%s", res.Exit, res.Stdout, res.Stderr)
				}
				all += string(res.Stderr)
			}
			if !strings.Contains(all, "virtkit: warning: service idle has ended: failed: its supervisor was killed") {
				t.Errorf("the trace says\n%s", all)
			}
		})
	}
}

// A service is held to its own lists on top of the job's.
func TestServiceEgress(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	s := jobWith(t, h, img, map[string]string{"MICROVM_EGRESS_ALLOW_NAME": "example.com"},
		service(img, "shut", map[string]any{"command": []string{"sleep", "1000"}, "variables": map[string]string{"MICROVM_EGRESS_ALLOW_NAME": ""}}))
	t.Cleanup(func() { nothingLeft(t, h) })
	prepared(t, s)
	res := stage(t, s, execdrv.StageBuild, "vk-agent exec --service shut -- nslookup www.example.com; vk-agent exec --service shut -- nslookup build\n")
	if !strings.Contains(string(res.Stdout), "NXDOMAIN") || res.Exit != 0 || !strings.Contains(string(res.Stderr), "www.example.com") {
		t.Errorf("build_script: %d %s\n%s", res.Exit, res.Stdout, res.Stderr)
	}
	// At most four commands at once, and again as soon as one has ended.
	res = stage(t, s, execdrv.StageBuild, `p=
for i in 1 2 3 4; do vk-agent exec --service shut -- sh -c 'echo up; exec sleep 1000' > /tmp/o$i & p="$p $!"; done
for i in 1 2 3 4; do until [ -s /tmp/o$i ]; do sleep 0.1; done; done
vk-agent exec --service shut -- true; echo "= $?"
kill $p; wait
until vk-agent exec --service shut -- true 2>/dev/null; do sleep 0.1; done; echo room again
`)
	if string(res.Stdout) != "= 125\nroom again\n" || !strings.Contains(string(res.Stderr), "4 commands run in services already, as many as may") {
		t.Errorf("five commands at once: %q\n%s", res.Stdout, res.Stderr)
	}
	if b, err := os.ReadFile(filepath.Join(h.State, "jobs", h.JobDirs()[0], "egress.json")); err != nil || !strings.Contains(string(b), `"shut"`) {
		t.Errorf("the record does not name the service: %v\n%s", err, b)
	}
}

// Commands in a service: streams apart, exit codes, environment, users, signals
// and the end of who asked, from a job of another user than root; and guests of
// one kind that start from a template at the same time.
func TestServiceExec(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	idle := map[string]any{"command": []string{"sleep", "1000"}}
	// Each place on a job's network has templates of its own, and only one is made
	// at a time: of three guests that boot at once at least one leaves its.
	const rounds = 4
	for round, restored := 0, 0; round < rounds && restored < 3; round++ {
		s := jobWith(t, h, img, map[string]string{"MICROVM_USER": "build", "MICROVM_MEM": "256M"}, service(img, "one", idle), service(img, "two", idle))
		prep := prepared(t, s)
		jobdir := filepath.Join(h.State, "jobs", h.JobDirs()[0])
		restored = 0
		for _, dir := range []string{jobdir, supervise.ServiceDir(jobdir, "one"), supervise.ServiceDir(jobdir, "two")} {
			if st, err := supervise.ReadState(dir); err != nil {
				t.Error(err)
			} else if st.Restored {
				restored++
			}
		}
		if t.Logf("%d of 3 restored\n%s", restored, prep.Stdout); round == rounds-1 && restored < 3 {
			t.Errorf("%d of 3 guests were restored at last", restored)
		}
		res := stage(t, s, execdrv.StageBuild, `x() { vk-agent exec --service "$@"; echo "= $?"; }
x one -- hostname
x two -- hostname
echo input | x one -i -- cat
x one -e A=b -u build -w /tmp sh -c 'echo $A $(id -un) $PWD; echo err >&2; exit 7'
x one -- /nonexistent
x nosuch -- true
x one -- sh -c 'kill -9 $$'
x one -b sh -c 'echo $$ > /tmp/pid; exec sleep 2000'
vk-agent exec --service two -- sh -c 'echo $$ > /tmp/pid; exec sleep 3000' & p=$!
until vk-agent exec --service two -- test -s /tmp/pid; do sleep 0.1; done
kill -TERM $p; wait $p; echo "= $?"
until vk-agent exec --service one -- sh -c 'test -s /tmp/pid && kill $(cat /tmp/pid)'; do sleep 0.1; done
`)
		want := "one\n= 0\ntwo\n= 0\ninput\n= 0\nb build /tmp\n= 7\n= 127\n= 125\n= 137\n= 0\n= 143\n"
		if res.Exit != 0 || string(res.Stdout) != want || !strings.Contains(string(res.Stderr), "err\n") || !strings.Contains(string(res.Stderr), `this job has no service "nosuch"; it has: one, two`) {
			t.Errorf("build_script: %d\n%s\n%s", res.Exit, res.Stdout, res.Stderr)
		}
		if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
			t.Errorf("cleanup: %+v %v", res, err)
		}
		nothingLeft(t, h)
	}
}

// [executor] guest_service_exec = false refuses it, in words.
func TestServiceExecRefused(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	conf := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(conf, []byte(strings.Replace(config, "[executor]", "[executor]\nguest_service_exec = false", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	other := *h
	other.Conf = conf
	t.Cleanup(func() { nothingLeft(t, h) })
	s := jobWith(t, &other, img, nil, service(img, "idle", map[string]any{"command": []string{"sleep", "1000"}}))
	prepared(t, s)
	res := stage(t, s, execdrv.StageBuild, "vk-agent exec --service idle -- true\n")
	if res.FileCode != "125" || !strings.Contains(string(res.Stderr), "guest_service_exec = false") {
		t.Errorf("build_script: %d %q\n%s", res.Exit, res.FileCode, res.Stderr)
	}
}

// Under another [net] mode such a job is refused before anything starts.
func TestServicesNeedTheSwitch(t *testing.T) {
	h := guests(t)
	conf := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(conf, []byte(strings.Replace(config, "[net]", "[net]\nmode = \"none\"", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	other := *h
	other.Conf = conf
	s := jobWith(t, &other, busybox(t, h), nil, service(busybox(t, h), "idle", nil))
	res, _, _ := s.Config(t.Context())
	if res.Exit != 2 || !strings.Contains(string(res.Stderr), "services: they need the per-job LAN") {
		t.Errorf("config: %d\n%s", res.Exit, res.Stderr)
	}
}
