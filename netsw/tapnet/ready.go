package tapnet

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Possible fails when a port certainly cannot be had, with what is missing. It
// changes nothing and takes no lock.
func Possible(cfg Config, pool bool) error {
	cfg.fill()
	if pool && len(cfg.Devices) > 0 {
		_, _, err := resolvers(cfg.Resolvers, cfg.ResolvConf)
		return err
	}
	_, _, err := cfg.prepare()
	return err
}

// Ready tells whether devices of vk's own can be made on this host, having
// tried: text says how, and err what is missing.
func Ready(ctx context.Context, cfg Config) (text string, err error) {
	cfg.fill()
	addrs, _, err := cfg.prepare()
	if err != nil {
		return "", err
	}
	l, err := lock(ctx) // which makes a tap device
	if err != nil {
		return "", err
	}
	defer l.Close()
	network, err := pickNetwork(cfg.Subnet, addrs)
	if err != nil {
		return "", err
	}
	if err := tryRules(ctx); err != nil {
		return "", err
	}
	have, err := devices()
	if err != nil {
		return "", err
	}
	mtu, err := uplinkMTU()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("devices in %s, %d of %d taken, MTU %d", network, len(have), capacity(network), mtu), nil
}

// tryRules has nft check the rules without setting them. It reads them with
// the kernel's eyes: what the kernel lacks is an error here too.
func tryRules(ctx context.Context) error {
	there, err := haveRules(ctx)
	if err != nil {
		return err
	}
	if there {
		return nil
	}
	if err := applyRules(ctx, nil); err != nil {
		return err
	}
	have, err := devices()
	if err == nil && len(have) == 0 {
		err = dropRules(ctx)
	}
	return err
}

// PoolReady looks at each device of an administrator's pool: how many can be
// leased now and how many are in use. errs are the others.
func PoolReady(cfg Config) (free, used int, errs []error) {
	cfg.fill()
	if _, _, err := resolvers(cfg.Resolvers, cfg.ResolvConf); err != nil {
		errs = append(errs, err)
	}
	for _, d := range cfg.Devices {
		_, err := d.network()
		if err == nil {
			p := &Port{cfg: cfg, name: d.Name, kept: true}
			if err = p.attach(); err == nil {
				p.f.Close()
				free++
				continue
			}
		}
		if errors.Is(err, unix.EBUSY) {
			used++
			continue
		}
		errs = append(errs, err)
	}
	return free, used, errs
}

// Closed names the firewall chains of the host, beside ours, that drop what is
// routed unless a rule lets it through: guests' packets may end there. It asks
// nft and needs the right to.
func Closed(ctx context.Context) ([]string, error) {
	out, err := nft(ctx, "list chains\n")
	if err != nil {
		return nil, err
	}
	return closedChains(out), nil
}

func closedChains(listing string) []string {
	var out []string
	var table, chain string
	for l := range strings.Lines(listing) {
		w := strings.Fields(l)
		switch {
		case len(w) >= 3 && w[0] == "table":
			table = w[1] + " " + w[2]
		case len(w) >= 2 && w[0] == "chain":
			chain = w[1]
		case strings.Contains(l, "hook forward ") && strings.Contains(l, "policy drop") && table != "inet "+tableName:
			out = append(out, table+" "+chain)
		}
	}
	return out
}
