package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"virtkit/core/machine"
)

var (
	_ machine.Restorer = (*Driver)(nil)
	_ machine.Saver    = (*guest)(nil)
)

// StateKey implements machine.Restorer: a digest of QEMU's version and command
// line, without what differs between two runs of one guest, and of what the
// files named in it are.
func (d *Driver) StateKey(ctx context.Context, s machine.Spec) (key, why string, err error) {
	switch {
	case len(s.Shares) > 0:
		return "", "virtio-fs devices cannot be saved", nil
	case s.Nested:
		return "", "guests that run guests are not saved", nil
	}
	v, err := d.Verdict(ctx, s.Kernel)
	if err != nil {
		return "", "", err
	}
	if v.Accel != "tcg" {
		return "", "saving guests was never tried under " + v.Accel, nil
	}
	info, err := d.Info(ctx)
	if err != nil {
		return "", "", err
	}
	p := plan{spec: s, accel: v.Accel, disks: make([]int, len(s.Disks))}
	p.spec.Name = "x"
	if n := s.NIC; n != nil {
		// The agent gives its interface the address that Setup names.
		p.spec.NIC = &machine.NIC{Tap: n.Tap, MAC: "02:00:00:00:00:01", MTU: n.MTU}
	}
	if p.tscKHz, err = d.ClockKHz(); err != nil {
		return "", "", err
	}
	h := sha256.New()
	fmt.Fprintf(h, "%s %s\n%q\n", info.Binary, info.Version, p.args())
	files := []string{info.Binary, s.Kernel.Image, s.Kernel.Initrd}
	for _, k := range s.Disks {
		if k.ReadOnly && !k.Varies {
			files = append(files, k.Path)
			continue
		}
		st, err := os.Stat(k.Path) // another file each time, of the same size
		if err != nil {
			return "", "", fmt.Errorf("disk %s: %w", k.Serial, err)
		}
		fmt.Fprintf(h, "%s %d\n", k.Serial, st.Size())
	}
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil {
			return "", "", err
		}
		// Not by its time: that of a kept file is when it was used last. Kernels,
		// initramfs and images are replaced by new files, never changed.
		ino := uint64(0)
		if sys, ok := st.Sys().(*syscall.Stat_t); ok {
			ino = sys.Ino
		}
		fmt.Fprintf(h, "%s %d %d\n", f, st.Size(), ino)
	}
	return hex.EncodeToString(h.Sum(nil)[:16]), "", nil
}

// apicKHz is the rate of QEMU's local APIC, which counts nanoseconds, as Linux
// divides it, by 16.
const apicKHz = 1_000_000 / 16

// TimerKHz implements machine.Saver, of which QEMU is one under emulation alone.
func (g *guest) TimerKHz() int { return apicKHz }

// saveRate bounds how fast a state is written, in bytes a second. QEMU's own
// bound is made for networks.
const saveRate = 1 << 36

// Save implements machine.Saver by QEMU's migration to a descriptor. QEMU
// stops the guest for the last pass and leaves it stopped.
func (g *guest) Save(ctx context.Context, f *os.File) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("saving %s: %w", g.name, err)
		}
	}()
	if _, err := g.qmp.Do(ctx, "migrate-set-parameters", map[string]any{"max-bandwidth": saveRate}); err != nil {
		return err
	}
	if _, err := g.qmp.DoFile(ctx, "getfd", map[string]any{"fdname": "state"}, f); err != nil {
		return err
	}
	if _, err := g.qmp.Do(ctx, "migrate", map[string]any{"uri": "fd:state"}); err != nil {
		return err
	}
	err = g.migrated(ctx)
	if err != nil {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, _ = g.qmp.Do(cctx, "migrate_cancel", nil)
		_, _ = g.qmp.Do(cctx, "cont", nil) // it may have been stopped already
		return err
	}
	return g.Continue(ctx)
}

// migrated waits for the end of a migration. QEMU tells of it by events only
// when a capability is set, which would be part of the state.
func (g *guest) migrated(ctx context.Context) error {
	for {
		b, err := g.qmp.Do(ctx, "query-migrate", nil)
		if err != nil {
			return err
		}
		var st struct {
			Status string `json:"status"`
			Desc   string `json:"error-desc"`
		}
		if err := json.Unmarshal(b, &st); err != nil {
			return fmt.Errorf("reading query-migrate: %w", err)
		}
		switch st.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			if st.Desc == "" {
				st.Desc = "the state could not be written"
			}
			return errors.New("QEMU's migration " + st.Status + ": " + st.Desc)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
