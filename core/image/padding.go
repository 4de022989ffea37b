package image

import (
	"encoding/binary"
	"fmt"
	"os"
)

// padInodeBitmaps sets the bits of each group's inode bitmap that stand for no
// inode. The converter leaves them clear; Linux does not mind, but e2fsck
// calls such a filesystem damaged (ext4, "Inode Bitmap": trailing bits are 1).
func padInodeBitmaps(f *os.File) error {
	var sb [1024]byte
	if _, err := f.ReadAt(sb[:], 1024); err != nil {
		return fmt.Errorf("reading the superblock: %w", err)
	}
	le := binary.LittleEndian
	if le.Uint16(sb[56:]) != 0xef53 {
		return fmt.Errorf("the converter wrote no ext4 superblock")
	}
	blocks, perGroup, inodes := le.Uint32(sb[4:]), le.Uint32(sb[32:]), le.Uint32(sb[40:])
	const block = 4096
	gds := make([]byte, int((blocks+perGroup-1)/perGroup)*32)
	if _, err := f.ReadAt(gds, block); err != nil {
		return fmt.Errorf("reading the group descriptors: %w", err)
	}
	pad := make([]byte, block-inodes/8) // inodes per group are a multiple of 16
	for i := range pad {
		pad[i] = 0xff
	}
	for g := 0; len(pad) > 0 && g < len(gds); g += 32 {
		at := int64(le.Uint32(gds[g+4:]))*block + int64(inodes/8)
		if _, err := f.WriteAt(pad, at); err != nil {
			return err
		}
	}
	return nil
}
