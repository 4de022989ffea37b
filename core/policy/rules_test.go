package policy_test

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/policy"
)

func TestParseName(t *testing.T) {
	for in, want := range map[string]string{
		"example.com":           "example.com",
		"Example.COM":           "example.com",
		"com":                   "com",
		"in-addr.arpa":          "in-addr.arpa",
		"xn--bcher-kva.example": "xn--bcher-kva.example",
		"_sip._tcp.example.com": "_sip._tcp.example.com",
		"3.example":             "3.example",
	} {
		if got, err := policy.ParseName(in); err != nil || got != want {
			t.Errorf("ParseName(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		"":                                     "an empty name",
		"https://Example.com/x":                "a URL: write the name alone (write example.com)",
		"https://u:p@example.com:8443/":        "a URL: write the name alone (write example.com)",
		"*.example.com":                        "a pattern: a suffix matches the names below it already (write example.com)",
		"*":                                    "a pattern: a suffix matches the names below it already",
		"*foo.com":                             "a pattern: a suffix matches the names below it already",
		"a.*.com":                              "a pattern: a suffix matches the names below it already",
		"**.com":                               "a pattern: a suffix matches the names below it already",
		"[a]":                                  "a pattern: a suffix matches the names below it already",
		".com":                                 "a leading dot: a suffix matches the names below it already (write com)",
		"example.com:443":                      "a port, which a name cannot have (write example.com)",
		"example.com.":                         "a trailing dot (write example.com)",
		".":                                    "a trailing dot",
		"10.0.0":                               "not a DNS suffix: it ends with a number (an IPv4 network belongs in allow_ip)",
		"a..b":                                 "an empty label between two dots",
		"example.com/path":                     "a path: write the name alone (write example.com)",
		"192.0.2.1":                            "an address, which belongs in allow_ip",
		"192.0.2.1:80":                         "an address, which belongs in allow_ip",
		"2001:db8::1":                          "an address, which belongs in allow_ip",
		"10.0.0.0/8":                           "a network, which belongs in allow_ip",
		"bücher.example":                       "not ASCII: write an internationalized name in its xn-- form, as it is looked up",
		"-a.example":                           `the label "-a" begins or ends with a hyphen`,
		"a b":                                  `not a DNS suffix: the label "a b" has " " in it`,
		`a\.b`:                                 `not a DNS suffix: the label "a\\" has "\\" in it`,
		strings.Repeat("a", 64) + ".x":         `the label "` + strings.Repeat("a", 64) + `" is longer than 63 bytes`,
		strings.Repeat("a.", 127) + "abcdefgh": "longer than a DNS name can be (262 bytes, at most 253)",
	} {
		if got, err := policy.ParseName(in); err == nil || err.Error() != want {
			t.Errorf("ParseName(%q) = %q, %v; want %s", in, got, err, want)
		}
	}
}

func TestParseIP(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.0/8":            "10.0.0.0/8",
		"10.1.2.3/8":            "10.0.0.0/8",
		"192.0.2.7":             "192.0.2.7/32",
		"192.0.2.7:443":         "192.0.2.7/32:443",
		"10.10.140.49/32:65535": "10.10.140.49/32:65535",
		"0.0.0.0/0":             "0.0.0.0/0",
	} {
		got, err := policy.ParseIP(in)
		if err != nil || got.String() != want {
			t.Errorf("ParseIP(%q) = %v, %v; want %s", in, got, err, want)
		}
		if again, err := policy.ParseIP(got.String()); err != nil || again != got {
			t.Errorf("ParseIP(%q) = %v, %v: the canonical form does not read back", got, again, err)
		}
	}
	const v6 = "IPv6, which guests do not have: write an IPv4 network"
	const not4 = "not an IPv4 network such as 10.0.0.0/8"
	for in, want := range map[string]string{
		"":                    not4,
		"2001:db8::/32":       v6,
		"2001:db8::1":         v6,
		"::ffff:10.0.0.1":     v6,
		"[2001:db8::1]:443":   v6,
		"2001:db8::/32:443":   v6,
		"[2001:db8::]/32":     v6,
		"::/0":                v6,
		"10.0.0.0/33":         not4,
		"10.0.0/8":            not4,
		"010.0.0.1":           not4,
		"10.0.0.0/8:0":        `the port "0" is not a number from 1 to 65535`,
		"10.0.0.0/8:":         `the port "" is not a number from 1 to 65535`,
		"10.0.0.0/8:http":     `the port "http" is not a number from 1 to 65535`,
		"10.0.0.0/8:65536":    `the port "65536" is not a number from 1 to 65535`,
		"10.0.0.0/8:+1":       `the port "+1" is not a number from 1 to 65535`,
		"10.0.0.0/8:0443":     `the port "0443" is not a number from 1 to 65535`,
		"example.com":         "a name, which belongs in allow_name",
		"tcp://10.0.0.1":      "a URL: write the network alone, such as 192.0.2.7/32 or 192.0.2.7/32:443",
		"10.0.0.1-10.0.0.255": not4,
	} {
		if got, err := policy.ParseIP(in); err == nil || err.Error() != want {
			t.Errorf("ParseIP(%q) = %v, %v; want %s", in, got, err, want)
		}
	}
}

func TestSplitList(t *testing.T) {
	for in, want := range map[string][]string{
		"":                                 nil,
		" ,\t\n,":                          nil,
		"# all of it\n  # a comment":       nil,
		"crates.io debian.org github.com":  {"crates.io", "debian.org", "github.com"},
		"crates.io,debian.org,,github.com": {"crates.io", "debian.org", "github.com"},
		"crates.io          # Rust registry, and more\r\nstatic.crates.io#x\ndebian.org\t10.0.0.0/8": {"crates.io", "static.crates.io", "debian.org", "10.0.0.0/8"},
	} {
		if d := cmp.Diff(want, policy.SplitList(in)); d != "" {
			t.Errorf("SplitList(%q) (-want +got):\n%s", in, d)
		}
	}
}

func TestParseSwitch(t *testing.T) {
	for in, want := range map[string]bool{"1": true, "true": true, "YES": true, "On": true, "": false, "0": false, "no": false, "off": false, " false ": false} {
		if got, err := policy.ParseSwitch("MICROVM_EGRESS_AUDIT", in); err != nil || got != want {
			t.Errorf("ParseSwitch(%q) = %v, %v", in, got, err)
		}
	}
	_, err := policy.ParseSwitch("MICROVM_EGRESS_AUDIT", "maybe")
	if err == nil || !strings.Contains(err.Error(), "MICROVM_EGRESS_AUDIT") || fault.KindOf(err) != fault.Usage || fault.HintOf(err) == "" {
		t.Errorf("ParseSwitch(maybe) = %v", err)
	}
}

// TestAbsentAndEmpty is the load-bearing part: what a list that is missing
// means, and what an empty one does.
func TestAbsentAndEmpty(t *testing.T) {
	name, addr := "a.example", netip.MustParseAddrPort("192.0.2.1:443")
	for _, c := range []struct {
		what                     string
		l                        policy.Lists
		restricted, nameOK, ipOK bool
	}{
		{"both absent", policy.Lists{}, false, true, true},
		{"names empty", policy.Lists{Names: []string{}}, true, false, false},
		{"ips empty", policy.Lists{IPs: []policy.IPRule{}}, true, false, false},
		{"names listed, ips absent", policy.Lists{Names: []string{"example"}}, true, true, false},
		{"ips listed, names absent", policy.Lists{IPs: ips(t, "192.0.2.0/24")}, true, false, true},
		{"both listed", policy.Lists{Names: []string{"example"}, IPs: ips(t, "192.0.2.0/24")}, true, true, true},
	} {
		y := policy.NodeCap(policy.Run, c.l)
		if y.Restricted() != c.restricted || y.AllowsName(name) != c.nameOK || y.AllowsIP(addr) != c.ipOK {
			t.Errorf("%s: restricted %v, name %v, ip %v", c.what, y.Restricted(), y.AllowsName(name), y.AllowsIP(addr))
		}
		b, err := json.Marshal(c.l)
		if err != nil {
			t.Fatal(err)
		}
		var back policy.Lists
		if err := json.Unmarshal(b, &back); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		if d := cmp.Diff(c.l, back, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
			t.Errorf("%s through JSON %s (-want +got):\n%s", c.what, b, d)
		}
	}
}

func TestListsFromAHubAreChecked(t *testing.T) {
	for _, in := range []string{`{"names":["*.x"]}`, `{"ips":["::/0"]}`, `{"names":"x"}`, `{"names":null}`, `{"name":["a.b"]}`, `null`, `[]`} {
		var l policy.Lists
		if err := json.Unmarshal([]byte(in), &l); err == nil {
			t.Errorf("%s is taken as %+v", in, l)
		}
	}
}

func TestVariables(t *testing.T) {
	none := func(string) (string, bool) { return "", false }
	of := func(m map[string]string) func(string) (string, bool) {
		return func(k string) (string, bool) { v, ok := m[k]; return v, ok }
	}
	empty := map[string]string{"MICROVM_EGRESS_ALLOW_NAME": ""}
	comment := map[string]string{"MICROVM_EGRESS_ALLOW_NAME": " # nothing yet\n"}
	for _, c := range []struct {
		what string
		vm   string
		vars func(string) (string, bool)
		want policy.Lists
	}{
		{"a job without", "", none, policy.Lists{}},
		{"a service without", "db", none, policy.Lists{}},
		{"a job, empty", "", of(empty), policy.Lists{}},
		{"a service, empty", "db", of(empty), policy.Lists{Names: []string{}}},
		{"a job, a comment alone", "", of(comment), policy.Lists{}},
		{"a service, a comment alone", "db", of(comment), policy.Lists{Names: []string{}}},
		{"a job, a list twice over", "", of(map[string]string{"MICROVM_EGRESS_ALLOW_NAME": "B.example a.example,b.example"}), policy.Lists{Names: []string{"b.example", "a.example"}}},
	} {
		got, bad := policy.ParseVariables(policy.Run, c.vm, c.vars)
		if d := cmp.Diff(c.want, got); d != "" || bad != nil {
			t.Errorf("%s: %v (-want +got):\n%s", c.what, bad, d)
		}
	}
	b, bad := policy.ParseVariables(policy.Build, "", of(map[string]string{"MICROVM_BUILD_EGRESS_ALLOW_IP": "10.0.0.0/8", "MICROVM_EGRESS_ALLOW_NAME": "x"}))
	if bad != nil || b.Names != nil || len(b.IPs) != 1 {
		t.Errorf("build: %+v, %v", b, bad)
	}
}

func TestInvalidEntriesNameTheirSource(t *testing.T) {
	_, bad := policy.ParseCap(policy.Build, []string{"ok.example", "https://x.example"}, []string{"::1"}, "/etc/virtkit/config.toml:7", "/etc/virtkit/config.toml:9")
	_, more := policy.ParseVariables(policy.Run, "db", func(k string) (string, bool) { return "*.x", k == "MICROVM_EGRESS_ALLOW_NAME" })
	_, flags := policy.ParseFlags([]string{"a.example."}, nil, false)
	err := policy.Refuse(append(append(bad, more...), flags...))
	want := `/etc/virtkit/config.toml:7: [egress.build] allow_name: invalid entry "https://x.example": a URL: write the name alone (write x.example)
/etc/virtkit/config.toml:9: [egress.build] allow_ip: invalid entry "::1": IPv6, which guests do not have: write an IPv4 network
service db: MICROVM_EGRESS_ALLOW_NAME: invalid entry "*.x": a pattern: a suffix matches the names below it already (write x)
--allow-name: invalid entry "a.example.": a trailing dot (write a.example)`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	if fault.KindOf(err) != fault.Usage || fault.HintOf(err) == "" {
		t.Errorf("kind %s, hint %q", fault.KindOf(err), fault.HintOf(err))
	}
	var e *policy.EntryError
	if !errors.As(err, &e) || e.Entry != "https://x.example" {
		t.Errorf("no EntryError in it: %+v", e)
	}
	if policy.Refuse(nil) != nil {
		t.Error("nothing invalid is an error")
	}
	got := policy.Invalid(policy.Run, append(bad, more...))
	if d := cmp.Diff([]policy.Refusal{{Variable: "MICROVM_EGRESS_ALLOW_NAME", Entry: "*.x", Dimension: policy.DimName, Phase: policy.Run, Service: "db", Reason: policy.InvalidEntry}},
		got, cmp.AllowUnexported(policy.Refusal{})); d != "" {
		t.Errorf("Invalid (-want +got):\n%s", d)
	}
}

func TestFlags(t *testing.T) {
	if l, _ := policy.ParseFlags(nil, nil, false); l.Restricted() {
		t.Error("no flag restricts")
	}
	l, _ := policy.ParseFlags(nil, nil, true)
	if !l.Restricted() || l.Names == nil || l.IPs == nil {
		t.Errorf("--egress-restrict alone: %+v", l)
	}
	l, _ = policy.ParseFlags([]string{"a.example"}, nil, true)
	if len(l.Names) != 1 {
		t.Errorf("--egress-restrict drops --allow-name: %+v", l)
	}
}

func ips(t testing.TB, in ...string) []policy.IPRule {
	t.Helper()
	l, bad := policy.ParseIPs(policy.Source{}, in)
	if bad != nil {
		t.Fatal(bad[0])
	}
	return l
}

func FuzzParseName(f *testing.F) {
	for _, s := range []string{"example.com", "*.x", "https://a/b", "a.b.", "ünï.x", "a:1", "10.0.0.0/8", "-", "a\x00b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := policy.ParseName(s)
		if err != nil {
			if err.Error() == "" || len(err.Error()) > 3000 {
				t.Errorf("ParseName(%q): an error of %d bytes", s, len(err.Error()))
			}
			return
		}
		if again, err := policy.ParseName(n); err != nil || again != n {
			t.Errorf("ParseName(%q) = %q, which reads as %q, %v", s, n, again, err)
		}
		if !strings.EqualFold(n, s) || policy.CleanName(n) != n {
			t.Errorf("ParseName(%q) = %q", s, n)
		}
		y := policy.NodeCap(policy.Run, policy.Lists{Names: []string{n}})
		if !y.AllowsName(n) || !y.AllowsName("w."+n) || y.AllowsName("w"+n) || y.AllowsName(n+".test") {
			t.Errorf("the rule %q does not match whole labels", n)
		}
	})
}

func FuzzParseIP(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "10.0.0.1", "1.2.3.4/5:6", "::1/128", "[::1]:4", "a.b", "1.1.1.1:", "0.0.0.0/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := policy.ParseIP(s)
		if err != nil {
			return
		}
		if again, err := policy.ParseIP(r.String()); err != nil || again != r {
			t.Errorf("ParseIP(%q) = %s, which reads as %v, %v", s, r, again, err)
		}
		y := policy.NodeCap(policy.Run, policy.Lists{IPs: []policy.IPRule{r}})
		in := netip.AddrPortFrom(r.Net.Addr(), max(r.Port, 1))
		if !y.AllowsIP(in) {
			t.Errorf("%s does not allow %s", r, in)
		}
		if r.Port != 0 && (y.AllowsIP(netip.AddrPortFrom(r.Net.Addr(), r.Port^1)) || y.AllowsIP(netip.AddrPortFrom(r.Net.Addr(), 0))) {
			t.Errorf("%s allows another port", r)
		}
	})
}

func FuzzSplitList(f *testing.F) {
	f.Add("a, b\t#c\nd")
	f.Fuzz(func(t *testing.T, s string) {
		for _, e := range policy.SplitList(s) {
			if e == "" || strings.ContainsAny(e, " ,\t\r\n#") {
				t.Errorf("SplitList(%q) has %q", s, e)
			}
		}
	})
}
