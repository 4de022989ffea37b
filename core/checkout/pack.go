package checkout

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/erofs"
	"virtkit/core/fault"
)

// Packed is a tree as a guest gets it.
type Packed struct {
	Path  string // of the image
	Files int
	Bytes int64 // of the image; its file is longer, and sparse
	Took  time.Duration
}

// FSType is what a guest mounts an image as.
const FSType = erofs.FSType

// minImage is the least length of an image's file. Lengths are powers of two,
// so that guests of many jobs have disks of one size and can start from one
// template (machine.Disk.Varies).
const minImage = 1 << 30

// Pack writes the tree with its repository to an image at file, which must not
// exist. The repository stands alone in it: what the tree borrows from the
// mirror is there too. Its configuration is the guest's: it takes in include
// (where the job's credentials are to be), and compares files by time and size
// alone, because their other marks change on the way. What cannot be a file of
// a repository (pipes, sockets, devices) is left out.
func (t *Tree) Pack(ctx context.Context, file, include string) (Packed, error) {
	start := time.Now()
	tree := erofs.New()
	skip := t.notForGuests()
	if err := tree.AddDir(ctx, t.Path, "", skip); err != nil {
		return Packed{}, fmt.Errorf("packing the sources: %w", err)
	}
	clean, _, _ := t.job.credentials()
	type part struct {
		repo
		mirror *mirror
		conf   string
	}
	parts := []part{{repo{gitDir: ".git"}, t.mirror, repoConfig(clean, t.job.Format)}}
	for _, m := range t.modules {
		parts = append(parts, part{m.repo(), m.mirror, m.configFile(t.job.Format)})
	}
	for _, p := range parts {
		if p.mirror != nil {
			if err := tree.AddStore(ctx, p.mirror.objects(), p.gitDir+"/objects", skip); err != nil {
				return Packed{}, fmt.Errorf("packing the mirror's objects: %w", err)
			}
		}
	}
	for _, p := range parts {
		// Inode numbers, owners and change times are the image's own: without
		// this the first git status would read every file.
		conf := p.conf + "[core]\n\tcheckStat = minimal\n\ttrustctime = false\n"
		if include != "" {
			conf += "[include]\n\tpath = " + quoteConfig(include) + "\n"
		}
		tree.AddFile(p.gitDir+"/config", []byte(conf+settings(t.modules, p.repo)))
		// Git trusts what it has noted of a file only when the file is older
		// than the note. Nothing changes a tree that is held, so the note may be
		// dated later than all of it.
		tree.Later(p.gitDir+"/index", 2)
	}
	st, err := tree.Write(ctx, file)
	if err != nil {
		if errors.Is(err, unix.ENOSPC) {
			err = fault.Newf(fault.Busy, "no room for the packed sources in %s", filepath.Dir(file)).Because(err).Hint("run vk gc, or free some disk space")
		}
		return Packed{}, err
	}
	length := int64(minImage)
	for length < st.Length {
		length *= 2
	}
	if err := os.Truncate(file, length); err != nil {
		return Packed{}, errors.Join(err, os.Remove(file))
	}
	return Packed{Path: file, Files: st.Files, Bytes: st.Bytes, Took: time.Since(start)}, nil
}

// notForGuests tells the parts of a repository that are only the host's: where
// it borrows from, leavings, and summaries of packs that do not fit once two
// repositories are merged.
func (t *Tree) notForGuests() erofs.Skip {
	dirs := []string{".git/"}
	for _, m := range t.modules {
		dirs = append(dirs, m.gitDir+"/")
	}
	return func(in, base string) bool {
		if !strings.HasPrefix(in, ".git") { // most of a tree
			return false
		}
		p := in + "/" + base
		if !strings.HasPrefix(p, dirs[0]) {
			return false
		}
		rest := ""
		for _, d := range dirs {
			// A submodule's repository is below that of what it is in, and comes
			// after it.
			if r, ok := strings.CutPrefix(p, d); ok {
				rest = r
			}
		}
		switch rest {
		case "hooks", "FETCH_HEAD", "objects/info":
			return true
		case "modules":
			return len(t.modules) == 0
		}
		return strings.HasPrefix(rest, "objects/") && (strings.HasPrefix(base, "tmp_") || base == "multi-pack-index" || strings.HasSuffix(base, ".bitmap") || strings.HasPrefix(base, "incoming-"))
	}
}
