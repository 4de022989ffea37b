package wire_test

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/wire"
)

const lockFile = "testdata/wire_lock.txt"

// fields lists every field of every message: Struct.Field "json" GoType since.
func fields(t *testing.T) (out []string) {
	seen := map[reflect.Type]bool{}
	var visit func(reflect.Type)
	visit = func(ty reflect.Type) {
		switch ty.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			visit(ty.Elem())
			return
		}
		if ty.Kind() != reflect.Struct || seen[ty] {
			return
		}
		seen[ty] = true
		for i := range ty.NumField() {
			f := ty.Field(i)
			tag, ok := f.Tag.Lookup("json")
			if !ok {
				t.Errorf("%s.%s has no JSON tag", ty.Name(), f.Name)
			}
			if _, ok := f.Tag.Lookup("since"); ok && !strings.Contains(tag, "omitempty") {
				t.Errorf("%s.%s is of a later version and is not omitted when it is empty", ty.Name(), f.Name)
			}
			out = append(out, strings.TrimRight(fmt.Sprintf("%s.%s %q %s %s", ty.Name(), f.Name, tag, strings.ReplaceAll(f.Type.String(), "wire.", ""), f.Tag.Get("since")), " "))
			visit(f.Type)
		}
	}
	for _, m := range wire.Types {
		visit(reflect.TypeOf(m.New()))
	}
	for _, v := range []any{wire.EnrollRequest{}, wire.EnrollReply{}, wire.EnrollRefused{}} {
		visit(reflect.TypeOf(v))
	}
	slices.Sort(out)
	return out
}

func lines(t *testing.T) (out []string) {
	for _, m := range wire.Types {
		out = append(out, fmt.Sprintf("message %s %s since %d %T", m.From, m.Name(), m.Since, m.New()))
	}
	return append(out, fields(t)...)
}

// judge says whether a lock of revision had may become one of revision now.
func judge(had []string, hadRevision int, now []string, revision int) error {
	for _, l := range had {
		if !slices.Contains(now, l) {
			return fmt.Errorf("%q was changed or taken away: fields and types are only ever added", l)
		}
	}
	if len(now) > len(had) && revision <= hadRevision {
		return fmt.Errorf("%d fields or types were added without a new Revision: add an entry to History", len(now)-len(had))
	}
	return nil
}

// TestLock fails on a change of the messages that is not a new revision.
func TestLock(t *testing.T) {
	now := lines(t)
	data, err := os.ReadFile(lockFile)
	var had []string
	revision := 0
	if err == nil {
		had = strings.Split(strings.TrimSpace(string(data)), "\n")
		if revision, err = strconv.Atoi(strings.TrimPrefix(had[0], "revision ")); err != nil {
			t.Fatal(err)
		}
		had = had[1:]
		if err := judge(had, revision, now, wire.Revision); err != nil {
			t.Fatal(err)
		}
	} else if !*update {
		t.Fatal(err)
	}
	if *update {
		writeFile(t, lockFile, []byte(fmt.Sprintf("revision %d\n%s\n", wire.Revision, strings.Join(now, "\n"))))
		return
	}
	if revision != wire.Revision || !slices.Equal(had, now) {
		t.Errorf("%s is of revision %d, the code of %d: write it with -update", lockFile, revision, wire.Revision)
	}
}

func TestJudge(t *testing.T) {
	had := []string{"a", "b"}
	for _, c := range []struct {
		now      []string
		revision int
		ok       bool
	}{
		{[]string{"a", "b"}, 1, true},
		{[]string{"a", "b", "c"}, 1, false}, // added, same revision
		{[]string{"a", "b", "c"}, 2, true},
		{[]string{"a"}, 2, false},           // taken away
		{[]string{"a", "b2"}, 2, false},     // changed
		{[]string{"a", "x", "c"}, 2, false}, // renamed and added
	} {
		if err := judge(had, 1, c.now, c.revision); (err == nil) != c.ok {
			t.Errorf("judge(%v, revision %d) = %v", c.now, c.revision, err)
		}
	}
}

func TestHistory(t *testing.T) {
	last := ""
	for i, e := range wire.History {
		if _, err := time.Parse(time.DateOnly, e.Date); err != nil || e.Date < last || e.Revision != i+1 || e.Text == "" || e.Versions.Check() != nil {
			t.Errorf("entry %d of History: %+v, %v", i, e, err)
		}
		last = e.Date
	}
	if n := len(wire.History); n == 0 || wire.History[n-1].Revision != wire.Revision || wire.History[n-1].Versions != wire.Spoken {
		t.Errorf("History does not end with revision %d and versions %v", wire.Revision, wire.Spoken)
	}
}
