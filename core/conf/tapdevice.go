package conf

import (
	"fmt"
	"net/netip"
	"strings"
)

// TapDevice is one word of [net] pool: a tap device that an administrator made.
type TapDevice struct {
	Name string
	// Guest is the address of the guest behind it with its network's length, and
	// Gateway its way out; zero = told from the device's own address.
	Guest   netip.Prefix
	Gateway netip.Addr
}

// ownDevices begins the names of the devices that vk makes itself.
const ownDevices = "vktap"

// ParseTapDevice reads NAME, or "NAME=ADDRESS/LENGTH via GATEWAY".
func ParseTapDevice(s string) (TapDevice, error) {
	name, rest, has := strings.Cut(s, "=")
	d := TapDevice{Name: name}
	switch {
	// What the kernel takes for a name (dev_valid_name), less "%", which it
	// makes numbers of.
	case name == "" || len(name) > 15 || name == "." || name == ".." || strings.ContainsAny(name, "/:% \t\n\x00"):
		return d, fmt.Errorf("expected a device's name, 1 to 15 bytes without slash, colon, percent or space")
	case strings.HasPrefix(name, ownDevices):
		return d, fmt.Errorf("expected a device of your own: names that begin with %s are vk's", ownDevices)
	case !has:
		return d, nil
	}
	addr, gw, has := strings.Cut(rest, " via ")
	var err error
	if d.Guest, err = netip.ParsePrefix(strings.TrimSpace(addr)); err != nil || !d.Guest.Addr().Is4() || !has {
		return d, fmt.Errorf("expected NAME=ADDRESS/LENGTH via GATEWAY, such as %s=192.0.2.50/24 via 192.0.2.1", name)
	}
	if d.Gateway, err = netip.ParseAddr(strings.TrimSpace(gw)); err != nil || !d.Guest.Contains(d.Gateway) || d.Gateway == d.Guest.Addr() {
		return d, fmt.Errorf("expected a gateway in %s that is not the guest itself", d.Guest.Masked())
	}
	return d, nil
}

func checkTapDevice(s string) error {
	_, err := ParseTapDevice(s)
	return err
}
