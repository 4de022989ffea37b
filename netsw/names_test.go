package netsw_test

import (
	"bytes"
	"testing"

	"virtkit/core/fault"
	"virtkit/netsw"
	"virtkit/netsw/netswtest"
)

// resolve asks the gateway for a name of the job; "" when there is none.
func resolve(t *testing.T, sw *netsw.Switch, g *netswtest.Guest, name string) string {
	t.Helper()
	r := g.Ask(t, at(sw, 53), dnsQuery(7, name, 1))
	if r[3]&15 != 0 {
		return ""
	}
	if len(r) < 16 || r[7] != 1 {
		t.Fatalf("A %s = % x, want one record", name, r)
	}
	for _, p := range sw.Ports() {
		if a := p.Addr().As4(); bytes.HasSuffix(r, a[:]) {
			return p.Name()
		}
	}
	t.Fatalf("A %s = % x, nobody's address", name, r)
	return ""
}

// The job's guest is "build" and has its hostname, unless a service is called
// either; services come and go while it runs.
func TestServicesTakeTheNamesThatTheJobYields(t *testing.T) {
	up := nxdomain(t)
	sw := open(t, netsw.Config{Upstreams: up})
	job, err := sw.AddPort(netsw.PortConfig{Name: "job", Yields: []string{"build"}})
	if err != nil {
		t.Fatal(err)
	}
	g := netswtest.New(t, job.File(), job.Net())
	job.CloseFile()
	if err := job.AddYields("Runner-1.", "build"); err != nil {
		t.Fatal(err)
	}
	want := func(when string, names map[string]string) {
		t.Helper()
		for n, p := range names {
			if got := resolve(t, sw, g, n); got != p {
				t.Errorf("%s: %s is %q, want %q", when, n, got, p)
			}
		}
	}
	ptr := func(p *netsw.Port, name string) {
		t.Helper()
		a := p.Addr().As4()
		r := g.Ask(t, at(sw, 53), dnsQuery(7, reverse(a), 12))
		if !bytes.HasSuffix(r, append(append([]byte{byte(len(name))}, name...), 0)) {
			t.Errorf("PTR of %s = % x, want %s", p.Name(), r, name)
		}
	}
	want("alone", map[string]string{"BUILD": "job", "runner-1": "job", "db": ""})
	ptr(job, "build")

	db, err := sw.AddPort(netsw.PortConfig{Name: "db", Hostname: "postgres", Aliases: []string{"db", "Build"}})
	if err != nil {
		t.Fatal(err)
	}
	want("with a service called build", map[string]string{"build": "db", "runner-1": "job", "db": "db", "postgres": "db"})
	ptr(job, "runner-1")
	ptr(db, "postgres")

	if err := db.AddNames("late"); err != nil {
		t.Fatal(err)
	}
	cache, err := sw.AddPort(netsw.PortConfig{Name: "cache", Hostname: "redis", Yields: []string{"late", "spare"}})
	if err != nil {
		t.Fatal(err)
	}
	want("late names", map[string]string{"late": "db", "spare": "cache"})
	if err := cache.AddNames("new", "postgres"); fault.KindOf(err) != fault.Conflict {
		t.Errorf("AddNames of a taken name = %v, want a conflict", err)
	}
	want("after a conflict", map[string]string{"new": "", "postgres": "db"})

	db.Remove()
	want("when it is gone", map[string]string{"build": "job", "late": "cache", "db": "", "postgres": ""})
	ptr(job, "build")
	if err := db.AddNames("ghost"); err == nil {
		t.Error("a removed port took a name")
	}
}
