package conf_test

import (
	"strings"
	"testing"
	"time"

	toml "github.com/pelletier/go-toml/v2"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/conf"
	"virtkit/core/fault"
)

func TestParseTypes(t *testing.T) {
	c, err := conf.Parse("c.toml", []byte("\xef\xbb\xbfstate_dir = '/s'\r\n"+`
vmm = { accel = "tcg", disk = "32G", hang_timeout_secs = 0 }
gc.build_cache_max = "none" # dotted
[net]
host_loopback = [
  80, # http
  5000,
]
dns = ["192.0.2.1", "[2001:db8::1]:53"]
[executor]
checkout_overlay_size = "50%"
[executor.vm]
cpus = 0x04
mem = "8GiB"
max_mem = '16G'
reclaim = "512M"
[executor.share]
"/opt/a.b" = "/srv/x y"
[egress]
allow_name = []
allow_ip = ["10.0.0.0/8", "192.0.2.7/32:443"]
[node]
require_signed = false
`))
	if err != nil {
		t.Fatal(err)
	}
	f := false
	want := conf.Default()
	want.File, want.StateDir = "c.toml", "/s"
	want.VMM.Accel, want.VMM.Disk, want.VMM.HangTimeout = "tcg", 32<<30, 0
	want.Executor.VM.CPUs, want.Executor.VM.Mem, want.Executor.VM.MaxMem = 4, 8<<30, 16<<30
	want.Executor.VM.Reclaim = conf.Amount{Bytes: 512 << 20}
	want.Executor.CheckoutOverlaySize = conf.Amount{Percent: 50}
	want.Executor.Share = map[string]string{"/opt/a.b": "/srv/x y"}
	want.Net.HostLoopback = []int{80, 5000}
	want.Net.DNS = []string{"192.0.2.1", "[2001:db8::1]:53"}
	want.GC.BuildCacheMax = conf.Amount{Word: "none"}
	want.Egress.AllowName = []string{}
	want.Egress.AllowIP = []string{"10.0.0.0/8", "192.0.2.7/32:443"}
	want.Node.RequireSigned = &f
	if d := diff(want, c); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	if c.Egress.AllowName == nil {
		t.Error("an explicit empty list became an absent one")
	}
	if c.Egress.Build.AllowName != nil {
		t.Error("an absent list became an empty one")
	}
	if got := c.Origin("gc.build_cache_max"); got != (conf.Origin{Source: conf.FromFile, File: "c.toml", Line: 4, Col: 1}) {
		t.Errorf("origin = %+v", got)
	}
	if got := c.Origin("executor.vm.nested").Source; got != conf.FromDefault {
		t.Errorf("origin of a key not set = %q", got)
	}
}

// diff compares everything but warnings and origins.
func diff(want, got *conf.Config) string {
	a, b := *want, *got
	a.Warnings, b.Warnings = nil, nil
	return cmp.Diff(a, b, cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".origins" }, cmp.Ignore()))
}

func TestDefaults(t *testing.T) {
	c := conf.Default()
	if c.VMM.BootTimeout != 120*time.Second || c.VMM.HangTimeout != 300*time.Second || c.VMM.Disk != 16<<30 ||
		c.VMM.Accel != "auto" || c.Net.Mode != "switch" || c.Executor.BuildsDir != "/builds" || c.Executor.CacheDir != "/cache" {
		t.Errorf("defaults = %+v", c)
	}
	if c.ImageIdle() != 30*time.Minute || c.CheckoutIdle() != 30*time.Minute {
		t.Errorf("idle times = %v, %v; want 30m each", c.ImageIdle(), c.CheckoutIdle())
	}
	c, err := conf.Parse("f", []byte("[images]\nidle_secs=0\n[executor]\nimage_cache_idle_secs=60\n"))
	if err != nil {
		t.Fatal(err)
	}
	if c.ImageIdle() != 0 || c.CheckoutIdle() != time.Minute {
		t.Errorf("idle times = %v, %v; want 0s, 1m", c.ImageIdle(), c.CheckoutIdle())
	}
	for _, k := range conf.Keys() {
		if got := conf.Default().Value(k.Name); got != k.Default {
			t.Errorf("%s: default is %s, the table says %s", k.Name, got, k.Default)
		}
	}
}

// TestProblems is S37: each slip is refused with its place, what was
// expected, and the nearest right name; S33's and S32's malformed rules too.
func TestProblems(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"[egres]\nallow_ip = []\n", `f:1:2: egres: is not a section; did you mean [egress]?`},
		{"[executor.vm]\nmax-mem = \"4G\"\n", `f:2:1: executor.vm.max-mem: is not a configuration key; did you mean "max_mem"?`},
		{"[executor.vm]\n  max_men = \"4G\"\n", `f:2:3: executor.vm.max_men: is not a configuration key; did you mean "max_mem"?`},
		{"[executor]\nmax_mem = \"4G\"\n", `f:2:1: executor.max_mem: is not a configuration key; did you mean "executor.vm.max_mem"?`},
		{"[vm]\ncpus = 1\n", `f:1:2: vm: is not a section; did you mean [executor.vm]?`},
		{"[executor.vm]\ncpus = \"4\"\n", `f:2:8: executor.vm.cpus: is the string "4", expected a whole number; did you mean 4?`},
		{"[executor.vm]\ncpus = 4.5\n", `f:2:8: executor.vm.cpus: is the number 4.5, expected a whole number`},
		{"[executor.vm]\ncpus = 0\n", `f:2:8: executor.vm.cpus: is 0, expected a whole number from 1 to 1024`},
		{"[executor.vm]\nmem = 4\n", `f:2:7: executor.vm.mem: is the number 4, expected a size such as "4G" or "512M"; did you mean "4G"?`},
		{"[executor.vm]\nmem = \"4 g\"\n", `f:2:7: executor.vm.mem: is the string "4 g", expected a size such as "4G" or "512M"; did you mean "4G"?`},
		{"[executor.vm]\nmem = \"1K\"\n", `f:2:7: executor.vm.mem: is "1K", expected at least "64M"`},
		{"[executor.vm]\nmem = \"99999999999G\"\n", `f:2:7: executor.vm.mem: is the string "99999999999G", expected a size such as "4G" or "512M"`},
		{"[executor.vm]\nnested = \"true\"\n", `f:2:10: executor.vm.nested: is the string "true", expected true or false; did you mean true?`},
		{"[executor.vm]\nhostname = \"a b\"\n", `f:2:12: executor.vm.hostname: is "a b", expected a host name of letters, digits, hyphens and dots, at most 64`},
		{"[executor.vm]\ncpus = 8\nmax_cpus = 4\n", `f:2:1: executor.vm.cpus: is 8, expected at most executor.vm.max_cpus, which is 4`},
		{"[executor.vm]\nmem = \"8G\"\nmax_mem = \"4G\"\n", `f:2:1: executor.vm.mem: is "8G", expected at most executor.vm.max_mem, which is "4G"`},
		{"[executor.schedule]\nmem_budget = \"150%\"\n", `f:2:14: executor.schedule.mem_budget: is the string "150%", expected a size such as "4G" or a percentage such as "50%"`},
		{"[executor.vm]\nreclaim = \"aut\"\n", `f:2:11: executor.vm.reclaim: is the string "aut", expected a size such as "4G" or a percentage such as "50%", or "auto", "off"; did you mean "auto"?`},
		{"[executor.vm]\ndax = \"8G:allways\"\n", `f:2:7: executor.vm.dax: is "8G:allways", expected "off", a size such as "8G", "8G:always" or "8G:inode=64K"`},
		{"[vmm]\naccel = \"kmv\"\n", `f:2:9: vmm.accel: is "kmv", expected one of "auto", "kvm", "tcg"; did you mean "kvm"?`},
		{"[vmm]\nboot_timeout_secs = \"2m\"\n", `f:2:21: vmm.boot_timeout_secs: is the string "2m", expected a whole number of seconds`},
		{"[vmm]\nqemu = \"bin/qemu\"\n", `f:2:8: vmm.qemu: is "bin/qemu", expected a plain name or an absolute path`},
		{"state_dir = \"~/x\"\n", `f:1:13: state_dir: is "~/x", expected an absolute path; ~ is not expanded here`},
		{"[egress]\nallow_name = \"a.example\"\n", `f:2:14: egress.allow_name: is the string "a.example", expected a list of strings such as ["a", "b"]; did you mean ["a.example"]?`},
		{"[egress.allow_name]\nx = 1\n", `f:1:2: egress.allow_name: is a table, expected a list of strings such as ["a", "b"]`},
		{"[egress]\nallow_name = { x = 1 }\n", `f:2:14: egress.allow_name: is a table, expected a list of strings such as ["a", "b"]`},
		{"[egress]\nallow_name.x = 1\n", `f:2:1: egress.allow_name: is a table, expected a list of strings such as ["a", "b"]`},
		{"[[egress]]\nallow_name = []\n", `f:1:3: egress: is a list of tables, expected one table; did you mean [egress]?`},
		{"executor = 3\n", `f:1:1: executor: is the number 3, expected a section: write [executor] above its keys`},
		{"[egress]\nallow_name = [\"*.a.example\", 3, \"b.example.\"]\n", `f:2:15: egress.allow_name: entry 1 is "*.a.example", a pattern: a suffix matches the names below it already (write a.example)
f:2:30: egress.allow_name: entry 2 is the number 3, expected a string
f:2:33: egress.allow_name: entry 3 is "b.example.", a trailing dot (write b.example)`},
		{"[egress]\nallow_name = [\"*\", \"*foo.com\", \"a.*.com\", \"**.com\", \".com\", \"example.com.\"]\n", `f:2:15: egress.allow_name: entry 1 is "*", a pattern: a suffix matches the names below it already
f:2:20: egress.allow_name: entry 2 is "*foo.com", a pattern: a suffix matches the names below it already
f:2:32: egress.allow_name: entry 3 is "a.*.com", a pattern: a suffix matches the names below it already
f:2:43: egress.allow_name: entry 4 is "**.com", a pattern: a suffix matches the names below it already
f:2:53: egress.allow_name: entry 5 is ".com", a leading dot: a suffix matches the names below it already (write com)
f:2:61: egress.allow_name: entry 6 is "example.com.", a trailing dot (write example.com)`},
		{"[egress]\nallow_ip = [\"a.example\", \"2001:db8::/32\", \"10.0.0.0/8:0\"]\n", `f:2:13: egress.allow_ip: entry 1 is "a.example", a name, which belongs in allow_name
f:2:26: egress.allow_ip: entry 2 is "2001:db8::/32", IPv6, which guests do not have: write an IPv4 network
f:2:43: egress.allow_ip: entry 3 is "10.0.0.0/8:0", the port "0" is not a number from 1 to 65535`},
		{"[net]\nhost_loopback = [0, \"80\", [1]]\n", `f:2:1: net.host_loopback: entry 3 is a list, expected a port number from 1 to 65535
f:2:18: net.host_loopback: entry 1 is the number 0, expected a port number from 1 to 65535
f:2:21: net.host_loopback: entry 2 is the string "80", expected a port number from 1 to 65535`},
		{"[net]\nhost_loopback = 80\n", `f:2:17: net.host_loopback: is the number 80, expected a list of port numbers such as [80, 443]; did you mean [80]?`},
		{"[net]\ndns = [\"localhost\"]\n", `f:2:8: net.dns: entry 1 is "localhost", expected an IP address, or IP:port`},
		{"[registry]\nrepo = \"https://r.example\"\n", `f:2:8: registry.repo: is "https://r.example", expected HOST[:PORT][/PATH] without a scheme`},
		{"[vmm]\nkernel = \"a\"\nkernel = \"b\"\n", `f:3:1: vmm.kernel: is set twice, first on line 2`},
		{"[vmm]\n[net]\n[vmm]\n", `f:3:2: vmm: is opened again, first on line 1; a section may be written once`},
		{"[executor.share]\n\"opt\" = \"/srv\"\n\"/x\" = 1\n\"/y\" = \"srv\"\n", `f:2:1: executor.share."opt": the path in the guest is "opt", expected an absolute path
f:3:8: executor.share."/x": is the number 1, expected a directory of the host as a string
f:4:8: executor.share."/y": is "srv", expected an absolute path`},
		{"\"a\\u001b.b\" = 1\n", `f:1:1: "a\u001B.b": is not a configuration key`},
		{"[executor]\nvm = { cpus = 1 }\n[executor.vm]\nmem = \"1G\"\n", `f:3:2: executor.vm: not TOML: key vm should be a table, not a value`},
		{"[vmm]\naccel = kvm\nchanel = \"auto\"\n", `f:2:9: not TOML: unexpected character U+006B 'k' at start of value
f:3:1: vmm.chanel: is not a configuration key; did you mean "channel"?`},
		{"é = 1", "f:1:1: not TOML: "},
		{"[vmm]\naccel = \"é\x80\"", "f:2:11: not TOML: "},
	} {
		got, err := conf.Parse("f", []byte(c.in))
		if err == nil {
			t.Errorf("%q was accepted as %+v", c.in, got)
			continue
		}
		if strings.HasSuffix(c.want, "not TOML: ") { // the library's own words follow
			if !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%q:\ngot  %s\nwant %s…", c.in, err, c.want)
			}
			continue
		}
		if err.Error() != c.want {
			t.Errorf("%q:\ngot  %s\nwant %s", c.in, err, c.want)
		}
		if fault.KindOf(err) != fault.Usage || fault.HintOf(err) == "" {
			t.Errorf("%q: kind %s, hint %q", c.in, fault.KindOf(err), fault.HintOf(err))
		}
	}
}

func TestAllProblemsAtOnce(t *testing.T) {
	_, err := conf.Parse("f", []byte(`[egres]
x = 1
[executor.vm]
max-mem = "1G"
cpus = "4"
broken =
[net]
mode = "swich"
`))
	var got []string
	for _, p := range conf.ProblemsOf(err) {
		got = append(got, p.Key)
	}
	if d := cmp.Diff([]string{"egres", "executor.vm.max-mem", "executor.vm.cpus", "", "net.mode"}, got); d != "" {
		t.Errorf("keys of the problems (-want +got)\n%s\n%v", d, err)
	}
}

func TestTooLong(t *testing.T) {
	_, err := conf.Parse("f", make([]byte, 1<<21))
	if err == nil || !strings.Contains(err.Error(), "not a configuration") {
		t.Errorf("got %v", err)
	}
}

func TestWarnings(t *testing.T) {
	c, err := conf.Parse("f", []byte("[vmm]\nchannel = \"vsock\"\n[build]\njobs = 2\n[net]\nmode = \"tap\"\n[executor]\n[executor.share]\n\"/a\" = \"/b\"\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{`f:2: vmm.channel = "vsock" is not acted on yet`, "f:4: build.jobs is not acted on yet"}
	if d := cmp.Diff(want, c.Warnings); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// TestActedOn guards the promise of which keys do something now.
func TestActedOn(t *testing.T) {
	acted := map[string]bool{}
	for _, k := range conf.Keys() {
		acted[k.Name] = k.Acted
		if k.Doc == "" || !strings.HasSuffix(k.Doc, ".") {
			t.Errorf("%s: doc %q is no sentence", k.Name, k.Doc)
		}
		if strings.HasPrefix(k.Name, "vmm.") && !k.Acted {
			t.Errorf("%s: everything in [vmm] is acted on", k.Name)
		}
	}
	for _, name := range []string{"state_dir", "net.mode", "net.host_loopback", "net.dns", "local.dir", "registry.repo", "docker.repo",
		"executor.builds_dir", "executor.cache_dir", "executor.image_cache_idle_secs", "images.idle_secs", "executor.vm.cpus",
		"executor.vm.mem", "executor.vm.max_cpus", "executor.vm.max_mem", "executor.vm.hostname", "executor.vm.user", "executor.vm.nested"} {
		if !acted[name] {
			t.Errorf("%s is not acted on", name)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(conf.Example()))
	f.Add([]byte("[a]\nb.c = [1, [2], {x = 1}]\n[[d]]\n\"e.f\" = '''x\n'''\n"))
	f.Add([]byte("[executor.share]\n\"/a\" = \"/b\"\n[egress]\nallow_ip = [\"10.0.0.0/8:1\"]\n"))
	f.Add([]byte("x = [[[\n\n]\n= \n[vmm"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := conf.Parse("f", data)
		if err != nil {
			ps := conf.ProblemsOf(err)
			if len(ps) == 0 {
				t.Fatalf("an error without problems: %v", err)
			}
			for _, p := range ps {
				if p.Text == "" || len(data) <= 1<<20 && (p.Line < 1 || p.Col < 1) {
					t.Fatalf("a problem without place or text: %+v", p)
				}
			}
			return
		}
		var m map[string]any
		if err := toml.Unmarshal(trimBOM(data), &m); err != nil {
			t.Fatalf("accepted what is not TOML: %v", err)
		}
		again, err := conf.Parse("f", []byte(c.Dump(true)))
		if err != nil {
			t.Fatalf("its own dump is refused: %v\n%s", err, c.Dump(true))
		}
		if d := diff(c, again); d != "" {
			t.Fatalf("read back from its dump (-want +got)\n%s", d)
		}
	})
}

func trimBOM(b []byte) []byte { return []byte(strings.TrimPrefix(string(b), "\xef\xbb\xbf")) }
