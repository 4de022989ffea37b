package supervise_test

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
	"virtkit/core/usage"
)

func TestUsage(t *testing.T) {
	d := &supervisetest.Driver{Victims: guestwire.Victims{Total: 3, List: []guestwire.Victim{{Name: "cc1\x1b[2J", PID: 7, RSS: 5 << 20, UptimeMS: 48500}}}}
	d.UpperUsed.Store(5000)
	d.UpperSize.Store(9000)
	w := run(t, d)
	u, err := w.client.Usage(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	if u.Memory < 1<<20 || u.CPU < 0 || u.Killed != 3 || !cmp.Equal(u.Net, &usage.Net{Sent: 7, Received: 11}) || !cmp.Equal(u.Overlay, &usage.Overlay{Used: 5000, Size: 9000}) {
		t.Errorf("%+v", u)
	}
	if len(u.Victims) != 1 || u.Victims[0].PID != 7 || u.Victims[0].Uptime != 48500*time.Millisecond || u.Victims[0].Name == "cc1\x1b[2J" {
		t.Errorf("%+v", u.Victims)
	}
	if _, err := os.Stat("/proc/self/io"); (err == nil) != (u.IO != nil) {
		t.Errorf("block I/O: %+v, %v", u.IO, err)
	}
	// What was removed again was needed all the same.
	d.UpperUsed.Store(8000)
	eventually(t, "a pulse that tells of it", func() bool {
		u, err = w.client.Usage(ctxFor(t))
		return err == nil && u.Overlay.Used == 8000
	})
	d.UpperUsed.Store(100)
	if u, err = w.client.Usage(ctxFor(t)); err != nil || u.Overlay.Used != 8000 {
		t.Errorf("%+v, %v", u.Overlay, err)
	}
	// What the guest has yet to write out, and its file when it has, is the same.
	d.UpperSize.Store(1 << 30)
	d.UpperUsed.Store(1 << 20)
	if u, err = w.client.Usage(ctxFor(t)); err != nil || u.Overlay.Used != 1<<20 {
		t.Errorf("%+v, %v", u.Overlay, err)
	}
	d.UpperUsed.Store(100)
	// Between two pulses it was written and removed.
	f, err := os.OpenFile(filepath.Join(w.dir, supervise.UpperFile), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(make([]byte, 2<<20)); err != nil {
		t.Fatal(err)
	}
	f.Sync()
	f.Close()
	if u, err = w.client.Usage(ctxFor(t)); err != nil || u.Overlay.Used < 2<<20 || u.Overlay.Used > 2<<20+64<<10 {
		t.Errorf("%+v, %v", u.Overlay, err)
	}
	// The same bytes told by both are one.
	d.UpperUsed.Store(2 << 20)
	if u, err = w.client.Usage(ctxFor(t)); err != nil || u.Overlay.Used > 2<<20+64<<10 {
		t.Errorf("%+v, %v", u.Overlay, err)
	}
	// A guest that does not answer has its figures of the host.
	w.driver.Last().Hang()
	if u, err = w.client.Usage(ctxFor(t)); err != nil || u.Memory == 0 || u.Killed != 0 {
		t.Errorf("%+v, %v", u, err)
	}
}

func TestUsageWithoutANetworkAndAfterTheEnd(t *testing.T) {
	w := run(t, &supervisetest.Driver{}, keep, func(s *supervise.Spec, _ *supervise.Deps) { s.Net.Mode = "none" })
	u, err := w.client.Usage(ctxFor(t))
	if err != nil || u.Net != nil || u.Overlay != nil {
		t.Errorf("%+v, %v", u, err)
	}
	if _, err := w.client.Stop(ctxFor(t), time.Second); err != nil {
		t.Fatal(err)
	}
	w.wait()
	if u, err := w.client.Usage(ctxFor(t)); err == nil {
		t.Errorf("of a guest that is gone: %+v", u)
	}
}

// A lock that is handed over is held as long as a supervisor of the job or a VMM
// lives, each of which has it once.
func TestHold(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "run-1")
	claim := filepath.Join(base, "image.claim")
	take := func() (*os.File, error) {
		f, err := os.OpenFile(claim, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		return f, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	f, err := take()
	if err != nil {
		t.Fatal(err)
	}
	spec := testSpec(base)
	spec.Services = []supervise.Service{shell(base, "web", "sleep 1000")}
	o := launchOptions(dir, spec)
	o.Hold = []*os.File{f}
	c, err := supervise.Launch(ctxFor(t), o)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if f, err := take(); err == nil {
		t.Error("nobody holds the lock while the guest runs")
		f.Close()
	}
	st, err := c.State(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	holders := func(pid int) int {
		n := 0
		links, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "fd", "*"))
		for _, l := range links {
			if to, err := os.Readlink(l); err == nil && to == claim {
				n++
			}
		}
		return n
	}
	if holders(st.PID) != 1 || holders(st.VMMPID) != 1 {
		t.Errorf("the supervisor has %d of it, its VMM %d", holders(st.PID), holders(st.VMMPID))
	}
	web, err := supervise.ReadState(supervise.ServiceDir(dir, "web"))
	if err != nil || holders(web.PID) != 1 || holders(web.VMMPID) != 1 {
		t.Errorf("a service's supervisor has %d of it, its VMM %d (%v)", holders(web.PID), holders(web.VMMPID), err)
	}
	unix.Kill(st.PID, unix.SIGKILL)
	eventually(t, "the lock", func() bool {
		f, err := take()
		f.Close()
		return err == nil
	})
	nothingLeft(t, dir, supervise.Owner{PID: st.VMMPID, Start: st.VMMStart})
}

func TestHoldOfNothing(t *testing.T) {
	base := t.TempDir()
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	o := launchOptions(filepath.Join(base, "run-1"), testSpec(base), "VIRTKIT_SUPERVISE_HOLD=900-901")
	f.Close()
	if _, err := supervise.Launch(ctxFor(t), o); err == nil || fault.KindOf(err) != fault.System {
		t.Errorf("descriptors that are not there: %v", err)
	}
}
