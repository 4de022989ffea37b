package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/fault"
)

// Dimension is one of the two lists of a layer.
type Dimension string

// The dimensions.
const (
	DimName Dimension = "allow_name"
	DimIP   Dimension = "allow_ip"
)

// IPRule is one entry of an allow_ip list: an IPv4 network, masked, and the
// one port it is for (0 = every port, and ICMP echo too).
type IPRule struct {
	Net  netip.Prefix
	Port uint16
}

// String is the canonical form: 10.0.0.0/8 or 10.0.0.0/8:443.
func (r IPRule) String() string {
	if r.Port == 0 {
		return r.Net.String()
	}
	return r.Net.String() + ":" + strconv.Itoa(int(r.Port))
}

// MarshalText writes String.
func (r IPRule) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads what ParseIP reads.
func (r *IPRule) UnmarshalText(b []byte) (err error) { *r, err = ParseIP(string(b)); return err }

// overlaps says whether some destination matches both.
func (r IPRule) overlaps(o IPRule) bool {
	return r.Net.Overlaps(o.Net) && (r.Port == 0 || o.Port == 0 || r.Port == o.Port)
}

// Lists are what one layer allows in one phase. A nil list is absent, an empty
// one is present and allows nothing. Both absent restrict nothing; once one is
// present, the absent one allows nothing.
//
// In JSON an absent list has no key, an empty one is [].
type Lists struct {
	Names []string // canonical DNS suffixes, in the order written
	IPs   []IPRule // in the order written
}

// Restricted says whether the lists restrict anything.
func (l Lists) Restricted() bool { return l.Names != nil || l.IPs != nil }

// MarshalJSON keeps nil and empty apart.
func (l Lists) MarshalJSON() ([]byte, error) {
	w := wireLists{}
	if l.Names != nil {
		w.Names = &l.Names
	}
	if l.IPs != nil {
		w.IPs = &l.IPs
	}
	return json.Marshal(w)
}

// UnmarshalJSON reads lists that a hub sends, and checks every entry. A key it
// does not know and a null are errors, not absent lists: what is absent
// restricts nothing.
func (l *Lists) UnmarshalJSON(b []byte) error {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(b, &keys); err != nil {
		return err
	}
	if keys == nil {
		return errors.New("egress lists: null")
	}
	read := func(key string) ([]string, error) {
		raw, has := keys[key]
		if !has {
			return nil, nil
		}
		delete(keys, key)
		var out []string
		if err := json.Unmarshal(raw, &out); err != nil {
			return nil, fmt.Errorf("egress lists: %s: %w", key, err)
		}
		if out == nil {
			return nil, fmt.Errorf("egress lists: %s: null", key)
		}
		return out, nil
	}
	names, err := read("names")
	if err != nil {
		return err
	}
	addrs, err := read("ips")
	if err != nil {
		return err
	}
	for k := range keys {
		return fmt.Errorf("egress lists: unknown key %s", quote(k))
	}
	got, bad := parseLists(names, addrs, Source{Key: "egress lists: names"}, Source{Key: "egress lists: ips"})
	*l = got
	return Refuse(bad)
}

type wireLists struct {
	Names *[]string `json:"names,omitempty"`
	IPs   *[]IPRule `json:"ips,omitempty"`
}

func addOnce[T comparable](l []T, v T) []T {
	if slices.Contains(l, v) {
		return l
	}
	return append(l, v)
}

const maxName = 253

// ParseName reads an entry of an allow_name list: a bare DNS suffix, which
// allows itself and every name below it, whole labels only. It returns the
// canonical form, in lower case. The error says what is wrong and what to
// write instead; the caller names the entry and where it stands.
func ParseName(s string) (string, error) {
	low := strings.ToLower(s)
	switch {
	case s == "":
		return "", errors.New("an empty name")
	case strings.Contains(s, "://"):
		return "", fmt.Errorf("a URL: write the name alone%s", instead(hostOf(low)))
	case strings.ContainsAny(s, "*?[]"):
		return "", fmt.Errorf("a pattern: a suffix matches the names below it already%s", instead(strings.TrimPrefix(low, "*.")))
	case strings.Contains(s, "/"):
		if _, err := netip.ParsePrefix(s); err == nil {
			return "", errors.New("a network, which belongs in allow_ip")
		}
		return "", fmt.Errorf("a path: write the name alone%s", instead(hostOf(low)))
	}
	if isAddr(s) {
		return "", errors.New("an address, which belongs in allow_ip")
	}
	switch {
	case strings.Contains(s, ":"):
		return "", fmt.Errorf("a port, which a name cannot have%s", instead(hostOf(low)))
	case strings.HasSuffix(s, "."):
		return "", fmt.Errorf("a trailing dot%s", instead(strings.TrimSuffix(low, ".")))
	case strings.HasPrefix(s, "."):
		return "", fmt.Errorf("a leading dot: a suffix matches the names below it already%s", instead(strings.TrimPrefix(low, ".")))
	case !ascii(s):
		return "", errors.New("not ASCII: write an internationalized name in its xn-- form, as it is looked up")
	case len(s) > maxName:
		return "", fmt.Errorf("longer than a DNS name can be (%d bytes, at most %d)", len(s), maxName)
	}
	last := ""
	for label := range strings.SplitSeq(low, ".") {
		if err := checkLabel(label); err != nil {
			return "", err
		}
		last = label
	}
	if strings.Trim(last, "0123456789") == "" {
		return "", errors.New("not a DNS suffix: it ends with a number (an IPv4 network belongs in allow_ip)")
	}
	return low, nil
}

func checkLabel(l string) error {
	switch {
	case l == "":
		return errors.New("an empty label between two dots")
	case len(l) > 63:
		return fmt.Errorf("the label %s is longer than 63 bytes", quote(l))
	case l[0] == '-' || l[len(l)-1] == '-':
		return fmt.Errorf("the label %s begins or ends with a hyphen", quote(l))
	}
	for i := range len(l) {
		if !hostByte(l[i]) {
			return fmt.Errorf("not a DNS suffix: the label %s has %s in it", quote(l), quote(string(l[i])))
		}
	}
	return nil
}

// hostByte says whether c is of the characters a hostname is spelled with.
// The underscore is one: service records (_sip._tcp.example.com) need it.
func hostByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

func ascii(s string) bool { return strings.IndexFunc(s, func(r rune) bool { return r > 126 }) < 0 }

func isAddr(s string) bool {
	// Names, of which there is one in each question, are told cheaply: what has no
	// colon is an IPv4 address at most, and that ends in a digit.
	if strings.IndexByte(s, ':') < 0 && (s == "" || s[len(s)-1] < '0' || s[len(s)-1] > '9') {
		return false
	}
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	_, err := netip.ParseAddrPort(s)
	return err == nil
}

// hostOf is what is left of a URL when scheme, user, port and path are gone.
func hostOf(s string) string {
	if _, rest, ok := strings.Cut(s, "://"); ok {
		s = rest
	}
	s, _, _ = strings.Cut(s, "/")
	if _, rest, ok := strings.Cut(s, "@"); ok {
		s = rest
	}
	s, _, _ = strings.Cut(s, ":")
	return strings.TrimSuffix(s, ".")
}

// instead proposes s, if it is an entry.
func instead(s string) string {
	if strings.ContainsAny(s, ":/*?[]") || strings.HasSuffix(s, ".") || strings.HasPrefix(s, ".") {
		return ""
	}
	if n, err := ParseName(s); err == nil {
		return " (write " + n + ")"
	}
	return ""
}

// ParseIP reads an entry of an allow_ip list: an IPv4 network in CIDR form, or
// an address alone for its /32, and optionally :port after it. Host bits are
// cleared. IPv6 is refused, since no guest has it. Errors as ParseName's.
func ParseIP(s string) (IPRule, error) {
	if strings.Contains(s, "://") {
		return IPRule{}, errors.New("a URL: write the network alone, such as 192.0.2.7/32 or 192.0.2.7/32:443")
	}
	if isIPv6(s) {
		return IPRule{}, errors.New("IPv6, which guests do not have: write an IPv4 network")
	}
	cidr, port, has := strings.Cut(s, ":")
	var r IPRule
	if has {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || port[0] == '+' || port[0] == '0' {
			return IPRule{}, fmt.Errorf("the port %s is not a number from 1 to 65535", quote(port))
		}
		r.Port = uint16(n)
	}
	switch p, err := netip.ParsePrefix(cidr); {
	case err == nil:
		r.Net = p.Masked()
	default:
		a, err := netip.ParseAddr(cidr)
		if err != nil {
			return IPRule{}, errors.New(notIP(cidr))
		}
		r.Net = netip.PrefixFrom(a, a.BitLen())
	}
	if !r.Net.Addr().Is4() {
		return IPRule{}, errors.New("not an IPv4 network such as 10.0.0.0/8")
	}
	return r, nil
}

func notIP(s string) string {
	if n, err := ParseName(s); err == nil && strings.IndexFunc(n, func(r rune) bool { return r >= 'a' && r <= 'z' }) >= 0 {
		return "a name, which belongs in allow_name"
	}
	return "not an IPv4 network such as 10.0.0.0/8"
}

func isIPv6(s string) bool {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Is6()
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Addr().Is6()
	}
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr().Is6()
	}
	if strings.Count(s, ":") < 2 { // 2001:db8::/32:443 and [2001:db8::1]/64 are left
		return false
	}
	cut := s[:strings.LastIndexByte(s, ':')]
	p, err := netip.ParsePrefix(cut)
	return err == nil && p.Addr().Is6() || strings.HasPrefix(s, "[")
}

// SplitList takes a variable's value apart: entries are separated by spaces,
// commas, tabs and newlines; # begins a comment that ends with the line.
func SplitList(value string) []string {
	var out []string
	for line := range strings.Lines(value) {
		line, _, _ = strings.Cut(line, "#")
		out = append(out, strings.FieldsFunc(line, func(r rune) bool {
			return r == ' ' || r == ',' || r == '\t' || r == '\n' || r == '\r'
		})...)
	}
	return out
}

// ParseSwitch reads a variable that turns something on: 1, true, yes or on, in
// any case. Empty, 0, false, no and off leave it off; anything else is an
// error that names the variable.
func ParseSwitch(variable, value string) (bool, error) {
	switch strings.ToLower(strings.TrimSpace(value)) {
	case "1", "true", "yes", "on":
		return true, nil
	case "", "0", "false", "no", "off":
		return false, nil
	}
	return false, fault.Newf(fault.Usage, "%s: %s is neither on nor off", variable, quote(value)).
		Hint("write 1, true, yes or on; or leave %s out", variable)
}

// Source says where a list is written.
type Source struct {
	Key   string // "[egress] allow_name", "MICROVM_EGRESS_ALLOW_NAME", "--allow-ip"
	Place string // FILE:LINE of the configuration; "" for a variable or flag
	VM    string // the service whose variable it is; "" = the job's
}

// String is the source as errors begin: /etc/virtkit.toml:7: [egress] allow_ip.
func (s Source) String() string {
	switch {
	case s.Place != "":
		return s.Place + ": " + s.Key
	case s.VM != "":
		return "service " + s.VM + ": " + s.Key
	}
	return s.Key
}

// EntryError is one invalid entry of a list.
type EntryError struct {
	Source Source
	Dim    Dimension
	Entry  string
	Reason string
}

// Error names source, entry and reason.
func (e *EntryError) Error() string {
	return fmt.Sprintf("%s: invalid entry %s: %s", e.Source, quote(e.Entry), e.Reason)
}

// ParseNames reads all entries of an allow_name list that is present; the
// result is not nil. Repeated entries are kept once. It returns one EntryError
// for each invalid entry.
func ParseNames(src Source, entries []string) ([]string, []*EntryError) {
	return parseAll(src, DimName, entries, ParseName)
}

// ParseIPs is ParseNames for an allow_ip list.
func ParseIPs(src Source, entries []string) ([]IPRule, []*EntryError) {
	return parseAll(src, DimIP, entries, ParseIP)
}

func parseAll[T comparable](src Source, dim Dimension, entries []string, parse func(string) (T, error)) ([]T, []*EntryError) {
	out := make([]T, 0, len(entries))
	seen := make(map[T]bool, len(entries))
	var bad []*EntryError
	for _, e := range entries {
		v, err := parse(e)
		if err != nil {
			bad = append(bad, &EntryError{Source: src, Dim: dim, Entry: e, Reason: err.Error()})
			continue
		}
		if !seen[v] {
			seen[v] = true
			out = append(out, v)
		}
	}
	return out, bad
}

// Refuse makes one error of invalid entries, nil of none. It is for the user:
// each entry on a line of its own, with where it stands and what is wrong.
func Refuse(bad []*EntryError) error {
	if len(bad) == 0 {
		return nil
	}
	errs := make([]error, len(bad))
	for i, b := range bad {
		errs[i] = b
	}
	return fault.New(fault.Usage, "").Because(errors.Join(errs...)).
		Hint("a name is a bare DNS suffix such as example.com; an address is an IPv4 network such as 192.0.2.0/24, or 192.0.2.7/32:443 for one port")
}

// quote is %q with a bound, so that a long entry does not fill a trace.
func quote(s string) string {
	if len(s) > 300 {
		return strconv.Quote(s[:300]) + "…"
	}
	return strconv.Quote(s)
}
