package erofs

import (
	"bytes"
	"encoding/binary"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Names of a scan are parts of one string a directory, as the kernel gave them:
// each ends in a NUL that is not of its length. So one can be handed back to the
// kernel as it is, where x/sys would copy it for each call; and a tree has some
// hundred thousand.

// buffers are for getdents.
var buffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// entry is a name in a directory.
type entry struct {
	name string
	kind uint32 // as in a mode; 0 = the filesystem does not tell
}

// entriesOf are those of the directory fd but "." and "..", in the kernel's order.
func entriesOf(fd int) ([]entry, error) {
	buf := buffers.Get().(*[64 << 10]byte)
	defer buffers.Put(buf)
	var all []byte
	var out []entry
	var ends []int // of each name in all, its NUL included
	for {
		n, err := unix.Getdents(fd, buf[:])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return nil, os.NewSyscallError("getdents64", err)
		case n == 0:
			s := string(all)
			start := 0
			for i, end := range ends {
				out[i].name = s[start : end-1]
				start = end
			}
			return out, nil
		}
		for b := buf[:n]; len(b) > 0; {
			// ino and off, 8 bytes each, then the record's length, the kind, the name
			one := b[:binary.NativeEndian.Uint16(b[16:])]
			b = b[len(one):]
			name := one[19:]
			name = name[:bytes.IndexByte(name, 0)+1]
			if s := string(name); s == ".\x00" || s == "..\x00" {
				continue
			}
			all = append(all, name...)
			ends = append(ends, len(all))
			out = append(out, entry{kind: uint32(one[18]) << 12}) // DT_ is S_IF without its zeros
		}
	}
}

// openAt opens the regular file that a name of entriesOf is. It follows no symlink
// and waits for nothing, whatever is there by now.
func openAt(dir int, name string) (int, error) {
	const flags = unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_LARGEFILE
	for {
		fd, _, e := unix.Syscall6(unix.SYS_OPENAT, uintptr(dir), uintptr(unsafe.Pointer(unsafe.StringData(name))), flags, 0, 0, 0)
		switch e {
		case 0:
			return int(fd), nil
		case unix.EINTR:
		default:
			return -1, e
		}
	}
}
