package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

func egressRecord(id, site string, names ...string) supervise.EgressRecord {
	r := policy.NewRecorder(policy.Run)
	for _, n := range names {
		r.Judged("", policy.Flow{Proto: policy.DNS, Name: n}, policy.Judgement{Verdict: policy.Verdict{Allow: true}}, false, time.Unix(1e9, 0))
	}
	return supervise.EgressRecord{Schema: "vk.egress-record/1", ID: id, Name: id, Kind: "gitlab", Record: r.Snapshot(),
		Egress: supervise.Egress{Site: site, Policy: policy.Policy{Phase: policy.Run}}}
}

func TestEgressRecordsAreKeptAndFound(t *testing.T) {
	e := ledger.OpenEgress(t.TempDir())
	for _, id := range []string{"77-web-test-01", "78-web-test-02", "run-00000001"} {
		if err := e.Keep(egressRecord(id, "")); err != nil {
			t.Fatal(err)
		}
	}
	for job, want := range map[string]string{"77-web-test-01": "77-web-test-01", "78": "78-web-test-02", "run-0": "run-00000001", "7": "fault", "nosuch": "fault", "../x": "fault", "": "fault"} {
		r, err := e.Find(t.Context(), job)
		if err != nil {
			if fault.HintOf(err) == "" {
				t.Errorf("%s: an error without a next step: %v", job, err)
			}
			r.ID = "fault"
		}
		if r.ID != want {
			t.Errorf("Find(%q) = %s (%v), want %s", job, r.ID, err, want)
		}
	}
	// "run" is the beginning of both guests' ids, not one job's number.
	for _, id := range []string{"run-00000001", "run-00000002"} {
		r := egressRecord(id, "")
		r.Kind = "run"
		if err := e.Keep(r); err != nil {
			t.Fatal(err)
		}
	}
	if r, err := e.Find(t.Context(), "run"); fault.KindOf(err) != fault.Usage {
		t.Errorf("Find(run) of two guests = %s, %v; want a usage error", r.ID, err)
	}
	if err := e.Keep(egressRecord("../../x", "")); err == nil {
		t.Error("a record was kept outside")
	}
}

func TestDamagedRecordIsReportedAndLeft(t *testing.T) {
	dir := t.TempDir()
	e := ledger.OpenEgress(dir)
	if err := e.Keep(egressRecord("1-a", "")); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(dir, "egress", "2-b.json")
	if err := os.WriteFile(bad, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	kept, problems, err := e.Kept(t.Context())
	if err != nil || len(kept) != 1 || len(problems) != 1 || !strings.Contains(problems[0].Error(), bad) {
		t.Errorf("Kept = %+v, %v, %v", kept, problems, err)
	}
}

func TestOldRecordsGo(t *testing.T) {
	dir := t.TempDir()
	e := ledger.OpenEgress(dir)
	for i := range 3 {
		if err := e.Keep(egressRecord(fmt.Sprint(i), "")); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-15 * 24 * time.Hour)
	if err := os.Chtimes(filepath.Join(dir, "egress", "1.json"), old, old); err != nil {
		t.Fatal(err)
	}
	if err := e.Keep(egressRecord("new", "")); err != nil {
		t.Fatal(err)
	}
	kept, _, err := e.Kept(t.Context())
	var ids []string
	for _, r := range kept {
		ids = append(ids, r.ID)
	}
	if err != nil || len(ids) != 3 || strings.Contains(strings.Join(ids, " "), "1") {
		t.Errorf("kept %v, %v; want all but the old one", ids, err)
	}
}

// Jobs of one name run at the same time, on hosts with many runners; no name
// may get lost.
func TestStandingListGrowsFromManySides(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			r := egressRecord(fmt.Sprintf("%d-x", i), "42-acme/test-1", "all.example", fmt.Sprintf("n%d.example", i))
			if err := ledger.OpenEgress(dir).Keep(r); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	s, err := ledger.OpenEgress(dir).Standing("42-acme/test-1")
	if err != nil || len(s.Names("")) != 9 {
		t.Errorf("%+v, %v; want 9 names", s, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "sites", "42-acme", "test-1.json")); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"../x", "a", "a/../b", "a/b/c", "/", ".x/y"} {
		if _, err := ledger.OpenEgress(dir).Contacted(bad, "", nil); err == nil {
			t.Errorf("key %q was taken", bad)
		}
	}
}

func TestListOfALaterVersionIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "sites", "1-a", "b.json")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(`{"version":9,"policies":[]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := ledger.OpenEgress(dir).Contacted("1-a/b", "", []string{"x.example"})
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "version 9") || fault.HintOf(err) == "" {
		t.Errorf("%v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != `{"version":9,"policies":[]}` {
		t.Errorf("the file was changed: %s", b)
	}
}

// What is no file of ours in the place of a list is told of, neither followed
// nor waited for, and stays.
func TestListThatIsNoFile(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"symbolic link": func(path string) error {
			to := filepath.Join(t.TempDir(), "list")
			return errors.Join(os.WriteFile(to, []byte(`{"version":1,"policies":[]}`), 0o600), os.Symlink(to, path))
		},
		"regular file": func(path string) error { return unix.Mkfifo(path, 0o600) }, // reading it would never end
		"bytes":        func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<30)) },
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "sites", "1-a", "b.json")
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), put(path)); err != nil {
			t.Fatal(err)
		}
		was, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ledger.OpenEgress(dir).Contacted("1-a/b", "", []string{"x.example"})
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if is, err := os.Lstat(path); err != nil || !os.SameFile(was, is) {
			t.Errorf("%s: it was replaced: %v", name, err)
		}
	}
}

// Whoever removes a job's directory keeps its record: cleanup after a killed
// supervisor, and the sweep when no cleanup came.
func TestRemovedDirectoriesLeaveTheirRecords(t *testing.T) {
	dir := t.TempDir()
	j, err := ledger.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	e := ledger.OpenEgress(dir)
	make := func(id string) {
		t.Helper()
		r, err := j.Reserve(t.Context(), supervise.Spec{ID: id, Kind: "run"})
		if err != nil {
			t.Fatal(err)
		}
		r.Lock.Close() // as a killed supervisor
		b := fmt.Sprintf(`{"schema":"vk.egress-record/1","id":%q,"ended":false,"egress":{"site":"1-p/%s","policy":{"phase":"run","cap":{},"job":{}}},"record":{"phase":"run","revision":1,"entries":[{"outcome":"observed","proto":"dns","dest":"seen.example","kind":"domain","count":1}]}}`, id, id)
		if err := os.WriteFile(filepath.Join(r.Dir, supervise.EgressFile), []byte(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	make("removed")
	if err := j.Remove(t.Context(), "removed"); err != nil {
		t.Fatal(err)
	}
	make("swept")
	if _, err := j.Sweep(t.Context(), ledger.SweepOptions{DryRun: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Find(t.Context(), "swept"); err == nil {
		t.Error("a dry run kept a record")
	}
	if w, err := j.Sweep(t.Context(), ledger.SweepOptions{}); err != nil || len(w.Problems) > 0 {
		t.Fatal(w, err)
	}
	for _, id := range []string{"removed", "swept"} {
		r, err := e.Find(context.Background(), id)
		s, serr := e.Standing("1-p/" + id)
		if err != nil || r.Ended || serr != nil || !cmp.Equal(s.Names(""), []string{"seen.example"}) {
			t.Errorf("%s: %+v %v; standing %+v %v", id, r, err, s, serr)
		}
	}
	// A damaged record does not keep the directory.
	make("damaged")
	if err := os.WriteFile(filepath.Join(j.Path("damaged"), supervise.EgressFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := j.Remove(t.Context(), "damaged"); fault.KindOf(err) != fault.Partial {
		t.Errorf("Remove = %v", err)
	}
	if _, err := os.Stat(j.Path("damaged")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
}
