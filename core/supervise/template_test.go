package supervise_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/machine"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// templates are kept in a directory, without vmm/template's care.
type templates struct {
	dir   string
	mu    sync.Mutex
	drops int
	makes int
	fail  error
	stuck bool // nothing can be removed
}

func (s *templates) path(key string) string { return filepath.Join(s.dir, key) }

func (s *templates) Get(key string) (*os.File, error) { return os.Open(s.path(key)) }

func (s *templates) Make(ctx context.Context, key string, write func(context.Context, *os.File) error) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.makes++
	if s.fail != nil {
		return false, s.fail
	}
	f, err := os.Create(s.path(key) + ".tmp")
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := write(ctx, f); err != nil {
		return false, errors.Join(err, os.Remove(f.Name()))
	}
	return true, os.Rename(f.Name(), s.path(key))
}

func (s *templates) Drop(key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drops++
	if s.stuck {
		return fs.ErrPermission
	}
	return os.Remove(s.path(key))
}

// with gives supervisors these templates.
func (s *templates) with(_ *supervise.Spec, d *supervise.Deps) { d.Templates = s }

func output(t *testing.T, w *world, argv ...string) string {
	t.Helper()
	var out bytes.Buffer
	r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: argv}, guestclient.Stdio{Out: &out}, nil)
	if err != nil || r.Code != 0 {
		t.Fatalf("%q = %+v, %v", argv, r, err)
	}
	return out.String()
}

// works tells whether the world's guest runs programs, and returns its state.
func works(t *testing.T, w *world) supervise.State {
	t.Helper()
	if out := output(t, w, "echo", "hello"); out != "hello\n" {
		t.Errorf("the guest says %q", out)
	}
	st, err := w.client.State(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestTemplate(t *testing.T) {
	s := &templates{dir: t.TempDir()}
	d := &supervisetest.Driver{Key: "k"}
	first := run(t, d, s.with)
	if st := works(t, first); st.Restored || s.makes != 1 {
		t.Errorf("the first: restored %v, %d templates made", st.Restored, s.makes)
	}
	second := run(t, d, s.with)
	if st := works(t, second); !st.Restored || !d.Last().Restored || s.makes != 1 {
		t.Errorf("the second: restored %v, %d templates made", st.Restored, s.makes)
	}
	setup := d.Last().Setups()
	if len(setup) != 1 || setup[0].Hostname != "g1" || len(setup[0].Entropy) < 32 || setup[0].UnixNano == 0 {
		t.Errorf("a restored guest is told who it is, the time and new entropy; got %+v", setup)
	}
	console, err := os.ReadFile(filepath.Join(second.dir, supervise.ConsoleFile))
	if err != nil || !strings.Contains(string(console), "[guest restored from template k]") {
		t.Errorf("console %q, %v", console, err)
	}
	// One that reboots starts from it too, and has one port for all its lives.
	d.Last().End(machine.Reboot, "")
	eventually(t, "the reboot", func() bool {
		st, err := second.client.State(ctxFor(t))
		return err == nil && st.Boots == 2 && st.Phase == supervise.Running
	})
	if st := works(t, second); !st.Restored {
		t.Error("after a reboot it was booted")
	}
	other := run(t, d, s.with, func(s *supervise.Spec, _ *supervise.Deps) { s.NoTemplate = true })
	if st := works(t, other); st.Restored {
		t.Error("restored against Spec.NoTemplate")
	}
}

// A template that is no good costs a boot, not the guest, and goes.
func TestBadTemplate(t *testing.T) {
	for name, c := range map[string]*supervisetest.Driver{
		"ends":   {Key: "k", BadState: machine.Crashed},
		"reboot": {Key: "k", BadState: machine.Reboot},
		"silent": {Key: "k"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &templates{dir: t.TempDir()}
			if err := os.WriteFile(s.path("k"), []byte("rubbish"), 0o600); err != nil {
				t.Fatal(err)
			}
			d := c
			w := run(t, d, s.with, func(s *supervise.Spec, d *supervise.Deps) {
				if name == "silent" {
					soonStillborn(s, d)
				}
			})
			st := works(t, w)
			if st.Restored || s.drops != 1 || s.makes != 1 {
				t.Errorf("restored %v, %d dropped, %d made; want a boot, and a new template", st.Restored, s.drops, s.makes)
			}
			if len(st.Retried) != 1 || !strings.HasPrefix(st.Retried[0], "its start from a template came to nothing: the guest ended: ") {
				t.Errorf("told of starts given up: %q", st.Retried)
			}
			if st := works(t, run(t, d, s.with)); !st.Restored {
				t.Error("the new template was not used")
			}
		})
	}
}

// What the image lacks is not the template's fault: no second start, and the
// template stays for the guests to come.
func TestTemplateOutlivesAWrongUser(t *testing.T) {
	s := &templates{dir: t.TempDir()}
	works(t, run(t, &supervisetest.Driver{Key: "k"}, s.with))
	d := &supervisetest.Driver{Key: "k", SetupErr: `user "nosuch" is not in /etc/passwd of the image`, SetupErrStage: "dirs"}
	w := begin(t, d, s.with)
	w.wait()
	if s.drops != 0 || d.Boots() != 1 {
		t.Errorf("%d templates dropped, %d starts; want none, and one start", s.drops, d.Boots())
	}
	if st := works(t, run(t, &supervisetest.Driver{Key: "k"}, s.with)); !st.Restored {
		t.Error("the template is not used any more")
	}
}

// A bad template that cannot be removed is not tried again by this guest.
func TestBadTemplateStays(t *testing.T) {
	s := &templates{dir: t.TempDir(), stuck: true}
	if err := os.WriteFile(s.path("k"), []byte("rubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := &supervisetest.Driver{Key: "k", BadState: machine.Crashed}
	if st := works(t, run(t, d, s.with)); st.Restored || s.drops != 1 || d.Boots() != 2 {
		t.Errorf("restored %v, %d dropped, %d starts; want one of each and a boot", st.Restored, s.drops, d.Boots())
	}
}

// What goes wrong with keeping a template is not the guest's.
func TestTemplateNotKept(t *testing.T) {
	s := &templates{dir: t.TempDir()}
	works(t, run(t, &supervisetest.Driver{Key: "k", SaveErr: errors.New("disk full")}, s.with))
	s.fail = fs.ErrPermission
	works(t, run(t, &supervisetest.Driver{Key: "k"}, s.with))
	works(t, run(t, &supervisetest.Driver{}, s.with)) // has no key
	if s.makes != 2 {
		t.Errorf("%d templates were tried, want 2", s.makes)
	}
	if left, err := os.ReadDir(s.dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
