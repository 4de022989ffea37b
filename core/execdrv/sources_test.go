package execdrv_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/execdrv"
)

func TestReadSources(t *testing.T) {
	fetch := execdrv.Sources{Strategy: "fetch", Checkout: true, CleanFlags: []string{"-ffdx"}, FetchFlags: []string{"--prune", "--quiet"}, Attempts: 1, SubmoduleDepth: -1}
	with := func(change func(*execdrv.Sources)) execdrv.Sources {
		s := fetch
		change(&s)
		return s
	}
	for _, tt := range []struct {
		vars string
		want execdrv.Sources
	}{
		{"", fetch},
		{"GIT_STRATEGY= GIT_CLEAN_FLAGS=", fetch},
		{"GIT_STRATEGY=clone", with(func(s *execdrv.Sources) { s.Strategy = "clone" })},
		{"GIT_STRATEGY=empty", with(func(s *execdrv.Sources) { s.Strategy = "empty" })},
		{"GIT_STRATEGY=pull", fetch},
		{"GIT_CHECKOUT=false", with(func(s *execdrv.Sources) { s.Checkout = false })},
		{"GIT_CHECKOUT=maybe", fetch},
		{"GIT_SUBMODULE_STRATEGY=none", fetch},
		{"GIT_SUBMODULE_STRATEGY=recursive", with(func(s *execdrv.Sources) { s.Submodules, s.Recursive = true, true })},
		{"GIT_SUBMODULE_STRATEGY=normal GIT_SUBMODULE_DEPTH=3 GIT_SUBMODULE_FORCE_HTTPS=true GIT_SUBMODULE_PATHS=lib GIT_SUBMODULE_UPDATE_FLAGS=--remote", with(func(s *execdrv.Sources) {
			s.Submodules, s.SubmoduleDepth, s.ForceHTTPS, s.SubmodulePaths, s.SubmoduleFlags = true, 3, true, []string{"lib"}, []string{"--remote"}
		})},
		{"GIT_SUBMODULE_DEPTH=deep GIT_SUBMODULE_FORCE_HTTPS=perhaps", fetch},
		{"GIT_SUBMODULE_STRATEGY=all", with(func(s *execdrv.Sources) { s.Unknown = "all" })},
		{"GIT_CLEAN_FLAGS=none GIT_FETCH_EXTRA_FLAGS=none", with(func(s *execdrv.Sources) { s.CleanFlags, s.FetchFlags = nil, nil })},
		{"GIT_CLEAN_FLAGS=-ffd_-e_x GIT_FETCH_EXTRA_FLAGS=--no-tags", with(func(s *execdrv.Sources) {
			s.CleanFlags, s.FetchFlags = []string{"-ffd", "-e", "x"}, []string{"--no-tags"}
		})},
		{"GET_SOURCES_ATTEMPTS=3", with(func(s *execdrv.Sources) { s.Attempts = 3 })},
		{"GET_SOURCES_ATTEMPTS=0", fetch},
		{"GET_SOURCES_ATTEMPTS=11", with(func(s *execdrv.Sources) { s.Attempts = 10 })},
		{"GET_SOURCES_ATTEMPTS=many", fetch},
	} {
		var env []string
		for _, v := range strings.Fields(tt.vars) {
			env = append(env, "CUSTOM_ENV_"+strings.ReplaceAll(v, "_-", " -"))
		}
		for i := range env {
			env[i] = strings.ReplaceAll(env[i], "e_x", "e x")
		}
		c := execdrv.ReadCall(env)
		if d := cmp.Diff(tt.want, execdrv.ReadSources(&c, execdrv.Response{AllowFetch: true})); d != "" {
			t.Errorf("%s:\n%s", tt.vars, d)
		}
	}
	c := execdrv.ReadCall(nil)
	if s := execdrv.ReadSources(&c, execdrv.Response{}); s.Strategy != "clone" {
		t.Errorf("a job that may not fetch: %+v", s)
	}
}

func TestEcho(t *testing.T) {
	for in, want := range map[string]string{
		"make":      "printf '%s\\n' '\x1b[32;1m$ make\x1b[0;m'\n",
		"a\nb":      "printf '%s\\n' '\x1b[32;1m$ a # collapsed multi-line command\x1b[0;m'\n",
		"echo 'x'%": "printf '%s\\n' '\x1b[32;1m$ echo '\\''x'\\''%\x1b[0;m'\n",
	} {
		if got := execdrv.Echo(in); got != want {
			t.Errorf("Echo(%q) = %q, want %q", in, got, want)
		}
	}
}
