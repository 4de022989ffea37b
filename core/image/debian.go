package image

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"virtkit/core/fault"
	"virtkit/core/leash"
)

// EnvDefaultTar names a root filesystem tar to be taken for local/default
// instead of making one, for tests and hosts without Debian's archive.
const EnvDefaultTar = "VIRTKIT_DEFAULT_IMAGE_TAR"

// recipe says what local/default is made of. Its digest is what the image is
// kept by: whatever changes here makes a new one.
type recipe struct {
	Version   int      `json:"version"`
	Converter int      `json:"converter"`
	Suite     string   `json:"suite,omitempty"`
	Arch      string   `json:"arch"`
	Packages  []string `json:"packages,omitempty"`
	Tar       string   `json:"tar,omitempty"` // of EnvDefaultTar: path, size, mtime
}

// recipeVersion is raised when the commands of buildDefault change.
const recipeVersion = 2

// defaultPackages is what a job expects to find: the shell and tools that
// GitLab's stage scripts call, ssh for git, ps for people.
var defaultPackages = []string{"bash", "ca-certificates", "curl", "git", "openssh-client", "procps", "unzip", "xz-utils"}

// aptSources is where apt keeps its sources; a field of its own for tests.
const aptSources = "/etc/apt"

func (s *Store) defaultRecipe() (recipe, error) {
	r := recipe{Version: recipeVersion, Converter: converterVersion, Arch: runtime.GOARCH}
	if t := s.o.Getenv(EnvDefaultTar); t != "" {
		st, err := os.Stat(t)
		if err != nil {
			return r, fault.Newf(fault.Usage, "%s", EnvDefaultTar).Because(err).Hint("unset it, or name a root filesystem tar")
		}
		r.Tar = fmt.Sprintf("%s %d %d", t, st.Size(), st.ModTime().UnixNano())
		return r, nil
	}
	r.Suite, r.Packages = hostSuite(), defaultPackages
	return r, nil
}

// digest is what the image made by r is kept by, with r as it is recorded.
func (r recipe) digest() (string, []byte, error) {
	b, err := json.Marshal(r)
	return digestOf(append([]byte("virtkit default image\n"), b...)), b, err
}

// hostSuite is the host's own Debian suite, else the one that vk is made on.
func hostSuite() string {
	b, _ := os.ReadFile("/etc/os-release")
	id, code := "", ""
	for _, l := range strings.Split(string(b), "\n") {
		k, v, _ := strings.Cut(l, "=")
		switch v = strings.Trim(v, `"'`); k {
		case "ID":
			id = v
		case "VERSION_CODENAME":
			code = v
		}
	}
	if id == "debian" && regexp.MustCompile(`^[a-z]+$`).MatchString(code) {
		return code
	}
	return "bookworm"
}

// resolveDefault makes local/default, once for a recipe.
func (s *Store) resolveDefault(ctx context.Context, o ResolveOptions, p *progress) (*Image, error) {
	r, err := s.defaultRecipe()
	if err != nil {
		return nil, err
	}
	digest, b, err := r.digest()
	if err != nil {
		return nil, err
	}
	if o.Policy == Never {
		img, err := s.open(digest, DefaultRef)
		if err != nil {
			return nil, fault.New(fault.NotFound, "not made yet on this host, and the pull policy is never").Hint("vk pull local/default makes it")
		}
		return img, nil
	}
	return s.keep(ctx, digest, DefaultRef, p, func(st *stage, dir string) (record, error) {
		file := s.o.Getenv(EnvDefaultTar)
		if file == "" {
			file = st.path("spool")
			if err := s.debootstrap(ctx, r, file, p); err != nil {
				return record{}, err
			}
		}
		src, err := oneLayer(file, s.o.MaxBytes)
		if err != nil {
			return record{}, err
		}
		if err := s.convert(src.layers, filepath.Join(dir, rootFile), p); err != nil {
			return record{}, err
		}
		return record{
			Kind: "default", Platform: "linux/" + r.Arch, Recipe: string(b),
			Config: Config{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, Cmd: []string{"bash"}},
		}, nil
	})
}

// debootstrap runs mmdebstrap, whose tar goes to file. Always in its unshare
// mode: as root that is a mount namespace alone, so that a kill leaves no
// mounts; for others a user namespace too.
func (s *Store) debootstrap(ctx context.Context, r recipe, file string, p *progress) error {
	if err := CanMakeDefault(); err != nil {
		return err
	}
	out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return noSpace(file, err)
	}
	defer out.Close()
	args := []string{
		"--variant=minbase", "--mode=unshare", "--format=tar", "--architectures=" + debArch(r.Arch),
		"--include=" + strings.Join(r.Packages, ","),
		// Documentation nobody reads in a job is a third of the files.
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/info/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
		"--dpkgopt=path-include=/usr/share/doc/*/copyright",
		// A guest's disk never outlives its job: nothing needs to reach it.
		"--dpkgopt=force-unsafe-io", `--aptopt=Acquire::Languages "none"`,
		r.Suite, "-",
	}
	srcs := suiteSources(aptSources, r.Suite)
	if srcs != "" {
		args = append(args, "-")
	}
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	cmd.Stdin, cmd.Stdout = strings.NewReader(srcs), out
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "TMPDIR=") }), "LC_ALL=C")
	pr, pw := io.Pipe()
	cmd.Stderr = pw
	tail := make(chan []string, 1)
	p.say("build", fmt.Sprintf("making local/default once: Debian %s with %s (one to three minutes)", r.Suite, strings.Join(r.Packages, ", ")))
	go func() { tail <- s.follow(pr, p) }()
	// Terminated, it removes its temporary directory; killed, it could not.
	err = leash.Run(cmd)
	pw.Close()
	last := <-tail
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		for _, l := range last {
			if strings.Contains(l, "No space left") {
				return noSpace(file, fmt.Errorf("mmdebstrap: %w", syscall.ENOSPC))
			}
		}
		return fault.Newf(fault.Unavailable, "mmdebstrap could not make local/default: %s", strings.Join(last, "; ")).
			Hint("does `apt-get update` work on this host? otherwise: vk image import ROOTFS.tar default").Because(err)
	}
	return nil
}

// follow passes mmdebstrap's own steps on as progress and returns its last
// complaints. A step that takes long is told again, so that nobody wonders
// whether anything still happens.
func (s *Store) follow(r io.Reader, p *progress) []string {
	var last []string
	start := time.Now()
	told, step := start, "starting"
	say := func(format string, a ...any) {
		told = time.Now()
		p.say("build", fmt.Sprintf("%3.0f s  ", told.Sub(start).Seconds())+fmt.Sprintf(format, a...))
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		sc := bufio.NewScanner(r)
		sc.Buffer(nil, 1<<20)
		sc.Split(scanLinesCR)
		for sc.Scan() {
			lines <- strings.TrimSpace(sc.Text())
		}
		_, _ = io.Copy(io.Discard, r)
	}()
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if time.Since(told) > 9*time.Second {
				say("still %s", step)
			}
		case l, ok := <-lines:
			if !ok {
				return last
			}
			s.o.Log.Debug("mmdebstrap", "line", l)
			switch {
			case strings.HasPrefix(l, "I: ") && !strings.Contains(l, "tempdir"):
				step = strings.TrimRight(strings.TrimPrefix(l, "I: "), ".")
				say("%s", step)
			case strings.HasPrefix(l, "E: "), strings.HasPrefix(l, "Err:"), strings.Contains(l, "rror"), strings.Contains(l, "No space left"):
				if last = append(last, l); len(last) > 4 {
					last = last[1:]
				}
			case time.Since(told) > 5*time.Second && l != "":
				say("%.70s", l)
			}
		}
	}
}

func scanLinesCR(data []byte, eof bool) (int, []byte, error) {
	if i := bytes.IndexAny(data, "\r\n"); i >= 0 {
		return i + 1, data[:i], nil
	}
	if eof && len(data) > 0 {
		return len(data), data, nil
	}
	return 0, nil, nil
}

func debArch(goarch string) string {
	switch goarch {
	case "386":
		return "i386"
	case "arm":
		return "armhf"
	case "ppc64le":
		return "ppc64el"
	}
	return goarch
}

// suiteSources collects those of the host's apt sources that are for a suite
// and its updates, so that the machine's own mirror is used and no third
// party's. "" when there are none: mmdebstrap then uses its own default.
func suiteSources(dir, suite string) string {
	ours := func(s string) bool {
		return s == suite || strings.HasPrefix(s, suite+"-") || strings.HasPrefix(s, suite+"/")
	}
	var stanzas, lines []string
	files, _ := filepath.Glob(filepath.Join(dir, "sources.list.d", "*"))
	for _, f := range append([]string{filepath.Join(dir, "sources.list")}, files...) {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		switch filepath.Ext(f) {
		case ".sources":
			for _, st := range strings.Split(string(b), "\n\n") {
				if keepStanza(st, ours) {
					stanzas = append(stanzas, strings.TrimSpace(st)+"\n")
				}
			}
		case ".list":
			for _, l := range strings.Split(string(b), "\n") {
				fields := strings.Fields(regexp.MustCompile(`\[[^]]*\]`).ReplaceAllString(l, ""))
				if len(fields) >= 4 && fields[0] == "deb" && ours(fields[2]) {
					lines = append(lines, l)
				}
			}
		}
	}
	if len(stanzas) > 0 { // one format only can be passed on; both name the archive
		return strings.Join(stanzas, "\n")
	}
	if len(lines) > 0 {
		return strings.Join(lines, "\n") + "\n"
	}
	return ""
}

func keepStanza(st string, ours func(string) bool) bool {
	deb, suites := false, false
	for _, l := range strings.Split(st, "\n") {
		k, v, _ := strings.Cut(l, ":")
		switch strings.ToLower(strings.TrimSpace(k)) {
		case "types":
			deb = slices.Contains(strings.Fields(v), "deb")
		case "suites":
			suites = slices.ContainsFunc(strings.Fields(v), ours)
		case "enabled":
			if strings.TrimSpace(v) == "no" {
				return false
			}
		}
	}
	return deb && suites
}
