package relay_test

import (
	"os"
	"testing"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/relay"
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
