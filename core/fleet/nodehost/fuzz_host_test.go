package nodehost_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fleet/nodehost"
)

// FuzzHostFiles reads any files of the host for what a node tells of it: what is
// told can be sent.
func FuzzHostFiles(f *testing.F) {
	names := []string{"/etc/passwd", "/etc/group", "/proc/self/mountinfo", "/proc/cpuinfo", "/proc/loadavg", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io",
		"/proc/diskstats", "/proc/meminfo", "/sys/devices/system/node/node0/meminfo", "/sys/devices/system/node/node0/cpulist"}
	for n, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			b = []byte("some avg10=0.1 avg60=NaN total=1\nfull avg10=1e999\n")
		}
		f.Add(uint8(n), b[:min(len(b), 2000)])
	}
	f.Add(uint8(11), []byte("0-9223372036854775807,-5-3,7"))
	f.Add(uint8(2), []byte(`36 35 98:0 /mnt1 /mnt2\040\011\999 rw - ext3 /dev/root rw`))
	f.Add(uint8(10), []byte("Node 0 MemTotal: 9223372036854775807 kB"))
	// The other files are good.
	root := files(f, map[string]string{"etc/passwd": passwd, "etc/group": groups, "proc/cpuinfo": "processor : 0\nmodel name : x\n"})
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		name := names[int(which)%len(names)]
		was, had := os.ReadFile(root.Path(name))
		if err := os.MkdirAll(filepath.Dir(root.Path(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root.Path(name), data, 0o644); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if had == nil {
				_ = os.WriteFile(root.Path(name), was, 0o644)
			}
		}()
		u, ok, err := root.LookupUser("ci")
		if ok && (err != nil || u.Name != "ci" || u.UID < 0 || u.GID < 0) {
			t.Errorf("%+v, %v", u, err)
		}
		if gs, err := root.GroupsOf(u); err == nil && (len(gs) == 0 || gs[0] != u.GID) {
			t.Errorf("groups %v of %+v", gs, u)
		}
		nodehost.Points(root)
		var told []any
		n, model, err := root.CPUs()
		if err == nil && n < 1 {
			t.Errorf("%d processors", n)
		}
		told = append(told, n, model)
		if nodes, err := root.MemoryNodes(); err == nil {
			for _, m := range nodes {
				if m.Memory < 0 || m.CPUs < 0 {
					t.Errorf("%+v", m)
				}
			}
			told = append(told, nodes)
		}
		if l, err := root.Load1(); err == nil {
			told = append(told, l)
		}
		if p, err := root.Pressure(); err == nil {
			told = append(told, p)
		}
		if _, err := json.Marshal(told); err != nil {
			t.Errorf("it cannot be sent: %v", err)
		}
	})
}

// FuzzUnit reads any unit of a gitlab-runner, with its drop-in.
func FuzzUnit(f *testing.F) {
	f.Add([]byte(systemUnit), []byte("[Service]\nUser=other\nExecStart=\nExecStart=-/usr/bin/x \"a b\" 'c' \\\n  d%%;e ; f\n"))
	f.Add([]byte("[Service]\nExecStart=@/a b"), []byte(`[Service]`+"\n"+`ExecStart="\`))
	root := files(f, map[string]string{"etc/passwd": passwd, "etc/group": groups})
	f.Fuzz(func(t *testing.T, unit, drop []byte) {
		writeIn(root, "/etc/systemd/system/gitlab-runner.service", string(unit))
		writeIn(root, "/etc/systemd/system/gitlab-runner.service.d/x.conf", string(drop))
		u, err := root.FindUnit("gitlab-runner.service")
		if err != nil || u == nil {
			t.Fatalf("%+v, %v", u, err)
		}
		if u.Masked != (len(unit) == 0) || strings.ContainsAny(u.User, "\n") {
			t.Errorf("%+v", u)
		}
		if len(u.Exec) > 0 {
			root.Program(u.Exec[0])
		}
	})
}

// files is a root with those files, for a target's runs to share.
func files(f *testing.F, list map[string]string) nodehost.Root {
	root := nodehost.Root(f.TempDir())
	for p, text := range list {
		writeIn(root, "/"+p, text)
	}
	return root
}
