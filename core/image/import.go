package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"virtkit/core/fault"
)

// ImportOptions are one import's wishes.
type ImportOptions struct {
	Replace  bool    // take the place of a bundle of that name
	Platform string  // as in ResolveOptions
	Config   *Config // instead of what the source says; nil = the source's
	Progress func(Progress)
}

// Import makes the bundle local/<name> from src: a docker or OCI archive, a
// root filesystem as a tar (plain, gzip, zstd, xz or bzip2), a directory, or
// an OCI layout; of an OCI layout that holds several images, <path>:<tag> is one.
// A directory read by another user than root becomes root's:
// that user's files get owner 0. Nothing is left behind when it fails.
func (s *Store) Import(ctx context.Context, src, bundle string, o ImportOptions) (Info, error) {
	bundle = strings.TrimPrefix(bundle, "local/")
	if !localName.MatchString(bundle) {
		return Info{}, badRef("local/"+bundle, "a bundle's name is 1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit")
	}
	if _, err := os.Lstat(filepath.Join(s.o.LocalDir, bundle)); err == nil && !o.Replace {
		return Info{}, fault.Newf(fault.Conflict, "bundle %s exists already", filepath.Join(s.o.LocalDir, bundle)).Hint("--replace takes its place")
	}
	info, err := s.importTo(ctx, src, bundle, o)
	if err != nil {
		return Info{}, fmt.Errorf("importing %s: %w", src, err)
	}
	return info, nil
}

func (s *Store) importTo(ctx context.Context, src, bundle string, o ImportOptions) (Info, error) {
	want, err := parsePlatform(o.Platform)
	if err != nil {
		return Info{}, err
	}
	p := newProgress(o.Progress)
	work, err := s.stage(ctx)
	if err != nil {
		return Info{}, err
	}
	defer work.Close()
	p.say("import", "reading "+src)
	got, err := s.readSource(ctx, src, work, want)
	if err != nil {
		return Info{}, err
	}
	if !slices.ContainsFunc(got.layers, func(l layerSource) bool {
		return slices.ContainsFunc(l.idx.Entries, func(e entry) bool { return e.Name != "" })
	}) {
		// What a failed `… > rootfs.tar` leaves is an empty file.
		return Info{}, fault.New(fault.Usage, "there is not one file in it").Hint("a root filesystem is expected: was it made whole?")
	}
	if o.Config != nil {
		got.config = *o.Config
	}
	out, err := s.bundleStage()
	if err != nil {
		return Info{}, err
	}
	defer func() {
		_, _ = removeOurs(out.dir)
		os.Remove(out.lock.File().Name())
		out.lock.Close()
	}()
	if err := s.convert(got.layers, out.path(rootFile), p); err != nil {
		return Info{}, err
	}
	st, err := os.Lstat(out.path(rootFile))
	if err != nil {
		return Info{}, err
	}
	rec := record{
		Schema: recordSchema, Ref: "local/" + bundle, Kind: "bundle", Platform: platformString(want), FSType: "ext4",
		Created: time.Now().UTC().Truncate(time.Second), Size: st.Size(), Config: got.config,
	}
	if rec.Digest, err = contentDigest(got); err != nil {
		return Info{}, err
	}
	if err := writeJSON(out.path(bundleJSON), rec); err != nil {
		return Info{}, err
	}
	if err := s.placeBundle(out.dir, bundle, o.Replace); err != nil {
		return Info{}, err
	}
	p.say("done", "")
	dir := filepath.Join(s.o.LocalDir, bundle)
	i := info(rec, dir, s.bundleLock(bundle))
	i.Refs = []string{rec.Ref}
	return i, nil
}

// source is what Import read: layers, bottom first, and a configuration.
type source struct {
	layers []layerSource
	config Config
}

// contentDigest names a bundle by what it was made of.
func contentDigest(s source) (string, error) {
	v := struct {
		Converter int
		Layers    []string
		Config    Config
	}{converterVersion, nil, s.config}
	for _, l := range s.layers {
		v.Layers = append(v.Layers, l.idx.DiffID)
	}
	b, err := json.Marshal(v)
	return digestOf(b), err
}

func (s *Store) readSource(ctx context.Context, src string, work *stage, want v1.Platform) (source, error) {
	st, err := os.Stat(src)
	tag := ""
	if i := strings.LastIndexByte(src, ':'); err != nil && i > 0 && !strings.Contains(src[i:], "/") {
		if tagged, terr := os.Stat(src[:i]); terr == nil {
			st, err, src, tag = tagged, nil, src[:i], src[i+1:]
		}
	}
	if err != nil {
		return source{}, fault.New(fault.NotFound, "").Because(err).Hint("it is a tar, a directory or an OCI layout")
	}
	if st.IsDir() {
		if _, err := os.Stat(filepath.Join(src, "oci-layout")); err == nil {
			return fromLayout(dirMembers(src), tag, want, s.o.MaxBytes)
		}
		if tag != "" {
			return source{}, noLayout(src, tag)
		}
		spool := work.path("spool")
		if err := tarDirectory(ctx, src, spool); err != nil {
			return source{}, noSpace(spool, err)
		}
		return oneLayer(spool, s.o.MaxBytes)
	}
	if !st.Mode().IsRegular() {
		return source{}, fault.Newf(fault.Usage, "%s is neither a file nor a directory", src)
	}
	file, err := unsqueeze(ctx, src, work)
	if err != nil {
		return source{}, err
	}
	got, err := oneLayer(file, s.o.MaxBytes)
	if err != nil {
		return source{}, fault.Newf(fault.Usage, "%s is not a tar that can be read", src).
			Hint("a docker or OCI archive or a root filesystem is expected").Because(err)
	}
	has := map[string]bool{}
	for _, e := range got.layers[0].idx.Entries {
		has[e.Name] = true
	}
	layout := has["oci-layout"] && has["index.json"]
	switch {
	case tag != "" && !layout:
		return source{}, noLayout(src, tag)
	case !has["manifest.json"] && !layout:
		return got, nil
	}
	m, err := tarMembers(file, work)
	if err != nil {
		return source{}, err
	}
	if has["manifest.json"] && tag == "" {
		return fromDockerArchive(m, s.o.MaxBytes)
	}
	return fromLayout(m, tag, want, s.o.MaxBytes)
}

func noLayout(src, tag string) error {
	return fault.Newf(fault.Usage, "%s is no OCI layout, of which %q could be one image", src, tag)
}

// oneLayer takes a tar as the whole root.
func oneLayer(file string, max int64) (source, error) {
	open := func() (io.ReadCloser, error) { return os.Open(file) }
	l, err := scanLayer(filepath.Base(file), open, "", max)
	if err != nil {
		return source{}, err
	}
	return source{layers: []layerSource{l}}, nil
}

func scanLayer(name string, open func() (io.ReadCloser, error), digest string, max int64) (layerSource, error) {
	r, err := open()
	if err != nil {
		return layerSource{}, err
	}
	defer r.Close()
	t := &hashed{r: r, h: newSum()}
	idx, err := scan(t, max)
	if err != nil {
		return layerSource{}, fmt.Errorf("layer %s: %w", name, err)
	}
	if _, err := io.Copy(io.Discard, t); err != nil {
		return layerSource{}, fmt.Errorf("layer %s: %w", name, err)
	}
	if digest != "" && t.digest() != digest {
		return layerSource{}, fault.Newf(fault.System, "layer %s has digest %s: the archive is damaged", digest, t.digest())
	}
	return layerSource{name: name, idx: idx, open: open}, nil
}

// unsqueeze unpacks a file in a compression that only a program of the host
// knows; other files are returned as they are.
func unsqueeze(ctx context.Context, src string, work *stage) (string, error) {
	f, err := os.Open(src)
	if err != nil {
		return "", err
	}
	defer f.Close()
	head := make([]byte, 6)
	n, _ := io.ReadFull(f, head)
	prog := ""
	switch {
	case string(head[:n]) == "\xfd7zXZ\x00":
		prog = "xz"
	case strings.HasPrefix(string(head[:n]), "BZh"):
		prog = "bzip2"
	default:
		return src, nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	bin, err := exec.LookPath(prog)
	if err != nil {
		pkg := map[string]string{"xz": "xz-utils", "bzip2": "bzip2"}[prog]
		return "", fault.Newf(fault.Usage, "%s is compressed with %s, which is not installed", src, prog).
			Hint("apt-get install %s, or repack it with gzip or zstd", pkg)
	}
	spool, err := os.OpenFile(work.path("spool"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", noSpace(work.dir, err)
	}
	defer spool.Close()
	var said strings.Builder
	cmd := exec.CommandContext(ctx, bin, "-dc")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = f, spool, &said
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s -dc: %w: %s", prog, err, strings.TrimSpace(said.String()))
	}
	return spool.Name(), nil
}

// members opens files of an archive or a layout by their names in it.
type members func(name string) (io.ReadCloser, error)

func (m members) read(name string, max int64) ([]byte, error) {
	r, err := m(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, max+1))
	if err == nil && int64(len(b)) > max {
		err = fmt.Errorf("%s is longer than %d bytes", name, max)
	}
	return b, err
}

func dirMembers(dir string) members {
	return func(name string) (io.ReadCloser, error) {
		root, err := os.OpenRoot(dir)
		if err != nil {
			return nil, err
		}
		defer root.Close()
		return root.Open(name)
	}
}

// tarMembers finds where the members of a tar begin, after unpacking it into
// work when it is compressed.
func tarMembers(file string, work *stage) (members, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, c, err := expand(f)
	if err != nil {
		return nil, err
	}
	defer z.Close()
	if c != plain {
		file = work.path("blob")
		out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, noSpace(work.dir, err)
		}
		_, err = io.Copy(out, z)
		if e := out.Close(); err == nil {
			err = e
		}
		if err != nil {
			return nil, noSpace(work.dir, err)
		}
	}
	in, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	type span struct{ off, size int64 }
	at, alias := map[string]span{}, map[string]string{}
	tr := tar.NewReader(in) // seeks over contents, and reads ahead of no header
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		name := path.Clean(strings.TrimLeft(h.Name, "/"))
		switch h.Typeflag {
		case tar.TypeReg:
			off, err := in.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			at[name] = span{off, h.Size}
		case tar.TypeSymlink: // old docker save: a layer that it has twice
			alias[name] = path.Join(path.Dir(name), h.Linkname)
		case tar.TypeLink:
			alias[name] = path.Clean(h.Linkname)
		}
	}
	return func(name string) (io.ReadCloser, error) {
		name = path.Clean(name)
		if to, ok := alias[name]; ok {
			name = to
		}
		sp, ok := at[name]
		if !ok {
			return nil, fmt.Errorf("the archive has no %s", name)
		}
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		return struct {
			io.Reader
			io.Closer
		}{io.NewSectionReader(f, sp.off, sp.size), f}, nil
	}, nil
}

// fromDockerArchive reads what `docker save` writes.
func fromDockerArchive(m members, max int64) (source, error) {
	b, err := m.read("manifest.json", maxManifest)
	if err != nil {
		return source{}, err
	}
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return source{}, fmt.Errorf("manifest.json: %w", err)
	}
	if len(list) != 1 {
		var names []string
		for _, i := range list {
			names = append(names, i.RepoTags...)
		}
		return source{}, fault.Newf(fault.Usage, "the archive holds %d images (%s)", len(list), strings.Join(names, ", ")).Hint("save one image at a time")
	}
	if b, err = m.read(list[0].Config, maxConfig); err != nil {
		return source{}, err
	}
	cf, err := parseConfig(b)
	if err != nil {
		return source{}, fmt.Errorf("%s: %w", list[0].Config, err)
	}
	out := source{config: configOf(cf)}
	if len(cf.RootFS.DiffIDs) != len(list[0].Layers) {
		return source{}, fmt.Errorf("manifest.json has %d layers, the configuration %d", len(list[0].Layers), len(cf.RootFS.DiffIDs))
	}
	for i, name := range list[0].Layers {
		l, err := scanLayer(name, func() (io.ReadCloser, error) { return m(name) }, "", max)
		if err != nil {
			return source{}, err
		}
		if want := cf.RootFS.DiffIDs[i].String(); l.idx.DiffID != want {
			return source{}, diffMismatch(name, want, l.idx.DiffID)
		}
		out.layers = append(out.layers, l)
	}
	return out, nil
}

// refName is the annotation with which a layout's index names an image.
const refName = "org.opencontainers.image.ref.name"

// named are the images of a layout's index that are called tag, all of them
// when tag is "", and what all are called.
func named(all []v1.Descriptor, tag string) (out []v1.Descriptor, names []string) {
	for _, d := range all {
		if n := d.Annotations[refName]; n != "" {
			names = append(names, n)
		}
		if tag == "" || d.Annotations[refName] == tag {
			out = append(out, d)
		}
	}
	return out, names
}

// fromLayout reads one image, by its tag when that is not "", of an OCI layout
// (image-spec, "OCI Image Layout").
func fromLayout(m members, tag string, want v1.Platform, max int64) (source, error) {
	b, err := m.read("index.json", maxManifest)
	if err != nil {
		return source{}, err
	}
	blob := func(d v1.Hash) string { return "blobs/" + d.Algorithm + "/" + d.Hex }
	checked := func(d v1.Descriptor, limit int64) ([]byte, error) {
		b, err := m.read(blob(d.Digest), limit)
		if err == nil && digestOf(b) != d.Digest.String() {
			err = fmt.Errorf("%s has other content than its name says", blob(d.Digest))
		}
		return b, err
	}
	for depth := 0; ; depth++ {
		var idx v1.IndexManifest
		if err := json.Unmarshal(b, &idx); err != nil {
			return source{}, fmt.Errorf("the layout's index: %w", err)
		}
		if len(idx.Manifests) == 0 {
			break
		}
		var names []string
		if depth == 0 {
			if idx.Manifests, names = named(idx.Manifests, tag); len(idx.Manifests) == 0 {
				return source{}, fault.Newf(fault.NotFound, "the layout has no image %q", tag).Hint("it has: %s", strings.Join(names, ", "))
			}
		}
		if depth == 4 {
			return source{}, errors.New("indexes in indexes, too deep")
		}
		bare := slices.IndexFunc(idx.Manifests, func(d v1.Descriptor) bool { return d.Platform == nil })
		d := idx.Manifests[0]
		switch {
		case bare >= 0 && len(idx.Manifests) > 1:
			return source{}, fault.Newf(fault.Usage, "the layout holds %d images: %s", len(idx.Manifests), strings.Join(names, ", ")).Hint("name one: <path>:<tag>")
		case bare < 0:
			if d, err = choose(&idx, want, "the layout"); err != nil {
				return source{}, err
			}
		}
		if b, err = checked(d, maxManifest); err != nil {
			return source{}, err
		}
	}
	var mf v1.Manifest
	if err := json.Unmarshal(b, &mf); err != nil {
		return source{}, fmt.Errorf("the layout's manifest: %w", err)
	}
	if b, err = checked(mf.Config, maxConfig); err != nil {
		return source{}, err
	}
	cf, err := parseConfig(b)
	if err != nil {
		return source{}, fmt.Errorf("the layout's configuration: %w", err)
	}
	if len(cf.RootFS.DiffIDs) != len(mf.Layers) {
		return source{}, fmt.Errorf("the manifest has %d layers, the configuration %d", len(mf.Layers), len(cf.RootFS.DiffIDs))
	}
	out := source{config: configOf(cf)}
	for i, d := range mf.Layers {
		l, err := scanLayer(d.Digest.String(), func() (io.ReadCloser, error) { return m(blob(d.Digest)) }, d.Digest.String(), max)
		if err != nil {
			return source{}, err
		}
		if wantID := cf.RootFS.DiffIDs[i].String(); l.idx.DiffID != wantID {
			return source{}, diffMismatch(d.Digest.String(), wantID, l.idx.DiffID)
		}
		out.layers = append(out.layers, l)
	}
	return out, nil
}
