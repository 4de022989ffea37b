package relay_test

import (
	"os"
	"path/filepath"
	"testing"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/wire"
)

// FuzzTranslate takes anything for GitLab's answer: what is made of it is a job
// that a node takes.
func FuzzTranslate(f *testing.F) {
	raw, err := os.ReadFile("testdata/response.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte(`{"id":1,"token":"t","image":{"name":"a","executor_opts":{"docker":{"platform":1}}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, spec, err := relay.Translate(data, source)
		if r == nil {
			t.Fatal("nothing of what the job is")
		}
		if err != nil {
			return
		}
		b, err := spec.Encode()
		if err != nil {
			t.Fatalf("taken, and not encoded: %v", err)
		}
		if _, err := job.Parse(b); err != nil {
			t.Errorf("taken, and no node takes it: %v", err)
		}
	})
}

// FuzzState reads any state file: it is refused, or each entry is a job.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{"version":1,"relay":"00","hub":"00","jobs":[{"job_id":1,"token":"t","end":{"failure":{"class":"x"}}}]}`))
	f.Add([]byte(`{"version":1,"jobs":[null]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := relay.StatePath(t.TempDir(), "demo")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		records, err := relay.ReadState(path)
		for _, r := range records {
			if r.ID <= 0 {
				t.Errorf("a job without a number: %+v", r)
			}
		}
		held, herr := relay.HeldJobs(filepath.Dir(path))
		if (err == nil) != (herr == nil) || held["demo.json"] != len(records) {
			t.Errorf("%d jobs, %v; counted %v, %v", len(records), err, held, herr)
		}
	})
}

// FuzzEnrollment reads any identity of a relay.
func FuzzEnrollment(f *testing.F) {
	f.Add([]byte(`{"url":"https://hub.example.com","relay":"000000000000000000000000000000aa","hub":"00000000000000000000000000000001"}`), []byte("key"), []byte("-----BEGIN CERTIFICATE-----"))
	f.Fuzz(func(t *testing.T, enrollment, key, ca []byte) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, relay.HubDir), 0o700); err != nil {
			t.Fatal(err)
		}
		for name, b := range map[string][]byte{relay.EnrollmentFile: enrollment, relay.KeyFile: key, relay.CAFile: ca} {
			if err := os.WriteFile(filepath.Join(dir, relay.HubDir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if e, err := relay.LoadEnrollment(dir); err == nil && (!wire.IsHex(e.Relay, wire.IDLen) || len(e.Key) == 0) {
			t.Errorf("taken: %+v", e)
		}
	})
}
