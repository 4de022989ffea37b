package hubconf

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fsx"
)

// UI are the keys of the web UI (fleet-reference, "ui_addr in hub.toml turns
// the listener on …").
type UI struct {
	UIAddr    string `toml:"ui_addr"`     // HOST:PORT of the web UI; "" = off
	UIURL     string `toml:"ui_url"`      // origin at which browsers reach it; "" = http(s)://ui_addr
	UITLSCert string `toml:"ui_tls_cert"` // PEM files; none = tls_cert and tls_key
	UITLSKey  string `toml:"ui_tls_key"`
}

// OIDC is [oidc]: the provider through which people sign in.
type OIDC struct {
	Issuer           string `toml:"issuer"`
	ClientID         string `toml:"client_id"`
	ClientSecretFile string `toml:"client_secret_file"`
	DefaultRole      string `toml:"default_role"` // of whom no grant admits: viewer or none
}

// CallbackPath is where the provider sends browsers back to.
const CallbackPath = "/auth/callback"

// UICertificate is the files of the web UI's own certificate or, without them,
// the node listener's; "" = it serves plain text.
func (c *Config) UICertificate() (cert, key string) {
	if c.UITLSCert != "" {
		return c.UITLSCert, c.UITLSKey
	}
	return c.TLSCert, c.TLSKey
}

// Origin is ui_url as a browser writes an origin.
func (c *Config) Origin() (string, error) {
	cert, _ := c.UICertificate()
	if c.UIURL == "" {
		host, port, err := net.SplitHostPort(c.UIAddr)
		if err != nil {
			return "", err
		}
		ip, _ := netip.ParseAddr(host)
		if ip.IsUnspecified() {
			return "", fmt.Errorf("is needed, since ui_addr %s stands for all addresses: the URL at which browsers reach the UI", c.UIAddr)
		}
		if port == "0" {
			return "", errors.New("is needed, since ui_addr leaves the port to the system")
		}
		scheme := "http"
		if cert != "" {
			scheme = "https"
		}
		return origin(scheme+"://"+c.UIAddr, cert != "")
	}
	return origin(c.UIURL, cert != "")
}

// origin normalizes the URL of an origin as browsers do (WHATWG URL, host
// parsing and serializing): a state-changing request's Origin is compared with
// it, byte for byte.
func origin(s string, tls bool) (string, error) {
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("%.200q is no URL", s)
	}
	if u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "" || u.Opaque != "" {
		return "", fmt.Errorf("%.200q is not https://HOST[:PORT]", s)
	}
	if u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Contains(s, "#") || u.Path != "" && u.Path != "/" {
		return "", fmt.Errorf("%.200q has more than https://HOST[:PORT]: a path, a query, a fragment or a user", u.Redacted())
	}
	host, err := browserHost(u.Hostname(), strings.HasPrefix(u.Host, "["))
	if err != nil {
		return "", err
	}
	port := u.Port()
	if port != "" {
		n, err := strconv.Atoi(port)
		if err != nil || n < 1 || n > 65535 {
			return "", fmt.Errorf("%.40q is no port", port)
		}
		port = strconv.Itoa(n)
	} else if strings.HasSuffix(u.Host, ":") {
		return "", fmt.Errorf("%.200q has a colon without a port", s)
	}
	if port == map[string]string{"https": "443", "http": "80"}[u.Scheme] {
		port = ""
	}
	if u.Scheme == "http" {
		if tls {
			return "", fmt.Errorf("%.200q is not https, and the UI has a certificate", s)
		}
		if !localHost(host) {
			return "", fmt.Errorf("%.200q: http is for localhost, 127.0.0.0/8 and [::1] alone", s)
		}
	}
	if port != "" {
		host += ":" + port
	}
	return u.Scheme + "://" + host, nil
}

// browserHost is a host as browsers write it.
func browserHost(h string, brackets bool) (string, error) {
	if brackets {
		ip, err := netip.ParseAddr(h)
		if err != nil || !ip.Is6() || ip.Zone() != "" {
			return "", fmt.Errorf("[%.80s] is no IPv6 address", h)
		}
		if ip.Is4In6() {
			return "", fmt.Errorf("[%.80s] is an IPv4 address in IPv6: write it as %s", h, ip.Unmap())
		}
		return "[" + ip.String() + "]", nil
	}
	h = strings.ToLower(h)
	if len(h) > 253 {
		return "", errors.New("the host has more than 253 characters")
	}
	for _, label := range strings.Split(strings.TrimSuffix(h, "."), ".") {
		if label == "" || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" || len(label) > 63 {
			return "", fmt.Errorf("%.80q is no host name in ASCII (one of other letters is written as xn--…)", h)
		}
	}
	last := h[strings.LastIndexByte(strings.TrimSuffix(h, "."), '.')+1:]
	last = strings.TrimSuffix(last, ".")
	if numeric(last) {
		// Browsers read 127.1 and 0x7f.0.0.1 as addresses, and write another.
		if ip, err := netip.ParseAddr(h); err != nil || !ip.Is4() || ip.String() != h {
			return "", fmt.Errorf("%.80q ends with a number, and is not an IPv4 address of four decimal numbers", h)
		}
	}
	return h, nil
}

func numeric(label string) bool {
	if rest, ok := strings.CutPrefix(label, "0x"); ok {
		return strings.Trim(rest, "0123456789abcdef") == ""
	}
	return strings.Trim(label, "0123456789") == ""
}

func localHost(h string) bool {
	if h == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(strings.Trim(h, "[]"))
	return err == nil && ip.IsLoopback()
}

func (c *Config) validateUI(bad func(key, format string, a ...any)) {
	if c.UIAddr == "" {
		for key, v := range map[string]string{"ui_url": c.UIURL, "ui_tls_cert": c.UITLSCert, "ui_tls_key": c.UITLSKey} {
			if v != "" {
				bad(key, "is of the web UI, which ui_addr turns on")
			}
		}
		if c.OIDC != nil {
			bad("oidc", "is of the web UI, which ui_addr turns on")
			c.OIDC.validate(bad)
		}
		return
	}
	cert, _ := c.UICertificate()
	if err := checkAddr(c.UIAddr); err != nil {
		bad("ui_addr", "%v", err)
		return
	}
	if cert == "" && !Loopback(c.UIAddr) {
		bad("ui_addr", "%s is not on loopback, and without ui_tls_cert and ui_tls_key, or tls_cert and tls_key, the UI is served on loopback alone", c.UIAddr)
	}
	if (c.UITLSCert == "") != (c.UITLSKey == "") {
		bad("ui_tls_cert", "ui_tls_cert and ui_tls_key go together")
	}
	at, err := c.Origin()
	if err != nil {
		bad("ui_url", "%v", err)
	}
	if c.OIDC != nil {
		if err == nil && !strings.HasPrefix(at, "https://") {
			bad("oidc", "needs a ui_url that is https, not %s: the cookies of a sign-in are for https alone", at)
		}
		c.OIDC.validate(bad)
	}
}

func (o *OIDC) validate(bad func(key, format string, a ...any)) {
	if err := CheckIssuer(o.Issuer); err != nil {
		bad("oidc.issuer", "%v", err)
	}
	if o.ClientID == "" || len(o.ClientID) > 1024 {
		bad("oidc.client_id", "is needed: what the provider calls this hub, 1 to 1024 bytes")
	}
	if !filepath.IsAbs(o.ClientSecretFile) {
		bad("oidc.client_secret_file", "%q is not an absolute path", o.ClientSecretFile)
	}
	switch hub.Role(o.DefaultRole) {
	case "", hub.NoRole, hub.Viewer:
	case hub.Operator:
		bad("oidc.default_role", "operator would make everyone whom the provider signs in an operator: grant it with vk-hub accounts grant")
	default:
		bad("oidc.default_role", "%q is neither viewer nor none", o.DefaultRole)
	}
}

// CheckIssuer says what is wrong with an issuer's URL: it is https, or http on
// loopback, with no query or fragment (OpenID Connect Discovery 1.0, 2).
func CheckIssuer(s string) error {
	if s == "" {
		return errors.New("is needed: the provider's issuer URL, as its discovery document names it")
	}
	u, err := url.Parse(s)
	if err != nil || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.ForceQuery || strings.Contains(s, "#") {
		return errors.New("is not https://HOST/PATH, without a user, a query and a fragment")
	}
	if !SafeURL(u) {
		return fmt.Errorf("%.200q is not https; http is for a provider on loopback alone", s)
	}
	return nil
}

// SafeURL says whether secrets may be sent to a URL: https, or http on loopback.
func SafeURL(u *url.URL) bool {
	return u.Host != "" && u.User == nil && (u.Scheme == "https" || u.Scheme == "http" && localHost(strings.ToLower(u.Hostname())))
}

// Role is default_role.
func (o *OIDC) Role() hub.Role { return cmp.Or(hub.Role(o.DefaultRole), hub.NoRole) }

// maxSecret is the most bytes of a client_secret_file.
const maxSecret = 4096

// Secret reads client_secret_file, which is no symbolic link; warning is what
// an operator should know of it, "" = nothing.
func (o *OIDC) Secret() (secret, warning string, err error) {
	fail := func(err error) (string, string, error) {
		return "", "", fault.New(fault.Usage, "reading client_secret_file of [oidc]").Because(err).Hint("put the secret that the provider gave for this client there, mode 0600")
	}
	info, err := os.Lstat(o.ClientSecretFile)
	if err != nil {
		return fail(err)
	}
	if info.Mode().Type() == fs.ModeSymlink {
		return fail(fmt.Errorf("%s is a symbolic link", o.ClientSecretFile))
	}
	b, err := fsx.ReadFile(o.ClientSecretFile, maxSecret)
	if err != nil {
		return fail(err)
	}
	if b = bytes.TrimSpace(b); len(b) == 0 {
		return fail(fmt.Errorf("%s is empty", o.ClientSecretFile))
	}
	if info.Mode().Perm()&0o044 != 0 {
		warning = fmt.Sprintf("client_secret_file %s can be read by others (mode %04o): chmod 600 %s", o.ClientSecretFile, info.Mode().Perm(), o.ClientSecretFile)
	}
	return string(b), warning, nil
}
