package checkout_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"virtkit/core/checkout"
	"virtkit/core/fault"
)

// What the guest fetches is found out before there is any work in a tree, and
// the slot's next job finds a tree that nobody was killed in.
func TestGuestsSubmodulesTouchNoTree(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	var steps []string
	s, err := checkout.Open(checkout.Options{Root: d.root, Mirrors: d.mirrors, Hook: func(step string) { steps = append(steps, step) }})
	if err != nil {
		t.Fatal(err)
	}
	guests := func(j checkout.Job, want bool) {
		t.Helper()
		steps = nil
		tree, err := s.Take(t.Context(), j, func(string) {})
		var g *checkout.GuestOnly
		if errors.As(err, &g) != want || err != nil && !want {
			t.Fatalf("Take: %v, want the guest %v", err, want)
		}
		if err == nil {
			tree.Close()
			return
		}
		if slices.Contains(steps, "make") || slices.Contains(steps, "init") || slices.Contains(steps, "fetch") {
			t.Errorf("work in a tree for naught: %q", steps)
		}
	}
	mended := func(j checkout.Job, want string) {
		t.Helper()
		tree, err := s.Take(t.Context(), j, func(string) {})
		if err != nil {
			t.Fatal(err)
		}
		defer tree.Close()
		if tree.Mended != want {
			t.Errorf("the slot's next tree is mended: %q, want %q", tree.Mended, want)
		}
	}
	n := head(w.nested)
	before := head(w.top)
	w.top.commit(map[string]string{".gitmodules": module("sub", "dir/sub", "../sub.git") + module("m", "a dir/m", "https://elsewhere.example/m.git") + module("gone", "gone", "https://elsewhere.example/gone.git"), "a dir/m": "@" + n})
	j := w.job(true)
	guests(j, true)
	if es, _ := filepath.Glob(filepath.Join(d.root, "*", "[^.]*")); len(es) != 0 {
		t.Errorf("there is a tree: %q", es)
	}
	if es, _ := filepath.Glob(filepath.Join(d.root, "*", ".[nt]*")); len(es) != 0 {
		t.Errorf("left: %q", es)
	}
	// Another commit of the slot, then the guest's once more.
	old := j
	old.SHA = before
	mended(old, "there was none")
	guests(j, true)
	mended(old, "")
	// Those that the job leaves out are not asked for, nor is a name in
	// .gitmodules that the commit has nothing at.
	j.Submodules = &checkout.Submodules{Paths: []string{":(exclude)a dir"}}
	guests(j, false)
	j.Submodules = &checkout.Submodules{Paths: []string{"a dir"}}
	guests(j, true)
	j.Submodules = nil
	guests(j, false)
}

// Where only a submodule names what the guest fetches, and where there are no
// mirrors to read, it is found out with the tree in hand.
func TestGuestsSubmodulesLeaveAWholeTree(t *testing.T) {
	w := newModules(t)
	n := head(w.nested)
	good := w.sub.commit(map[string]string{"f": "good"})
	outer := w.top.commit(map[string]string{"dir/sub": "@" + good})
	bad := w.sub.commit(map[string]string{".gitmodules": module("m", "m", "https://elsewhere.example/m.git"), "m": "@" + n})
	inner := w.top.commit(map[string]string{"dir/sub": "@" + bad})
	top := w.top.commit(map[string]string{".gitmodules": module("m", "m", "https://elsewhere.example/m.git"), "m": "@" + n, "dir/sub": "-"})
	for _, mirrors := range []bool{true, false} {
		d := newDirs(t)
		if !mirrors {
			d.mirrors = ""
		}
		s := d.open(t)
		take := func(sha string, sub bool, want string) {
			t.Helper()
			j := w.job(true)
			j.SHA = sha
			if !sub {
				j.Submodules = nil
			}
			tree, err := s.Take(t.Context(), j, func(string) {})
			if want == "guest" {
				var g *checkout.GuestOnly
				if !errors.As(err, &g) {
					t.Fatalf("mirrors %v: %v, want the guest's", mirrors, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer tree.Close()
			if tree.Mended != want {
				t.Errorf("mirrors %v: %q, want %q", mirrors, tree.Mended, want)
			}
			if sub {
				isFile(t, filepath.Join(tree.Path, "dir/sub/f"), "good")
			} else if es, err := os.ReadDir(filepath.Join(tree.Path, "dir/sub")); err == nil && len(es) > 0 {
				t.Errorf("mirrors %v: a job without submodules finds %v", mirrors, es)
			}
		}
		take(inner, true, "guest")
		take(outer, false, "")
		take(outer, true, "")
		take(inner, true, "guest")
		take(outer, true, "")
		take(top, true, "guest")
		take(outer, true, "")
	}
}

// A server that does not answer costs the slot no tree, and says nothing
// against it.
func TestAServerThatIsDownCostsNoTree(t *testing.T) {
	s, d := newServer(t), newDirs(t)
	sha := s.commit(map[string]string{"a": "1"})
	st := d.open(t)
	before := done(t, st, s.job(sha))
	id, err := os.Stat(before.Path)
	if err != nil {
		t.Fatal(err)
	}
	s.down.Store(true)
	if _, err := st.Take(t.Context(), s.job(sha), func(string) {}); fault.KindOf(err) != fault.Unavailable {
		t.Fatalf("Take: %v", err)
	}
	s.down.Store(false)
	after := done(t, st, s.job(sha))
	now, err := os.Stat(after.Path)
	if err != nil || !os.SameFile(id, now) || after.Mended != "" || !after.Reused {
		t.Errorf("another tree: %q, reused %v, %v", after.Mended, after.Reused, err)
	}
}

// A mirror is every project's: what it has of a submodule is for who the server
// gives it to.
func TestAMirrorIsNoWayAroundTheServer(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	s := d.open(t)
	sub := "/group/sub.git"
	secret := w.sub.commit(map[string]string{"sub.txt": "secret\n"})
	w.top.commit(map[string]string{"dir/sub": "@" + secret})
	j := w.job(true)
	done(t, s, j) // the mirror has it now
	w.top.shut.Store(&sub)
	j.Slot, j.Project = "other-1", "8-other"
	if _, err := s.Take(t.Context(), j, func(string) {}); err == nil || strings.Contains(err.Error(), token) {
		t.Errorf("another project's job was given what the server refuses: %v", err)
	}
	// Neither does a tree that has another commit of it.
	w.top.shut.Store(nil)
	j.SHA = w.top.commit(map[string]string{"dir/sub": "@" + w.sub.commit(map[string]string{"sub.txt": "new\n"})})
	done(t, s, j)
	w.top.shut.Store(&sub)
	j.SHA = w.top.commit(map[string]string{"dir/sub": "@" + secret})
	if _, err := s.Take(t.Context(), j, func(string) {}); err == nil {
		t.Error("a submodule's other commit was taken from the mirror alone")
	}
}
