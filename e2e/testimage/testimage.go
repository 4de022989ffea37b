// Package testimage makes small container images for tests, as archives that
// `vk image import` takes: a root with busybox as its only shell, with git from
// this host or without, and any configuration.
package testimage

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Spec says what is in an image.
type Spec struct {
	Git   bool              // the host's git with the libraries it needs
	Files map[string]string // path without leading slash → content, mode 0755
	// Programs are programs of this host with the libraries they need: path
	// without leading slash → path on this host.
	Programs map[string]string
	Config   v1.Config
}

// Write makes the archive at path. The error says which program is missing.
func Write(path string, s Spec) error {
	layer, err := root(s)
	if err != nil {
		return err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil })
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return err
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return err
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", "amd64"
	cf.Config = s.Config
	if len(cf.Config.Env) == 0 {
		cf.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	}
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		return err
	}
	tag, err := name.NewTag("test/image:latest")
	if err != nil {
		return err
	}
	return tarball.WriteToFile(path, tag, img)
}

func root(s Spec) ([]byte, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, errors.New("needs busybox: apt-get install busybox-static")
	}
	t := &tree{made: map[string]bool{}}
	t.w = tar.NewWriter(&t.buf)
	t.dir("tmp", 0o1777, 0)
	t.dir("home/build", 0o755, 1000)
	t.dir("root", 0o700, 0)
	t.dir("builds", 0o777, 0)
	t.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nbuild:x:1000:1000:build:/home/build:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"))
	t.file("etc/group", 0o644, []byte("root:x:0:\nbuild:x:1000:\nnogroup:x:65534:\n"))
	t.hostFile(busybox, "bin/busybox")
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("busybox --list: %w", err)
	}
	for _, a := range strings.Fields(string(applets)) {
		if a != "busybox" {
			t.link("bin/"+a, "busybox")
		}
	}
	if s.Git {
		t.git()
	}
	for _, p := range slices.Sorted(mapKeys(s.Files)) {
		t.file(p, 0o755, []byte(s.Files[p]))
	}
	for _, p := range slices.Sorted(mapKeys(s.Programs)) {
		t.hostFile(s.Programs[p], p)
		t.libraries(s.Programs[p])
	}
	if t.err == nil {
		t.err = t.w.Close()
	}
	return t.buf.Bytes(), t.err
}

func mapKeys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

type tree struct {
	buf  bytes.Buffer
	w    *tar.Writer
	made map[string]bool
	err  error
}

func (t *tree) header(h *tar.Header, body []byte) {
	if t.err != nil || t.made[h.Name] {
		return
	}
	t.made[h.Name] = true
	h.Size = int64(len(body))
	if t.err = t.w.WriteHeader(h); t.err == nil {
		_, t.err = t.w.Write(body)
	}
}

func (t *tree) parents(name string) {
	if d := filepath.Dir(name); d != "." {
		t.dir(d, 0o755, 0)
	}
}

func (t *tree) dir(name string, mode int64, owner int) {
	if t.made[name+"/"] {
		return
	}
	t.parents(name)
	t.header(&tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode, Uid: owner, Gid: owner}, nil)
}

func (t *tree) file(name string, mode int64, body []byte) {
	t.parents(name)
	t.header(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode}, body)
}

func (t *tree) link(name, target string) {
	t.parents(name)
	t.header(&tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}, nil)
}

func (t *tree) hostFile(src, name string) {
	b, err := os.ReadFile(src)
	if err != nil {
		if t.err == nil {
			t.err = err
		}
		return
	}
	t.file(name, 0o755, b)
}

// git copies what a clone over HTTP with submodules needs.
func (t *tree) git() {
	core, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.err = errors.New("needs git: apt-get install git")
		return
	}
	dir := strings.TrimSpace(string(core))
	for _, p := range []string{"git-remote-http", "git-submodule", "git-sh-setup", "git-sh-i18n", "git-sh-i18n--envsubst"} {
		t.program(filepath.Join(dir, p))
	}
	t.link(strings.TrimPrefix(filepath.Join(dir, "git-remote-https"), "/"), "git-remote-http")
	git, err := exec.LookPath("git")
	if err != nil {
		t.err = err
		return
	}
	t.program(git)
	t.link(strings.TrimPrefix(filepath.Join(dir, "git"), "/"), git)
	// The host's certificates are not needed: the recorded jobs speak HTTP.
	for _, f := range []string{"/usr/share/git-core/templates/description"} {
		if _, err := os.Stat(f); err == nil {
			t.hostFile(f, strings.TrimPrefix(f, "/"))
		}
	}
}

// program copies a file with the shared libraries it is linked to.
func (t *tree) program(path string) {
	t.hostFile(path, strings.TrimPrefix(path, "/"))
	t.libraries(path)
}

func (t *tree) libraries(path string) {
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		return // a script
	}
	for _, w := range strings.Fields(string(out)) {
		if strings.HasPrefix(w, "/") {
			t.hostFile(w, strings.TrimPrefix(w, "/"))
		}
	}
}
