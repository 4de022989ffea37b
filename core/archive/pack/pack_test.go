package pack_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/archive"
	"virtkit/core/archive/pack"
	"virtkit/core/fleet/job"
)

var old = time.Date(2024, 2, 3, 4, 5, 6, 0, time.UTC)

type file struct {
	name, text string
	mode       int64
}

// stream is a tar of files; a text "-> x" is a link, a name with / at its end a
// directory.
func stream(t testing.TB, files ...file) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, ModTime: old, Uid: 7, Gid: 8, Format: tar.FormatPAX, Typeflag: tar.TypeReg, Size: int64(len(f.text))}
		if strings.HasSuffix(f.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if to, ok := strings.CutPrefix(f.text, "-> "); ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, to, 0
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			io.WriteString(w, f.text)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// told tells what a tar stream holds.
func told(t *testing.T, r io.Reader) (out []string) {
	t.Helper()
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%c %q %o %d:%d %d -> %q %d %x", h.Typeflag, h.Name, h.Mode, h.Uid, h.Gid, h.ModTime.Unix(), h.Linkname, len(b), b[:min(len(b), 8)]))
	}
}

func long(n int) string {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range b {
		b[i] = byte('a' + r.IntN(4))
	}
	return string(b)
}

// TestRoundTrip: every format that can be extracted gives back what it got.
func TestRoundTrip(t *testing.T) {
	files := []file{
		{"emptyd/", "", 0o755}, {"out/", "", 0o700}, {"out/link", "-> one.txt", 0o777}, {"out/one.txt", "one\n", 0o644},
		{"out/empty", "", 0o600}, {"out/tool", "bin", 0o4755}, {"out/ü\n", "odd", 0o644}, {"out/\xff", "odd", 0o644},
		{"out/exactly", long(pack.Block), 0o644}, {"out/long", long(3*pack.Block + 5), 0o644}, {"out/z", "z", 0o644},
	}
	for _, format := range []job.Format{job.Zip, job.ZipZstd, job.TarZstd} {
		for _, level := range []pack.Level{"", pack.Fastest, pack.Slowest} {
			in := stream(t, files...)
			want := told(t, bytes.NewReader(in.Bytes()))
			path := filepath.Join(t.TempDir(), "archive")
			f, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if n, err := pack.Write(f, in, format, level); err != nil || n != len(files) {
				t.Fatalf("%s: %d, %v", format, n, err)
			}
			var out bytes.Buffer
			if err := pack.Read(&out, f); err != nil {
				t.Fatalf("%s: %v", format, err)
			}
			if d := cmp.Diff(want, told(t, &out)); d != "" {
				t.Errorf("%s %s: %s", format, level, d)
			}
			if format == job.Zip {
				t.Run("unzip", func(t *testing.T) {
					unzip, err := exec.LookPath("unzip")
					if err != nil {
						t.Skip("needs unzip: apt-get install unzip")
					}
					if out, err := exec.Command(unzip, "-tqq", path).CombinedOutput(); err != nil {
						t.Errorf("unzip -t: %v\n%s", err, out)
					}
				})
			}
		}
	}
}

// TestZipAsRecorded: methods, flags, extra fields and sizes of artifacts-zip.
func TestZipAsRecorded(t *testing.T) {
	read := func(files ...file) []string {
		var b bytes.Buffer
		if _, err := pack.Write(&b, stream(t, files...), job.Zip, ""); err != nil {
			t.Fatal(err)
		}
		z, err := zip.NewReader(bytes.NewReader(b.Bytes()), int64(b.Len()))
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, f := range z.File {
			out = append(out, fmt.Sprintf("%s %d/%d method %d flags %d mode %o version %d/%d extra %x", f.Name, f.UncompressedSize64, f.CompressedSize64, f.Method, f.Flags, f.ExternalAttrs>>16, f.CreatorVersion, f.ReaderVersion, f.Extra))
		}
		return out
	}
	const extra = "75780b000104070000000408000000555405000172bbbd65"
	want := []string{
		"out/ 0/0 method 0 flags 0 mode 40755 version 788/20 extra " + extra,
		"out/link 7/7 method 0 flags 0 mode 120777 version 788/20 extra " + extra,
		"out/one.txt 4/4 method 0 flags 8 mode 100644 version 788/20 extra " + extra,
		"out/tool 3/3 method 0 flags 8 mode 100755 version 788/20 extra " + extra,
	}
	if d := cmp.Diff(want, read(file{"out/", "", 0o755}, file{"out/link", "-> one.txt", 0o777}, file{"out/one.txt", "one\n", 0o644}, file{"out/tool", "bin", 0o755})); d != "" {
		t.Error(d)
	}
	// One file alone is deflated, though it grows.
	got := read(file{"out/one.txt", "one\n", 0o644})
	if !strings.Contains(got[0], "method 8 flags 8") {
		t.Error(got)
	}
}

// TestZipNumbers: what other programs read by number: zstd's method (APPNOTE
// 4.4.5) and times of MS-DOS (4.4.6), which begin with 1980 and end with 2107.
func TestZipNumbers(t *testing.T) {
	stamped := func(at time.Time) *bytes.Buffer {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		text := strings.Repeat("text ", 1000)
		if err := w.WriteHeader(&tar.Header{Name: "a", Mode: 0o644, ModTime: at, Format: tar.FormatPAX, Typeflag: tar.TypeReg, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, text)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return &b
	}
	for _, c := range []struct {
		at          time.Time
		date, clock uint16
	}{
		{old, (2024-1980)<<9 | 2<<5 | 3, 4<<11 | 5<<5 | 6/2},
		{time.Unix(0, 0), 1<<5 | 1, 0},
		{time.Date(1980, 1, 1, 0, 0, 2, 0, time.UTC), 1<<5 | 1, 1},
		{time.Date(2199, 12, 31, 23, 59, 58, 0, time.UTC), 127<<9 | 12<<5 | 31, 23<<11 | 59<<5 | 29},
	} {
		for format, method := range map[job.Format]uint16{job.Zip: zip.Deflate, job.ZipZstd: 93} {
			var b bytes.Buffer
			if _, err := pack.Write(&b, stamped(c.at), format, ""); err != nil {
				t.Fatal(err)
			}
			z, err := zip.NewReader(bytes.NewReader(b.Bytes()), int64(b.Len()))
			if err != nil {
				t.Fatal(err)
			}
			h := z.File[0].FileHeader
			//lint:ignore SA1019 Modified is the extra field's
			date, clock := h.ModifiedDate, h.ModifiedTime
			if h.Method != method || date != c.date || clock != c.clock {
				t.Errorf("%s of %s: method %d, date %#x, time %#x; want %d, %#x, %#x", format, c.at, h.Method, date, clock, method, c.date, c.clock)
			}
		}
	}
}

// TestGzipAndRaw: reports, one member a file; a raw one is a file alone.
func TestGzipAndRaw(t *testing.T) {
	var b bytes.Buffer
	files := []file{{"r/", "", 0o755}, {"r/j1.xml", "<testsuite/>\n", 0o644}, {"r/j\u00ff.xml", "<testsuite name=2/>\n", 0o644}}
	if _, err := pack.Write(io.Discard, stream(t, files...), job.Gzip, ""); !errors.Is(err, pack.ErrNotRegular) || err.Error() != `the "r" is not a regular file` {
		t.Errorf("a directory: %v", err)
	}
	if n, err := pack.Write(&b, stream(t, files[1:]...), job.Gzip, ""); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	z, err := gzip.NewReader(&b)
	if err != nil {
		t.Fatal(err)
	}
	z.Multistream(false)
	for _, f := range files[1:] {
		text, err := io.ReadAll(z)
		if err != nil || string(text) != f.text || z.Comment != f.name || z.Name != filepath.Base(f.name) || z.ModTime.Unix() != old.Unix() {
			t.Errorf("%q, %q, %q, %v, %v", text, z.Name, z.Comment, z.ModTime, err)
		}
		if err := z.Reset(&b); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		z.Multistream(false)
	}
	b.Reset()
	if n, err := pack.Write(&b, stream(t, file{"a", "alone", 0o644}), job.Raw, ""); n != 1 || err != nil || b.String() != "alone" {
		t.Errorf("%d, %v, %q", n, err, b.String())
	}
	if _, err := pack.Write(io.Discard, stream(t, files...), job.Raw, ""); !errors.Is(err, pack.ErrOneFile) {
		t.Error(err)
	}
}

// failingWriter fails after some bytes, as a disk that is full.
type failingWriter struct{ left int }

var errFull = errors.New("full")

func (f *failingWriter) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errFull
	}
	return len(p), nil
}

func TestBroken(t *testing.T) {
	text := long(4 * pack.Block)
	for _, format := range []job.Format{job.Zip, job.ZipZstd, job.TarZstd, job.Gzip, job.Raw} {
		if _, err := pack.Write(&failingWriter{left: 1000}, stream(t, file{"a", text, 0o644}), format, ""); !errors.Is(err, errFull) {
			t.Errorf("%s: a disk that is full: %v", format, err)
		}
		in := stream(t, file{"a", text, 0o644})
		if _, err := pack.Write(io.Discard, bytes.NewReader(in.Bytes()[:in.Len()/2]), format, ""); err == nil {
			t.Errorf("%s: a stream that is cut short is no error", format)
		}
	}
	for _, text := range []string{"", "x", "PK\x03\x04 no zip", "\x28\xb5\x2f\xfd no zstd"} {
		path := filepath.Join(t.TempDir(), "a")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := pack.Read(io.Discard, f); err == nil {
			t.Errorf("%q was read", text)
		}
		f.Close()
	}
}

func benchTree(b *testing.B) (string, int64) {
	root := b.TempDir()
	r := rand.New(rand.NewPCG(3, 4))
	var total int64
	words := strings.Fields("func return if err != nil { } := range the of a to package import string int error for struct type var")
	for i := range 2000 {
		n := 1 << (8 + r.IntN(9))
		var sb strings.Builder
		for sb.Len() < n {
			fmt.Fprintf(&sb, "%s %d ", words[r.IntN(len(words))], r.IntN(1000))
		}
		path := filepath.Join(root, fmt.Sprintf("d%d", i%50), fmt.Sprintf("f%d", i))
		os.MkdirAll(filepath.Dir(path), 0o755)
		if err := os.WriteFile(path, []byte(sb.String()), 0o644); err != nil {
			b.Fatal(err)
		}
		total += int64(sb.Len())
	}
	big := strings.Repeat(long(1<<20), 32)
	if err := os.WriteFile(filepath.Join(root, "big"), []byte(big), 0o644); err != nil {
		b.Fatal(err)
	}
	return root, total + int64(len(big))
}

// BenchmarkZip: a tree of 2000 texts and a file of 32 MiB, read from disk.
func BenchmarkZip(b *testing.B) {
	root, total := benchTree(b)
	b.Run("vk", func(b *testing.B) {
		b.SetBytes(total)
		for b.Loop() {
			r, w := io.Pipe()
			go func() {
				entries, err := archive.Select(archive.Selection{Tree: root, Paths: []string{"."}}, func(archive.Note) {})
				if err == nil {
					err = archive.Write(w, root, entries, func(archive.Note) {})
				}
				w.CloseWithError(err)
			}()
			if _, err := pack.Write(io.Discard, r, job.Zip, ""); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("archive-zip", func(b *testing.B) {
		b.SetBytes(total)
		for b.Loop() {
			z := zip.NewWriter(io.Discard)
			if err := z.AddFS(os.DirFS(root)); err != nil {
				b.Fatal(err)
			}
			z.Close()
		}
	})
	b.Run("info-zip", func(b *testing.B) {
		program, err := exec.LookPath("zip")
		if err != nil {
			b.Skip("no zip program")
		}
		b.SetBytes(total)
		for b.Loop() {
			cmd := exec.Command(program, "-qr", "-", ".")
			cmd.Dir, cmd.Stdout = root, io.Discard
			if err := cmd.Run(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
