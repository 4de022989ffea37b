package tapnet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"

	"virtkit/core/fault"
)

// tableName is the table of all devices, of family inet.
const tableName = "virtkit"

// The rules, for nft(8) 1.0 or later and Linux 5.6 or later (a masquerade that
// knows the interface that a packet came in by). They hold guests to what the
// switch does, docs/network.md: nothing of the host but its resolvers and
// echo, no cloud's metadata, nobody of another job; and nobody reaches a guest
// that it did not speak to first but the host.
//
// The table is added before it is flushed, so that it need not exist; flush
// leaves the set's elements.
const rulesText = `add table inet virtkit
flush table inet virtkit
table inet virtkit {
	set resolvers {
		type ipv4_addr
	}
	chain guest_in {
		type filter hook prerouting priority raw; policy accept;
		iifname "vktap*" meta nfproto != ipv4 drop
		iifname "vktap*" fib saddr . iif oif missing drop
	}
	chain to_host {
		type filter hook input priority filter; policy accept;
		iifname != "vktap*" accept
		ct state established,related accept
		ip daddr @resolvers meta l4proto { tcp, udp } th dport 53 accept
		icmp type echo-request fib daddr . iif type local accept
		meta l4proto tcp reject with tcp reset
		reject with icmpx type admin-prohibited
	}
	chain through {
		type filter hook forward priority filter; policy accept;
		iifname "vktap*" jump from_guest
		oifname "vktap*" ct state established,related accept
		oifname "vktap*" drop
	}
	chain from_guest {
		ip daddr @resolvers meta l4proto { tcp, udp } th dport 53 accept
		ip daddr { 0.0.0.0/8, 127.0.0.0/8, 224.0.0.0/4, 240.0.0.0/4 } drop
		oifname "vktap*" meta l4proto tcp reject with tcp reset
		oifname "vktap*" reject with icmpx type admin-prohibited
		ip daddr 169.254.0.0/16 meta l4proto tcp reject with tcp reset
		ip daddr 169.254.0.0/16 reject with icmpx type admin-prohibited
		tcp flags syn / syn,rst tcp option maxseg size set rt mtu
	}
	chain nat {
		type nat hook postrouting priority srcnat; policy accept;
		iifname "vktap*" oifname != "vktap*" masquerade
	}
}
`

// applyRules puts the rules in force, in one transaction. resolvers are let
// through wherever they are.
func applyRules(ctx context.Context, resolvers []netip.Addr) error {
	var b strings.Builder
	b.WriteString(rulesText)
	for _, r := range resolvers {
		fmt.Fprintf(&b, "add element inet %s resolvers { %s }\n", tableName, r)
	}
	if _, err := nft(ctx, b.String()); err != nil {
		return fault.New(fault.System, "the firewall rules of guests' devices cannot be set").
			Hint("they need Linux 5.6 or later with nf_tables, nft_nat, nft_masq, nft_fib and nft_reject; `vk check` shows what is missing").Because(err)
	}
	return nil
}

// dropRules removes them, if they are there.
func dropRules(ctx context.Context) error {
	_, err := nft(ctx, "add table inet "+tableName+"\ndelete table inet "+tableName+"\n")
	return err
}

// haveRules reports whether the table is there.
func haveRules(ctx context.Context) (bool, error) {
	out, err := nft(ctx, "list tables inet\n")
	if err != nil {
		return false, err
	}
	for l := range strings.Lines(out) {
		if strings.TrimSpace(l) == "table inet "+tableName {
			return true, nil
		}
	}
	return false, nil
}

// nft runs a script of nft's.
func nft(ctx context.Context, script string) (string, error) {
	path, err := nftPath()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, path, "-f", "-")
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"}
	cmd.Stdin = strings.NewReader(script)
	var out, bad bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &bad
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return "", cause
		}
		first, _, _ := strings.Cut(strings.TrimSpace(bad.String()), "\n")
		return "", fmt.Errorf("%s: %w: %s", path, err, first)
	}
	return out.String(), nil
}

func nftPath() (string, error) {
	if p, err := exec.LookPath("nft"); err == nil {
		return p, nil
	}
	for _, p := range []string{"/usr/sbin/nft", "/sbin/nft"} { // a plain user's PATH has no sbin
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	return "", fault.New(fault.System, "the program nft is missing; it sets the firewall rules of guests' devices").
		Hint("apt-get install nftables").Because(errors.ErrUnsupported)
}
