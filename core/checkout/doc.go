// Package checkout keeps the work trees that a host clones for its jobs
// (`[executor] host_checkout`), and packs them for guests.
//
// Vocabulary. A slot is one of a runner's concurrent places; a tree is the
// checkout of one project in one slot, reused by the next job there. A mirror
// is a bare repository of one URL that all trees of that URL borrow their
// objects from, so that a second slot fetches from the server only what is new.
// An image is a tree as a guest gets it (core/erofs).
//
// Files below the root (<state_dir>/checkouts, or <checkout_dir>/vk):
//
//	<slot>/<project>/         the tree
//	<slot>/.<project>.json    its record: which directory it is, what state it is in
//	<slot>/.<project>.lock    held while a process works in the tree or packs it
//	<slot>/.new-…             a tree before it has its name
//
// and below the mirrors (<state_dir>/mirrors):
//
//	<name>-<digest>.git       a bare repository
//	.<name>-<digest>.lock     held to fetch
//	.<name>-<digest>.use      shared to borrow, exclusive to take something out
//
// Submodules are repositories below the tree's own (.git/modules), each with a
// mirror; the tree's record names their places, so that a job that wants none
// finds none. What only the guest may fetch of them is read from the mirror,
// before there is any work in a tree.
//
// Trust. A guest gets an image, never the directory, so nothing that a job does
// can reach a tree or a mirror. All the same git is told everything it would
// otherwise look up: its configuration is written anew before each use and
// comes in the environment, hooks, filters, helpers, fsmonitor and what the
// user or the system have configured do not exist for it, and it speaks http
// and https alone (its own mirror's file: beside them). What a repository says
// (.gitattributes, .gitmodules, symlinks, names of any bytes) is content. Flags
// that a job may give are known ones: --upload-pack and its like would run a
// program on this host. A mirror is every project's: a job gets from it only what
// the server has given to that job's token, so that the commit of a submodule that
// the job's tree does not have yet is asked for at the server also where a mirror
// has it (two requests, and nothing is sent again).
//
// Crashes. A record says "busy" before the first change to a tree and "clean"
// after the last; a busy one belongs to nobody once its lock is free, and the
// next job removes git's own leavings (lock files) and lets git mend the tree.
// A tree without a record, of another directory, or whose mending fails is
// removed and cloned anew. A tree of an earlier boot of the host loses its
// index, so that each file is written again.
package checkout
