package conf_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/conf"
	"virtkit/core/fault"
)

func env(kv ...string) func(string) string {
	m := map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		m[kv[i]] = kv[i+1]
	}
	return func(k string) string { return m[k] }
}

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSearchOrder(t *testing.T) {
	d := t.TempDir()
	system := filepath.Join(d, "etc/config.toml")
	load := func(kv ...string) (*conf.Config, error) { return conf.LoadAt(env(kv...), d, system) }
	cpus := func(n int) string { return fmt.Sprintf("[executor.vm]\ncpus = %d\n", n) }
	check := func(want int, file string, kv ...string) {
		t.Helper()
		c, err := load(kv...)
		if err != nil {
			t.Fatal(err)
		}
		if c.Executor.VM.CPUs != want || c.File != file {
			t.Errorf("cpus = %d from %q, want %d from %q", c.Executor.VM.CPUs, c.File, want, file)
		}
	}
	check(2, "")
	write(t, system, cpus(3))
	check(3, system)
	home := write(t, filepath.Join(d, ".config/virtkit/config.toml"), cpus(4))
	check(4, home)
	named := write(t, filepath.Join(d, "named.toml"), cpus(5))
	check(5, named, "VIRTKIT_CONFIG", named)

	_, err := load("VIRTKIT_CONFIG", filepath.Join(d, "missing.toml"))
	if fault.KindOf(err) != fault.Usage || !strings.Contains(fmt.Sprint(err), "missing.toml") || fault.HintOf(err) == "" {
		t.Errorf("a missing $VIRTKIT_CONFIG gives %v (hint %q)", err, fault.HintOf(err))
	}
	if _, err := load("VIRTKIT_CONFIG", d); err == nil || !strings.Contains(err.Error(), d) {
		t.Errorf("a directory as $VIRTKIT_CONFIG gives %v", err)
	}
	write(t, home, "x = 1\n")
	if _, err := load(); err == nil || !strings.HasPrefix(err.Error(), home+":1:1: x: ") {
		t.Errorf("a bad file gives %v", err)
	}
	// A loop of links is neither "there" nor "not there": no other file is chosen.
	os.Remove(home)
	if err := os.Symlink(home, home); err != nil {
		t.Fatal(err)
	}
	if _, err := load(); err == nil || !strings.Contains(err.Error(), home) {
		t.Errorf("an unreadable file gives %v", err)
	}
}

// TestForeignHome: HOME is one that this user may not even look into.
func TestForeignHome(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("needs a user other than root: root may look everywhere")
	}
	d := t.TempDir()
	if err := os.Mkdir(d+"/home", 0); err != nil {
		t.Fatal(err)
	}
	system := write(t, d+"/config.toml", "[executor.vm]\ncpus = 3\n")
	c, err := conf.LoadAt(env(), d+"/home", system)
	if err != nil || c.File != system || len(c.Warnings) != 1 || !strings.Contains(c.Warnings[0], d+"/home/.config") {
		t.Errorf("got %+v, %v; want the system's file and a warning", c, err)
	}
}

func TestEnvAndFlags(t *testing.T) {
	d := t.TempDir()
	f := write(t, filepath.Join(d, "c.toml"), "state_dir = \"/file\"\n[vmm]\naccel = \"kvm\"\n")
	c, err := conf.Load(env("VIRTKIT_CONFIG", f, "VIRTKIT_ACCEL", "tcg", "VIRTKIT_STATE_DIR", "/env"), "")
	if err != nil {
		t.Fatal(err)
	}
	if c.VMM.Accel != "tcg" || c.StateDir != "/env" {
		t.Errorf("accel = %q, state_dir = %q; the environment does not override", c.VMM.Accel, c.StateDir)
	}
	if o := c.Origin("vmm.accel"); o.Source != conf.FromEnv || o.String() != "$VIRTKIT_ACCEL" {
		t.Errorf("origin = %+v", o)
	}
	if err := c.Set("net.host_loopback", "80, 443", conf.Origin{Source: conf.FromFlag, Name: "--net-host-loopback"}); err != nil {
		t.Fatal(err)
	}
	if got := c.Value("net.host_loopback"); got != "[80, 443]" {
		t.Errorf("set by a flag: %s", got)
	}
	if err := c.Set("executor.vm.cpus", "8", conf.Origin{Source: conf.FromFlag, Name: "--cpus"}); err != nil || c.Executor.VM.CPUs != 8 {
		t.Errorf("--cpus 8: %v, cpus = %d", err, c.Executor.VM.CPUs)
	}
	err = c.Set("executor.vm.cpus", "many", conf.Origin{Source: conf.FromFlag, Name: "--cpus"})
	if want := `--cpus: is the string "many", expected a whole number`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if err := c.Set("executor.vm.cpu", "8", conf.Origin{}); err == nil || !strings.Contains(err.Error(), `"cpus"`) {
		t.Errorf("an unknown key gives %v", err)
	}
	_, err = conf.Load(env("VIRTKIT_CONFIG", f, "VIRTKIT_ACCEL", "hvf", "VIRTKIT_STATE_DIR", "rel"), "")
	for _, want := range []string{`$VIRTKIT_ACCEL: is "hvf", expected one of "auto", "kvm", "tcg"`, `$VIRTKIT_STATE_DIR: is "rel", expected an absolute path`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want it to say %s", err, want)
		}
	}
}

func TestDump(t *testing.T) {
	c, err := conf.Parse("a\nb.toml", []byte("[executor.share]\n\"/z\" = \"/1\"\n\"/a\\\"\" = \"/2\"\n[images]\nidle_secs = 0\n"))
	if err != nil {
		t.Fatal(err)
	}
	got := c.Dump(true)
	for _, want := range []string{"idle_secs = 0  # a?b.toml:5\n", "\"/a\\\"\" = \"/2\"  # a?b.toml:2\n\"/z\" = \"/1\"", "accel = \"auto\"  # default\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("the dump lacks %q:\n%s", want, got)
		}
	}
	again, err := conf.Parse("d", []byte(got))
	if err != nil {
		t.Fatal(err)
	}
	again.File = c.File
	if d := diff(c, again); d != "" {
		t.Errorf("read back (-want +got)\n%s", d)
	}
}

func TestCheckChangesNothing(t *testing.T) {
	d := t.TempDir()
	f := write(t, filepath.Join(d, "c.toml"), "state_dir = \""+d+"/state\"\n[build]\njobs = 2\n")
	w, err := conf.Check(f)
	if err != nil || len(w) != 1 {
		t.Errorf("Check = %q, %v", w, err)
	}
	if _, err := conf.Check(filepath.Join(d, "no.toml")); err == nil || !strings.Contains(err.Error(), "no.toml") {
		t.Errorf("a missing file gives %v", err)
	}
	if _, err := os.Stat(d + "/state"); !os.IsNotExist(err) {
		t.Errorf("checking made the state directory (%v)", err)
	}
}

func TestReloadKeepsTheOldOnError(t *testing.T) {
	f := write(t, filepath.Join(t.TempDir(), "c.toml"), "[executor.vm]\ncpus = 3\n")
	load := func() (*conf.Config, error) { return conf.Load(env("VIRTKIT_CONFIG", f), "") }
	c, err := load()
	if err != nil {
		t.Fatal(err)
	}
	l := conf.NewLive(c)
	write(t, f, "[executor.vm]\ncpus = 4\n[egres]\n")
	err = l.Reload(load)
	if err == nil || !strings.Contains(err.Error(), "old one stays") || !strings.Contains(err.Error(), "[egress]") || fault.KindOf(err) != fault.Usage {
		t.Errorf("reload of a bad file: %v", err)
	}
	if l.Get() != c || c.Executor.VM.CPUs != 3 {
		t.Error("the old configuration is gone")
	}
	write(t, f, "[executor.vm]\ncpus = 4\n")
	if err := l.Reload(load); err != nil || l.Get().Executor.VM.CPUs != 4 {
		t.Errorf("reload: %v, cpus = %d", err, l.Get().Executor.VM.CPUs)
	}
}

func TestStateDir(t *testing.T) {
	d := t.TempDir()
	none := func(string) string { return "" }
	dir, why, err := conf.ResolveStateDirAt(conf.Default(), none, d, d+"/var/virtkit")
	if err != nil || dir != d+"/var/virtkit" || why != "the default" {
		t.Errorf("got %q, %q, %v", dir, why, err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("made %v, %v", st, err)
	}
	// Not even root can make names here.
	const ro = "/sys/virtkit-test"
	dir, why, err = conf.ResolveStateDirAt(conf.Default(), env("XDG_STATE_HOME", d+"/xdg"), d, ro)
	if err != nil || dir != d+"/xdg/virtkit" || !strings.Contains(why, ro) {
		t.Errorf("got %q, %q, %v", dir, why, err)
	}
	dir, _, err = conf.ResolveStateDirAt(conf.Default(), env("XDG_STATE_HOME", "relative"), d, ro)
	if err != nil || dir != d+"/.local/state/virtkit" {
		t.Errorf("got %q, %v", dir, err)
	}
	if _, _, err = conf.ResolveStateDirAt(conf.Default(), none, "", ro); err == nil || fault.HintOf(err) == "" {
		t.Errorf("no place at all: %v", err)
	}
	c := conf.Default()
	if err := c.Set("state_dir", ro, conf.Origin{Source: conf.FromEnv, Name: "VIRTKIT_STATE_DIR"}); err != nil {
		t.Fatal(err)
	}
	if _, _, err = conf.ResolveStateDirAt(c, none, d, d); err == nil || !strings.Contains(err.Error(), "$VIRTKIT_STATE_DIR") {
		t.Errorf("one that was asked for and cannot be written: %v", err)
	}
	// What is in the way of the default is an error, not a reason to move.
	file := write(t, d+"/file", "")
	if dir, _, err = conf.ResolveStateDirAt(conf.Default(), none, d, file+"/x"); err == nil {
		t.Errorf("a file in the way gives %q", dir)
	}
}

func TestSecret(t *testing.T) {
	s := conf.Secret("hunter2")
	j, err := json.Marshal(map[string]any{"a": s})
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "s", s)
	all := fmt.Sprintf("%s %v %q %x %#v %+v %d %v", s, s, s, s, s, struct{ S conf.Secret }{s}, s, []conf.Secret{s}) + string(j) + log.String()
	if strings.Contains(all, "hunter2") || strings.Contains(all, fmt.Sprintf("%x", "hunter2")) || strings.Count(all, "[redacted]") != 10 {
		t.Errorf("shown: %s", all)
	}
	if s.Reveal() != "hunter2" {
		t.Errorf("Reveal = %q", s.Reveal())
	}
}

func TestSizes(t *testing.T) {
	for in, want := range map[string]int64{"0K": 0, "1K": 1024, "512M": 512 << 20, "4GiB": 4 << 30, "2T": 2 << 40, "8191P": 8191 << 50} {
		got, err := conf.ParseSize(in)
		if err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "4", "G", "4g", "4GB", "-4G", "+4G", "4.5G", " 4G", "8192P", "99999999999999999999G", "4GG"} {
		if got, err := conf.ParseSize(in); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", in, got)
		}
	}
	for in, want := range map[int64]string{1024: "1K", 1 << 30: "1G", 1536 << 20: "1536M", 1 << 60: "1024P", 0: "0"} {
		if got := conf.FormatSize(in); got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", in, got, want)
		}
	}
	if got := (conf.Amount{Percent: 80}).Of(1 << 60); got != (1<<60)/5*4 {
		t.Errorf("80%% of 1 EiB = %d", got)
	}
}
