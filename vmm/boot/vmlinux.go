package boot

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// maxVmlinux bounds a decompressed kernel, in bytes.
const maxVmlinux = 512 << 20

// extractVmlinux takes the ELF kernel out of a bzImage (kernel's
// Documentation/arch/x86/boot.rst: setup_sects at 0x1f1, "HdrS" at 0x202,
// payload_offset at 0x248 and payload_length at 0x24c, counted from the end of
// the setup sectors; the payload ends with its plain size in 4 bytes). The
// result has a PVH entry, else it is an error.
func extractVmlinux(bz []byte) ([]byte, error) {
	if len(bz) < 0x250 || string(bz[0x202:0x206]) != "HdrS" {
		return nil, errors.New("the file is no bzImage")
	}
	setup := uint64(bz[0x1f1])
	if setup == 0 {
		setup = 4
	}
	start := (setup+1)*512 + uint64(binary.LittleEndian.Uint32(bz[0x248:]))
	size := uint64(binary.LittleEndian.Uint32(bz[0x24c:]))
	if size < 8 || start+size > uint64(len(bz)) {
		return nil, errors.New("the bzImage's payload is not within the file")
	}
	payload := bz[start : start+size]
	want := uint64(binary.LittleEndian.Uint32(payload[size-4:]))
	if want > maxVmlinux {
		return nil, fmt.Errorf("the bzImage's payload of %d bytes is too large", want)
	}
	payload = payload[:size-4]
	var r io.Reader
	switch {
	case bytes.HasPrefix(payload, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		d, err := zstd.NewReader(bytes.NewReader(payload), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxVmlinux))
		if err != nil {
			return nil, err
		}
		defer d.Close()
		r = d
	case bytes.HasPrefix(payload, []byte{0x1f, 0x8b}):
		d, err := gzip.NewReader(bytes.NewReader(payload))
		if err != nil {
			return nil, err
		}
		d.Multistream(false)
		r = d
	default:
		return nil, fmt.Errorf("the bzImage's payload (% x) is neither zstd nor gzip", payload[:4])
	}
	var out bytes.Buffer
	if _, err := io.Copy(&out, io.LimitReader(r, int64(want)+1)); err != nil {
		return nil, fmt.Errorf("decompressing the bzImage's payload: %w", err)
	}
	if uint64(out.Len()) != want {
		return nil, fmt.Errorf("the bzImage's payload has %d bytes, its end says %d", out.Len(), want)
	}
	if !hasPVH(out.Bytes()) {
		return nil, errors.New("the kernel has no PVH entry")
	}
	return out.Bytes(), nil
}

// hasPVH says whether an ELF kernel has the note with its 32-bit entry point
// (XEN_ELFNOTE_PHYS32_ENTRY), by which QEMU boots it.
func hasPVH(image []byte) bool {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return false
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > 1<<20 {
			continue
		}
		n := make([]byte, p.Filesz)
		if _, err := p.ReadAt(n, 0); err != nil {
			continue
		}
		for len(n) >= 12 {
			name := uint64(binary.LittleEndian.Uint32(n))
			desc := uint64(binary.LittleEndian.Uint32(n[4:]))
			typ := binary.LittleEndian.Uint32(n[8:])
			end := 12 + (name+3)&^3 + (desc+3)&^3
			if end > uint64(len(n)) {
				break
			}
			if typ == 18 && string(n[12:12+name]) == "Xen\x00" {
				return true
			}
			n = n[end:]
		}
	}
	return false
}
