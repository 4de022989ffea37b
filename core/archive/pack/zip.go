package pack

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"runtime"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	kflate "github.com/klauspost/compress/flate"

	"virtkit/core/zst"
)

// Block is how much of a file is compressed at once, in bytes.
const Block = 1 << 20

// zstdMethod is zstd's number in a zip (APPNOTE 4.4.5).
const zstdMethod = 93

// part is a block on its way through a compressor.
type part struct {
	head *zip.FileHeader // of the first of a file, or of an entry without content
	last bool            // of its file
	raw  []byte
	buf  *[]byte // that raw is in
	out  bytes.Buffer
	done chan struct{}
	err  error
}

type zipper struct {
	level   int
	zstd    int // level; 0 = deflate
	buffers sync.Pool
	flates  sync.Pool
	slots   chan struct{} // one for each block that is being compressed
	queue   chan *part    // in order
}

func writeZip(w io.Writer, r io.Reader, l Level, zstd bool) (int, error) {
	cpus := runtime.GOMAXPROCS(0)
	z := &zipper{level: l.flate(), slots: make(chan struct{}, cpus), queue: make(chan *part, 2*cpus)}
	if zstd {
		z.zstd = l.zstd()
	}
	z.buffers.New = func() any { b := make([]byte, Block); return &b }
	z.flates.New = func() any { f, _ := kflate.NewWriter(nil, z.level); return f }
	stop := make(chan struct{})
	wrote := make(chan error, 1)
	go func() {
		err := z.write(w)
		if err != nil {
			close(stop)
			for range z.queue { // what is on its way
			}
		}
		wrote <- err
	}()
	n, err := each(r, func(h *tar.Header, r io.Reader) error {
		select {
		case <-stop:
			return errStopped
		default:
		}
		return z.entry(h, r)
	})
	close(z.queue)
	if werr := <-wrote; werr != nil {
		return n, werr
	}
	return n, err
}

// errStopped stops the reading side; the writer's error is told.
var errStopped = io.ErrClosedPipe

// entry hands an entry over to the compressors.
func (z *zipper) entry(h *tar.Header, r io.Reader) error {
	head := headerOf(h)
	switch h.Typeflag {
	case tar.TypeDir:
		z.queue <- ready(&part{head: head, last: true})
		return nil
	case tar.TypeSymlink:
		z.queue <- ready(&part{head: head, last: true, raw: []byte(h.Linkname)})
		return nil
	case tar.TypeReg:
	default:
		return nil
	}
	head.Flags |= 8 // sizes come behind
	head.Method = zip.Deflate
	switch {
	case z.zstd > 0:
		head.Method = zstdMethod
	case z.level == 0:
		head.Method = zip.Store
	}
	for left := h.Size; ; {
		p := &part{head: head, buf: z.buffers.Get().(*[]byte), done: make(chan struct{})}
		n, err := io.ReadFull(r, (*p.buf)[:min(left, Block)])
		if err != nil {
			return err
		}
		left -= int64(n)
		p.raw, p.last = (*p.buf)[:n], left == 0
		whole := head != nil && p.last
		z.slots <- struct{}{}
		go func() {
			defer func() { <-z.slots; close(p.done) }()
			p.err = z.compress(p, whole)
		}()
		z.queue <- p
		if p.last {
			return nil
		}
		head = nil
	}
}

func ready(p *part) *part { p.done = make(chan struct{}); close(p.done); return p }

func (z *zipper) compress(p *part, whole bool) error {
	switch {
	case z.zstd > 0:
		w, err := zst.NewWriter(&p.out, z.zstd)
		if err != nil {
			return err
		}
		if _, err := w.Write(p.raw); err != nil {
			return err
		}
		return w.Close()
	case z.level == 0:
		return nil
	}
	p.out.Grow(len(p.raw)/2 + 64)
	f := z.flates.Get().(*kflate.Writer)
	defer z.flates.Put(f)
	f.Reset(&p.out)
	if _, err := f.Write(p.raw); err != nil {
		return err
	}
	if whole || p.last {
		return f.Close()
	}
	return f.Flush()
}

// write writes what comes out of the compressors. The first file is held back
// until it is known whether there is another.
func (z *zipper) write(w io.Writer) error {
	zw := zip.NewWriter(w)
	var file io.Writer
	var head *zip.FileHeader
	var first *part
	files := 0
	flush := func(alone bool) error {
		if first == nil {
			return nil
		}
		p := first
		first = nil
		return z.whole(zw, p, alone)
	}
	for p := range z.queue {
		<-p.done
		if p.err != nil {
			return p.err
		}
		regular := p.head == nil || p.head.Flags&8 != 0
		if p.head != nil && regular {
			if err := flush(false); err != nil {
				return err
			}
			files++
		}
		switch {
		case !regular:
			out, err := small(zw, p.head, p.raw)
			if err != nil {
				return err
			}
			if _, err := out.Write(p.raw); err != nil {
				return err
			}
			continue
		case p.head != nil && p.last && files == 1:
			first = p
			continue
		case p.head != nil && p.last:
			if err := z.whole(zw, p, false); err != nil {
				return err
			}
			continue
		case p.head != nil:
			head = p.head
			var err error
			if file, err = zw.CreateRaw(head); err != nil {
				return err
			}
		}
		if err := z.block(file, head, p); err != nil {
			return err
		}
	}
	if err := flush(files == 1); err != nil {
		return err
	}
	return zw.Close()
}

// small writes the header of a directory or a link.
func small(zw *zip.Writer, head *zip.FileHeader, content []byte) (io.Writer, error) {
	head.CRC32 = crc32.ChecksumIEEE(content)
	head.CompressedSize64, head.UncompressedSize64 = uint64(len(content)), uint64(len(content))
	return zw.CreateRaw(head)
}

// whole writes a file of one block.
func (z *zipper) whole(zw *zip.Writer, p *part, alone bool) error {
	content := p.out.Bytes()
	if p.head.Method == zip.Store || !alone && len(content) >= len(p.raw) {
		p.head.Method, content = zip.Store, p.raw
	}
	file, err := zw.CreateRaw(p.head)
	if err != nil {
		return err
	}
	return z.append(file, p.head, p, content)
}

// block writes a part of a long file.
func (z *zipper) block(file io.Writer, head *zip.FileHeader, p *part) error {
	content := p.out.Bytes()
	if head.Method == zip.Store {
		content = p.raw
	}
	return z.append(file, head, p, content)
}

func (z *zipper) append(file io.Writer, head *zip.FileHeader, p *part, content []byte) error {
	if _, err := file.Write(content); err != nil {
		return err
	}
	head.CRC32 = crc32.Update(head.CRC32, crc32.IEEETable, p.raw)
	head.CompressedSize64 += uint64(len(content))
	head.UncompressedSize64 += uint64(len(p.raw))
	//lint:ignore SA1019 the writer of a raw entry takes the central directory's from here
	head.CompressedSize, head.UncompressedSize = uint32(min(head.CompressedSize64, 1<<32-1)), uint32(min(head.UncompressedSize64, 1<<32-1))
	z.buffers.Put(p.buf)
	return nil
}

// headerOf is an entry's header but for its content.
func headerOf(h *tar.Header) *zip.FileHeader {
	fi := h.FileInfo()
	head := &zip.FileHeader{Name: h.Name}
	if h.Typeflag == tar.TypeDir && !strings.HasSuffix(head.Name, "/") {
		head.Name += "/"
	}
	head.SetMode(fi.Mode())
	head.CreatorVersion, head.ReaderVersion = 3<<8|20, 20 // Unix, as of 2.0
	if utf8.ValidString(h.Name) && strings.ContainsFunc(h.Name, func(r rune) bool { return r >= utf8.RuneSelf }) {
		head.Flags |= 0x800
	}
	//lint:ignore SA1019 of a raw entry nobody else fills them in
	head.ModifiedDate, head.ModifiedTime = dos(h.ModTime.UTC())
	x := []byte{0x75, 0x78, 11, 0, 1, 4} // "ux": owner
	x = binary.LittleEndian.AppendUint32(x, uint32(h.Uid))
	x = append(x, 4)
	x = binary.LittleEndian.AppendUint32(x, uint32(h.Gid))
	x = append(x, 0x55, 0x54, 5, 0, 1) // "UT": time
	head.Extra = binary.LittleEndian.AppendUint32(x, uint32(h.ModTime.Unix()))
	return head
}

// dos is a time as MS-DOS writes it, in steps of two seconds from 1980 on.
func dos(t time.Time) (date, clock uint16) {
	if t.Year() < 1980 {
		return 1<<5 | 1, 0
	}
	return uint16(t.Day() + int(t.Month())<<5 + min(t.Year()-1980, 127)<<9), uint16(t.Second()/2 + t.Minute()<<5 + t.Hour()<<11)
}
