package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"virtkit/core/fault"
)

// Resolve returns the image that ref means, held, fetching or making it when
// it must. It waits for other processes that are making the same one. Errors:
// fault.NotFound when there is none, fault.Denied and fault.Unavailable from
// registries, fault.System for what cannot be unpacked and for this host's
// disk. Nothing of a failed attempt is left behind but whole layers.
func (s *Store) Resolve(ctx context.Context, ref Ref, o ResolveOptions) (*Image, error) {
	p := newProgress(o.Progress)
	switch o.Policy {
	case "":
		o.Policy = Always
	case Always, IfNotPresent, Never:
	default:
		return nil, fault.Newf(fault.Usage, "pull policy %q: it is %s, %s or %s", o.Policy, Always, IfNotPresent, Never)
	}
	var img *Image
	var err error
	if ref.Kind == KindLocal {
		img, err = s.resolveLocal(ctx, ref, o, p)
	} else {
		img, err = s.resolveRemote(ctx, ref, o, p)
	}
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", ref, err)
	}
	p.say("done", "")
	return img, nil
}

// known is the content of a file in refs/.
type known struct {
	Schema   int       `json:"schema"`
	Ref      string    `json:"ref"`
	Remote   string    `json:"remote"`
	Platform string    `json:"platform"`
	Digest   string    `json:"digest"`
	Asked    time.Time `json:"asked"`
}

func (s *Store) knownPath(remote, platform string) string {
	h := sha256.Sum256([]byte(remote + "\x00" + platform))
	return filepath.Join(s.dir, "refs", hex.EncodeToString(h[:])+".json")
}

func (s *Store) readKnown(path string) (known, bool) {
	var k known
	b, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(b, &k) != nil || k.Schema != recordSchema || !digestForm.MatchString(k.Digest) {
		return known{}, false
	}
	return k, true
}

func (s *Store) resolveRemote(ctx context.Context, ref Ref, o ResolveOptions, p *progress) (*Image, error) {
	want, err := parsePlatform(o.Platform)
	if err != nil {
		return nil, err
	}
	platform := platformString(want)
	path := s.knownPath(ref.Remote, platform)
	k, have := s.readKnown(path)
	if have && (o.Policy != Always || strings.Contains(ref.Remote, "@")) {
		if img, err := s.open(k.Digest, ref.Text); err == nil {
			return img, nil
		}
	}
	if o.Policy == Never {
		return nil, fault.New(fault.NotFound, "not kept on this host, and the pull policy is never").
			Hint("vk pull %s fetches it", ref)
	}
	parsed, err := name.ParseReference(ref.Remote)
	if err != nil {
		return nil, fault.Newf(fault.Usage, "%q", ref.Remote).Because(err)
	}
	p.say("resolve", "asking "+parsed.Context().RegistryStr()+" for "+ref.Text)
	r, err := dial(ctx, parsed.Context(), o.Auth, s.o, "pull", p.note("resolve"))
	if err != nil {
		return nil, err
	}
	m, digest, err := r.manifest(ctx, parsed.Identifier(), want)
	if err != nil {
		return nil, err
	}
	img, err := s.keep(ctx, digest, ref.Text, p, func(st *stage, dir string) (record, error) {
		// Shared: GC takes it exclusively before it looks for unneeded blobs.
		using, err := s.usingBlobs(ctx)
		if err != nil {
			return record{}, err
		}
		defer using.Close()
		switch {
		case m.Config.MediaType == bundleConfigType:
			return s.pullBundle(ctx, r, m, dir, p)
		case ref.Kind == KindVirtkit:
			return record{}, fault.Newf(fault.Usage, "%s is a container image, not a virtkit bundle", ref.Remote).
				Hint("name it docker/… to boot it as one")
		case m.Config.MediaType == types.MediaType("application/vnd.oci.empty.v1+json"):
			return record{}, fault.Newf(fault.Usage, "%s is an artifact, not a container image", ref.Remote)
		}
		return s.pullImage(ctx, r, m, want, dir, p)
	})
	if err != nil {
		return nil, err
	}
	if have, e := parsePlatform(img.Platform); e == nil && img.Platform != "" {
		if err := runsOn(have, want); err != nil { // kept already, for another request
			img.Close()
			return nil, err
		}
	}
	now := known{Schema: recordSchema, Ref: ref.Text, Remote: ref.Remote, Platform: platform, Digest: digest, Asked: time.Now().UTC().Truncate(time.Second)}
	if !have || k.Digest != digest || now.Asked.Sub(k.Asked) > time.Hour {
		if err := writeJSON(path, now); err != nil {
			img.Close()
			return nil, err
		}
	}
	return img, nil
}

// resolveLocal finds a bundle on this host. local/default is made when nobody
// has put a bundle of that name there.
func (s *Store) resolveLocal(ctx context.Context, ref Ref, o ResolveOptions, p *progress) (*Image, error) {
	img, err := s.openBundle(ref)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return img, err
	}
	if ref.Text == DefaultRef {
		return s.resolveDefault(ctx, o, p)
	}
	hint := "vk image import SRC " + ref.Name + " makes it from a tar, a directory or an OCI layout"
	if names := s.bundleNames(); len(names) > 0 {
		hint = "there are: local/" + strings.Join(names, ", local/") + "; " + hint
	}
	return nil, fault.Newf(fault.NotFound, "no bundle in %s", filepath.Join(s.o.LocalDir, ref.Name)).Hint("%s", hint)
}
