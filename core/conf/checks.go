package conf

import (
	"encoding/base64"
	"errors"
	"net/netip"
	"strings"

	"virtkit/core/lazyre"
	"virtkit/core/policy"
)

// The checks of single strings. Each error completes "is X, …" and says what
// was expected.

var (
	hostLabel = lazyre.New(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
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

// checkCIDR takes an entry of an allow_ip list.
func checkCIDR(s string) error { _, err := policy.ParseIP(s); return err }

// checkSuffix takes an entry of an allow_name list.
func checkSuffix(s string) error { _, err := policy.ParseName(s); return err }

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
