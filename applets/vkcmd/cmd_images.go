package vkcmd

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/image"
)

func newImages(a *app) *cli.Command {
	var asJSON bool
	return &cli.Command{
		Name:        "images",
		Usage:       "list the images kept on this host",
		Description: "Lists images that were pulled, imported or made here, the last used first.",
		Flags:       []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.images/1)")},
		Action: a.withStore(func(_ context.Context, _ *cli.Command, store *image.Store, _ image.Auth) error {
			list, err := store.List()
			if err != nil {
				return err
			}
			return printImages(a.env.Stdout, list, asJSON, time.Now())
		}),
	}
}

// withStore is the action of a command that works on the host's images, with
// the user's credentials of registries.
func (a *app) withStore(f func(context.Context, *cli.Command, *image.Store, image.Auth) error) cli.ActionFunc {
	return func(ctx context.Context, c *cli.Command) error {
		h, err := a.host()
		if err != nil {
			return err
		}
		store, err := h.Store()
		if err != nil {
			return err
		}
		return f(ctx, c, store, h.Auth())
	}
}

func printImages(w io.Writer, list []image.Info, asJSON bool, now time.Time) error {
	if asJSON {
		if list == nil {
			list = []image.Info{}
		}
		return cliutil.JSON(w, "vk.images/1", struct {
			Images []image.Info `json:"images"`
		}{list})
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "IMAGE\tDIGEST\tPLATFORM\tSIZE\tUSED\tIN USE")
	for _, i := range list {
		use := ""
		if i.InUse {
			use = "yes"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s ago\t%s\n", imageName(i), shortDigest(i.Digest), i.Platform, units.BytesSize(float64(i.DiskSize)), units.HumanDuration(now.Sub(i.Used)), use)
	}
	return t.Flush()
}

// imageName is what people call an image. One whose name means another image
// by now (a tag that moved, a new recipe of local/default) has none.
func imageName(i image.Info) string {
	return first(i.Ref, "(was "+i.Former+")")
}

// shortDigest is the first 12 digits, as container tools show them.
func shortDigest(d string) string {
	d = strings.TrimPrefix(d, "sha256:")
	return d[:min(len(d), 12)]
}

func newPull(a *app) *cli.Command {
	var platform, policy = "", "always"
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "pull",
		Usage:     "make an image ready to boot",
		ArgsUsage: "IMAGE",
		Description: "Downloads an image, or makes local/default, so that guests boot from it without\n" +
			"waiting. Prints the digest.",
		Flags: []cli.Flag{
			cliutil.String(&platform, "platform", "OS/ARCH", "platform of the image").Default("this host's"),
			cliutil.Choice(&policy, "policy", "when to ask the registry", "always", "missing", "if-not-present", "never"),
		},
		Action: a.withStore(func(ctx context.Context, c *cli.Command, store *image.Store, auth image.Auth) error {
			ref, err := store.Parse(c.Args().First())
			if err != nil {
				return err
			}
			p := a.progress("image " + ref.Text)
			img, err := store.Resolve(ctx, ref, image.ResolveOptions{Auth: auth, Platform: platform, Policy: pullPolicy(policy), Progress: p.Image})
			p.Done(err)
			if err != nil {
				return err
			}
			defer img.Close()
			_, err = fmt.Fprintln(a.env.Stdout, img.Digest)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 1}),
		cliutil.Status{Code: "10", Means: "there is no such image"},
		cliutil.Status{Code: "12", Means: "the registry does not let this user have it"},
		cliutil.Status{Code: "13", Means: "the registry cannot be reached"})
}

func newImage(a *app) *cli.Command {
	return &cli.Command{
		Name:        "image",
		Usage:       "import, push, inspect and remove images",
		Description: "An image of one's own is a bundle: local/NAME. It is imported from an archive, a\ndirectory or an OCI layout, and pushed to the registry of [registry] repo.",
		Commands:    []*cli.Command{newImageImport(a), newImagePush(a), newImageInspect(a), newImageRemove(a)},
	}
}

func newImageImport(a *app) *cli.Command {
	var name, platform string
	var replace, asJSON bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "import",
		Usage:     "make the bundle local/NAME from files",
		ArgsUsage: "SOURCE [NAME]",
		Description: "SOURCE is a docker or OCI archive, a root filesystem as a tar (compressed or not),\n" +
			"a directory with a root filesystem, or an OCI layout, whose images are LAYOUT:TAG.\n" +
			"Without NAME the bundle is called as the file or the tag is.",
		Flags: []cli.Flag{
			cliutil.String(&name, "name", "NAME", "name of the bundle, in place of the second argument"),
			cliutil.String(&platform, "platform", "OS/ARCH", "platform to choose").Default("this host's"),
			cliutil.Bool(&replace, "replace", "take the place of a bundle of that name"),
			cliutil.Bool(&asJSON, "json", "print one JSON document (vk.image/1)"),
		},
		Action: a.withStore(func(ctx context.Context, c *cli.Command, store *image.Store, _ image.Auth) error {
			src, arg := c.Args().Get(0), c.Args().Get(1)
			if name != "" && arg != "" {
				return cliutil.BadOption("the name is given twice: %s and --name %s", arg, name)
			}
			bundle := strings.TrimPrefix(first(name, arg, bundleName(src)), "local/")
			p := a.progress("importing local/" + bundle)
			info, err := store.Import(ctx, src, bundle, image.ImportOptions{Replace: replace, Platform: platform, Progress: p.Image})
			p.Done(err)
			if err != nil {
				return err
			}
			if asJSON {
				return cliutil.JSON(a.env.Stdout, "vk.image/1", info)
			}
			_, err = fmt.Fprintln(a.env.Stdout, info.Ref)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 2}), cliutil.Status{Code: "10", Means: "there is no such file, or no such image in it"})
}

// bundleName is a file's name without what says how it is packed, or the tag
// behind it.
func bundleName(src string) string {
	base := strings.TrimRight(src, "/")
	base = base[strings.LastIndexByte(base, '/')+1:]
	for _, ext := range []string{".gz", ".xz", ".zst", ".bz2", ".tgz", ".tar", ".oci"} {
		base = strings.TrimSuffix(base, ext)
	}
	return base[strings.LastIndexByte(base, ':')+1:]
}

func newImagePush(a *app) *cli.Command {
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:        "push",
		Usage:       "upload the bundle local/NAME as virtkit/NAME",
		ArgsUsage:   "local/NAME [virtkit/NAME[:TAG]]",
		Description: "Uploads a bundle to the registry that [registry] repo names, so that other hosts\ncan use it. Prints the digest.",
		Action: a.withStore(func(ctx context.Context, c *cli.Command, store *image.Store, auth image.Auth) error {
			bundle := strings.TrimPrefix(c.Args().First(), "local/")
			to, err := store.Parse(first(c.Args().Get(1), "virtkit/"+bundle))
			if err != nil {
				return err
			}
			if to.Kind != image.KindVirtkit {
				return fault.Newf(fault.Usage, "a bundle is pushed as virtkit/NAME, not as %s", to)
			}
			p := a.progress("pushing " + to.Text)
			digest, err := store.Push(ctx, bundle, to, image.ResolveOptions{Auth: auth, Progress: p.Image})
			p.Done(err)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, digest)
			return err
		}),
	}, cliutil.Arity{Min: 1, Max: 2}),
		cliutil.Status{Code: "12", Means: "the registry does not let this user write"},
		cliutil.Status{Code: "13", Means: "the registry cannot be reached"})
}

func newImageInspect(a *app) *cli.Command {
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:        "inspect",
		Usage:       "print what is known of a kept image, as JSON",
		ArgsUsage:   "IMAGE",
		Description: "Prints one JSON document (vk.image/1). IMAGE is a reference, a digest or the\nbeginning of one.",
		Action: a.withStore(func(_ context.Context, c *cli.Command, store *image.Store, _ image.Auth) error {
			info, err := store.Inspect(c.Args().First())
			if err != nil {
				return err
			}
			return cliutil.JSON(a.env.Stdout, "vk.image/1", info)
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "there is no such image here"})
}

func newImageRemove(a *app) *cli.Command {
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:        "rm",
		Usage:       "remove kept images",
		ArgsUsage:   "IMAGE…",
		Description: "Removes images that no guest uses. What was removed before one could not be stays\nremoved.",
		Action: a.withStore(func(ctx context.Context, c *cli.Command, store *image.Store, _ image.Auth) error {
			for _, which := range c.Args().Slice() {
				if err := store.Remove(ctx, which); err != nil {
					return err
				}
			}
			return nil
		}),
	}, cliutil.Arity{Min: 1, Max: -1}),
		cliutil.Status{Code: "10", Means: "there is no such image here"},
		cliutil.Status{Code: "11", Means: "the image is in use"})
}
