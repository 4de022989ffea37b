package hubcmd

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/fleet/wire"
	"virtkit/core/ui"
)

func newKeys(a *app) *cli.Command {
	var asJSON bool
	list := a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
		r, err := c.Keys(ctx)
		if err != nil {
			return err
		}
		if asJSON {
			return cliutil.JSON(a.env.Stdout, "vk.hub-keys/1", r)
		}
		return printKeys(a.env.Stdout, r.Keys)
	})
	flag := func() []cli.Flag {
		return []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.hub-keys/1)")}
	}
	const text = "Lists each key's name, first 8 characters, scopes, pools, largest envelope, when and by\nwhom it was made, and whether it works."
	return statuses(cliutil.Takes(&cli.Command{
		Name: "keys", Usage: "keys of API clients that are no relays", Description: text, Flags: flag(), Action: list,
		Commands: []*cli.Command{
			newKeyCreate(a),
			statuses(cliutil.Takes(&cli.Command{Name: "list", Usage: "list the keys", Description: text, Flags: flag(), Action: list}, cliutil.Arity{})),
			statuses(cliutil.Takes(&cli.Command{
				Name: "revoke", Usage: "revoke a key", ArgsUsage: "NAME",
				Description: "Revokes the working key of that name: what it owns can no longer be followed with it.\nWith none working, the ones of that name are removed.",
				Action: a.asks(func(ctx context.Context, c *hubadmin.Client, args []string) error {
					r, err := c.RevokeKey(ctx, args[0])
					if err != nil {
						return err
					}
					done := "revoked"
					if r.Removed > 0 {
						done = fmt.Sprintf("%d removed", r.Removed)
					}
					_, err = fmt.Fprintf(a.env.Stdout, "%s: %s\n", args[0], done)
					return err
				}),
			}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "there is no key of that name"}),
		},
	}, cliutil.Arity{}))
}

// days reads a time span, of days too: 90d.
func days(p *time.Duration) func(string) error {
	return func(s string) error {
		var n int
		if _, err := fmt.Sscanf(s, "%dd", &n); err == nil && s == fmt.Sprintf("%dd", n) && n > 0 && n < 1<<15 {
			*p = time.Duration(n) * 24 * time.Hour
			return nil
		}
		d, err := time.ParseDuration(s)
		if err != nil || d <= 0 {
			return fmt.Errorf("%q is not a time span such as 90d or 12h", s)
		}
		*p = d
		return nil
	}
}

func newKeyCreate(a *app) *cli.Command {
	var q hubadmin.KeyRequest
	var cpus int
	ttl := 90 * 24 * time.Hour
	return statuses(cliutil.Takes(&cli.Command{
		Name: "create", Usage: "make a key, and print it once",
		Description: "Prints the key, vkk_ and 64 hex digits; the hub keeps its hash alone. A client sends it as\n" +
			"Authorization: Bearer. Scope jobs is the client API but submitting jobs, which only a\n" +
			"relay does; capacity is POST /v1/capacity alone. A placement outside the key's pools, or\n" +
			"larger than its envelope, is refused.",
		Flags: []cli.Flag{
			cliutil.String(&q.Name, "name", "NAME", "unique among the keys that work"),
			cliutil.Strings(&q.Pools, "pool", "POOL", "one that it may name; * for any"),
			cliutil.Strings(&q.Scopes, "scope", "jobs|capacity", "what it may do; jobs unless given"),
			cliutil.Size(&q.Max.Memory, "max-mem", "most memory of an envelope", 1),
			cliutil.Int(&cpus, "max-cpus", "N", "most CPUs of an envelope", 1, 1<<16),
			cliutil.Size(&q.Max.Disk, "max-disk", "most disk of an envelope", 1),
			cliutil.Custom("ttl", "DURATION", "how long it works, at most 365d", false, days(&ttl)).Default("90d"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			if q.Name == "" || len(q.Pools) == 0 {
				return cliutil.BadOption("--name and --pool are needed")
			}
			q.Max.CPUs, q.TTLSecs = cpus, int64(ttl/time.Second)
			if len(q.Name) > 63 {
				return fault.Newf(fault.Usage, "%q is no name of a key: it has more than 63 characters", wire.Clean(q.Name, 80))
			}
			key, err := c.CreateKey(ctx, q)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, key)
			return err
		}),
	}, cliutil.Arity{}))
}

func envelopeText(e wire.Envelope) string {
	var out []string
	if e.Memory > 0 {
		out = append(out, hubtext.Bytes(e.Memory))
	}
	if e.CPUs > 0 {
		out = append(out, fmt.Sprintf("%d CPUs", e.CPUs))
	}
	if e.Disk > 0 {
		out = append(out, hubtext.Bytes(e.Disk)+" of disk")
	}
	return hubtext.None(strings.Join(out, ", "))
}

func printKeys(w io.Writer, keys []hubadmin.Key) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tKEY\tSCOPES\tPOOLS\tLARGEST\tCREATED\tBY\tWORKS\tCLIENT")
	for _, k := range keys {
		works := "until " + hubtext.Stamp(k.Expires)
		switch {
		case k.Revoked > 0:
			works = "revoked " + hubtext.Stamp(k.Revoked)
		case !k.Works:
			works = "expired " + hubtext.Stamp(k.Expires)
		}
		client := "-"
		if c := k.Client; c != nil {
			client = strings.TrimSpace(c.Program + " " + c.Version + " " + c.Hostname)
		}
		fmt.Fprintf(t, "%s\tvkk_%s…\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", ui.CleanLine(k.Name), k.Prefix, strings.Join(k.Scopes, " "), strings.Join(k.Pools, " "), envelopeText(k.Max),
			hubtext.Stamp(k.Created), ui.CleanLine(k.Actor), works, ui.CleanLine(client))
	}
	return t.Flush()
}
