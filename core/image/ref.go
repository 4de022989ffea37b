package image

import (
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"virtkit/core/fault"
	"virtkit/core/lazyre"
)

// Kind is where an image comes from.
type Kind string

// The kinds of reference.
const (
	KindLocal   Kind = "local"   // a bundle directory on this host
	KindVirtkit Kind = "virtkit" // a bundle in the [registry] repo
	KindOCI     Kind = "docker"  // a container image
)

// DefaultRef is what an unset image means.
const DefaultRef = "local/default"

// Ref is a parsed reference. Make it with Store.Parse or ParseRef.
type Ref struct {
	Kind   Kind
	Name   string // KindLocal: the bundle's name
	Remote string // else: registry/repository:tag or @digest
	Text   string // canonical form, as shown to people and kept in refs/
}

// String is the canonical form.
func (r Ref) String() string { return r.Text }

// Sources says where the prefixes lead; see Options.
type Sources struct {
	RegistryRepo string
	DockerRepo   string
	Insecure     []string
}

var localName = lazyre.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// ParseRef reads a reference as MICROVM_IMAGE or a job's image: states it:
//
//	""                                    local/default
//	local/<name>                          a bundle on this host
//	virtkit/<name>[:tag|@sha256:…]        a bundle in src.RegistryRepo
//	docker/<name>[:tag|@sha256:…]         a container image
//	<name>[:tag|@sha256:…]                the same
//
// A container image whose name has no registry in it comes from
// src.DockerRepo when that is set. Anything else is fault.Usage.
func ParseRef(text string, src Sources) (Ref, error) {
	s := strings.TrimSpace(text)
	if s == "" {
		s = DefaultRef
	}
	for _, later := range []struct{ prefix, what string }{
		{"dockerfile:", "building an image from the checkout's Dockerfile"},
		{"compose:", "booting a fleet from a compose file"},
	} {
		if strings.HasPrefix(s, later.prefix) {
			return Ref{}, fault.Newf(fault.Usage, "image %q: not built yet: %s", s, later.what).
				Hint("name an image instead: local/<name>, virtkit/<name>, docker/<name> or a plain reference")
		}
	}
	if i := strings.IndexFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }); i >= 0 {
		return Ref{}, badRef(text, "it has a space or control character in it")
	}
	if strings.Contains(s, "://") {
		return Ref{}, badRef(text, "it is a URL; leave out the part up to ://")
	}
	switch first, rest, ok := strings.Cut(s, "/"); {
	case ok && first == string(KindLocal):
		if !localName.MatchString(rest) {
			return Ref{}, badRef(text, "a bundle's name is 1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit")
		}
		return Ref{Kind: KindLocal, Name: rest, Text: s}, nil
	case ok && first == string(KindVirtkit):
		if src.RegistryRepo == "" {
			return Ref{}, fault.Newf(fault.Usage, "image %q: no [registry] repo is configured, which is where virtkit/ images live", s).
				Hint("set repo in the [registry] section of config.toml")
		}
		return remoteRef(text, KindVirtkit, rest, src.RegistryRepo, src)
	case ok && first == string(KindOCI):
		return remoteRef(text, KindOCI, rest, src.DockerRepo, src)
	}
	return remoteRef(text, KindOCI, s, src.DockerRepo, src)
}

func badRef(text, why string) error {
	return fault.Newf(fault.Usage, "image %q: %s", text, why).
		Hint("images are named local/<name>, virtkit/<name>[:tag|@sha256:…], docker/<name>[:tag|@sha256:…] or as for docker pull")
}

// remoteRef completes a name with the repository that its prefix stands for
// and checks the result.
func remoteRef(text string, kind Kind, s, repo string, src Sources) (Ref, error) {
	if s == "" {
		return Ref{}, badRef(text, "nothing after the prefix")
	}
	full := s
	if repo != "" && (kind == KindVirtkit || !namesRegistry(s)) {
		full = strings.TrimSuffix(repo, "/") + "/" + s
	}
	// name@digest with a tag before it is what docker prints; the digest decides.
	if n, d, ok := strings.Cut(full, "@"); ok {
		if i := strings.LastIndexByte(n, ':'); i > strings.LastIndexByte(n, '/') {
			full = n[:i] + "@" + d
		}
	}
	r, err := name.ParseReference(full, name.WithDefaultTag("latest"))
	if err != nil {
		why := strings.TrimPrefix(err.Error(), "could not parse reference: ")
		if _, d, ok := strings.Cut(full, "@"); ok && !digestForm.MatchString(d) {
			why = "a digest is sha256: and 64 of 0-9 and a-f"
		}
		return Ref{}, badRef(text, why)
	}
	out := Ref{Kind: kind, Remote: r.Name()}
	if kind == KindVirtkit {
		out.Text = string(kind) + "/" + s
	} else {
		out.Text = string(KindOCI) + "/" + s
	}
	return out, nil
}

// namesRegistry tells "host.example/x" and "localhost/x" from "library/x",
// by the rule of docker's own reference grammar.
func namesRegistry(s string) bool {
	host, _, ok := strings.Cut(s, "/")
	return ok && (strings.ContainsAny(host, ".:") || host == "localhost" || strings.ToLower(host) != host)
}
