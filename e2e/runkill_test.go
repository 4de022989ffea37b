package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"

	"virtkit/e2e/host"
)

// TestRandomKillsOfRun is TestRandomKills for `vk run`, `vk run --detach` and
// `vk exec`: whatever dies at whatever moment, no exit code is one that the
// program did not have, and nothing is left after the next sweep.
func TestRandomKillsOfRun(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	rnd := rand.New(rand.NewPCG(killSeed(t), 2))
	k := &runKiller{h: h, img: img, rnd: rnd, boot: 6 * time.Second}
	for i := range kills() {
		form := []string{"run", "run --detach", "exec"}[rnd.IntN(3)]
		victim := []string{"vk", "supervisor", "vmm"}[rnd.IntN(3)]
		if !t.Run(fmt.Sprintf("%d/%s of %s", i, victim, form), func(t *testing.T) {
			k.t = t
			switch form {
			case "run":
				k.run(victim)
			case "run --detach":
				k.detached(victim)
			case "exec":
				k.exec(victim)
			}
			if _, err := h.Run(t.Context(), "gc"); err != nil {
				t.Error(err)
			}
			nothingLeft(t, h)
		}) {
			return
		}
	}
}

type runKiller struct {
	t    *testing.T
	h    *host.Host
	img  string
	rnd  *rand.Rand
	boot time.Duration // how long a guest takes to run
}

// runScript ends with 7 after a second; its last line shows that it was not cut.
const runScript = "echo begin; sleep 1; echo end; exit 7"

type runEnd struct {
	exit     int // -1 = killed
	out, err string
	took     time.Duration
}

// vk runs vk and kills the victim within span; hit says that there was one.
func (k *runKiller) vk(victim string, span time.Duration, args ...string) (e runEnd, hit bool) {
	k.t.Helper()
	cmd := exec.Command(k.h.VK, args...)
	cmd.Env = k.h.Env()
	var out, errb bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errb
	start := time.Now()
	if err := cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	done, struck := make(chan struct{}), make(chan bool, 1)
	after := time.Duration(k.rnd.Int64N(int64(span)))
	go func() {
		if victim == "" {
			struck <- false
			return
		}
		select {
		case <-done:
			struck <- false
		case <-time.After(after):
			struck <- (&killer{h: k.h}).kill(victim, cmd.Process.Pid)
		}
	}()
	_ = cmd.Wait()
	close(done)
	hit = <-struck
	e = runEnd{cmd.ProcessState.ExitCode(), out.String(), errb.String(), time.Since(start)}
	k.t.Logf("vk %s: exit %d after %v, killed %q after %v: %v", args[0], e.exit, e.took.Round(time.Millisecond), victim, after.Round(time.Millisecond), hit)
	return e, hit
}

// right checks the end of a command that ends with 7.
func (k *runKiller) right(e runEnd, victim string, hit bool) {
	k.t.Helper()
	switch {
	case e.exit == 7 && e.out == "begin\nend\n":
	case hit && victim == "vk" && e.exit == -1:
	case hit && victim != "vk" && e.exit == 125 && e.err != "":
	default:
		k.t.Errorf("killed %q (%v): exit %d, output %q\n%s", victim, hit, e.exit, e.out, e.err)
	}
}

func (k *runKiller) run(victim string) {
	e, hit := k.vk(victim, k.boot+2*time.Second, "run", "--mem", "256M", k.img, "sh", "-c", runScript)
	k.right(e, victim, hit)
}

// start makes a guest that goes on, and returns its id, if it is known.
func (k *runKiller) start(victim string) (string, runEnd, bool) {
	e, hit := k.vk(victim, k.boot+time.Second/2, "run", "--detach", "--mem", "256M", k.img, "sleep", "1000")
	if victim == "" || !hit {
		k.boot = (k.boot + e.took) / 2
	}
	return strings.TrimSpace(e.out), e, hit
}

func (k *runKiller) detached(victim string) {
	id, e, hit := k.start(victim)
	switch {
	case e.exit == 0 && id != "":
	case hit && victim == "vk" && e.exit == -1:
	case hit && victim != "vk" && e.exit == 125 && id == "" && e.err != "":
	default:
		k.t.Errorf("killed %q (%v): exit %d, output %q\n%s", victim, hit, e.exit, e.out, e.err)
	}
	// A launcher killed before it gave the guest free took the guest with it;
	// later, the guest runs on. Its id may not have been printed any more.
	k.stopAll()
}

func (k *runKiller) stopAll() {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, id := range k.h.JobDirs() {
		_, err := k.h.Run(ctx, "stop", id)
		if err == nil {
			continue
		}
		// One whose launcher died is ending by itself: its directory may be gone
		// and its supervisor not yet.
		for len(k.h.Supervisors(id)) > 0 {
			if ctx.Err() != nil {
				k.t.Errorf("%v; its supervisor lives on", err)
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
}

func (k *runKiller) exec(victim string) {
	id, e, _ := k.start("")
	if e.exit != 0 || id == "" {
		k.t.Fatalf("run --detach: exit %d %q\n%s", e.exit, e.out, e.err)
	}
	e, hit := k.vk(victim, 1500*time.Millisecond, "exec", id, "sh", "-c", runScript)
	k.right(e, victim, hit)
	if victim != "vk" && hit {
		return
	}
	// The guest and its own command go on, and the command whose client died
	// is gone soon.
	deadline := time.Now().Add(time.Minute)
	for {
		e, _ := k.vk("", 1, "exec", id, "sh", "-c", "ps -o args | grep -c '[s]leep 1$'; ps -o args | grep -c '[s]leep 1000'")
		if e.exit == 0 && e.out == "0\n1\n" {
			break
		}
		if time.Now().After(deadline) {
			k.t.Fatalf("after a killed exec: exit %d %q %s", e.exit, e.out, e.err)
		}
	}
	k.stopAll()
}
