// Package image turns what a job names as its image into one read-only
// filesystem image that a guest can boot, and keeps it.
//
// Vocabulary: a reference (Ref) is what the user wrote; a blob is a
// compressed layer as a registry serves it; an index is the list of a layer's
// tar headers; a root is the ext4 image made by merging an image's layers; a
// bundle is a root with its configuration in a directory of its own.
//
// # Layout of a store
//
// All directories are 0700, all files 0600 except roots, which are 0400.
//
//	images/sha256-<hex>/      one kept image; <hex> is the digest of its manifest
//	                          (for local/default: of its recipe)
//	    image.json            Record: reference, configuration, blobs it was made of
//	    root.ext4             the filesystem, never written again
//	    hold                  flock: shared while in use; its mtime is the last use
//	refs/<hex>.json           reference and platform → digest, when last asked
//	blobs/sha256-<hex>        layer as received, and
//	blobs/sha256-<hex>.idx    its index (gob, versioned; made again when unreadable)
//	locks/*.lock              flocks: one per image or blob being made, one per bundle
//	staging/s-<16 hex>/       work in progress; its file "lock" is held by its maker
//
// Nothing is ever written in place: an image, a blob and a bundle appear by
// rename(2) of something complete. A staging directory whose lock can be taken
// belongs to nobody and is swept by GC and by the next Open. Names that do not
// have one of these forms, symbolic links and mount points are left alone.
//
// # Trust
//
// Bytes from a registry are checked twice, as received (digest) and as
// unpacked (diff id), before anything of them is kept. Kept blobs are not
// flushed to disk; their diff id is checked again whenever they are read, and
// one that no longer matches is fetched again. Roots are flushed before they
// appear.
//
// # Decisions
//
// 2026-11-29: layers are applied in order to a tree of headers, then written
// in one pass; that gives exactly what unpacking one after the other gives,
// without root and without touching the host's file system.
//
// 2026-11-29: an extended attribute with an empty value is kept, empty; any
// other PAX record with an empty value counts as absent (POSIX). Attributes of
// overlayfs itself (trusted.overlay.*, user.overlay.*) are dropped: the root
// is the lower layer of an overlay in the guest, where they would act.
package image
