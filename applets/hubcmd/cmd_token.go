package hubcmd

import (
	"context"
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fleet/hubadmin"
)

func newToken(a *app) *cli.Command {
	ttl := time.Hour
	kind := "node"
	create := statuses(cliutil.Takes(&cli.Command{
		Name:  "create",
		Usage: "issue a token with which one machine may join",
		Description: "Prints the token alone. It is good for one vk node join, or with --kind gitlab for one\n" +
			"vk-gitlab join, within --ttl; the hub keeps only its hash. Pass it by a pipe, so that it\n" +
			"is in no argument list:\n" +
			"  vk-hub token create | ssh ci-7 vk node join https://hub.example.com --token -\n" +
			"  vk-hub token create --kind gitlab | ssh gw vk-gitlab join https://hub… --token -",
		Flags: []cli.Flag{
			cliutil.Duration(&ttl, "ttl", "how long it is valid, at most 720h").Default("1h"),
			cliutil.Choice(&kind, "kind", "who may join: a node, or a vk-gitlab", "node", "gitlab"),
		},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			of := ""
			if kind == "gitlab" {
				of = kind
			}
			t, err := c.TokenOf(ctx, of, int64(ttl/time.Second))
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, t)
			return err
		}),
	}, cliutil.Arity{}))
	return &cli.Command{Name: "token", Usage: "enrollment tokens", Description: "Tokens let machines join the fleet.", Commands: []*cli.Command{create}}
}
