package image_test

import (
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"

	"virtkit/core/fault"
	"virtkit/core/image"
)

const zeros = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

func TestParseRef(t *testing.T) {
	hub := name.DefaultRegistry
	full := image.Sources{RegistryRepo: "reg.example/vk", DockerRepo: "mirror.example:5000/hub"}
	for _, c := range []struct {
		in     string
		src    image.Sources
		kind   image.Kind
		remote string // or the local name
		text   string
	}{
		{"", full, image.KindLocal, "default", "local/default"},
		{" \n", full, image.KindLocal, "default", "local/default"},
		{"local/a.b_c-1", full, image.KindLocal, "a.b_c-1", "local/a.b_c-1"},
		{"virtkit/ci", full, image.KindVirtkit, "reg.example/vk/ci:latest", "virtkit/ci"},
		{"virtkit/team/ci:2", full, image.KindVirtkit, "reg.example/vk/team/ci:2", "virtkit/team/ci:2"},
		{"virtkit/ci@" + zeros, full, image.KindVirtkit, "reg.example/vk/ci@" + zeros, "virtkit/ci@" + zeros},
		{"docker/alpine:3", full, image.KindOCI, "mirror.example:5000/hub/alpine:3", "docker/alpine:3"},
		{"docker/alpine:3", image.Sources{}, image.KindOCI, hub + "/library/alpine:3", "docker/alpine:3"},
		{"docker/reg.example/x/y:1", full, image.KindOCI, "reg.example/x/y:1", "docker/reg.example/x/y:1"},
		{"alpine", full, image.KindOCI, "mirror.example:5000/hub/alpine:latest", "docker/alpine"},
		{"team/app", image.Sources{}, image.KindOCI, hub + "/team/app:latest", "docker/team/app"},
		{"localhost/app", full, image.KindOCI, "localhost/app:latest", "docker/localhost/app"},
		{"reg.example:5000/app", full, image.KindOCI, "reg.example:5000/app:latest", "docker/reg.example:5000/app"},
		{"reg.example/app:tag@" + zeros, full, image.KindOCI, "reg.example/app@" + zeros, "docker/reg.example/app:tag@" + zeros},
	} {
		r, err := image.ParseRef(c.in, c.src)
		if err != nil {
			t.Errorf("ParseRef(%q): %v", c.in, err)
			continue
		}
		remote := r.Remote + r.Name
		if r.Kind != c.kind || remote != c.remote || r.Text != c.text {
			t.Errorf("ParseRef(%q) = %s %s %s; want %s %s %s", c.in, r.Kind, remote, r.Text, c.kind, c.remote, c.text)
		}
	}
}

func TestParseRefErrors(t *testing.T) {
	for in, want := range map[string]string{
		"dockerfile:ci/Dockerfile#test": "not built yet",
		"compose:compose.yml#app":       "not built yet",
		"local/":                        "a bundle's name",
		"local/../etc":                  "a bundle's name",
		"local/a/b":                     "a bundle's name",
		"virtkit/x":                     "no [registry] repo",
		"docker/":                       "nothing after the prefix",
		"https://reg.example/x":         "it is a URL",
		"a b":                           "space or control",
		"UPPER":                         "",
		"x@sha256:12":                   "a digest is sha256: and 64",
		"reg.example/x:b@d:tag":         "a digest is sha256: and 64",
		"x:":                            "",
	} {
		_, err := image.ParseRef(in, image.Sources{})
		if fault.KindOf(err) != fault.Usage || err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), strings.TrimSpace(in)) {
			t.Errorf("ParseRef(%q) = (%s) %v; want usage, the reference and %q", in, fault.KindOf(err), err, want)
		}
		if fault.HintOf(err) == "" {
			t.Errorf("ParseRef(%q): no hint", in)
		}
	}
}

func FuzzReference(x *testing.F) {
	for _, s := range []string{"", "local/a", "virtkit/a:1", "docker/a@" + zeros, "reg.example:5/a/b:c", "dockerfile:x", "\x00"} {
		x.Add(s)
	}
	src := image.Sources{RegistryRepo: "reg.example/vk", DockerRepo: "mirror.example/hub"}
	x.Fuzz(func(t *testing.T, s string) {
		r, err := image.ParseRef(s, src)
		if err != nil {
			if fault.KindOf(err) != fault.Usage {
				t.Errorf("ParseRef(%q): kind %s", s, fault.KindOf(err))
			}
			return
		}
		again, err := image.ParseRef(r.Text, src)
		if err != nil || again != r {
			t.Errorf("ParseRef(%q) = %+v, but its text gives %+v, %v", s, r, again, err)
		}
		if r.Kind == image.KindLocal && strings.ContainsAny(r.Name, "/\x00") || strings.HasPrefix(r.Name, ".") {
			t.Errorf("ParseRef(%q): name %q could leave the directory", s, r.Name)
		}
	})
}
