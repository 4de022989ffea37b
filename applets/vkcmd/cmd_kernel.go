package vkcmd

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/vmm/boot"
)

func newKernel(a *app) *cli.Command {
	return &cli.Command{
		Name:        "kernel",
		Usage:       "list and fetch guest kernels",
		Description: "Guests boot the first kernel of the list unless told otherwise. make kernel builds\nthe tuned one, which starts two to three times sooner than a distribution's.",
		Commands:    []*cli.Command{newKernelList(a), newKernelFetch(a)},
	}
}

func newKernelList(a *app) *cli.Command {
	var asJSON bool
	return &cli.Command{
		Name:        "list",
		Usage:       "list the guest kernels of this host, the best first",
		Description: "Lists kernels below the state directory, those installed for the whole host, and\nthe host's own where they can be guests.",
		Flags:       []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.kernels/1)")},
		Action: func(context.Context, *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			list, problems := boot.List(h.StateDir)
			for _, p := range problems {
				a.warn("%v", p)
			}
			return printKernels(a.env.Stdout, list, asJSON)
		},
	}
}

func printKernels(w io.Writer, list []boot.Kernel, asJSON bool) error {
	if asJSON {
		if list == nil {
			list = []boot.Kernel{}
		}
		return cliutil.JSON(w, "vk.kernels/1", struct {
			Kernels []boot.Kernel `json:"kernels"`
		}{list})
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tVERSION\tORIGIN\tIMAGE")
	for _, k := range list {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", k.Name, k.Version, k.Origin, k.Image)
	}
	return t.Flush()
}

func newKernelFetch(a *app) *cli.Command {
	return &cli.Command{
		Name:        "fetch",
		Usage:       "fetch Debian's kernel for guests",
		Description: "Downloads Debian's cloud kernel through this host's apt, without installing it and\nwithout root. Done by itself when a guest is to boot and there is no kernel.",
		Action: func(ctx context.Context, _ *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			p := a.progress("kernel")
			k, err := boot.Fetch(ctx, h.StateDir, p.Line)
			p.Done(err)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, k.Name)
			return err
		},
	}
}
