package hubcmd

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/ui"
)

// comeBack is how long a follower waits for a hub that went away, at first and
// at most.
const comeBackFirst, comeBackMost = time.Second, 15 * time.Second

func newEvents(a *app) *cli.Command {
	var q hubadmin.EventQuery
	var asJSON bool
	return interruptible(statuses(cliutil.Takes(&cli.Command{
		Name: "events", Usage: "follow what happens on the fleet",
		Description: "Prints how the fleet is, then each change as it is stored: time, kind, node or job, what.\n" +
			"Goes on until it is interrupted, also over a restart of the hub. Of a follower that comes\n" +
			"back late, what happened meanwhile is printed as long as the hub holds it (4,096 events);\n" +
			"otherwise one line says resync, and how the fleet is follows.\n\n" +
			"Kinds: " + kindsText() + ".",
		Flags: []cli.Flag{
			cliutil.Strings(&q.Nodes, "node", "NODE", "of these nodes: an ID, 8 digits of one, or a hostname"),
			cliutil.Strings(&q.Kinds, "kind", "KIND", "of these kinds"),
			cliutil.String(&q.After, "after", "ID", "go on after this event, whose ID --json printed"),
			cliutil.Bool(&asJSON, "json", "print one JSON document a line (vk.hub-event/1)"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			wait, reached := comeBackFirst, false
			for {
				err := c.Follow(ctx, q, func(t hubadmin.Told) error {
					reached, wait = true, comeBackFirst
					if t.ID != "" {
						q.After = t.ID
					}
					return a.printTold(t, asJSON)
				})
				switch {
				case ctx.Err() != nil:
					return nil
				case err != nil && (!reached || fault.KindOf(err) != fault.Unavailable):
					return err
				}
				fmt.Fprintf(a.env.Stderr, "vk-hub: the hub went away; trying again in %s\n", wait)
				select {
				case <-time.After(wait):
				case <-ctx.Done():
					return nil
				}
				wait = min(2*wait, comeBackMost)
			}
		}),
	}, cliutil.Arity{}), noSuchNode))
}

// toldDoc is an event as --json prints it.
type toldDoc struct {
	ID       string             `json:"id,omitempty"`
	Event    *hub.Event         `json:"event,omitempty"`
	Snapshot *hubadmin.FleetNow `json:"snapshot,omitempty"`
	Resync   string             `json:"resync,omitempty"`
}

func (a *app) printTold(t hubadmin.Told, asJSON bool) error {
	if asJSON {
		return cliutil.JSONLine(a.env.Stdout, "vk.hub-event/1", toldDoc(t))
	}
	var text string
	now := a.now().UTC().Format(time.RFC3339)
	switch {
	case t.Resync != "":
		text = fmt.Sprintf("%s  resync: %s", now, t.Resync)
	case t.Snapshot != nil:
		reach := map[string]int{}
		for _, n := range t.Snapshot.Nodes {
			reach[string(n.Reach)]++
		}
		text = fmt.Sprintf("%s  %d nodes (%s), %d jobs not settled", now, len(t.Snapshot.Nodes), counts(reach), len(t.Snapshot.Jobs))
	default:
		e := t.Event
		of, node := hubtext.Dash(e.Node), ""
		if e.Job != "" {
			of = e.Job
			if e.Node != "" {
				node = ", node " + e.Node[:min(8, len(e.Node))]
			}
		}
		text = strings.TrimRight(fmt.Sprintf("%s  %-9s  %s  %s%s", time.Unix(e.At, 0).UTC().Format(time.RFC3339), e.Kind, of, e.Text, node), " ")
	}
	_, err := fmt.Fprintln(a.env.Stdout, ui.CleanLine(text))
	return err
}

// kindsText is the kinds in lines of a help text.
func kindsText() string {
	half := len(hub.EventKinds) / 2
	return strings.Join(hub.EventKinds[:half], ", ") + ",\n" + strings.Join(hub.EventKinds[half:], ", ")
}
