package fleet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/job"
	"virtkit/e2e/fleetup"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
)

const publicToken = "glcbt-64_elsewhere"

// TestPlacedHostCheckout: placed jobs whose sources their node's host fetches,
// each in a real microVM. Submodules with URLs relative to the project's are the
// host's too, down to those of submodules; a project with one of elsewhere is the
// guest's to clone, as a whole. Whoever fetches, the job finds the same tree, in
// which no credential is.
func TestPlacedHostCheckout(t *testing.T) {
	elsewhere := ""
	f := upWith(t, "[executor]\nhost_checkout = true\n", func(o *fleetup.Options) {
		o.Between = func(who, addr string) (string, error) {
			if who == "git" { // a port of its own: not the job's server
				srv := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
					r.SetURL(&url.URL{Scheme: "http", Host: addr})
					r.Out.SetBasicAuth(gitsrv.User, publicToken) // whoever asks there is let in
				}})
				t.Cleanup(srv.Close)
				elsewhere = srv.Listener.Addr().String()
				return elsewhere, nil
			}
			return addr, nil
		}
	})
	if err := gitsrv.Recorded(f.Repos); err != nil {
		t.Fatal(err)
	}
	f.Git.Allow(publicToken)
	mixed := withSubmoduleOf(t, f, "http://"+elsewhere+"/group/nested.git")
	for id, path := range map[int64]string{42: "group/project", 43: "group/mixed"} {
		if err := f.Approve(t.Context(), id, path); err != nil {
			t.Fatal(err)
		}
	}
	const nested = "c6e9119ff8af77d1c4ba91570c94e14433ae9e45"
	onHost := "virtkit: sources of f400d9d3 cloned on the host in "
	for i, c := range []struct {
		project, sha, script string
		id                   int64
		says, not            string
		again                string
	}{
		{project: "group/project", id: 42, sha: gitsrv.MainSHA, says: onHost, again: "virtkit: sources of f400d9d3 fetched on the host in ",
			script: "cat sub/sub.txt sub/nested/nested.txt; git submodule status --recursive | cut -c1-50; git -C sub/nested fetch -q origin main && git -C sub/nested rev-parse FETCH_HEAD"},
		{project: "group/mixed", id: 43, sha: mixed, says: "virtkit: the sources are cloned in the guest: the submodule \"ext\" comes from elsewhere than the job's server", not: "on the host in ",
			script: "cat sub/sub.txt sub/nested/nested.txt ext/nested.txt; git submodule status | cut -c1-50"},
	} {
		rounds := []string{c.says}
		if c.again != "" {
			rounds = append(rounds, c.again) // the slot's tree is there
		}
		for n, says := range rounds {
			id := int64(7000 + 10*i + n)
			token := fmt.Sprintf("glcbt-64_checkouttoken%d", id)
			f.Git.Allow(token)
			got := runSources(t, f, id, token, c.id, c.project, c.sha, c.script+`; git status --porcelain; echo "head $(git rev-parse HEAD)"; ! grep -r `+token+" .git && echo no credential")
			trace := string(got.Trace)
			for _, want := range []string{says, "\x1b[32;1mUpdating/initializing submodules recursively", nested, "sub\n", "nested\n", "head " + c.sha, "no credential"} {
				if !strings.Contains(trace, want) {
					t.Errorf("%s, %d: the trace has no %q", c.project, n+1, want)
				}
			}
			if c.not != "" && strings.Contains(trace, c.not) {
				t.Errorf("%s: the trace says %q", c.project, c.not)
			}
			if !strings.Contains(string(got.Final), `"state":"success"`) || strings.Contains(trace, token) || t.Failed() {
				t.Errorf("%s, %d: ended as %s:\n%s", c.project, n+1, got.Final, trace)
			}
		}
	}
}

// withSubmoduleOf makes group/mixed: a submodule by a relative URL, and one at url.
func withSubmoduleOf(t *testing.T, f *fleetup.Fleet, url string) (sha string) {
	t.Helper()
	r, err := gitsrv.InitBare(f.Repos, "group/mixed.git")
	if err != nil {
		t.Fatal(err)
	}
	sha, err = r.Commit(gitsrv.Commit{Message: "mixed", Date: "2024-02-01T00:00:00Z", Files: []gitsrv.File{
		{Path: ".gitmodules", Mode: "100644", Data: "[submodule \"sub\"]\n\tpath = sub\n\turl = ../sub.git\n[submodule \"ext\"]\n\tpath = ext\n\turl = " + url + "\n"},
		{Path: "sub", Mode: "160000", Data: "700918091af52bc16095c5cf3b138ec822ff2028"},
		{Path: "ext", Mode: "160000", Data: "c6e9119ff8af77d1c4ba91570c94e14433ae9e45"},
	}})
	if err == nil {
		err = r.Ref("refs/heads/main", sha)
	}
	if err == nil {
		err = r.Ref("refs/pipelines/500", sha)
	}
	if err != nil {
		t.Fatal(err)
	}
	return sha
}

// runSources gives a job with recursive submodules out and waits for its end.
func runSources(t *testing.T, f *fleetup.Fleet, id int64, token string, project int64, path, sha, script string) gitlabtest.Job {
	t.Helper()
	var com struct {
		Server    string
		Variables []job.Variable
	}
	readJSON(t, "common.json", &com)
	place := strings.NewReplacer("@TOKEN@", token, "@ID@", fmt.Sprint(id), "@NAME@", "sources", "group/project", path, com.Server, f.URL)
	vars := []job.Variable{{Key: "GIT_SUBMODULE_STRATEGY", Value: "recursive", Public: true}}
	for _, v := range com.Variables {
		v.Value = place.Replace(v.Value)
		vars = append(vars, v)
	}
	response, err := json.Marshal(map[string]any{
		"id": id, "token": token, "allow_git_fetch": true,
		"job_info": map[string]any{"id": id, "name": "sources", "stage": "test", "pipeline_id": 500, "project_id": project, "project_name": "project", "project_full_path": path},
		"git_info": map[string]any{"repo_url": strings.Replace(f.URL, "://", "://gitlab-ci-token:"+token+"@", 1) + "/" + path + ".git", "repo_object_format": "sha1",
			"ref": "main", "sha": sha, "before_sha": strings.Repeat("0", 40), "ref_type": "branch", "depth": 20,
			"refspecs": []string{"+refs/pipelines/500:refs/pipelines/500", "+refs/heads/main:refs/remotes/origin/main"}},
		"runner_info": map[string]any{"timeout": 900}, "image": map[string]any{"name": "local/default"},
		"variables": vars,
		"steps":     []job.Step{{Name: "script", Script: []string{script}, TimeoutSecs: 900, When: job.OnSuccess}},
		"features":  map[string]any{"trace_sections": true},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.GitLab.AddJob(response); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	got, err := f.Ended(ctx, id)
	if err != nil {
		t.Fatalf("%v; asked of GitLab:\n%s", err, gitlabtest.Sequence(f.GitLab.Requests()))
	}
	return got
}
