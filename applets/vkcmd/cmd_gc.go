package vkcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/checkout"
	"virtkit/core/fault"
	"virtkit/core/image"
	"virtkit/ledger"
	"virtkit/vmm/boot"
)

type gcOptions struct {
	idle   int
	dryRun bool
	json   bool
}

// gcReport is what a collection did.
type gcReport struct {
	DryRun bool         `json:"dry_run"`
	Guests []string     `json:"guests"` // directories of guests whose supervisor is gone
	Killed []int        `json:"killed"` // processes that had outlived their supervisor
	Net    []string     `json:"net"`    // devices and firewall rules that no guest needs
	Images image.Report `json:"images"`
	Boot   int64        `json:"boot_bytes"` // of initramfs files and guests' saved states
	Left   []string     `json:"left"`       // directories among those of guests that are none, or not this user's

	Checkouts     []string `json:"checkouts"`      // host checkouts, as slot/project
	Mirrors       []string `json:"mirrors"`        // of repositories
	CheckoutBytes int64    `json:"checkout_bytes"` // of both
	Builds        []string `json:"builds"`         // entries of the local build cache
	BuildBytes    int64    `json:"build_bytes"`
	Problems      []string `json:"problems"`
}

func newGCReport(o gcOptions) gcReport {
	return gcReport{DryRun: o.dryRun, Guests: []string{}, Killed: []int{}, Net: []string{}, Left: []string{}, Problems: []string{},
		Checkouts: []string{}, Mirrors: []string{}, Builds: []string{}}
}

func newGC(a *app) *cli.Command {
	o := gcOptions{idle: -1}
	return cliutil.Exits(&cli.Command{
		Name:  "gc",
		Usage: "remove what is no longer used",
		Description: "Removes the leavings of guests whose supervisor is gone, images that nothing has\n" +
			"used for a while, layers that no image needs, host checkouts and mirrors of\n" +
			"repositories that no job has used for long, and what is too old or too much in the\n" +
			"local build cache ([gc]). What is in use stays, and so does what is not this\n" +
			"user's: mount points, symlinks, other users' files. A state directory that is not\n" +
			"there is not made.",
		Flags: []cli.Flag{
			cliutil.Int(&o.idle, "idle-secs", "N", "remove images unused for so long", 0, 1<<31-1).Default("[images] idle_secs"),
			cliutil.Bool(&o.dryRun, "dry-run", "say what would be removed and remove nothing"),
			cliutil.Bool(&o.json, "json", "print one JSON document (vk.gc/1)"),
		},
		Action: func(ctx context.Context, _ *cli.Command) error { return a.gc(ctx, o) },
	}, cliutil.Status{Code: "3", Means: "some of it could not be removed"})
}

func (a *app) gc(ctx context.Context, o gcOptions) error {
	if dir, there, err := wire.StateDirThere(a.env, a.overrides()); err != nil {
		return err
	} else if !there {
		a.warn("there is no %s, so there is nothing to remove", dir)
		return a.printGC(newGCReport(o), o)
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	h.LookOnly = o.dryRun
	idle := h.Conf.ImageIdle()
	if o.idle >= 0 {
		idle = time.Duration(o.idle) * time.Second
	}
	r := newGCReport(o)
	problem := func(err error) {
		if err != nil {
			r.Problems = append(r.Problems, err.Error())
		}
	}
	swept, err := h.Jobs.Sweep(ctx, ledger.SweepOptions{DryRun: o.dryRun})
	problem(err)
	r.Guests = append(r.Guests, swept.Removed...)
	r.Killed = append(r.Killed, swept.Killed...)
	r.Left = append(r.Left, swept.Skipped...)
	for _, p := range swept.Problems {
		problem(p)
	}
	net, err := h.SweepNet(ctx, o.dryRun)
	problem(err)
	r.Net = append(r.Net, net...)
	store, err := h.Store()
	if err != nil {
		return errors.Join(err, a.printGC(r, o))
	}
	r.Images, err = store.GC(ctx, idle, o.dryRun)
	problem(err)
	r.Boot, err = boot.Sweep(h.StateDir, max(idle, time.Hour), o.dryRun)
	problem(err)
	states, err := h.SweepTemplates(max(idle, time.Hour), o.dryRun)
	r.Boot += states
	problem(err)
	problem(a.gcCheckouts(ctx, h, o, &r))
	builds, err := h.CollectBuilds(ctx, o.dryRun)
	problem(err)
	r.Builds, r.BuildBytes = append(r.Builds, builds.Entries...), builds.Bytes
	for _, k := range builds.Kept {
		a.warn("left: %s", k)
	}
	if err := a.printGC(r, o); err != nil {
		return err
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if len(r.Problems) > 0 {
		return fault.Newf(fault.Partial, "%d things could not be removed", len(r.Problems)).
			Hint("the lines above name them; a busy one goes with the next vk gc")
	}
	return nil
}

// gcCheckouts removes host checkouts and mirrors that no job has used for long.
func (a *app) gcCheckouts(ctx context.Context, h *wire.Host, o gcOptions, r *gcReport) error {
	if !checkout.Exists(h.CheckoutRoot()) {
		return nil
	}
	s, err := h.Checkouts()
	if err != nil {
		return err
	}
	idle := time.Duration(-1)
	if o.idle >= 0 {
		idle = time.Duration(o.idle) * time.Second
	}
	swept, err := s.Sweep(ctx, checkout.SweepOptions{Idle: idle, DryRun: o.dryRun, Sizes: true})
	r.Checkouts, r.Mirrors, r.CheckoutBytes = append(r.Checkouts, swept.Trees...), append(r.Mirrors, swept.Mirrors...), swept.Bytes
	for _, k := range swept.Kept {
		a.warn("left: %s", k)
	}
	return err
}

func (a *app) printGC(r gcReport, o gcOptions) error {
	for _, p := range r.Problems {
		a.warn("%s", p)
	}
	for _, p := range r.Left {
		a.warn("left: jobs/%s is no guest of this user", p)
	}
	for _, p := range r.Images.Skipped {
		a.warn("left: %s", p)
	}
	if o.json {
		return cliutil.JSON(a.env.Stdout, "vk.gc/1", r)
	}
	return writeGC(a.env.Stdout, r)
}

func writeGC(w io.Writer, r gcReport) error {
	verb := "removed"
	if r.DryRun {
		verb = "would remove"
	}
	for _, g := range r.Guests {
		fmt.Fprintf(w, "%s guest %s\n", verb, g)
	}
	for _, n := range r.Net {
		fmt.Fprintf(w, "%s %s\n", verb, n)
	}
	for _, i := range r.Images.Images {
		fmt.Fprintf(w, "%s image %s (%s)\n", verb, imageName(i), units.BytesSize(float64(i.DiskSize)))
	}
	for _, c := range r.Checkouts {
		fmt.Fprintf(w, "%s checkout %s\n", verb, c)
	}
	for _, m := range r.Mirrors {
		fmt.Fprintf(w, "%s mirror %s\n", verb, m)
	}
	for _, b := range r.Builds {
		fmt.Fprintf(w, "%s build cache entry %.12s\n", verb, b)
	}
	_, err := fmt.Fprintf(w, "%s %d guests, %d images, %d layers: %s; %d images are in use\n", verb,
		len(r.Guests), len(r.Images.Images), r.Images.Blobs, units.BytesSize(float64(r.Images.Bytes+r.Boot+r.CheckoutBytes+r.BuildBytes)), r.Images.Held)
	return err
}
