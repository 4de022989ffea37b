package fleet_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"virtkit/core/zst"
	"virtkit/e2e/fleetup"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
)

// secret is one that a run knows, in all forms in which it could be found.
type secret struct {
	name  string
	forms map[string][]byte
}

func newSecret(name, text string) secret {
	s := secret{name, map[string][]byte{"clear": []byte(text), "URL": []byte(url.QueryEscape(text)), "URL path": []byte(url.PathEscape(text))}}
	if b, err := json.Marshal(text); err == nil {
		s.forms["JSON"] = b[1 : len(b)-1]
	}
	for shift := range 3 {
		// All but the ends of it are the same whatever is around.
		for alphabet, enc := range map[string]*base64.Encoding{"base64": base64.RawStdEncoding, "base64url": base64.RawURLEncoding} {
			coded := enc.EncodeToString([]byte(strings.Repeat("x", shift) + text))
			s.forms[fmt.Sprintf("%s+%d", alphabet, shift)] = []byte(coded[4 : len(coded)-4])
		}
	}
	return s
}

// in says in which form b holds it; "" = in none.
func (s secret) in(b []byte) string {
	for form, text := range s.forms {
		if bytes.Contains(b, text) {
			return form
		}
	}
	return ""
}

// allowed are the files that must hold secrets, below the fleet's directory.
var allowed = []struct {
	path    *regexp.Regexp
	secrets string // names, or "*"
	why     string
}{
	{regexp.MustCompile(`^runner\.token$`), "runner token", "the operator's own file, which vk-gitlab is pointed to"},
	{regexp.MustCompile(`^relay/demo\.json(\.\S+)?$`), "*", "vk-gitlab must go on with its jobs after a restart: their tokens, and the spec until the hub has it"},
	{regexp.MustCompile(`^node/node/jobs/[^/]+/start\.json(\.\S+)?$`), "*", "the node's journal: the driver reads its job from it, and takes the secrets out when it is over"},
	{regexp.MustCompile(`^node/node/jobs/\.new-[^/]+/start\.json$`), "*", "the same, before its rename"},
	{regexp.MustCompile(`^node/node/jobs/[^/]+/work/(script\d+/script|response\.json)$`), "*", "the executor's contract: a stage's script exports the variables, JOB_RESPONSE_FILE is the job; gone before the result"},
	{regexp.MustCompile(`^node/stand-in/`), "*", "the guest's own disk, of a guest that is this host"},
	{regexp.MustCompile(`^node/jobs/[^/]+/(.*/)?[^/]*(disk|overlay|root|scratch|\.img|\.qcow2)[^/]*$`), "*", "the guest's own disk"},
}

// isAllowed says whether a file may hold a secret. writing says that somebody
// may be about to write such a file: its temporary one then may hold what it may.
func isAllowed(rel, name string, writing bool) bool {
	if dir, base := filepath.Split(rel); writing {
		if of, _, found := strings.Cut(base, ".tmp-"); found && strings.HasPrefix(of, ".") {
			rel = dir + of[1:]
		}
	}
	for _, a := range allowed {
		if a.path.MatchString(rel) && (a.secrets == "*" || a.secrets == name) {
			return true
		}
	}
	return false
}

// leaks looks for secrets while a fleet is at work.
type leaks struct {
	t       *testing.T
	dir     string
	secrets []secret

	mu    sync.Mutex
	told  map[string]bool
	seen  map[string]bool // allowed files that held some
	files int
}

func (l *leaks) tell(format string, a ...any) {
	text := fmt.Sprintf(format, a...)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.told[text] {
		l.told[text] = true
		l.t.Error(text)
	}
}

const maxLook = 64 << 20 // bytes of a file: what is larger is a disk

// look goes through every file and every process's arguments. over says that the
// fleet is down.
func (l *leaks) look(over bool) {
	err := filepath.WalkDir(l.dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !d.Type().IsRegular() || d.Name() == standInName {
			return err
		}
		info, err := d.Info()
		if err != nil || info.Size() > maxLook {
			return nil //nolint:nilerr // it is gone meanwhile
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil //nolint:nilerr // the same
		}
		rel, _ := filepath.Rel(l.dir, path)
		b = append(b, unpacked(b)...)
		l.mu.Lock()
		l.files++
		l.mu.Unlock()
		for _, s := range l.secrets {
			form := s.in(b)
			switch {
			case form == "":
			case !isAllowed(rel, s.name, !over):
				l.tell("%s holds the %s (%s)", rel, s.name, form)
			case info.Mode().Perm()&0o077 != 0 && !strings.HasPrefix(rel, "node/stand-in/"): // a guest's modes are its own
				l.tell("%s, which holds the %s, has mode %v", rel, s.name, info.Mode())
			default:
				l.mu.Lock()
				l.seen[rel] = true
				l.mu.Unlock()
			}
		}
		return nil
	})
	if err != nil {
		l.tell("looking through %s: %v", l.dir, err)
	}
	state := filepath.Join(l.dir, "node")
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		line, err := os.ReadFile(f)
		pid := filepath.Base(filepath.Dir(f))
		if err != nil || len(line) == 0 || pid == strconv.Itoa(os.Getpid()) {
			continue
		}
		args := strings.Split(string(line), "\x00")
		if env, _ := os.ReadFile(fmt.Sprintf("/proc/%s/environ", pid)); bytes.Contains(append([]byte{0}, env...), []byte("\x00HOME="+guestsDir(state)+"/")) {
			continue // the job's own, in its guest
		}
		for _, s := range l.secrets {
			if form := s.in([]byte(strings.Join(args, "\x00"))); form != "" {
				l.tell("the arguments of process %s (%s) hold the %s (%s)", pid, args[0], s.name, form)
			}
		}
	}
}

// unpacked is what a file holds that is compressed; nil for another file.
func unpacked(b []byte) []byte {
	if !bytes.HasPrefix(b, []byte("\x28\xb5\x2f\xfd")) {
		return nil
	}
	z, err := zst.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil
	}
	defer z.Close()
	all, _ := io.ReadAll(io.LimitReader(z, maxLook)) // one that is being written has no end
	return all
}

// says looks through what the hub tells people, which its database has in a
// compressed form.
func (l *leaks) says(ctx context.Context, f *fleetup.Fleet) {
	out, err := f.Hub(ctx, "jobs", "--json")
	if err != nil {
		l.tell("vk-hub jobs: %v", err)
	}
	var all struct{ Jobs []struct{ ID string } }
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all.Jobs) == 0 {
		l.tell("vk-hub jobs: %d jobs, %v", len(all.Jobs), err)
	}
	commands := [][]string{{"audit"}, {"audit", "--json"}, {"jobs"}, {"nodes", "--json"}, {"relays", "--json"}, {"keys", "--json"}, {"gitlabs", "--json"}}
	for _, j := range all.Jobs {
		commands = append(commands, []string{"jobs", "show", "--json", j.ID}, []string{"jobs", "output", j.ID})
	}
	kept := 0
	for _, args := range commands {
		text, err := f.Hub(ctx, args...)
		if err != nil && args[0] != "jobs" { // of a good job nothing is kept
			l.tell("vk-hub %q: %v", args, err)
		}
		if len(args) > 1 && args[1] == "output" && len(text) > 0 {
			kept++
		}
		for _, s := range l.secrets {
			if form := s.in([]byte(text + fmt.Sprint(err))); form != "" {
				l.tell("vk-hub %q prints the %s (%s)", args, s.name, form)
			}
		}
	}
	if kept == 0 {
		l.tell("the hub kept no job's output")
	}
}

// crashes has each part of the fleet print all its goroutines and end, as a
// panic does, and starts it again.
func crashes(t *testing.T, f *fleetup.Fleet) {
	for _, name := range []string{"vk-gitlab", "node", "hub"} {
		if err := f.Restart(name, syscall.SIGQUIT, 0); err != nil {
			t.Error(err)
		}
	}
}

// requests looks through all that GitLab was asked. The tokens are where the
// API has them, and nowhere else.
func (l *leaks) requests(all []gitlabtest.Request) {
	for _, r := range all {
		h := r.Header.Clone()
		for _, name := range []string{"Job-Token", "Runner-Token"} {
			h.Del(name)
		}
		if r.Endpoint == "git" {
			h.Del("Authorization") // Basic, of the job's token
		}
		body := r.Body
		if strings.HasPrefix(h.Get("Content-Type"), "application/json") {
			var m map[string]any
			if json.Unmarshal(body, &m) == nil {
				delete(m, "token")
				body, _ = json.Marshal(m)
			}
		}
		var b bytes.Buffer
		fmt.Fprintln(&b, r.Method, r.Target)
		h.Write(&b)
		b.Write(body)
		for _, s := range l.secrets {
			if form := s.in(b.Bytes()); form != "" {
				l.tell("request %d, %s %s, holds the %s (%s)", r.Seq, r.Method, r.Target, s.name, form)
			}
		}
	}
}

// spiteful is a registry that lets nobody in, and tells what it was told.
func spiteful(t *testing.T) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, password, ok := r.BasicAuth()
		if !ok {
			w.Header().Set("WWW-Authenticate", `Basic realm="spite"`)
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(map[bool]int{true: http.StatusForbidden, false: http.StatusUnauthorized}[ok])
		text, _ := json.Marshal("no entry with " + password + " nor " + r.Header.Get("Authorization"))
		fmt.Fprintf(w, `{"errors":[{"code":"DENIED","message":%s}]}`, text)
	}))
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

// TestSecretsStay runs jobs that know secrets, and let them slip where they can:
// printed, traced by the shell, in a command that fails, in a clone that fails,
// in what a registry answers. Meanwhile and afterwards it looks through every
// file of hub, vk-gitlab, node and jobs, the arguments of every process, their
// logs, and every request that GitLab got.
//
// It does so with guests that are processes of this host, and in real ones:
// they alone pull images.
func TestSecretsStay(t *testing.T) {
	t.Run("stand-in", func(t *testing.T) { secretsStay(t, newLight(t).Fleet, false) })
	t.Run("guests", func(t *testing.T) { secretsStay(t, up(t), true) })
}

func secretsStay(t *testing.T, f *fleetup.Fleet, pulls bool) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	if err := gitsrv.Recorded(f.Repos); err != nil {
		t.Fatal(err)
	}
	if err := f.Approve(ctx, 42, "group/project"); err != nil {
		t.Fatal(err)
	}
	key, err := f.Hub(ctx, "keys", "create", "--name", "tests", "--pool", "ci")
	if err != nil {
		t.Fatal(err)
	}
	spite := spiteful(t)
	const masked, file, password = "hid+den/of=the&masked?word", "contents of the+secret/file=&", "pass+word/of=the&registry"
	const token1, token2, token3 = "glcbt-64_firstJobsOwnToken01", "glcbt-64_secondJobsOwnToken2", "glcbt-64_thirdJobsOwnToken03"
	apiKey := strings.TrimSpace(key)
	l := &leaks{t: t, dir: f.Dir, told: map[string]bool{}, seen: map[string]bool{}, secrets: []secret{
		newSecret("masked variable", masked), newSecret("masked file", file), newSecret("registry password", password), newSecret("runner token", fleetup.RunnerToken),
		newSecret("API key", apiKey[strings.LastIndexByte(apiKey, '\n')+1:]), newSecret("job token", token1), newSecret("second job token", token2), newSecret("third job token", token3),
	}}
	over := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(300 * time.Millisecond):
				l.look(false)
			}
		}
	})
	t.Cleanup(func() {
		select {
		case <-over:
		default:
			close(over)
		}
		looking.Wait()
	})
	for i, j := range []struct {
		token, image, sha string
		debug             bool
		script            []string
		state             string
	}{
		{token1, "local/default", "", false, []string{"echo \"$HIDDEN $CI_JOB_TOKEN $PASSWORD\"; cat $KEYFILE; echo \"$HIDDEN\" >&2", "git remote -v; git config --list; cat .git/config", "curl -s \"" + f.GitURL + "/none?q=x\" -o /dev/null || true",
			"printf '%s' \"${HIDDEN:0:9}\"; sleep 0.2; printf '%s\\n' \"${HIDDEN:9}\"", "echo all is told; sleep 8"}, "success"},
		{token2, "local/default", "", true, []string{"git fetch https://gitlab-ci-token:$CI_JOB_TOKEN@127.0.0.1:9/none.git || true", "\"no-such-command-$HIDDEN\""}, "failed"},
		{token3, spite + "/team/app:1", "", false, []string{"true"}, "failed"},
	} {
		if j.image != "local/default" && !pulls {
			continue
		}
		id := int64(700 + i)
		f.Git.Allow(j.token)
		b, err := json.Marshal(map[string]any{
			"id": id, "token": j.token, "allow_git_fetch": true,
			"job_info": map[string]any{"id": id, "name": "leak", "stage": "test", "pipeline_id": 500, "project_id": 42, "project_name": "project", "project_full_path": "group/project"},
			"git_info": map[string]any{"repo_url": strings.Replace(f.URL, "://", "://gitlab-ci-token:"+j.token+"@", 1) + "/group/project.git", "repo_object_format": "sha1", "ref": "main", "sha": recordedSHA(t),
				"before_sha": strings.Repeat("0", 40), "ref_type": "branch", "depth": 5, "refspecs": []string{"+refs/heads/main:refs/remotes/origin/main"}},
			"runner_info": map[string]any{"timeout": 900},
			"variables": []any{
				map[string]any{"key": "HIDDEN", "value": masked, "masked": true}, map[string]any{"key": "KEYFILE", "value": file, "masked": true, "file": true},
				map[string]any{"key": "PASSWORD", "value": password, "masked": true}, map[string]any{"key": "CI_JOB_TOKEN", "value": j.token, "masked": true},
				map[string]any{"key": "CI_JOB_ID", "value": fmt.Sprint(id), "public": true}, map[string]any{"key": "CI_DEBUG_TRACE", "value": fmt.Sprint(j.debug), "public": true},
				map[string]any{"key": "CI_SERVER_URL", "value": f.URL, "public": true}, map[string]any{"key": "CI_PROJECT_PATH", "value": "group/project", "public": true},
			},
			"steps":       []any{map[string]any{"name": "script", "script": j.script, "timeout": 900, "when": "on_success"}},
			"image":       map[string]any{"name": j.image},
			"credentials": []any{map[string]any{"type": "registry", "url": spite, "username": "user", "password": password}},
			"features":    map[string]any{"trace_sections": true, "failure_reasons": []string{"unknown_failure", "image_pull_failure"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.GitLab.AddJob(b); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			for { // until its guest knows all
				if j, _ := f.GitLab.Job(id); bytes.Contains(j.Trace, []byte("all is told")) || ctx.Err() != nil {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
			crashes(t, f)
		}
		got, err := f.Ended(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(got.Final), `"state":"`+j.state+`"`) {
			t.Errorf("job %d ended as %s:\n%s", id, got.Final, got.Trace)
		}
		t.Logf("job %d: %d bytes of trace, ended %s", id, len(got.Trace), got.Final[bytes.Index(got.Final, []byte(`"state"`)):])
		if i == 0 && strings.Count(string(got.Trace), "[MASKED]") < 6 {
			t.Errorf("the first job did not print what it was to print:\n%s", got.Trace)
		}
	}
	l.says(ctx, f)
	close(over)
	looking.Wait()
	if err := f.Down(); err != nil {
		t.Error(err)
	}
	l.look(true)
	l.requests(f.GitLab.Requests())
	if len(l.seen) < 3 || l.files < 100 {
		t.Errorf("%d files were looked at; the ones that must hold secrets were not there: %v", l.files, l.seen)
	}
	t.Logf("%d looks at files, %d requests; secrets were where they must be in %d files", l.files, len(f.GitLab.Requests()), len(l.seen))
}

// recordedSHA is a commit of the recorded project's.
func recordedSHA(t *testing.T) string {
	var rec struct{ Jobs []recordedJob }
	readJSON(t, "simple-success.json", &rec)
	return rec.Jobs[0].SHA
}
