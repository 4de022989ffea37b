package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	ociremote "github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"virtkit/core/fault"
	"virtkit/core/zst"
)

// A bundle in a registry is an OCI artifact: an image manifest with
//
//	config  bundleConfigType: bundle.json
//	layer   bundleRootType: root.ext4, zstd. Holes are runs of zeros, which cost
//	        nothing there and become holes again here.
//
// The annotations of the layer are the size and the digest of root.ext4.
const (
	bundleConfigType types.MediaType = "application/vnd.virtkit.bundle.config.v1+json"
	bundleRootType   types.MediaType = "application/vnd.virtkit.bundle.root.v1.ext4+zstd"
	bundleRootDigest                 = "vnd.virtkit.bundle.root.digest"
)

// pullBundle fetches a bundle's root into dir.
func (s *Store) pullBundle(ctx context.Context, r *remote, m *v1.Manifest, dir string, p *progress) (record, error) {
	body, _, err := r.small(ctx, "blobs", m.Config.Digest.String(), "", m.Config.Digest.String(), maxConfig)
	if err != nil {
		return record{}, err
	}
	var rec record
	if err := json.Unmarshal(body, &rec); err != nil || rec.Schema != recordSchema || rec.FSType != "ext4" {
		return record{}, fault.Newf(fault.System, "the bundle was made by a vk that this one does not understand (schema %d, %q)", rec.Schema, rec.FSType).
			Hint("update vk on this host")
	}
	if len(m.Layers) != 1 || m.Layers[0].MediaType != bundleRootType {
		return record{}, fault.New(fault.System, "the bundle's manifest is not of one root layer")
	}
	l := m.Layers[0]
	p.begin(l.Size)
	f, err := os.OpenFile(filepath.Join(dir, rootFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return record{}, noSpace(dir, err)
	}
	defer f.Close()
	pr, pw := io.Pipe()
	result := make(chan error, 1)
	sum := sha256.New()
	go func() {
		err := inflate(pr, f, sum, min(rec.Size, s.o.MaxBytes))
		_, _ = io.Copy(io.Discard, pr)
		result <- err
	}()
	err = r.blob(ctx, l.Digest.String(), l.Size, pw, p.note("pull"), p.counter("pull", l.Digest.String(), l.Size))
	pw.CloseWithError(err)
	if unpacking := <-result; err == nil && unpacking != nil {
		err = noSpace(dir, fmt.Errorf("unpacking the bundle's root: %w", unpacking))
	}
	if err != nil {
		return record{}, err
	}
	if got, want := "sha256:"+hex.EncodeToString(sum.Sum(nil)), l.Annotations[bundleRootDigest]; got != want {
		return record{}, fault.Newf(fault.System, "the bundle's root unpacks to %s, but its manifest says %s", got, want)
	}
	return record{Kind: "bundle", Platform: rec.Platform, Config: rec.Config}, nil
}

// inflate writes the ext4 image that r has as zstd, which must be size bytes.
func inflate(r io.Reader, f *os.File, sum hash.Hash, size int64) error {
	z, _, err := expand(r)
	if err != nil {
		return err
	}
	defer z.Close()
	out := &sparseFile{f: f}
	n, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(out, sum)}, io.LimitReader(z, size+1), make([]byte, 1<<20))
	if err != nil {
		return err
	}
	if n != size {
		return fmt.Errorf("%d bytes or more instead of %d", n, size)
	}
	return out.finish()
}

// Push uploads the bundle local/<bundle> to a virtkit/ reference and returns
// the digest of its manifest.
func (s *Store) Push(ctx context.Context, bundle string, to Ref, o ResolveOptions) (digest string, err error) {
	if to.Kind != KindVirtkit {
		return "", fault.Newf(fault.Usage, "%s: a bundle is pushed to virtkit/<name>[:tag]", to)
	}
	ref, err := name.NewTag(to.Remote)
	if err != nil {
		return "", fault.Newf(fault.Usage, "%s: a bundle is pushed to a tag, not to a digest", to)
	}
	img, err := s.openBundle(Ref{Kind: KindLocal, Name: bundle, Text: "local/" + bundle})
	if errors.Is(err, os.ErrNotExist) {
		e := fault.Newf(fault.NotFound, "no bundle local/%s", bundle)
		if "local/"+bundle == DefaultRef {
			return "", e.Hint("%s is made on each host anew and is no bundle; vk image import SRC NAME makes one that can be pushed", DefaultRef)
		}
		if names := s.bundleNames(); len(names) > 0 {
			return "", e.Hint("there are: local/%s", strings.Join(names, ", local/"))
		}
		return "", e.Hint("vk image import SRC %s makes it from a tar, a directory or an OCI layout", bundle)
	}
	if err != nil {
		return "", err
	}
	defer img.Close()
	p := newProgress(o.Progress)
	st, err := s.stage(ctx)
	if err != nil {
		return "", err
	}
	defer st.Close()
	p.say("push", "compressing "+img.Ref)
	layer, err := compressRoot(img.Path, st.path("blob"))
	if err != nil {
		return "", noSpace(st.dir, err)
	}
	rec, err := readRecord(filepath.Join(filepath.Dir(img.Path), bundleJSON))
	if err != nil {
		return "", err
	}
	rec.Blobs = nil
	cfg, err := json.Marshal(rec)
	if err != nil {
		return "", err
	}
	art := &artifact{base: mutate.MediaType(empty.Image, types.OCIManifestSchema1), cfg: cfg, layer: layer}
	cred, from, err := o.Auth.find(ctx, ref.Context())
	if err != nil {
		return "", err
	}
	p.say("push", "sending to "+ref.Name())
	if err := ociremote.Write(ref, art, ociremote.WithContext(ctx), ociremote.WithAuth(authn.FromConfig(cred)), ociremote.WithTransport(newPolite(s.o, p.note("push")))); err != nil {
		return "", explain(err, ref.RegistryStr(), ref.RepositoryStr(), from)
	}
	h, err := art.Digest()
	return h.String(), err
}

// rootLayer is a compressed root on disk, as go-containerregistry wants it.
type rootLayer struct {
	path        string
	digest, raw v1.Hash
	size        int64
}

func (l *rootLayer) Digest() (v1.Hash, error)            { return l.digest, nil }
func (l *rootLayer) DiffID() (v1.Hash, error)            { return l.raw, nil }
func (l *rootLayer) Compressed() (io.ReadCloser, error)  { return os.Open(l.path) }
func (l *rootLayer) Size() (int64, error)                { return l.size, nil }
func (l *rootLayer) MediaType() (types.MediaType, error) { return bundleRootType, nil }
func (l *rootLayer) Uncompressed() (io.ReadCloser, error) {
	f, err := os.Open(l.path)
	if err != nil {
		return nil, err
	}
	z, _, err := expand(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{z, f}, nil
}

func compressRoot(src, dst string) (*rootLayer, error) {
	in, err := os.Open(src)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	packed, raw := sha256.New(), sha256.New()
	z, err := zst.NewWriter(io.MultiWriter(out, packed), zst.Default)
	if err != nil {
		return nil, err
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(z, raw)}, in, make([]byte, 1<<20)); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	st, err := out.Stat()
	if err != nil {
		return nil, err
	}
	return &rootLayer{
		path: dst, size: st.Size(),
		digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(packed.Sum(nil))},
		raw:    v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(raw.Sum(nil))},
	}, nil
}

// artifact is the v1.Image that is pushed.
type artifact struct {
	base  v1.Image
	cfg   []byte
	layer *rootLayer
}

func (a *artifact) Manifest() (*v1.Manifest, error) {
	return &v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: v1.Descriptor{MediaType: bundleConfigType, Size: int64(len(a.cfg)), Digest: hashOf(a.cfg)},
		Layers: []v1.Descriptor{{
			MediaType: bundleRootType, Size: a.layer.size, Digest: a.layer.digest,
			Annotations: map[string]string{bundleRootDigest: a.layer.raw.String()},
		}},
	}, nil
}

func (a *artifact) RawManifest() ([]byte, error) {
	m, err := a.Manifest()
	if err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

func (a *artifact) Digest() (v1.Hash, error) {
	b, err := a.RawManifest()
	return hashOf(b), err
}

func (a *artifact) Size() (int64, error) {
	b, err := a.RawManifest()
	return int64(len(b)), err
}
func (a *artifact) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }
func (a *artifact) Layers() ([]v1.Layer, error)         { return []v1.Layer{a.layer}, nil }
func (a *artifact) ConfigName() (v1.Hash, error)        { return hashOf(a.cfg), nil }
func (a *artifact) ConfigFile() (*v1.ConfigFile, error) { return a.base.ConfigFile() }
func (a *artifact) RawConfigFile() ([]byte, error)      { return a.cfg, nil }
func (a *artifact) LayerByDigest(h v1.Hash) (v1.Layer, error) {
	if h == a.layer.digest {
		return a.layer, nil
	}
	return nil, fmt.Errorf("no layer %s", h)
}
func (a *artifact) LayerByDiffID(h v1.Hash) (v1.Layer, error) { return a.LayerByDigest(h) }

func hashOf(b []byte) v1.Hash {
	s := sha256.Sum256(b)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(s[:])}
}
