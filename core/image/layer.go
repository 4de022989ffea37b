package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/gob"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"

	"virtkit/core/zst"
)

// indexVersion changes whenever an index would come out differently.
const indexVersion = 1

// Limits that keep a hostile layer from taking the host's memory.
const (
	maxEntries    = 2 << 20
	maxIndexBytes = 1 << 30 // names, links and attributes of one layer
)

// entry is what a layer's index keeps of one tar header. Names are as in the
// tar, cleaned: no leading slash, no "." or ".." parts, "" for the root.
type entry struct {
	Name   string
	Type   byte // tar.TypeReg, TypeLink, TypeSymlink, TypeDir, TypeChar, TypeBlock, TypeFifo
	Link   string
	Size   int64
	Mode   uint32 // permission, setuid, setgid and sticky bits
	UID    uint32
	GID    uint32
	Sec    int64 // of mtime
	Nsec   int32
	Major  uint32
	Minor  uint32
	Xattrs map[string]string
}

// index is one layer's headers in order.
type index struct {
	Version int
	DiffID  string // sha256:… of the unpacked bytes
	Size    int64  // unpacked bytes
	Entries []entry
}

// compression is what a stream's first bytes say it is. Media types are not
// asked: registries and builders get them wrong (public report S26).
type compression string

const (
	plain    compression = "plain"
	gzipped  compression = "gzip"
	zstdized compression = "zstd"
)

// sniff looks at the first bytes of a stream without consuming them.
func sniff(br *bufio.Reader) (compression, error) {
	head, err := br.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return gzipped, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return zstdized, nil
	case len(head) >= 4 && head[0]&0xf0 == 0x50 && head[1] == 0x2a && head[2] == 0x4d && head[3] == 0x18:
		return zstdized, nil // starts with a skippable frame
	case bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		return "", errors.New("compressed with xz, which a layer may not be; repack it with gzip or zstd")
	case bytes.HasPrefix(head, []byte("BZh")):
		return "", errors.New("compressed with bzip2, which a layer may not be; repack it with gzip or zstd")
	}
	return plain, nil
}

// expand returns the unpacked bytes of r.
func expand(r io.Reader) (io.ReadCloser, compression, error) {
	br := bufio.NewReaderSize(r, 256<<10)
	c, err := sniff(br)
	if err != nil {
		return nil, "", err
	}
	switch c {
	case gzipped:
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, c, fmt.Errorf("unpacking gzip: %w", err)
		}
		return z, c, nil
	case zstdized:
		z, err := zst.NewReader(br)
		if err != nil {
			return nil, c, fmt.Errorf("unpacking zstd: %w", err)
		}
		return z, c, nil
	}
	return io.NopCloser(br), c, nil
}

// hashed counts and digests what passes through it, and ends a stream that
// grows past max.
type hashed struct {
	r   io.Reader
	h   hash.Hash
	n   int64
	max int64
}

var errTooBig = errors.New("unpacks to more than the limit")

func (t *hashed) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	t.h.Write(p[:n])
	t.n += int64(n)
	if t.max > 0 && t.n > t.max {
		return n, fmt.Errorf("%w of %d bytes", errTooBig, t.max)
	}
	return n, err
}

// newSum is the hash of all digests here.
func newSum() hash.Hash { return sha256.New() }

func (t *hashed) digest() string { return "sha256:" + hex.EncodeToString(t.h.Sum(nil)) }

// scan reads a layer, compressed or not, to its end and returns its index.
// max bounds its unpacked size; 0 = no bound.
func scan(r io.Reader, max int64) (*index, error) {
	z, _, err := expand(r)
	if err != nil {
		return nil, err
	}
	defer z.Close()
	t := &hashed{r: readAhead(z), h: sha256.New(), max: max}
	defer t.r.(io.Closer).Close()
	idx := &index{Version: indexVersion}
	total := 0
	err = eachEntry(t, func(e entry, _ io.Reader) error {
		total += len(e.Name) + len(e.Link) + 64
		for k, v := range e.Xattrs {
			total += len(k) + len(v)
		}
		if len(idx.Entries) >= maxEntries || total > maxIndexBytes {
			return fmt.Errorf("more than %d entries or %d bytes of names", maxEntries, maxIndexBytes)
		}
		idx.Entries = append(idx.Entries, e)
		return nil
	})
	if err != nil {
		return nil, err
	}
	idx.DiffID, idx.Size = t.digest(), t.n
	return idx, nil
}

// eachEntry calls f for each entry of an unpacked layer, in order; the reader
// it passes holds a regular file's content. It reads r to its end, padding and
// what follows the archive included, because all of it counts for the diff id.
func eachEntry(r io.Reader, f func(entry, io.Reader) error) error {
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the tar header of entry %d: %w", n, err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		e, err := toEntry(h)
		if err != nil {
			return err
		}
		if err := f(e, tr); err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("reading the end of the tar: %w", err)
	}
	return nil
}

// cleanName brings a tar's name into the form of entry.Name; a name that
// leads out of the root is an error.
func cleanName(s string) (string, error) {
	parts := strings.Split(s, "/")
	out := parts[:0]
	for _, p := range parts {
		switch p {
		case "", ".":
		case "..":
			if len(out) == 0 {
				return "", fmt.Errorf("%q leads out of the root", s)
			}
			out = out[:len(out)-1]
		default:
			if len(p) > 255 {
				return "", fmt.Errorf("%.40q… has a part longer than 255 bytes, which no Linux filesystem takes", s)
			}
			out = append(out, p)
		}
	}
	return strings.Join(out, "/"), nil
}

func toEntry(h *tar.Header) (entry, error) {
	name, err := cleanName(h.Name)
	if err != nil {
		return entry{}, err
	}
	e := entry{
		Name: name, Type: h.Typeflag, Mode: uint32(h.Mode) & 0o7777,
		Sec: h.ModTime.Unix(), Nsec: int32(h.ModTime.Nanosecond()),
	}
	if h.Uid < 0 || h.Gid < 0 || uint64(h.Uid) > 0xfffffffe || uint64(h.Gid) > 0xfffffffe {
		return entry{}, fmt.Errorf("%q: owner %d:%d is not one that Linux knows", h.Name, h.Uid, h.Gid)
	}
	e.UID, e.GID = uint32(h.Uid), uint32(h.Gid)
	switch h.Typeflag {
	case tar.TypeReg, 0, tar.TypeCont, tar.TypeGNUSparse: // 0 is what archives from before POSIX have
		e.Type = tar.TypeReg
		if h.Size > maxFile {
			return entry{}, fmt.Errorf("%q: a file of %d bytes is larger than the largest an image may hold, %d", h.Name, h.Size, int64(maxFile))
		}
		e.Size = h.Size
	case tar.TypeDir, tar.TypeFifo:
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) > 4095 {
			return entry{}, fmt.Errorf("%q: a symbolic link of %d bytes; 1 to 4095 are possible", h.Name, len(h.Linkname))
		}
		e.Link = h.Linkname
	case tar.TypeLink:
		if e.Link, err = cleanName(h.Linkname); err != nil {
			return entry{}, fmt.Errorf("%q: hard link to %w", h.Name, err)
		}
	case tar.TypeChar, tar.TypeBlock:
		// ext4's and Linux's own limits of a device number.
		if h.Devmajor < 0 || h.Devmajor > 0xfff || h.Devminor < 0 || h.Devminor > 0xfffff {
			return entry{}, fmt.Errorf("%q: device number %d:%d is out of range", h.Name, h.Devmajor, h.Devminor)
		}
		e.Major, e.Minor = uint32(h.Devmajor), uint32(h.Devminor)
	default:
		return entry{}, fmt.Errorf("%q: tar entry of unknown type %q", h.Name, h.Typeflag)
	}
	if h.Typeflag != tar.TypeLink { // a hard link has the attributes of its file
		e.Xattrs, err = xattrsOf(h)
	}
	return e, err
}

// maxFile is compactext4's limit of one file.
const maxFile = 128 << 30

const (
	paxXattr    = "SCHILY.xattr."
	paxArchive  = "LIBARCHIVE.xattr."
	aclAccess   = "system.posix_acl_access"
	aclDefault  = "system.posix_acl_default"
	maxXattrLen = 64 << 10
)

// xattrsOf collects the extended attributes of a header. See the package
// documentation for the rule about empty values and overlay's own ones.
func xattrsOf(h *tar.Header) (map[string]string, error) {
	var out map[string]string
	set := func(k, v string) error {
		switch {
		case k == "" || len(k) > 255 || strings.ContainsRune(k, 0):
			return fmt.Errorf("%q: bad name of an extended attribute, %.40q", h.Name, k)
		case len(v) > maxXattrLen:
			return fmt.Errorf("%q: extended attribute %s of %d bytes; Linux takes %d", h.Name, k, len(v), maxXattrLen)
		case strings.HasPrefix(k, "trusted.overlay."), strings.HasPrefix(k, "user.overlay."):
			return nil
		case k == aclAccess || k == aclDefault:
			disk, err := aclToDisk(v)
			if err != nil {
				return fmt.Errorf("%q: %s: %w", h.Name, k, err)
			}
			v = disk
		case !strings.HasPrefix(k, "user.") && !strings.HasPrefix(k, "trusted.") && !strings.HasPrefix(k, "security."):
			return nil // no such namespace on ext4
		}
		if out == nil {
			out = map[string]string{}
		}
		out[k] = v
		return nil
	}
	for k, v := range h.PAXRecords {
		// libarchive writes both forms; the SCHILY one, if there, is the same.
		if name, ok := strings.CutPrefix(k, paxArchive); ok {
			if _, both := h.PAXRecords[paxXattr+name]; both {
				continue
			}
			b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(v, "="))
			if err != nil {
				return nil, fmt.Errorf("%q: %s is not base64", h.Name, k)
			}
			if err := set(name, string(b)); err != nil {
				return nil, err
			}
		}
	}
	for k, v := range h.PAXRecords {
		if name, ok := strings.CutPrefix(k, paxXattr); ok {
			if err := set(name, v); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// aclToDisk turns an ACL from the form of getxattr(2) (version 2, 8 bytes an
// entry, linux/posix_acl_xattr.h) into ext4's own (version 1, 4 bytes for
// entries without an id, fs/ext4/acl.h).
func aclToDisk(v string) (string, error) {
	if len(v) < 4 || (len(v)-4)%8 != 0 || v[:4] != "\x02\x00\x00\x00" {
		return "", errors.New("not an ACL")
	}
	out := []byte{1, 0, 0, 0}
	for e := v[4:]; e != ""; e = e[8:] {
		out = append(out, e[:4]...)
		if tag := e[0]; tag == 0x02 || tag == 0x08 { // ACL_USER, ACL_GROUP
			out = append(out, e[4:8]...)
		}
	}
	return string(out), nil
}

func (e *entry) mtime() time.Time { return time.Unix(e.Sec, int64(e.Nsec)) }

func encodeIndex(idx *index) ([]byte, error) {
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(idx); err != nil {
		return nil, fmt.Errorf("encoding a layer's index: %w", err)
	}
	return b.Bytes(), nil
}

// decodeIndex fails on anything that this version would not have written.
func decodeIndex(b []byte) (*index, error) {
	var idx index
	if err := gob.NewDecoder(bytes.NewReader(b)).Decode(&idx); err != nil {
		return nil, fmt.Errorf("decoding a layer's index: %w", err)
	}
	if idx.Version != indexVersion {
		return nil, fmt.Errorf("a layer's index has version %d, not %d", idx.Version, indexVersion)
	}
	return &idx, nil
}
