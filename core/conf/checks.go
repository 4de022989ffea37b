package conf

import (
	"encoding/base64"
	"errors"
	"net/netip"
	"strconv"
	"strings"

	"virtkit/core/lazyre"
)

// The checks of single strings. Each error completes "is X, …" and says what
// was expected.

var (
	hostLabel = lazyre.New(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
	dnsLabel  = lazyre.New(`^[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?$`)
	userName  = lazyre.New(`^[A-Za-z0-9_][A-Za-z0-9_.-]*\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$`)
	label     = lazyre.New(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	repo      = lazyre.New(`^[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*$`)
)

func checkHostname(s string) error {
	if len(s) > 64 || !allLabels(s, hostLabel) {
		return errors.New("expected a host name of letters, digits, hyphens and dots, at most 64")
	}
	return nil
}

func allLabels(s string, re *lazyre.RE) bool {
	for _, l := range strings.Split(s, ".") {
		if !re.MatchString(l) {
			return false
		}
	}
	return true
}

func checkUser(s string) error {
	if !userName.MatchString(s) {
		return errors.New("expected a user's name or number, or USER:GROUP")
	}
	return nil
}

func checkLabel(s string) error {
	if !label.MatchString(s) {
		return errors.New("expected letters, digits, dots, hyphens and underscores, at most 64")
	}
	return nil
}

func checkRepo(s string) error {
	if strings.Contains(s, "://") {
		return errors.New("expected HOST[:PORT][/PATH] without a scheme")
	}
	if !repo.MatchString(s) {
		return errors.New("expected HOST[:PORT][/PATH], the path in lower case")
	}
	return nil
}

func checkResolver(s string) error {
	if _, err := netip.ParseAddr(s); err == nil {
		return nil
	}
	if ap, err := netip.ParseAddrPort(s); err == nil && ap.Port() != 0 {
		return nil
	}
	return errors.New("expected an IP address, or IP:port")
}

// checkSubnet takes an IPv4 network that a switch can serve.
func checkSubnet(s string) error {
	p, err := netip.ParsePrefix(s)
	if err != nil || !p.Addr().Is4() || p.Bits() < 16 || p.Bits() > 28 || p.Masked() != p {
		return errors.New("expected an IPv4 network of /16 to /28, such as 10.200.7.0/24")
	}
	return nil
}

// checkCIDR takes IPv4 CIDR or CIDR:port.
func checkCIDR(s string) error {
	cidr, port, has := strings.Cut(s, ":")
	if n, err := strconv.ParseUint(port, 10, 16); has && (err != nil || n == 0) {
		if p, err := netip.ParsePrefix(s); err == nil && p.Addr().Is6() {
			return errors.New("expected IPv4; IPv6 is not supported")
		}
		return errors.New("expected an IPv4 network such as 10.0.0.0/8, or CIDR:port")
	}
	p, err := netip.ParsePrefix(cidr)
	if err != nil || !p.Addr().Is4() {
		if a, err := netip.ParseAddr(cidr); err == nil && a.Is4() {
			return errors.New("expected a network: a single address is " + cidr + "/32")
		}
		return errors.New("expected an IPv4 network such as 10.0.0.0/8, or CIDR:port")
	}
	return nil
}

// checkSuffix takes a bare DNS suffix.
func checkSuffix(s string) error {
	switch {
	case strings.Contains(s, "://"):
		return errors.New("expected a DNS suffix such as example.com, not a URL")
	case strings.ContainsAny(s, "*?"):
		return errors.New("expected a DNS suffix such as example.com, which matches names below it too; not a pattern")
	case strings.Contains(s, ":"):
		return errors.New("expected a DNS suffix such as example.com, without a port")
	case strings.HasSuffix(s, "."):
		return errors.New("expected a DNS suffix such as example.com, without the final dot")
	case len(s) > 253 || !allLabels(s, dnsLabel):
		return errors.New("expected a DNS suffix such as example.com")
	}
	if _, err := netip.ParseAddr(s); err == nil {
		return errors.New("expected a DNS suffix; addresses belong in allow_ip")
	}
	return nil
}

func checkKey(s string) error {
	b, err := base64.StdEncoding.DecodeString(s)
	if err != nil || len(b) != 32 {
		return errors.New("expected an ed25519 public key: 32 bytes in base64")
	}
	return nil
}

func checkDAX(s string) error {
	err := errors.New(`expected "off", a size such as "8G", "8G:always" or "8G:inode=64K"`)
	if s == "off" {
		return nil
	}
	size, how, has := strings.Cut(s, ":")
	if n, e := ParseSize(size); e != nil || n == 0 {
		return err
	}
	if !has || how == "always" {
		return nil
	}
	floor, ok := strings.CutPrefix(how, "inode=")
	if _, e := ParseSize(floor); !ok || e != nil {
		return err
	}
	return nil
}
