package wire

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/buildcache"
	"virtkit/core/checkout"
	"virtkit/core/conf"
	"virtkit/core/logx"
)

// CheckoutRoot is the directory that host checkouts are below.
func (h *Host) CheckoutRoot() string {
	if d := h.Conf.Executor.CheckoutDir; d != "" {
		return filepath.Join(d, "vk")
	}
	return filepath.Join(h.StateDir, "checkouts")
}

// Checkouts is the host's store of work trees.
func (h *Host) Checkouts() (*checkout.Store, error) {
	e := h.Conf.Executor
	o := checkout.Options{
		Root: h.CheckoutRoot(), Idle: h.Conf.CheckoutIdle(), MirrorIdle: e.CheckoutMirrorIdle,
		Log: h.Log.With(logx.Comp, "checkout"),
	}
	if e.CheckoutMirror {
		o.Mirrors = filepath.Join(h.StateDir, "mirrors")
	}
	return checkout.Open(o)
}

// CollectBuilds bounds the local build cache by [gc].
func (h *Host) CollectBuilds(ctx context.Context, dryRun bool) (buildcache.Collected, error) {
	dir := filepath.Join(h.StateDir, "buildcache")
	g := h.Conf.GC
	o := buildcache.Options{Retention: time.Duration(g.BuildCacheRetentionDays) * 24 * time.Hour, Max: -1, DryRun: dryRun}
	if g.BuildCacheMax.Word != "none" {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); errors.Is(err, fs.ErrNotExist) {
			return buildcache.Collected{Entries: []string{}}, nil
		} else if err != nil {
			return buildcache.Collected{}, fmt.Errorf("looking at the build cache %s: %w", dir, err)
		}
		size := int64(st.Blocks) * st.Bsize
		if o.Max = buildcache.DefaultMax(size); g.BuildCacheMax != (conf.Amount{}) {
			o.Max = g.BuildCacheMax.Of(size)
		}
	}
	return buildcache.Collect(ctx, dir, o)
}

// CheckoutLayer is the most memory that the writable layer above a guest's work
// tree may take, in bytes of a guest of memMiB; 0 puts it on the guest's disk.
func (h *Host) CheckoutLayer(memMiB int) int64 {
	e := h.Conf.Executor
	if !e.CheckoutOverlay {
		return 0
	}
	return e.CheckoutOverlaySize.Of(int64(memMiB) << 20)
}
