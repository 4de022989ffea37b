package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"virtkit/core/fault"
	"virtkit/core/version"
)

// remote is a session with one repository of one registry.
type remote struct {
	repo   name.Repository
	scheme string
	http   *http.Client
	from   string // where the credentials came from, "" for none
	o      Options
}

// Media types that a manifest request accepts.
var acceptManifests = strings.Join([]string{
	string(types.OCIManifestSchema1), string(types.OCIImageIndex),
	string(types.DockerManifestSchema2), string(types.DockerManifestList),
}, ", ")

const (
	maxManifest = 8 << 20
	maxConfig   = 16 << 20
)

// dial finds credentials, and asks the registry how it wants them.
func dial(ctx context.Context, repo name.Repository, auth Auth, o Options, scope string, note func(string)) (*remote, error) {
	cred, from, err := auth.find(ctx, repo)
	if err != nil {
		return nil, err
	}
	if from != "" && note != nil {
		note("credentials for " + repo.RegistryStr() + " from " + from)
	}
	var base http.RoundTripper = newPolite(o, note)
	base = transport.NewUserAgent(base, "virtkit/"+version.Version)
	rt, err := transport.NewWithContext(ctx, repo.Registry, authn.FromConfig(cred), base, []string{repo.Scope(scope)})
	if err != nil {
		return nil, explain(err, repo.RegistryStr(), repo.RepositoryStr(), from)
	}
	return &remote{repo: repo, scheme: repo.Scheme(), http: &http.Client{Transport: rt}, from: from, o: o}, nil
}

// get asks for a path below the repository. The body is the caller's to close.
func (r *remote) get(ctx context.Context, kind, ref, accept string, from int64) (*http.Response, error) {
	u := fmt.Sprintf("%s://%s/v2/%s/%s/%s", r.scheme, r.repo.RegistryStr(), r.repo.RepositoryStr(), kind, ref)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	want := []int{http.StatusOK}
	if from > 0 {
		req.Header.Set("Range", "bytes="+strconv.FormatInt(from, 10)+"-")
		want = append(want, http.StatusPartialContent)
	}
	resp, err := r.http.Do(req)
	if err != nil {
		return nil, err
	}
	if err := transport.CheckError(resp, want...); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// small fetches a whole manifest or configuration; digest "" is not checked.
func (r *remote) small(ctx context.Context, kind, ref, accept, digest string, max int64) (body []byte, mediaType string, err error) {
	what := r.what(ref)
	for n := 1; ; n++ {
		body, mediaType, err = r.smallOnce(ctx, kind, ref, accept, max)
		if err == nil || n >= r.o.Retries || !transient(err) {
			break
		}
		if e := sleep(ctx, backoff(n)); e != nil {
			return nil, "", e
		}
	}
	if err != nil {
		return nil, "", explain(err, r.repo.RegistryStr(), what, r.from)
	}
	if got := digestOf(body); digest != "" && got != digest {
		return nil, "", wrongDigest(r.repo.RegistryStr(), what, digest, got)
	}
	return body, mediaType, nil
}

func (r *remote) smallOnce(ctx context.Context, kind, ref, accept string, max int64) ([]byte, string, error) {
	resp, err := r.get(ctx, kind, ref, accept, 0)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	slow := time.AfterFunc(r.o.Small, func() { resp.Body.Close() })
	body, err := io.ReadAll(io.LimitReader(resp.Body, max+1))
	if !slow.Stop() && err != nil {
		return nil, "", fault.Newf(fault.Unavailable, "registry %s had sent only %d bytes of %s after %s", r.repo.RegistryStr(), len(body), r.what(ref), r.o.Small).
			Hint("try again; the registry, or a proxy or the line on the way, is very slow")
	}
	if err != nil {
		return nil, "", err
	}
	if int64(len(body)) > max {
		return nil, "", fmt.Errorf("the answer is longer than %d bytes", max)
	}
	// A proxy that keeps an old body under a new name is found here, where the
	// registry has been asked by tag and no digest is known.
	if said := resp.Header.Get("Docker-Content-Digest"); strings.HasPrefix(said, "sha256:") && said != digestOf(body) {
		return nil, "", wrongDigest(r.repo.RegistryStr(), r.what(ref), said, digestOf(body))
	}
	return body, resp.Header.Get("Content-Type"), nil
}

func (r *remote) what(ref string) string {
	if strings.Contains(ref, ":") {
		return r.repo.RepositoryStr() + "@" + ref
	}
	return r.repo.RepositoryStr() + ":" + ref
}

func digestOf(b []byte) string {
	s := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(s[:])
}

func wrongDigest(registry, what, want, got string) error {
	return fault.Newf(fault.Unavailable, "registry %s sent other bytes for %s than asked: wanted %s, got %s", registry, what, want, got).
		Hint("nothing was kept; if it happens again, the registry or a proxy on the way is damaged")
}

// manifest finds the manifest for a platform: the one that ref names, or the
// one that the index chooses.
func (r *remote) manifest(ctx context.Context, ref string, want v1.Platform) (*v1.Manifest, string, error) {
	body, digest := []byte(nil), ""
	for depth := 0; ; depth++ {
		expect := ""
		if strings.Contains(ref, ":") {
			expect = ref
		}
		var media string
		var err error
		if body, media, err = r.small(ctx, "manifests", ref, acceptManifests, expect, maxManifest); err != nil {
			return nil, "", err
		}
		digest = digestOf(body)
		var head struct {
			SchemaVersion int             `json:"schemaVersion"`
			MediaType     string          `json:"mediaType"`
			Manifests     json.RawMessage `json:"manifests"`
			FSLayers      json.RawMessage `json:"fsLayers"`
		}
		if err := json.Unmarshal(body, &head); err != nil {
			return nil, "", fault.Newf(fault.Unavailable, "registry %s: the manifest of %s is not JSON (sent as %q)", r.repo.RegistryStr(), r.what(ref), media).Because(err)
		}
		if head.SchemaVersion == 1 || head.FSLayers != nil {
			return nil, "", fault.Newf(fault.System, "%s is an image of docker's old schema 1, which is no longer read", r.what(ref)).
				Hint("pull and push it again with a current docker to convert it")
		}
		if head.Manifests == nil {
			break
		}
		if depth == 3 {
			return nil, "", fault.Newf(fault.System, "%s: indexes in indexes, too deep", r.what(ref))
		}
		var idx v1.IndexManifest
		if err := json.Unmarshal(body, &idx); err != nil {
			return nil, "", fault.Newf(fault.Unavailable, "%s: its index cannot be read", r.what(ref)).Because(err)
		}
		d, err := choose(&idx, want, r.what(ref))
		if err != nil {
			return nil, "", err
		}
		ref = d.Digest.String()
	}
	var m v1.Manifest
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, "", fault.Newf(fault.Unavailable, "%s: its manifest cannot be read", r.what(ref)).Because(err)
	}
	return &m, digest, nil
}

// choose picks the manifest of an index for a platform; an error lists those
// there are.
func choose(idx *v1.IndexManifest, want v1.Platform, what string) (v1.Descriptor, error) {
	var have []string
	bestScore, bestAt := 0, -1
	for i, d := range idx.Manifests {
		if d.Platform == nil {
			if len(idx.Manifests) == 1 {
				return d, nil
			}
			continue
		}
		p := *d.Platform
		if p.OS == "unknown" || p.Architecture == "unknown" { // attestations
			continue
		}
		have = append(have, platformString(p))
		if score := fits(p, want); score > bestScore {
			bestScore, bestAt = score, i
		}
	}
	if bestAt < 0 {
		slices.Sort(have)
		return v1.Descriptor{}, fault.Newf(fault.NotFound, "%s has no image for %s; it has %s", what, platformString(want), strings.Join(slices.Compact(have), ", ")).
			Hint("choose an image made for %s", platformString(want))
	}
	return idx.Manifests[bestAt], nil
}

// fits is how well an image for p runs on want; 0 = not at all.
func fits(p, want v1.Platform) int {
	if p.OS != want.OS || p.Architecture != want.Architecture {
		return 0
	}
	switch {
	case p.Variant == want.Variant:
		return 4
	case p.Variant == "":
		return 3
	case p.Architecture == "arm64" && p.Variant == "v8":
		return 3
	case want.Variant == "" && p.Architecture == "amd64" && p.Variant == "v1":
		return 2
	case p.Architecture == "arm" && want.Variant != "" && p.Variant < want.Variant, p.Architecture == "arm" && want.Variant == "":
		return 1
	}
	return 0
}

func platformString(p v1.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

func parsePlatform(s string) (v1.Platform, error) {
	if s == "" {
		return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	p := strings.Split(s, "/")
	if len(p) < 2 || len(p) > 3 || slices.Contains(p, "") {
		return v1.Platform{}, fault.Newf(fault.Usage, "platform %q: it is os/arch or os/arch/variant, such as linux/amd64", s)
	}
	out := v1.Platform{OS: p[0], Architecture: p[1]}
	if len(p) == 3 {
		out.Variant = p[2]
	}
	return out, nil
}

// blob streams a blob's bytes to w, resuming after cuts, and checks its size
// and digest. count gets the number of bytes as they come.
func (r *remote) blob(ctx context.Context, digest string, size int64, w io.Writer, note func(string), count func(int64)) error {
	what := r.what(digest)
	sum := sha256.New()
	var off, lastCut int64
	buf := make([]byte, 256<<10)
	for n := 1; ; n++ {
		err := r.blobFrom(ctx, digest, &off, size, io.MultiWriter(sum, w), buf, count)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if off-lastCut >= 1<<20 {
			n = 1 // it got on; only cuts without progress count
		}
		lastCut = off
		if n >= r.o.Retries || !transient(err) && !errors.Is(err, errShort) {
			if errors.Is(err, errShort) || errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, errStalled) {
				err = fault.Newf(fault.Unavailable, "registry %s cut the connection %d times; %d of %d bytes of %s arrived", r.repo.RegistryStr(), n, off, size, what).
					Hint("try again; a proxy on the way may limit size or time").Because(cleaned(err))
			}
			return explain(err, r.repo.RegistryStr(), what, r.from)
		}
		wait := backoff(n)
		if note != nil {
			note(fmt.Sprintf("%s: %s after %d of %d bytes of %s; resuming in %s", r.repo.RegistryStr(), brief(err), off, size, short(digest), wait.Round(100*time.Millisecond)))
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); got != digest {
		return wrongDigest(r.repo.RegistryStr(), what, digest, got)
	}
	return nil
}

var errShort = errors.New("fewer bytes than announced")

// localWrite marks an error of this host's disk, which no registry can mend.
type localWrite struct{ err error }

func (e *localWrite) Error() string { return e.err.Error() }
func (e *localWrite) Unwrap() error { return e.err }

func (r *remote) blobFrom(ctx context.Context, digest string, off *int64, size int64, w io.Writer, buf []byte, count func(int64)) error {
	resp, err := r.get(ctx, "blobs", digest, "", *off)
	if te, ok := errors.AsType[*transport.Error](err); ok && te.StatusCode == http.StatusRequestedRangeNotSatisfiable {
		resp, err = r.get(ctx, "blobs", digest, "", 0) // a registry without open-ended ranges
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body := resp.Body
	if *off > 0 {
		if resp.StatusCode == http.StatusOK { // no ranges here: skip what is known
			if _, err := io.CopyN(io.Discard, body, *off); err != nil {
				return err
			}
		} else if cr := resp.Header.Get("Content-Range"); !strings.HasPrefix(cr, "bytes "+strconv.FormatInt(*off, 10)+"-") {
			return fmt.Errorf("asked for the bytes from %d on, was sent %q", *off, cr)
		}
	}
	for {
		n, err := body.Read(buf)
		if n > 0 {
			if *off+int64(n) > size {
				return fmt.Errorf("more than the announced %d bytes", size)
			}
			if _, e := w.Write(buf[:n]); e != nil {
				return &localWrite{e}
			}
			*off += int64(n)
			count(int64(n))
		}
		switch {
		case err == io.EOF && *off < size:
			return errShort
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// short is a digest as people read it.
func short(digest string) string {
	_, h, _ := strings.Cut(digest, ":")
	return h[:min(12, len(h))]
}
