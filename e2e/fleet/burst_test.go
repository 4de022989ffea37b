package fleet_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
	"virtkit/e2e/host"
)

// runner stands in for gitlab-runner: it takes one job after the other, and on
// SIGQUIT ends once the one that it has is over. It says so in a file, and when
// another runner holds its lock.
const runner = `#!/bin/sh
[ "$1" = run ] || { echo "Version: 17.0.0"; exit; }
exec 9>>"%[1]s/lock"
flock -n 9 || echo TWO >>"%[1]s/log"
trap q=1 QUIT
while [ -z "$q" ]; do
	echo take >>"%[1]s/log"
	sleep 0.2 9>&-
	echo over >>"%[1]s/log"
done
echo end >>"%[1]s/log"
`

// TestBurst cuts the concurrency, drains, stops and resumes all at once, while
// the managed runner has jobs and is killed, and so is the node that runs it:
// there is never more than one runner, and a node that says drained has none and
// takes no job until it is let.
func TestBurst(t *testing.T) {
	f := newFleet(t)
	r := f.record("bursts of jobs, concurrency cuts, drains and restarts")
	dir := filepath.Join(f.dir, "host")
	program, conf, log := filepath.Join(dir, "gitlab-runner"), filepath.Join(dir, "runner.toml"), filepath.Join(dir, "log")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	h, err := host.New("../..", dir, fmt.Sprintf("[node]\nrunner = \"managed\"\ngitlab_runner = %q\nrunner_config = %q\n", program, conf))
	if host.IsMissing(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{program: fmt.Sprintf(runner, dir), conf: "concurrent = 9\n", log: ""} {
		if err := os.WriteFile(file, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	out, err := h.Run(t.Context(), "node", "join", "http://"+f.addr, "--token", strings.TrimSpace(f.must("token", "create")))
	if err != nil {
		t.Fatal(err)
	}
	id := strings.TrimSpace(out)
	p := &process{t: t, log: filepath.Join(f.dir, "node.log"), command: func() *exec.Cmd {
		cmd := exec.Command(h.VK, "node", "run")
		cmd.Env = h.Env()
		return cmd
	}}
	p.start()
	t.Cleanup(func() {
		p.kill(syscall.SIGTERM) // with its runner
		if t.Failed() {
			f.show(p.log)
		}
	})
	said := func() string {
		b, err := os.ReadFile(log)
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	takes := func() {
		t.Helper()
		was := strings.Count(said(), "take")
		f.eventually("a runner takes jobs", func() bool { return strings.Count(said(), "take") > was })
	}
	takes()
	pid := regexp.MustCompile(`"pid": ?(\d+)`)
	for round := range 3 {
		r.fault("round %d: 16 of ceiling, stop, resume, drain and undrain at once, while jobs are taken", round)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 4 {
					args := [][]string{{"ceiling", id, fmt.Sprint(1 + rand.IntN(8))}, {"stop", id}, {"resume", id}, {"drain", id}, {"undrain", id}}[rand.IntN(5)]
					if out, code := f.cli(append([]string{"nodes"}, args...)...); code != 0 {
						t.Errorf("%q: status %d, %s", args, code, out)
					}
				}
			})
		}
		if round == 1 {
			r.fault("kill -9 of the node")
			p.restart() // the next node takes the runner over
		}
		if m := pid.FindSubmatch(read(filepath.Join(h.State, "node/runner.pid"))); round == 2 && m != nil {
			if n := atoi(m[1]); n > 1 {
				r.fault("kill -9 of the runner")
				syscall.Kill(n, syscall.SIGKILL)
			}
		}
		wg.Wait()
		f.must("nodes", "drain", id)
		f.eventually("it is drained", func() bool {
			n := f.node(id)
			return n.Reach == hub.Connected && n.Pending == 0 && n.Reported != nil && n.Reported.Node == wire.Drained
		})
		l, err := fsx.TryLock(filepath.Join(dir, "lock"), false)
		if err != nil {
			t.Fatalf("round %d: drained, and a runner lives: %v\n%s", round, err, said())
		}
		before := said()
		f.must("nodes", "ceiling", id, "2")
		f.must("nodes", "resume", id) // a drain stays
		f.eventually("it applies them", func() bool { n := f.node(id); return n.Sync == "ok" && applied(n.Reported).Ceiling == 2 })
		if now := said(); now != before {
			t.Errorf("round %d: jobs were taken while it is drained:\n%s", round, now[len(before):])
		}
		l.Close()
		f.must("nodes", "undrain", id)
		takes()
	}
	if s := said(); strings.Contains(s, "TWO") {
		t.Errorf("two runners at once:\n%s", s)
	}
	f.eventually("the runner's concurrency is cut", func() bool { return strings.Contains(string(read(conf)), "concurrent = 2") })
	if n := strings.Count(f.must("audit", "--node", id, "--limit", "1000"), "state drained"); n < 3 {
		t.Errorf("%d drains are in the audit log", n)
	}
}

func read(file string) []byte {
	b, _ := os.ReadFile(file)
	return b
}

func atoi(b []byte) (n int) {
	fmt.Sscan(string(b), &n)
	return n
}
