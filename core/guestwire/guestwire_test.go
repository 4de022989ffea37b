package guestwire_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/guestwire"
)

var update = flag.Bool("update", false, "rewrite the golden file")

// types are all that is sent, one value each with every field set.
var types = map[string]any{
	"Header": guestwire.Header{}, "Reply": guestwire.Reply{}, "Hello": guestwire.Hello{},
	"HelloReply": guestwire.HelloReply{}, "Progress": guestwire.Progress{}, "Setup": guestwire.Setup{},
	"Resume": guestwire.Resume{}, "ExecRequest": guestwire.ExecRequest{}, "Stdio": guestwire.Stdio{},
	"ExecControl": guestwire.ExecControl{}, "ExecEvent": guestwire.ExecEvent{}, "Pong": guestwire.Pong{},
	"Shutdown": guestwire.Shutdown{}, "Dial": guestwire.Dial{}, "WriteFile": guestwire.WriteFile{},
	"Service": guestwire.Service{}, "Victims": guestwire.Victims{},
}

// fill sets every field to something that is not its zero value.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Slice:
		if v.Type() == reflect.TypeFor[json.RawMessage]() {
			v.SetBytes([]byte(`{"any":"thing"}`))
			return
		}
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte("bytes"))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.String:
		v.SetString("text")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(7)
	case reflect.Uint16, reflect.Uint32:
		v.SetUint(7)
	default:
		panic("a wire type has a field of kind " + v.Kind().String())
	}
}

// TestGolden fails when the JSON of a type changes: host and guest ship
// together, but what is written in a job's files and traces does not.
func TestGolden(t *testing.T) {
	names := make([]string, 0, len(types))
	for n := range types {
		names = append(names, n)
	}
	sort.Strings(names)
	var got bytes.Buffer
	for _, n := range names {
		p := reflect.New(reflect.TypeOf(types[n]))
		fill(p.Elem())
		b, err := json.Marshal(p.Interface())
		if err != nil {
			t.Fatal(err)
		}
		got.WriteString(n + " " + string(b) + "\n")

		again := reflect.New(p.Type().Elem())
		if err := json.Unmarshal(b, again.Interface()); err != nil {
			t.Errorf("%s does not decode: %v", n, err)
		}
		if d := cmp.Diff(p.Interface(), again.Interface()); d != "" {
			t.Errorf("%s changes on its way (-sent +received):\n%s", n, d)
		}
	}
	golden := filepath.Join("testdata", "types.golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got.String()); d != "" {
		t.Errorf("the wire types changed; if that is meant, run go test -update (-want +got):\n%s", d)
	}
}

// TestTags fails on a field whose name on the wire is Go's.
func TestTags(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var walk func(reflect.Type)
	walk = func(rt reflect.Type) {
		for rt.Kind() == reflect.Pointer || rt.Kind() == reflect.Slice {
			rt = rt.Elem()
		}
		if rt.Kind() != reflect.Struct || seen[rt] {
			return
		}
		seen[rt] = true
		for i := range rt.NumField() {
			f := rt.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "" || name != strings.ToLower(name) {
				t.Errorf("%s.%s has the JSON name %q", rt, f.Name, name)
			}
			walk(f.Type)
		}
	}
	for _, v := range types {
		walk(reflect.TypeOf(v))
	}
}

func TestSendRecv(t *testing.T) {
	var b bytes.Buffer
	want := guestwire.Dial{Network: "tcp", Addr: "127.0.0.1:80"}
	if err := guestwire.Send(&b, want); err != nil {
		t.Fatal(err)
	}
	var got guestwire.Dial
	if err := guestwire.Recv(&b, &got); err != nil || got != want {
		t.Errorf("Recv = %+v, %v", got, err)
	}
	if err := guestwire.Recv(&b, &got); err != io.EOF {
		t.Errorf("Recv at the end = %v, want io.EOF itself", err)
	}
	if err := guestwire.Send(io.Discard, strings.Repeat("x", guestwire.MaxFrame)); err == nil {
		t.Error("Send of a frame over the limit was not refused")
	}
	long := binary.BigEndian.AppendUint32(nil, guestwire.MaxFrame+1)
	if err := guestwire.Recv(bytes.NewReader(long), &got); err == nil || !strings.Contains(err.Error(), "limit") {
		t.Errorf("Recv of a frame over the limit = %v", err)
	}
	if err := guestwire.Recv(strings.NewReader("\x00\x00\x00\x09{}"), &got); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("Recv of a cut frame = %v", err)
	}
}

func TestOpenCarriesTheBody(t *testing.T) {
	var b bytes.Buffer
	want := guestwire.Shutdown{Reboot: true, Grace: 3 * time.Second}
	if err := guestwire.Open(&b, guestwire.OpShutdown, want); err != nil {
		t.Fatal(err)
	}
	var h guestwire.Header
	if err := guestwire.Recv(&b, &h); err != nil || h.Op != guestwire.OpShutdown {
		t.Fatalf("Recv = %+v, %v", h, err)
	}
	var got guestwire.Shutdown
	if err := json.Unmarshal(h.Body, &got); err != nil || got != want {
		t.Errorf("body %+v, %v; want %+v", got, err, want)
	}
}

// writes records each Write.
type writes struct{ all [][]byte }

func (w *writes) Write(p []byte) (int, error) {
	w.all = append(w.all, bytes.Clone(p))
	return len(p), nil
}
func (w *writes) Read([]byte) (int, error) { return 0, io.EOF }
func (w *writes) Close() error             { return nil }

func TestJoinFrames(t *testing.T) {
	w := &writes{}
	j := guestwire.JoinFrames(w)
	data := []byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3}
	window := []byte{0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3}
	empty := []byte{0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0}
	for _, p := range [][]byte{window, data, []byte("abc"), empty, data, []byte("def")} {
		if n, err := j.Write(p); n != len(p) || err != nil {
			t.Errorf("Write(%q) = %d, %v", p, n, err)
		}
	}
	want := [][]byte{window, append(bytes.Clone(data), "abc"...), empty, append(bytes.Clone(data), "def"...)}
	if d := cmp.Diff(want, w.all); d != "" {
		t.Errorf("writes (-want +got):\n%s", d)
	}

	// Of a long body only the beginning is copied.
	w.all = nil
	long := bytes.Repeat([]byte("long"), 20<<10)
	for _, p := range [][]byte{data, long} {
		if n, err := j.Write(p); n != len(p) || err != nil {
			t.Errorf("Write of %d bytes = %d, %v", len(p), n, err)
		}
	}
	if got := bytes.Join(w.all, nil); len(w.all) != 2 || len(w.all[0]) != 32<<10 || !bytes.Equal(got, append(bytes.Clone(data), long...)) {
		t.Errorf("a long body came in %d writes, %d bytes in all", len(w.all), len(got))
	}
}

// The frame that opens a stream waits for the next one; the one that accepts a
// stream, and the one that ends it, do not wait.
func TestJoinFramesOfAStreamsBeginning(t *testing.T) {
	w := &writes{}
	j := guestwire.JoinFrames(w)
	frame := func(typ, flags, stream, n byte) []byte { return []byte{0, typ, 0, flags, 0, 0, 0, stream, 0, 0, 0, n} }
	open, accept, data, end := frame(1, 1, 3, 9), frame(1, 2, 4, 9), frame(0, 0, 3, 2), frame(1, 4, 3, 0)
	for _, p := range [][]byte{open, open, data, []byte("hi"), accept, open, end} {
		if n, err := j.Write(p); n != len(p) || err != nil {
			t.Errorf("Write(%v) = %d, %v", p, n, err)
		}
	}
	want := [][]byte{slices.Concat(open, open, data, []byte("hi")), accept, slices.Concat(open, end)}
	if d := cmp.Diff(want, w.all); d != "" {
		t.Errorf("writes (-want +got):\n%s", d)
	}
	w.all = nil
	for range 100 {
		if _, err := j.Write(open); err != nil {
			t.Error(err)
		}
	}
	if got := bytes.Join(w.all, nil); len(got) < 80*len(open) {
		t.Errorf("of 100 streams %d bytes were written", len(got))
	}
}

// failAfter takes n bytes and no more.
type failAfter struct {
	writes
	n int
}

func (w *failAfter) Write(p []byte) (int, error) {
	if len(p) > w.n {
		n := w.n
		w.n = 0
		return n, io.ErrClosedPipe
	}
	w.n -= len(p)
	return len(p), nil
}

// A failed write tells how much of the body went, whichever part failed.
// Frames that may wait do, until they are let go or something else goes.
func TestJoinFramesHeld(t *testing.T) {
	w := &writes{}
	f := guestwire.JoinFrames(w)
	frame := func(typ, flags, stream, n byte) []byte { return []byte{0, typ, 0, flags, 0, 0, 0, stream, 0, 0, 0, n} }
	accept, end := frame(1, 2, 3, 9), frame(1, 4, 3, 0)
	write := func(frames ...[]byte) {
		t.Helper()
		for _, p := range frames {
			if n, err := f.Write(p); n != len(p) || err != nil {
				t.Errorf("Write(%v) = %d, %v", p, n, err)
			}
		}
	}
	went := func(want ...[]byte) {
		t.Helper()
		if d := cmp.Diff(want, w.all); d != "" {
			t.Errorf("writes (-want +got):\n%s", d)
		}
		w.all = nil
	}
	f.HoldAccepts()
	write(accept, accept)
	went()
	write(end)
	went(slices.Concat(accept, accept, end))
	write(accept)
	f.Flush()
	went(accept)
	f.Flush()
	went()

	said := [][]byte{accept, frame(0, 0, 3, 2), []byte("hi"), end, frame(0, 0, 5, 3), []byte("all"), end}
	f.Hold()
	f.Hold()
	write(said...)
	f.Release()
	went()
	f.Release()
	went(slices.Concat(said...))

	// What one write has no room for does not wait.
	f.Hold()
	long := bytes.Repeat([]byte("long"), 20<<10)
	write(end, frame(0, 0, 3, 0xff), long)
	if got := bytes.Join(w.all, nil); len(got) != 2*12+len(long) {
		t.Errorf("of a long body %d bytes were written", len(got))
	}
	f.Release()

	// A failure that nobody was told of is that of the next write.
	f = guestwire.JoinFrames(&failAfter{n: 5})
	f.HoldAccepts()
	write(accept)
	f.Flush()
	if n, err := f.Write(end); n != 0 || err != io.ErrClosedPipe {
		t.Errorf("Write after a failed Flush = %d, %v", n, err)
	}

	var none *guestwire.Frames
	none.HoldAccepts()
	none.Hold()
	none.Release()
	none.Flush()
}

func TestJoinFramesFailure(t *testing.T) {
	header := []byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0}
	body := make([]byte, 64<<10)
	for room, want := range map[int]int{0: 0, 5: 0, 12 + 7: 7, 32 << 10: 32<<10 - 12, 40 << 10: 40<<10 - 12} {
		j := guestwire.JoinFrames(&failAfter{n: room})
		if n, err := j.Write(header); n != len(header) || err != nil {
			t.Errorf("header: Write = %d, %v", n, err)
		}
		if n, err := j.Write(body); n != want || err != io.ErrClosedPipe {
			t.Errorf("room for %d bytes: Write = %d, %v; want %d and the error", room, n, err, want)
		}
	}
}

// What JSON would change on its way is refused, not changed.
func TestExecIsPassedOnAsItIs(t *testing.T) {
	for _, r := range []guestwire.ExecRequest{{Argv: []string{"grep", "\xc4rger"}}, {Argv: []string{"x"}, Env: []string{"A=\xff"}}, {Argv: []string{"x"}, Dir: "/\xfe"}, {Argv: []string{"x"}, User: "\xfe"}} {
		var b bytes.Buffer
		if err := guestwire.Open(&b, guestwire.OpExec, r); err == nil || !strings.Contains(err.Error(), "is not UTF-8") || strings.Contains(err.Error(), "json:") || b.Len() > 0 {
			t.Errorf("Open of %+v = %v, %d bytes", r, err, b.Len())
		}
	}
	want := guestwire.ExecRequest{Argv: []string{"Ärger", "\x00\n\u2028<\ufffd"}, Env: []string{"ß=€"}, Dir: "/ü"}
	var b bytes.Buffer
	var h guestwire.Header
	var got guestwire.ExecRequest
	if err := guestwire.Open(&b, guestwire.OpExec, want); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(guestwire.Recv(&b, &h), json.Unmarshal(h.Body, &got)); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v came as %+v, %v", want, got, err)
	}
}

func FuzzRecv(f *testing.F) {
	var b bytes.Buffer
	guestwire.Open(&b, guestwire.OpExec, guestwire.ExecRequest{ID: strings.Repeat("a", 32), Argv: []string{"true"}})
	f.Add(b.Bytes())
	f.Add([]byte{})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, '{'})
	f.Add([]byte{0, 0, 0, 4, 'n', 'u', 'l', 'l'})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		for {
			var h guestwire.Header
			before := r.Len()
			err := guestwire.Recv(r, &h)
			if err == io.EOF && before != 0 {
				t.Fatalf("io.EOF with %d bytes left", before)
			}
			if err != nil {
				return
			}
			// What was received can be sent, and is the same then.
			var out bytes.Buffer
			if err := guestwire.Send(&out, h); err != nil {
				return // escapes may take it over the limit
			}
			var again guestwire.Header
			if err := guestwire.Recv(&out, &again); err != nil || again.Op != h.Op {
				t.Fatalf("%+v came back as %+v, %v", h, again, err)
			}
		}
	})
}
