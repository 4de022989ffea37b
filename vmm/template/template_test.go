package template_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"virtkit/vmm/template"
)

func open(t *testing.T) (*template.Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "a", "guests")
	s, err := template.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s, dir
}

func writes(text string) func(context.Context, *os.File) error {
	return func(_ context.Context, f *os.File) error {
		_, err := f.WriteString(text)
		return err
	}
}

func mustMake(t *testing.T, s *template.Store, key, text string) {
	t.Helper()
	if made, err := s.Make(t.Context(), key, writes(text)); !made || err != nil {
		t.Fatalf("Make(%s) = %v, %v", key, made, err)
	}
}

func content(t *testing.T, s *template.Store, key string) string {
	t.Helper()
	f, err := s.Get(key)
	if errors.Is(err, fs.ErrNotExist) {
		return "none"
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	ents, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range ents {
		out = append(out, e.Name())
	}
	return out
}

func TestMake(t *testing.T) {
	s, dir := open(t)
	if got := content(t, s, "k"); got != "none" {
		t.Errorf("before: %q", got)
	}
	mustMake(t, s, "k", "one")
	if made, err := s.Make(t.Context(), "k", writes("two")); made || err != nil {
		t.Errorf("a second Make = %v, %v", made, err)
	}
	if got := content(t, s, "k"); got != "one" {
		t.Errorf("after: %q", got)
	}
	fi, err := os.Stat(filepath.Join(dir, "k.state"))
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v %v, want 0600: it is a guest's memory", fi.Mode(), err)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("directory %v %v", fi.Mode(), err)
	}
	if err := errors.Join(s.Drop("k"), s.Drop("k")); err != nil {
		t.Errorf("Drop: %v", err)
	}
	if got := content(t, s, "k"); got != "none" {
		t.Errorf("dropped: %q", got)
	}
}

func TestMakeFails(t *testing.T) {
	s, dir := open(t)
	bad := errors.New("no")
	made, err := s.Make(t.Context(), "k", func(_ context.Context, f *os.File) error {
		f.WriteString("half")
		return bad
	})
	if made || !errors.Is(err, bad) {
		t.Errorf("Make = %v, %v", made, err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"lock"}) {
		t.Errorf("left: %q", got)
	}
	mustMake(t, s, "k", "whole")
}

// Of a burst, one writes and the others go on.
func TestMakeWhileMaking(t *testing.T) {
	s, _ := open(t)
	inner := make(chan error, 1)
	made, err := s.Make(t.Context(), "k", func(ctx context.Context, f *os.File) error {
		made, err := s.Make(ctx, "other", func(context.Context, *os.File) error { return errors.New("called") })
		if made || err != nil {
			err = fmt.Errorf("the second = %v, %w", made, err)
		}
		inner <- err
		_, werr := f.WriteString("x")
		return werr
	})
	if !made || err != nil {
		t.Errorf("Make = %v, %v", made, err)
	}
	if err := <-inner; err != nil {
		t.Error(err)
	}
}

func TestTheOldestGoes(t *testing.T) {
	s, dir := open(t)
	for i := range template.Most {
		key := fmt.Sprint("k", i)
		mustMake(t, s, key, key)
		old := time.Now().Add(time.Duration(i-100) * time.Hour)
		if err := os.Chtimes(filepath.Join(dir, key+".state"), old, old); err != nil {
			t.Fatal(err)
		}
	}
	content(t, s, "k0") // used now
	mustMake(t, s, "new", "new")
	for key, want := range map[string]string{"k0": "k0", "k1": "none", "k2": "k2", "new": "new"} {
		if got := content(t, s, key); got != want {
			t.Errorf("%s: %q, want %q", key, got, want)
		}
	}
}

func TestSweep(t *testing.T) {
	s, dir := open(t)
	mustMake(t, s, "old", "old")
	mustMake(t, s, "young", "young")
	then := time.Now().Add(-3 * time.Hour)
	if err := os.Chtimes(filepath.Join(dir, "old.state"), then, then); err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(dir, ".new-1.tmp")
	if err := os.WriteFile(dead, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	all := names(t, dir)
	dry, err := s.Sweep(time.Hour, true)
	if err != nil || dry == 0 || !slices.Equal(names(t, dir), all) {
		t.Errorf("dry run = %d, %v; left %q", dry, err, names(t, dir))
	}
	// One being made is not swept, and keeps the rest of the sweep.
	_, err = s.Make(t.Context(), "k", func(_ context.Context, f *os.File) error {
		if err := os.WriteFile(dead, []byte("half"), 0o600); err != nil { // Make has swept it
			return err
		}
		freed, err := s.Sweep(time.Hour, false)
		if _, serr := os.Stat(f.Name()); serr != nil || err != nil || freed == 0 || freed >= dry {
			return fmt.Errorf("beside a maker: %d of %d, %w, %w", freed, dry, err, serr)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := s.Sweep(time.Hour, false); err != nil {
		t.Error(err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"k.state", "lock", "young.state"}) {
		t.Errorf("left %q", got)
	}
}

// A maker that is killed at any step leaves a template that is whole, or none,
// and the next one makes it.
func TestKilledMaker(t *testing.T) {
	if dir := os.Getenv("VK_TEST_TEMPLATES"); dir != "" {
		s, err := template.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		s.Make(t.Context(), "k", func(_ context.Context, f *os.File) error {
			for range 64 {
				f.Write(make([]byte, 64<<10))
				fmt.Println("wrote")
			}
			return nil
		})
		fmt.Println("made")
		select {}
	}
	s, dir := open(t)
	for kill := range 67 { // writes, and one beyond each end
		cmd := exec.Command(os.Args[0], "-test.run", "^TestKilledMaker$")
		cmd.Env = append(os.Environ(), "VK_TEST_TEMPLATES="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		one := make([]byte, 1)
		for lines := 0; lines < kill; {
			n, err := out.Read(one)
			if n == 1 && one[0] == '\n' {
				lines++
			}
			if err != nil || kill > 64 && lines == 65 {
				break
			}
		}
		cmd.Process.Kill()
		cmd.Wait()
		if fi, err := os.Stat(filepath.Join(dir, "k.state")); err == nil && fi.Size() != 64*64<<10 {
			t.Fatalf("killed after %d writes: a template of %d bytes", kill, fi.Size())
		}
		if kill < 64 {
			if err := s.Drop("k"); err != nil {
				t.Fatal(err)
			}
		}
		if len(names(t, dir)) > 3 {
			t.Fatalf("killed after %d writes: %q", kill, names(t, dir))
		}
	}
	if _, err := s.Sweep(time.Hour, false); err != nil {
		t.Error(err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"k.state", "lock"}) {
		t.Errorf("left %q", got)
	}
}
