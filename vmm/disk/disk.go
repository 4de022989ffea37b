// Package disk makes the writable layers of guests: sparse ext4 images copied
// from a template that mkfs.ext4 makes once per size.
//
// Files it owns: <state_dir>/templates/upper-<recipe>-<MiB>.ext4, each made
// whole under a temporary name and renamed. They may be removed at any time
// and are made again when they are needed.
package disk

import "context"

// MinUpper is the smallest writable layer, in bytes.
const MinUpper = 16 << 20

// Upper makes dst, which must not exist, an empty ext4 of size bytes (rounded
// up to MiB, at least MinUpper), readable by its owner alone. Safe for any
// number of concurrent callers in any number of processes.
func Upper(ctx context.Context, stateDir, dst string, size int64) error {
	return upper(ctx, stateDir, dst, size)
}
