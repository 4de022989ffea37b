package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	ociremote "github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"virtkit/core/fault"
	"virtkit/core/version"
)

// Single is a kind of OCI artifact that is no image: a manifest with a small
// configuration and one layer.
type Single struct {
	ConfigType types.MediaType
	LayerType  types.MediaType
	Config     []byte // JSON
}

// Put uploads f, whole, as the layer of an artifact at ref
// (registry/repository:tag). A layer that the repository has already costs a
// request. size is what the layer has in bytes.
func (s Single) Put(ctx context.Context, ref string, f *os.File, auth Auth, o Options) (size int64, err error) {
	tag, err := o.tag(ref)
	if err != nil {
		return 0, err
	}
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(f, 0, fi.Size())); err != nil {
		return 0, err
	}
	l := &singleLayer{f: f, size: fi.Size(), kind: s.LayerType, digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}}
	cred, from, err := auth.find(ctx, tag.Context())
	if err != nil {
		return 0, err
	}
	rt := transport.NewUserAgent(newPolite(o.filled(), nil), "virtkit/"+version.Version)
	err = ociremote.Write(tag, &single{artifact: artifact{base: mutate.MediaType(empty.Image, types.OCIManifestSchema1), cfg: s.Config}, of: s, layer: l},
		ociremote.WithContext(ctx), ociremote.WithAuth(authn.FromConfig(cred)), ociremote.WithTransport(rt))
	if err != nil {
		return 0, explain(err, tag.RegistryStr(), tag.RepositoryStr(), from)
	}
	return l.size, nil
}

// Get downloads the layer of the artifact at ref to w, at most max bytes. One
// that is not there is a fault.NotFound.
func (s Single) Get(ctx context.Context, ref string, w io.Writer, max int64, auth Auth, o Options) (size int64, err error) {
	tag, err := o.tag(ref)
	if err != nil {
		return 0, err
	}
	r, err := dial(ctx, tag.Context(), auth, o.filled(), "pull", nil)
	if err != nil {
		return 0, err
	}
	body, _, err := r.small(ctx, "manifests", tag.TagStr(), string(types.OCIManifestSchema1), "", maxManifest)
	if err != nil {
		return 0, err
	}
	var m v1.Manifest
	if err := json.Unmarshal(body, &m); err != nil || len(m.Layers) != 1 || m.Layers[0].MediaType != s.LayerType {
		return 0, fault.Newf(fault.System, "%s is no artifact of one layer of %s", ref, s.LayerType)
	}
	d := m.Layers[0]
	if d.Size > max {
		return 0, fault.Newf(fault.System, "%s has %d bytes, at most %d are taken", ref, d.Size, max)
	}
	return d.Size, r.blob(ctx, d.Digest.String(), d.Size, w, nil, func(int64) {})
}

func (o Options) tag(ref string) (name.Tag, error) {
	t, err := name.NewTag(ref, name.StrictValidation)
	if err != nil {
		return t, fault.Newf(fault.Usage, "%q is no reference registry/repository:tag", ref)
	}
	for _, h := range o.Insecure {
		if strings.EqualFold(h, t.RegistryStr()) {
			return name.NewTag(ref, name.StrictValidation, name.Insecure)
		}
	}
	return t, nil
}

// filled has what a Store fills in.
func (o Options) filled() Options {
	orInt(&o.Retries, 6)
	if o.Stall <= 0 {
		o.Stall = 30 * time.Second
	}
	if o.Patience <= 0 {
		o.Patience = defaultPatience
	}
	if o.Small <= 0 {
		o.Small = smallLimit
	}
	return o
}

// single is the v1.Image that is pushed.
type single struct {
	artifact
	of    Single
	layer *singleLayer
}

// Manifest implements v1.Image.
func (a *single) Manifest() (*v1.Manifest, error) {
	return &v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: v1.Descriptor{MediaType: a.of.ConfigType, Size: int64(len(a.cfg)), Digest: hashOf(a.cfg)},
		Layers: []v1.Descriptor{{MediaType: a.of.LayerType, Size: a.layer.size, Digest: a.layer.digest}},
	}, nil
}

// RawManifest implements v1.Image.
func (a *single) RawManifest() ([]byte, error) {
	m, err := a.Manifest()
	if err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

// Digest implements v1.Image.
func (a *single) Digest() (v1.Hash, error) {
	b, err := a.RawManifest()
	return hashOf(b), err
}

// Size implements v1.Image.
func (a *single) Size() (int64, error) {
	b, err := a.RawManifest()
	return int64(len(b)), err
}

// Layers implements v1.Image.
func (a *single) Layers() ([]v1.Layer, error) { return []v1.Layer{a.layer}, nil }

// LayerByDigest implements v1.Image.
func (a *single) LayerByDigest(h v1.Hash) (v1.Layer, error) {
	if h == a.layer.digest {
		return a.layer, nil
	}
	return nil, fmt.Errorf("no layer %s", h)
}

// LayerByDiffID implements v1.Image.
func (a *single) LayerByDiffID(h v1.Hash) (v1.Layer, error) { return a.LayerByDigest(h) }

// singleLayer is a layer in a file, which stays compressed.
type singleLayer struct {
	f      *os.File
	size   int64
	kind   types.MediaType
	digest v1.Hash
}

// Digest implements v1.Layer.
func (l *singleLayer) Digest() (v1.Hash, error) { return l.digest, nil }

// DiffID implements v1.Layer.
func (l *singleLayer) DiffID() (v1.Hash, error) { return l.digest, nil }

// Compressed implements v1.Layer.
func (l *singleLayer) Compressed() (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(l.f, 0, l.size)), nil
}

// Uncompressed implements v1.Layer.
func (l *singleLayer) Uncompressed() (io.ReadCloser, error) { return l.Compressed() }

// Size implements v1.Layer.
func (l *singleLayer) Size() (int64, error) { return l.size, nil }

// MediaType implements v1.Layer.
func (l *singleLayer) MediaType() (types.MediaType, error) { return l.kind, nil }
