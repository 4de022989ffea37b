// Package erofs writes read-only filesystem images of directories, fast and
// without root: what a guest mounts as its checkout. The format is that of
// Linux's fs/erofs/erofs_fs.h, uncompressed: every kernel that has erofs at all
// (5.4 on) reads it.
//
// Vocabulary. An image is a row of blocks of 4 KiB: the superblock, then
// metadata (inodes, each with the last part of its content right behind it,
// where that is short and fits into the same block), then whole blocks of
// content. A nid is an inode's place in the metadata, in units of 32 bytes.
//
// The tree is first read as names and kinds. Then its files are opened, one
// after the other by several goroutines: each is read straight into the buffer
// of its part of the image, and parts are placed in the tree's order and written
// in long pieces. As the sizes of files come last, the metadata has room for the
// largest inodes there may be, and a hole where they are smaller. Nothing of a
// tree is followed: a symlink is its text, and directories are entered by
// descriptor. A file that changes while it is copied ends it all.
//
// What is not kept: hard links (each name becomes a file of its own), extended
// attributes, owners (everything is root's), sockets, pipes and devices (left
// out, and counted). Modes become 0644 or 0755, as git knows no others; times
// are kept to the nanosecond. Names are bytes: any but NUL and a slash.
//
// Equal trees give equal images.
package erofs
