package wire_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/wire"
)

var update = flag.Bool("update", false, "write the lock and golden files")

func base(name string) string { n, _, _ := strings.Cut(name, "+"); return n }

// TestSamplesAreWhole: every type has a sample, and every field of every
// message is set in one.
func TestSamplesAreWhole(t *testing.T) {
	have := map[string]bool{}
	set := map[string]bool{}
	for name, m := range samples() {
		have[base(name)] = true
		if ty, ok := wire.TypeOf(m); !ok || ty.Name() != base(name) {
			t.Errorf("sample %s is a %T", name, m)
		}
		walk(reflect.ValueOf(m), func(field string, v reflect.Value) { set[field] = set[field] || !v.IsZero() })
	}
	for _, ty := range wire.Types {
		if !have[ty.Name()] {
			t.Errorf("%s has no sample", ty.Name())
		}
	}
	for _, f := range fields(t) {
		if name, _, _ := strings.Cut(f, " "); !set[name] && !strings.HasPrefix(name, "Enroll") {
			t.Errorf("%s is not set in any sample", name)
		}
	}
}

// walk calls fn for each struct field below v, as Struct.Field.
func walk(v reflect.Value, fn func(string, reflect.Value)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			walk(v.Elem(), fn)
		}
	case reflect.Slice:
		for i := range v.Len() {
			walk(v.Index(i), fn)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			fn(v.Type().Name()+"."+v.Type().Field(i).Name, v.Field(i))
			walk(v.Field(i), fn)
		}
	}
}

// TestGolden: the JSON of each type in each version that changes it.
func TestGolden(t *testing.T) {
	want := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(samples())) {
		m := samples()[name]
		ty, _ := wire.TypeOf(m)
		var last []byte
		for v := ty.Since; v <= wire.Spoken.Max; v++ {
			if c, ok := m.(*wire.Command); ok && v < c.Op.Since() {
				continue
			}
			got, err := wire.Encode(v, m)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Equal(got, last) {
				continue
			}
			last = got
			path := filepath.Join("testdata", fmt.Sprintf("v%d", v), name+".json")
			want[path] = true
			if *update {
				writeFile(t, path, indent(t, got))
			}
			golden, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(golden), string(indent(t, got))); d != "" {
				t.Errorf("%s (-golden +now):\n%s", path, d)
			}
			back, err := wire.Decode(ty.From, v, []byte(compact(t, golden)))
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			again, err := wire.Encode(v, back)
			if err != nil || !bytes.Equal(again, got) {
				t.Errorf("%s: decoded and encoded again:\n%s\n%s, %v", path, again, got, err)
			}
			if v == wire.Spoken.Max {
				if d := cmp.Diff(m, back); d != "" {
					t.Errorf("%s decodes to (-sample +got):\n%s", path, d)
				}
			}
		}
	}
	files, err := filepath.Glob("testdata/v*/*.json")
	if err != nil || len(files) < len(wire.Types) {
		t.Fatalf("%d golden files, %v", len(files), err)
	}
	for _, f := range files {
		if !want[f] {
			t.Errorf("%s is no message of today's: a name is never taken back", f)
		}
	}
}

func indent(t *testing.T, b []byte) []byte {
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil {
		t.Fatal(err)
	}
	return append(out.Bytes(), '\n')
}

func writeFile(t *testing.T, path string, data []byte) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestTranscripts replays sessions as peers of each version have them: what
// was said then is understood, and said the same way, by today's code.
func TestTranscripts(t *testing.T) {
	files, _ := filepath.Glob("testdata/transcripts/v*.jsonl")
	if len(files) != wire.Spoken.Max {
		t.Fatalf("transcripts of %d versions, there are %d", len(files), wire.Spoken.Max)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		version, picked := 0, 0
		var hello *wire.Hello
		for i, line := range strings.Split(strings.TrimSpace(string(data)), "\n") {
			var l struct {
				From wire.Side       `json:"from"`
				Msg  json.RawMessage `json:"msg"`
			}
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatalf("%s:%d: %v", f, i+1, err)
			}
			if l.From == wire.FromHub && bytes.Contains(l.Msg, []byte(`"welcome"`)) {
				version = picked
			}
			m, err := wire.Decode(l.From, version, l.Msg)
			if err != nil {
				t.Fatalf("%s:%d: %v", f, i+1, err)
			}
			back, err := wire.Encode(version, m)
			if err != nil {
				t.Fatalf("%s:%d: %v", f, i+1, err)
			}
			if d := cmp.Diff(compact(t, l.Msg), string(back)); d != "" {
				t.Errorf("%s:%d (-said +encoded again):\n%s", f, i+1, d)
			}
			switch m := m.(type) {
			case *wire.Hello:
				hello = m
			case *wire.Challenge:
				v, ok := wire.Negotiate(hello.Versions, m.Versions)
				if picked = m.Version; !ok || v != picked {
					t.Errorf("%s:%d: picked %d, both speak %d", f, i+1, picked, v)
				}
			}
		}
		if want := fmt.Sprintf("testdata/transcripts/v%d.jsonl", version); f != want {
			t.Errorf("%s holds a session of version %d", f, version)
		}
	}
}

func compact(t *testing.T, b []byte) string {
	var out bytes.Buffer
	if err := json.Compact(&out, b); err != nil {
		t.Fatal(err)
	}
	return out.String()
}
