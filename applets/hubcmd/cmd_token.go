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
	create := statuses(cliutil.Takes(&cli.Command{
		Name:  "create",
		Usage: "issue a token with which one node may join",
		Description: "Prints the token alone. It is good for one vk node join, within --ttl; the hub keeps\n" +
			"only its hash. Pass it by a pipe, so that it is in no argument list:\n" +
			"  vk-hub token create | ssh ci-7 vk node join https://hub.example.com --token -",
		Flags: []cli.Flag{cliutil.Duration(&ttl, "ttl", "how long it is valid, at most 720h").Default("1h")},
		Action: a.asks(func(ctx context.Context, c *hubadmin.Client, _ []string) error {
			t, err := c.Token(ctx, ttl)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, t)
			return err
		}),
	}, cliutil.Arity{}))
	return &cli.Command{Name: "token", Usage: "enrollment tokens", Description: "Tokens let machines join the fleet.", Commands: []*cli.Command{create}}
}
