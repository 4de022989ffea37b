package gitlabcmd

import (
	"context"
	"fmt"
	"os"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/relay"
	"virtkit/core/version"
)

// joinOptions are the flags of vk-gitlab join.
type joinOptions struct {
	hub       string
	token     string
	tokenFile string
	ca        string
	replace   bool
}

func newJoin(a *app) *cli.Command {
	var o joinOptions
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "join",
		Usage:     "enroll this vk-gitlab with a hub, as a relay",
		ArgsUsage: "HUB",
		Description: "Makes this relay's key, signs the token with it, and keeps the id that the hub\n" +
			"answers below the state dir: the hub pins the key, which never leaves this host. HUB\n" +
			"is https://HOST, or http to a hub on loopback. Refused while a job is recorded.\n\n" +
			"  vk-hub token create --kind gitlab | vk-gitlab join https://hub.example.com --token -",
		Flags: []cli.Flag{
			cliutil.String(&o.token, "token", "TOKEN", "a token of the hub's, of kind gitlab; - reads it from standard input"),
			cliutil.String(&o.tokenFile, "token-file", "FILE", "read the token from a file"),
			cliutil.String(&o.ca, "ca", "FILE", "verify the hub against these certificates (PEM) alone"),
			cliutil.Bool(&o.replace, "replace", "enroll one that is enrolled already, as a new relay"),
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			o.hub = c.Args().First()
			return a.join(ctx, o)
		},
	}, cliutil.Arity{Min: 1, Max: 1}),
		cliutil.Status{Code: "12", Means: "the hub refuses the enrollment, or the state dir is another user's"},
		cliutil.Status{Code: "13", Means: "the hub cannot be reached"},
		busy)
}

var busy = cliutil.Status{Code: "75", Means: "a running vk-gitlab holds the state dir"}

func (a *app) join(ctx context.Context, o joinOptions) error {
	if _, err := node.ParseHub(o.hub); err != nil {
		return err
	}
	token, err := a.readToken(o)
	if err != nil {
		return err
	}
	dir, err := a.stateDir()
	if err != nil {
		return err
	}
	name, err := hostname()
	if err != nil {
		return err
	}
	j := relay.JoinOptions{StateDir: dir, Hub: o.hub, Token: token, Replace: o.replace, Hostname: name, VK: version.Version}
	if o.ca != "" {
		if j.CA, err = os.ReadFile(o.ca); err != nil {
			return fault.New(fault.Usage, "reading --ca").Because(err)
		}
	}
	r, err := relay.Join(ctx, j)
	if err != nil {
		return err
	}
	if r.OldRelay != "" {
		a.say("this was relay %s: remove it with vk-hub relays remove %s, on its hub", r.OldRelay, r.OldRelay)
	}
	if r.Again {
		a.say("the hub knows this key: the relay has its id back")
	}
	a.say("enrolled with %s; vk-gitlab run begins its session", r.URL)
	fmt.Fprintln(a.env.Stdout, r.Relay)
	return nil
}

func (a *app) say(format string, args ...any) {
	fmt.Fprintf(a.env.Stderr, "vk-gitlab: "+format+"\n", args...)
}

// readToken is the token of the flags. It is a secret: no error holds it.
func (a *app) readToken(o joinOptions) (string, error) {
	t := cliutil.Token{Value: o.token, File: o.tokenFile, Stdin: a.env.Stdin, Warn: func(f string, args ...any) { a.say("warning: "+f, args...) },
		Hint: "vk-hub token create --kind gitlab, on the hub's host, prints one; --token - reads it from standard input"}
	return t.Read()
}

func newLeave(a *app) *cli.Command {
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:  "leave",
		Usage: "delete this relay's enrollment",
		Description: "Deletes the key and the hub's address from the state dir. The hub still knows the\n" +
			"key: vk-hub relays remove takes it out. Refused while a job is recorded.",
		Action: func(ctx context.Context, _ *cli.Command) error {
			dir, err := a.stateDir()
			if err != nil {
				return err
			}
			e, err := relay.Leave(ctx, dir)
			if err != nil {
				return err
			}
			if e != nil {
				a.say("this was relay %s of %s: remove it with vk-hub relays remove %s, on its hub", e.Relay, e.URL, e.Relay)
			}
			return nil
		},
	}, cliutil.Arity{}),
		cliutil.Status{Code: "10", Means: "it is not enrolled"},
		cliutil.Status{Code: "12", Means: "the state dir is another user's"},
		busy)
}
