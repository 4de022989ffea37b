package cijob_test

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/cijob"
	"virtkit/core/cijob/artifact"
	"virtkit/core/cijob/cache"
	"virtkit/core/cijob/transfer/transfertest"
	"virtkit/core/fleet/job"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
	"virtkit/e2e/memreg"
)

// upload is what GitLab was sent as an artifact.
type upload struct {
	Query    map[string]string
	Filename string
	Kind     string   // zip, gzip, raw
	Entries  []string // name, size and mode of a zip's; names of a gzip's
}

// here is a host whose guest is this one.
type here struct{ noHost }

func (here) Guest(context.Context) (cijob.Guest, string, error) { return transfertest.Guest{}, "", nil }

var (
	varyRE = regexp.MustCompile(`(correlation_id(?:\x1b\[0;m)?=)[^ \n]+|(duration\x1b\[0;m=)[^ \n]+|(pid\x1b\[0;m=)[^ \n]+`)
	// storageRE are the lines that tell of where caches are kept, and of the program
	// that moves them: those of the recordings' are no registry.
	storageRE = regexp.MustCompile(`(?m)^(\S+ )?01E (Runtime platform|No URL provided, cache|Primary cache does not exist remotely|Downloading cache from|Uploading cache to).*\n?`)
)

func comparable(out string) string {
	return varyRE.ReplaceAllString(storageRE.ReplaceAllString(out, ""), "${1}${2}${3}X")
}

// TestTransferRecordings runs the recorded jobs that have caches, artifacts or
// dependencies, with this host's bash for a guest, a stand-in GitLab and a
// registry in memory. Trace, end and uploads are gitlab-runner's.
func TestTransferRecordings(t *testing.T) {
	files, err := filepath.Glob("../../testdata/ci-transfers/*.json")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d recordings, %v", len(files), err)
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".json")
		t.Run(name, func(t *testing.T) {
			var rec recorded
			readJSON(t, "../ci-transfers/"+name+".json", &rec)
			root := t.TempDir()
			git, err := gitsrv.New(root)
			if err != nil {
				t.Skip(err)
			}
			if err := gitsrv.Recorded(root); err != nil {
				t.Fatal(err)
			}
			git.Allow("*")
			gitlab := gitlabtest.New()
			gitlab.Git = git
			srv := httptest.NewServer(gitlab)
			t.Cleanup(srv.Close)
			s := newScene(t, srv.URL)
			s.host, s.caches = here{}, &cache.Registry{Repo: memreg.Start(t).Addr + "/team"}
			s.artifacts = &artifact.Client{Agent: "vk/test", Sleep: func(context.Context, time.Duration) error { return nil }}
			sp := special{edit: comparable, ours: comparable}
			if name == "artifacts-upload-413" || name == "dependencies-404" {
				sp.failure = job.ExternalDependency
			}
			for i, r := range rec.Jobs {
				for _, d := range append([]job.Dependency{{ID: r.ID, Token: r.Token}}, r.Dependencies...) {
					b, _ := json.Marshal(map[string]any{"id": d.ID, "token": d.Token})
					if _, err := gitlab.AddJob(b); err != nil {
						t.Fatal(err)
					}
				}
				gitlab.Misbehave(r.Rules...)
				s.compare(name, 1, r, sp) // each recording was a runner's first request
				got, _ := gitlab.Job(r.ID)
				var ups []upload
				for _, a := range got.Artifacts {
					ups = append(ups, uploaded(t, a))
				}
				if d := cmp.Diff(r.Uploads, ups); d != "" {
					t.Errorf("job %d: uploads (-recorded +ours):\n%s", i+1, d)
				}
			}
		})
	}
}

func uploaded(t *testing.T, a gitlabtest.Artifact) upload {
	u := upload{Query: map[string]string{}, Filename: a.Filename, Kind: "raw"}
	for k, v := range map[string][]string(url.Values(a.Query)) {
		u.Query[k] = strings.Join(v, ",")
	}
	if z, err := zip.NewReader(bytes.NewReader(a.Content), int64(len(a.Content))); err == nil {
		u.Kind = "zip"
		for _, e := range z.File {
			u.Entries = append(u.Entries, fmt.Sprintf("%s %d %o", e.Name, e.UncompressedSize64, e.ExternalAttrs>>16))
		}
		slices.Sort(u.Entries) // gitlab-runner packs several at a time
		return u
	}
	in := bytes.NewReader(a.Content)
	for z, err := gzip.NewReader(in); err == nil; err = z.Reset(in) {
		z.Multistream(false)
		u.Kind = "gzip"
		n, err := io.Copy(io.Discard, z)
		if err != nil {
			t.Error(err)
		}
		u.Entries = append(u.Entries, fmt.Sprintf("%s %d", z.Name, n))
	}
	return u
}
