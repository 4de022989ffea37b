package atop_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/atop"
)

// fill sets every number and text of v to something of its own.
func fill(v reflect.Value, n *int64) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(v.Index(i), n)
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		*n++
		v.SetFloat(float64(*n) / 10)
	case reflect.String:
		*n++
		v.SetString("t" + strings.Repeat("x", int(*n%7)))
	case reflect.Uint8:
		v.SetUint('S')
	case reflect.Uint:
		v.SetUint(0)
	default:
		*n++
		v.SetInt(*n)
	}
}

func full() *atop.Sample {
	var s atop.Sample
	n := int64(0)
	fill(reflect.ValueOf(&s).Elem(), &n)
	s.Has = atop.HasCPU | atop.HasCPL | atop.HasMEM | atop.HasSWP | atop.HasPAG | atop.HasPSI | atop.HasNET
	s.Procs[1].State = 'E'
	s.Procs[0].Name, s.Procs[0].Cmdline = "a) S 1 (b", "sh -c (echo 1 2 3) - (x)"
	s.Procs[1].Cmdline, s.Procs[1].CGroup, s.Procs[0].CGroup = "", "/a b (c)", ""
	for i := range s.Procs {
		s.Procs[i].WChan = "futex_do_wait"
	}
	return &s
}

func readAll(t *testing.T, in io.Reader) ([]atop.Sample, atop.ReadStats) {
	t.Helper()
	r := atop.NewReader(in)
	var out []atop.Sample
	for {
		var s atop.Sample
		err := r.Next(&s)
		if err == io.EOF {
			return out, r.Stats()
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
}

// TestRoundTrip: every field that is written is read again.
func TestRoundTrip(t *testing.T) {
	want := full()
	b := atop.AppendSample(nil, want)
	got, st := readAll(t, bytes.NewReader(b))
	if st.Skipped+st.Torn != 0 || len(got) != 1 {
		t.Fatalf("%d samples, %+v of\n%s", len(got), st, b)
	}
	if d := cmp.Diff(*want, got[0]); d != "" {
		t.Error(d)
	}
}

// fieldsOf counts the fields of each label's lines, names and command lines
// as one each.
func fieldsOf(t *testing.T, text string) map[string]int {
	out := map[string]int{}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		var b strings.Builder
		depth := 0
		for _, c := range line {
			switch {
			case c == '(':
				depth++
				b.WriteByte('x')
			case c == ')':
				depth--
			case depth == 0:
				b.WriteRune(c)
			}
		}
		f := strings.Fields(b.String())
		label := f[0]
		if label == "NET" && f[6] == "upper" {
			label = "NET upper"
		}
		if n, ok := out[label]; ok && n != len(f) {
			t.Errorf("%s has %d fields and %d", label, n, len(f))
		}
		out[label] = len(f)
	}
	return out
}

// judge is what atop 2.8.1 printed.
func judge(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("testdata/atop-2.8.1.txt")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestFieldsAsAtop: every label has as many fields as atop gives it.
func TestFieldsAsAtop(t *testing.T) {
	want := fieldsOf(t, judge(t))
	s := full()
	s.Procs[0].Name, s.Procs[0].Cmdline, s.Procs[1].CGroup = "sh", "sh", ""
	got := fieldsOf(t, string(atop.AppendSample(nil, s)))
	for _, own := range []string{"PRW", "PRK"} {
		delete(got, own)
	}
	for _, other := range []string{"NFC", "NFS", "NUM", "PRE", "PRN"} {
		delete(want, other)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// TestReadsAtop: what atop itself printed is read without a loss, and says the
// same when it is written again.
func TestReadsAtop(t *testing.T) {
	text := judge(t)
	got, st := readAll(t, strings.NewReader(text))
	if st.Skipped+st.Torn != 0 || len(got) != 2 || !got[0].Reset || got[1].Reset {
		t.Fatalf("%d samples, %+v", len(got), st)
	}
	compareLines(t, text, got)
}

// compareLines writes samples and compares them with atop's lines, but for what
// virtkit does not record.
func compareLines(t *testing.T, text string, samples []atop.Sample) {
	t.Helper()
	var b []byte
	for i := range samples {
		b = atop.AppendSample(b, &samples[i])
	}
	drop := func(label string, f []string) bool { // fields that virtkit has no source of
		switch label {
		case "CPU", "cpu":
			f[17], f[18] = "-", "-"
			f[19], f[20] = "-", "-"
		case "MEM":
			for _, i := range []int{14, 16, 17, 21, 22, 23} {
				f[i] = "-"
			}
		case "PRC", "PRM", "PRG", "PRD":
			return false
		case "NFC", "NFS", "NUM", "PRE", "PRN":
			return false
		}
		return true
	}
	canon := func(text string) []string {
		var out []string
		for line := range strings.Lines(text) {
			f := strings.Fields(line)
			if len(f) < 6 {
				continue
			}
			if drop(f[0], f) {
				out = append(out, strings.Join(f, " "))
			}
		}
		return out
	}
	if d := cmp.Diff(canon(text), canon(string(b))); d != "" {
		t.Error(d)
	}
	// Of processes, what stands left and right of names.
	proc := func(text, label string) []string {
		var out []string
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, label+" ") {
				continue
			}
			f := strings.Fields(line)
			switch label {
			case "PRC": // limits of control groups, unknown to us
				f[len(f)-1], f[len(f)-2] = "-", "-"
			case "PRM":
				for i := 1; i <= 4; i++ {
					f[len(f)-i] = "-"
				}
				f[len(f)-6] = "-" // proportional size
			}
			out = append(out, strings.Join(f, " "))
		}
		return out
	}
	for _, label := range []string{"PRG", "PRC", "PRM", "PRD"} {
		if d := cmp.Diff(proc(text, label), proc(string(b), label)); d != "" {
			t.Errorf("%s: %s", label, d)
		}
	}
}

// TestReadsLiveAtop reads what the atop of this host prints.
func TestReadsLiveAtop(t *testing.T) {
	bin, err := exec.LookPath("atop")
	if err != nil {
		t.Skip("needs atop (apt-get install atop)")
	}
	out, err := exec.Command(bin, "-P", "CPU,cpu,CPL,MEM,SWP,PAG,PSI,DSK,NET,PRG,PRC,PRM,PRD", "1", "2").Output()
	if err != nil {
		t.Fatal(err)
	}
	got, st := readAll(t, bytes.NewReader(out))
	if st.Skipped+st.Torn != 0 || len(got) != 2 || st.Lines == 0 {
		t.Errorf("%d samples, %+v", len(got), st)
	}
}

// TestDamage: whatever is in a file, what is good is read.
func TestDamage(t *testing.T) {
	good := string(atop.AppendSample(nil, full()))
	next := full()
	next.Epoch += 10
	cut := good[:len(good)/2]
	for _, tc := range []struct {
		name, in      string
		samples       int
		skipped, torn int64
	}{
		{"empty", "", 0, 0, 0},
		{"cut", good + cut, 1, 0, 1},
		{"cut, then another boot", cut + "\n" + string(atop.AppendSample(nil, next)), 1, 1, 1},
		{"binary", "\x00\xff\xfe\n" + good, 1, 0, 0},
		{"foreign labels", "GPU x 1 2\nSEP\nSEP\n" + good, 1, 0, 0},
		{"no numbers", "CPU h 1 d t x\nMEM h\n" + good, 1, 2, 0},
		{"long line", "PRG h " + strings.Repeat("9", 1<<20) + "\n" + good, 1, 1, 0},
		{"a process of nobody", "PRC h 1 d t 1 42 (x) S 100 1 1 0 0 0 0 0 0 42 y 0 () 0 -3 -3\nSEP\n", 1, 1, 0},
		{"huge numbers", "CPL h 1 d t 1 99999999999999999999999 1.00 2.00 3.00 1 2\nSEP\n", 1, 0, 0},
	} {
		got, st := readAll(t, strings.NewReader(tc.in))
		if len(got) != tc.samples || st.Skipped != tc.skipped || st.Torn != tc.torn {
			t.Errorf("%s: %d samples, %+v, want %d, %d skipped, %d torn", tc.name, len(got), st, tc.samples, tc.skipped, tc.torn)
		}
	}
}

// TestTexts: no text makes a line that is another.
func TestTexts(t *testing.T) {
	s := full()
	s.Procs = s.Procs[:1]
	s.Host = "a b\nSEP"
	s.Procs[0].Name, s.Procs[0].Cmdline = "x\nSEP\n", "a\x00b\nSEP\n\xff\xfe"+strings.Repeat("y", 1000)
	got, st := readAll(t, bytes.NewReader(atop.AppendSample(nil, s)))
	if len(got) != 1 || st.Skipped != 0 {
		t.Fatalf("%d samples, %+v", len(got), st)
	}
	if p := got[0].Procs[0]; p.Name != "x SEP " || !strings.HasPrefix(p.Cmdline, "a b SEP \xff\xfeyy") || len(p.Cmdline) != atop.MaxCmdline || got[0].Host != "a_b_SEP" {
		t.Errorf("read %q %q %q", got[0].Host, p.Name, p.Cmdline)
	}
}

func FuzzReader(f *testing.F) {
	b, err := os.ReadFile("testdata/atop-2.8.1.txt")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b[:4096])
	f.Add(atop.AppendSample(nil, full()))
	f.Add([]byte("RESET\nPRG h 1 d t 1 1 () S 0 0 1 1 0 0 () 0 0 0 0 0 0 0 0 0 0 0 y 0 0 - N ()\nSEP\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := atop.NewReader(bytes.NewReader(b))
		st := atop.NewStalls()
		var s atop.Sample
		for {
			if err := r.Next(&s); err != nil {
				if !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
				return
			}
			st.Add(&s, func(atop.Stalled) {})
			// What was read can be written and read again.
			again, stats := readAll(t, bytes.NewReader(atop.AppendSample(nil, &s)))
			if len(again) != 1 && stats.Lines > 0 || stats.Skipped > 0 {
				t.Fatalf("%d samples again, %+v, of %+v", len(again), stats, s)
			}
		}
	})
}
