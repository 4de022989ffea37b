package tapnet

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// SweepOptions say what is still wanted.
type SweepOptions struct {
	Home string // see HomeOf; devices of other hosts' jobs stay
	// Alive tells whether the job of an id has a supervisor, or somebody who is
	// about to start one.
	Alive func(job string) bool
	// KeepPool leaves the devices of vk's own pool.
	KeepPool bool
	// DryRun tells what would be removed and removes nothing.
	DryRun bool
}

// Sweep removes the devices of jobs that are gone, those of vk's own pool that
// nobody uses when it is not wanted any more, and the rules that no device needs.
// It returns what it removed, in words. Without the right to set up devices it
// does nothing: there is nothing that this user could have left.
func Sweep(ctx context.Context, o SweepOptions) (removed []string, err error) {
	if !Admin() {
		return nil, nil
	}
	if _, err := nftPath(); errors.Is(err, errors.ErrUnsupported) {
		return nil, nil // no device was ever made here
	}
	l, err := lock(ctx)
	if err != nil {
		return nil, fmt.Errorf("sweeping guests' devices: %w", err)
	}
	defer l.Close()
	have, err := devices()
	if err != nil {
		return nil, err
	}
	var problems []error
	left := 0
	for _, d := range have {
		gone, err := o.sweep(d)
		switch {
		case err != nil:
			problems = append(problems, err)
			left++
		case gone:
			removed = append(removed, "device "+d.name)
		default:
			left++
		}
	}
	if left == 0 {
		there, err := haveRules(ctx)
		if err == nil && there {
			removed = append(removed, "nftables table inet "+tableName)
			if !o.DryRun {
				err = dropRules(ctx)
			}
		}
		problems = append(problems, err)
	}
	return removed, errors.Join(problems...)
}

// sweep removes d if nobody wants it.
func (o *SweepOptions) sweep(d device) (gone bool, err error) {
	if strings.HasPrefix(d.name, poolPrefix) {
		if o.KeepPool {
			return false, nil
		}
		f, err := open(d.name, tapFlags)
		if errors.Is(err, unix.EBUSY) {
			return false, nil // a guest has it
		}
		if err != nil {
			return false, fmt.Errorf("sweeping the device %s: %w", d.name, err)
		}
		defer f.Close()
		if o.DryRun {
			return true, nil
		}
		return true, setPersistent(f, false)
	}
	job, home, ok := parseAlias(d.alias)
	if !ok || home != o.Home || o.Alive(job) {
		return false, nil
	}
	if o.DryRun {
		return true, nil
	}
	link, err := netlink.LinkByIndex(d.index)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return true, nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return false, fmt.Errorf("removing the device %s of job %s: %w", d.name, job, err)
	}
	return true, nil
}
