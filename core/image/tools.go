package image

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// toolsVersion is part of a tools image's digest; it grows when the same
// directory would be packed otherwise.
const toolsVersion = 1

// ToolsPrefix begins the reference of an image made by Tools.
const ToolsPrefix = "tools_dir:"

// Tool is one program of a tools directory.
type Tool struct {
	Name string
	Path string // on this host, with no link at its end
}

// ToolsIn lists the programs of a tools directory: its executable files and the
// links to such, by name. dir may be a link; where it leads to is returned. An
// error says what is wrong with the directory: a directory or program that
// others may change, or that belongs to neither root nor this user, would run
// in every job and is refused.
func ToolsIn(dir string) (real string, tools []Tool, err error) {
	if real, err = filepath.EvalSymlinks(dir); err != nil {
		return "", nil, fault.Newf(fault.System, "tools_dir %s", dir).Because(err).
			Hint("jobs see the tools of the directory that [executor] tools_dir names: make it, or take the key out")
	}
	if err := trusted(real, unix.S_IFDIR); err != nil {
		return "", nil, err
	}
	ents, err := os.ReadDir(real)
	if err != nil {
		return "", nil, fmt.Errorf("tools_dir %s: %w", dir, err)
	}
	for _, e := range ents {
		at := filepath.Join(real, e.Name())
		st, err := os.Stat(at)
		if err != nil {
			return "", nil, fault.Newf(fault.System, "tools_dir %s", dir).Because(err).Hint("a link that leads nowhere: make what it names, or remove it")
		}
		if !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			continue
		}
		file, err := filepath.EvalSymlinks(at)
		if err != nil {
			return "", nil, fmt.Errorf("tools_dir %s: %w", dir, err)
		}
		if err := trusted(file, unix.S_IFREG); err != nil {
			return "", nil, err
		}
		tools = append(tools, Tool{e.Name(), file})
	}
	if len(tools) == 0 {
		return "", nil, fault.Newf(fault.System, "tools_dir %s has no program in it", dir).
			Hint("put static tools there (git, git-remote-http, git-lfs, gitlab-runner), or take [executor] tools_dir out")
	}
	return real, tools, nil
}

// trusted refuses a file that others than root and this user may change.
func trusted(path string, kind uint32) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	bad := func(why, mend string, a ...any) error {
		return fault.Newf(fault.System, "tools_dir: %s %s", path, why).Hint(mend, a...)
	}
	switch {
	case st.Mode&unix.S_IFMT != kind:
		if kind == unix.S_IFDIR {
			return bad("is no directory", "[executor] tools_dir names a directory of programs")
		}
		return bad("is no regular file", "tools are programs")
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return bad(fmt.Sprintf("belongs to uid %d", st.Uid), "what every job runs has to belong to root or to the runner's user: chown it")
	case st.Mode&0o002 != 0:
		return bad("may be written by everybody", "chmod o-w %s", path)
	}
	return nil
}

// Tools returns the tools directory dir as a read-only image, made when dir has
// changed since the last one: its programs and the directories beside them,
// owned by root, without set-user-id bits and attributes. A link to a file
// beside it stays one, of other links the file is taken. It is held, like every
// image, and goes with GC when it is no longer used.
func (s *Store) Tools(ctx context.Context, dir string, o ResolveOptions) (*Image, error) {
	p := newProgress(o.Progress)
	for try := 1; ; try++ {
		real, tools, err := ToolsIn(dir)
		if err != nil {
			return nil, err
		}
		list, err := toolFiles(ctx, real, tools)
		if err != nil {
			return nil, fmt.Errorf("tools_dir %s: %w", dir, err)
		}
		img, err := s.keep(ctx, list.digest(real), ToolsPrefix+real, p, func(st *stage, out string) (record, error) {
			p.say("build", fmt.Sprintf("packing %d tools of %s", len(tools), real))
			spool := st.path("spool")
			if err := list.tar(spool); err != nil {
				return record{}, noSpace(spool, err)
			}
			src, err := oneLayer(spool, s.o.MaxBytes)
			if err != nil {
				return record{}, err
			}
			if err := s.convert(src.layers, filepath.Join(out, rootFile), p); err != nil {
				return record{}, err
			}
			return record{Kind: "tools"}, list.unchanged()
		})
		if errors.Is(err, errChanged) && try < 3 {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("tools_dir %s: %w", dir, err)
		}
		return img, nil
	}
}

var errChanged = errors.New("it changes while it is packed")

// toolFile is one entry of a tools image.
type toolFile struct {
	name string // in the image
	path string // of the content; "" for a link
	link string
	st   unix.Stat_t
}

type toolList []toolFile

// toolFiles lists what goes into the image, in order of names.
func toolFiles(ctx context.Context, real string, tools []Tool) (toolList, error) {
	var out toolList
	leads := map[string]string{}
	for _, t := range tools {
		leads[t.Name] = t.Path
	}
	err := filepath.WalkDir(real, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		rel, err := filepath.Rel(real, at)
		if err != nil || rel == "." {
			return err
		}
		f := toolFile{name: rel, path: at}
		switch file, tool := leads[rel]; {
		case d.Type()&fs.ModeSymlink != 0 && tool:
			if to, err := os.Readlink(at); err == nil && filepath.Dir(filepath.Join(real, to)) == real && !filepath.IsAbs(to) {
				f.link, f.path = to, ""
			} else {
				f.path = file
			}
		case d.Type()&fs.ModeSymlink != 0:
			if f.link, err = os.Readlink(at); err != nil {
				return err
			}
			f.path = ""
		case !d.Type().IsRegular() && !d.IsDir():
			return nil // a socket or a device is no tool
		}
		look := f.path
		if look == "" {
			look = at
		}
		if err := unix.Lstat(look, &f.st); err != nil {
			return &fs.PathError{Op: "stat", Path: look, Err: err}
		}
		out = append(out, f)
		return nil
	})
	return out, err
}

// digest names the image of these files: by what they are on the host, because
// reading them all at every job's start would cost more than packing them.
func (l toolList) digest(real string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "tools %d %d %s\n", toolsVersion, converterVersion, real)
	for _, f := range l {
		fmt.Fprintf(&b, "%q %q %s\n", f.name, f.link, identity(f.st))
	}
	return digestOf([]byte(b.String()))
}

// identity changes when a file does.
func identity(st unix.Stat_t) string {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return fmt.Sprintf("dir %o", st.Mode) // its times change with what is left out
	}
	return fmt.Sprintf("%d:%d %o %d %d.%d %d.%d", st.Dev, st.Ino, st.Mode, st.Size, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec)
}

func (l toolList) unchanged() error {
	for _, f := range l {
		if f.path == "" {
			continue
		}
		var now unix.Stat_t
		if err := unix.Lstat(f.path, &now); err != nil || identity(now) != identity(f.st) {
			return fmt.Errorf("%s: %w", f.path, errChanged)
		}
	}
	return nil
}

func (l toolList) tar(file string) (err error) {
	out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if e := out.Close(); err == nil {
			err = e
		}
	}()
	bw := bufio.NewWriterSize(out, 1<<20)
	tw := tar.NewWriter(bw)
	for _, f := range l {
		if err := f.write(tw); err != nil {
			return err
		}
	}
	return errors.Join(tw.Close(), bw.Flush())
}

func (f toolFile) write(tw *tar.Writer) error {
	h := &tar.Header{Name: f.name, Mode: int64(f.st.Mode&0o755 | 0o444), ModTime: time.Unix(f.st.Mtim.Sec, 0), Format: tar.FormatPAX}
	switch {
	case f.link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, f.link, 0o777
		return tw.WriteHeader(h)
	case f.st.Mode&unix.S_IFMT == unix.S_IFDIR:
		h.Typeflag, h.Mode = tar.TypeDir, 0o755
		h.Name += "/"
		return tw.WriteHeader(h)
	}
	h.Typeflag, h.Size = tar.TypeReg, f.st.Size
	if f.st.Mode&0o111 != 0 {
		h.Mode = 0o755 // by whomever the job runs as
	}
	in, err := os.OpenFile(f.path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := tw.WriteHeader(h); err != nil {
		return fmt.Errorf("%s: %w", f.path, err)
	}
	n, err := io.Copy(tw, io.LimitReader(in, h.Size))
	if err == nil && n != h.Size {
		err = fmt.Errorf("%s became shorter: %w", f.path, errChanged)
	}
	return err
}

// ToolNames are the names of tools, sorted.
func ToolNames(tools []Tool) []string {
	var out []string
	for _, t := range tools {
		out = append(out, t.Name)
	}
	slices.Sort(out)
	return out
}
