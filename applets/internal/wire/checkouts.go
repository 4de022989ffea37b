package wire

import (
	"path/filepath"

	"virtkit/core/checkout"
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

// CheckoutLayer is the most memory that the writable layer above a guest's work
// tree may take, in bytes of a guest of memMiB; 0 puts it on the guest's disk.
func (h *Host) CheckoutLayer(memMiB int) int64 {
	e := h.Conf.Executor
	if !e.CheckoutOverlay {
		return 0
	}
	return e.CheckoutOverlaySize.Of(int64(memMiB) << 20)
}
