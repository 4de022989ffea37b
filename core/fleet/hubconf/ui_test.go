package hubconf_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubconf"
)

const tlsPair = "ui_tls_cert = '/c'\nui_tls_key = '/k'\n"

func TestOrigin(t *testing.T) {
	for text, want := range map[string]string{
		"ui_addr = '127.0.0.1:8444'":                                               "http://127.0.0.1:8444",
		"ui_addr = 'localhost:80'":                                                 "http://localhost",
		"ui_addr = '[::1]:8444'":                                                   "http://[::1]:8444",
		"ui_addr = '127.0.0.1:443'\n" + tlsPair:                                    "https://127.0.0.1",
		"ui_addr = '192.0.2.1:8444'\ntls_cert = '/c'\ntls_key = '/k'":              "https://192.0.2.1:8444",
		"ui_addr = '0.0.0.0:8444'\nui_url = 'https://hub.example.com'\n" + tlsPair: "https://hub.example.com",
		"ui_addr = '[::]:1'\nui_url = 'https://Hub.Example.COM:443/'\n" + tlsPair:  "https://hub.example.com",
		"ui_addr = '[::]:1'\nui_url = 'https://hub:08444'\n" + tlsPair:             "https://hub:8444",
		"ui_addr = '[::]:1'\nui_url = 'https://[2001:DB8:0::1]:9'\n" + tlsPair:     "https://[2001:db8::1]:9",
		"ui_addr = '127.0.0.1:1'\nui_url = 'https://behind.a.proxy'":               "https://behind.a.proxy",
		"ui_addr = '127.0.0.1:1'\nui_url = 'http://127.3.2.1:80'":                  "http://127.3.2.1",
		"ui_addr = '127.0.0.1:1'\nui_url = 'http://[0:0::1]:9'":                    "http://[::1]:9",
	} {
		c, err := load(t, text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if got, err := c.Origin(); err != nil || got != want {
			t.Errorf("%q: %s, %v; want %s", text, got, err, want)
		}
	}
}

func TestUIRefusals(t *testing.T) {
	const on, at = "ui_addr = '127.0.0.1:1'\n", "ui_addr = '127.0.0.1:1'\nui_url = "
	const oidc = "[oidc]\nissuer = 'https://login.example.com'\nclient_id = 'vk'\nclient_secret_file = '/s'\n"
	const https = at + "'https://hub.example.com'\n"
	for text, want := range map[string]string{
		"ui_url = 'https://x'": "hub.toml:1: ui_url: is of the web UI, which ui_addr turns on",
		"\nui_tls_cert = '/c'": "hub.toml:2: ui_tls_cert: is of the web UI",
		"ui_tls_key = '/k'":    "ui_tls_key: is of the web UI",
		oidc:                   "hub.toml:1: oidc: is of the web UI",
		"ui_addr = 'x'":        "ui_addr: \"x\" is not HOST:PORT",
		"ui_addr = '0.0.0.0:1'\nui_url = 'https://hub'":                      "ui_addr: 0.0.0.0:1 is not on loopback",
		"ui_addr = '0.0.0.0:1'\n" + tlsPair:                                  "ui_url: is needed, since ui_addr 0.0.0.0:1 stands for all addresses",
		"ui_addr = '[::]:1'\n" + tlsPair:                                     "ui_url: is needed",
		"ui_addr = '127.0.0.1:0'":                                            "ui_url: is needed, since ui_addr leaves the port",
		on + "ui_tls_cert = '/c'":                                            "ui_tls_cert and ui_tls_key go together",
		on + "ui_tls_key = '/k'":                                             "ui_tls_cert and ui_tls_key go together",
		at + "'http://hub.example.com'":                                      "http is for localhost, 127.0.0.0/8 and [::1] alone",
		at + "'http://localhost'\n" + tlsPair:                                "is not https, and the UI has a certificate",
		at + "'ftp://localhost'":                                             "is not https://HOST",
		at + "'hub.example.com'":                                             "is not https://HOST",
		at + "'https://'":                                                    "is not https://HOST",
		at + "'https://hub/ui'":                                              "has more than",
		at + "'https://hub?x'":                                               "has more than",
		at + "'https://hub?'":                                                "has more than",
		at + "'https://hub#'":                                                "has more than",
		at + "'https://me:secret@hub'":                                       "has more than",
		at + "'https://hub:'":                                                "has a colon without a port",
		at + "'https://hub:0'":                                               "is no port",
		at + "'https://hub:65536'":                                           "is no port",
		at + "'https://[::ffff:192.0.2.1]'":                                  "is an IPv4 address in IPv6",
		at + "'https://[fe80::1%25eth0]'":                                    "is no IPv6 address",
		at + "'https://127.1'":                                               "ends with a number",
		at + "'https://0x7f.0.0.1'":                                          "ends with a number",
		at + "'https://2130706433'":                                          "ends with a number",
		at + "'https://127.0.0.01'":                                          "ends with a number",
		at + "'https://127.0.0.1.'":                                          "ends with a number",
		at + "'https://hub.0x1f'":                                            "ends with a number",
		at + "'https://büro.example'":                                        "is no host name in ASCII",
		at + "'https://a..b'":                                                "is no host name",
		on + oidc:                                                            "oidc: needs a ui_url that is https, not http://127.0.0.1:1",
		https + "[oidc]\n":                                                   "oidc.issuer: is needed",
		https + "[oidc]\nclient = 'x'":                                       "oidc.client: is no key of hub.toml",
		https + oidc + "default_role = 'operator'":                           "hub.toml:7: oidc.default_role: operator would make everyone",
		https + oidc + "default_role = 'root'":                               "is neither viewer nor none",
		https + strings.Replace(oidc, "'vk'", "''", 1):                       "oidc.client_id: is needed",
		https + strings.Replace(oidc, "'/s'", "'s'", 1):                      "hub.toml:6: oidc.client_secret_file: \"s\" is not an absolute path",
		https + strings.Replace(oidc, "https://l", "http://l", 1):            "is not https; http is for a provider on loopback alone",
		https + strings.Replace(oidc, ".com'", ".com?a=b'", 1):               "oidc.issuer: is not https://HOST/PATH",
		https + strings.Replace(oidc, ".com'", ".com#'", 1):                  "oidc.issuer: is not https://HOST/PATH",
		https + strings.Replace(oidc, "https://", "https://u:topsecret@", 1): "oidc.issuer: is not https://HOST/PATH",
	} {
		_, err := load(t, text)
		if err == nil || !strings.Contains(err.Error(), want) || fault.KindOf(err) != fault.Usage || strings.Contains(err.Error(), "secret@") {
			t.Errorf("%q: %v (%s), want %q", text, err, fault.KindOf(err), want)
		}
	}
	for _, ok := range []string{oidc, strings.Replace(oidc, "https://login.example.com", "http://127.0.0.1:9/app/1", 1), oidc + "default_role = 'viewer'"} {
		c, err := load(t, https+ok)
		if err != nil || c.OIDC == nil {
			t.Fatalf("%q: %v", ok, err)
		}
		if want := map[bool]hub.Role{true: hub.Viewer, false: hub.NoRole}[strings.Contains(ok, "viewer")]; c.OIDC.Role() != want {
			t.Errorf("role %s, want %s", c.OIDC.Role(), want)
		}
	}
}

func TestClientSecret(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, c := range map[string]struct {
		text       string
		mode       os.FileMode
		bad, warns bool
	}{
		"good":  {" the-secret\n", 0o600, false, false},
		"open":  {"the-secret", 0o644, false, true},
		"group": {"the-secret", 0o640, false, true},
		"empty": {" \n", 0o600, true, false},
		"large": {strings.Repeat("x", 4097), 0o600, true, false},
		"most":  {"the-secret" + strings.Repeat(" ", 4096-10), 0o600, false, false},
	} {
		if err := os.WriteFile(at(name), []byte(c.text), c.mode); err != nil {
			t.Fatal(err)
		}
		secret, warning, err := (&hubconf.OIDC{ClientSecretFile: at(name)}).Secret()
		if (err != nil) != c.bad || !c.bad && secret != "the-secret" || (warning != "") != c.warns || strings.Contains(warning, "the-secret") {
			t.Errorf("%s: %q, %q, %v", name, secret, warning, err)
		}
	}
	if err := os.Symlink("good", at("link")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := (&hubconf.OIDC{ClientSecretFile: at("link")}).Secret(); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("a link: %v", err)
	}
	for _, name := range []string{"link", "none", "."} {
		if _, _, err := (&hubconf.OIDC{ClientSecretFile: at(name)}).Secret(); fault.KindOf(err) != fault.Usage {
			t.Errorf("%s: %v", name, err)
		}
	}
}
