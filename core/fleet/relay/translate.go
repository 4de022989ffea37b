package relay

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path"
	"strconv"
	"strings"
	"unicode"

	"virtkit/core/fleet/job"
	"virtkit/core/gitlab"
)

// Source is what a job's spec says of where the job comes from.
type Source struct {
	ServerURL   string
	ServerCAPEM string
	RunnerID    int64 // as /runners/verify told it
	RunnerName  string
	ShortToken  string
	SystemID    string
	RequestID   string // X-Request-Id of GitLab's answer
	OutputLimit int64
	Info        gitlab.Info
}

// refusal is a job that is not submitted: it is failed in GitLab, uncommitted.
type refusal struct {
	failure job.Failure
	exit    int
	text    string // for the trace
	plain   bool   // as it is: without colour and timestamps
}

func (r *refusal) Error() string { return r.text }

// translate makes a job's spec of GitLab's answer. An error is a *refusal, and
// holds no secret. The job's ID, token, timestamps and the like are read of
// what could be decoded in any case.
func translate(raw []byte, s Source) (*response, *job.CiJob, error) {
	var r response
	if err := json.Unmarshal(raw, &r); err != nil {
		var ids struct {
			ID    int64  `json:"id"`
			Token string `json:"token"`
		}
		json.Unmarshal(raw, &ids) // what it could
		r = response{ID: ids.ID, Token: ids.Token}
		return &r, nil, &refusal{failure: job.System, text: "the job that GitLab sent cannot be decoded: " + plainError(err)}
	}
	if u := r.unsupported(); len(u) > 0 {
		return &r, nil, &refusal{failure: job.System, exit: 3, text: strings.Join(u, "\n") + "\n", plain: true}
	}
	if err := unsupportedJob(&r); err != nil {
		return &r, nil, err
	}
	j, err := r.spec(s)
	if err == nil {
		err = j.Check()
	}
	if err != nil {
		return &r, nil, &refusal{failure: job.System, text: "the job that GitLab sent cannot be run: " + strings.ReplaceAll(err.Error(), "\n", "; ")}
	}
	return &r, j, nil
}

// Spec is the job that GitLab's answer becomes. An error says why it is none,
// and holds no secret.
func Spec(raw []byte, s Source) (*job.CiJob, error) {
	_, j, err := translate(raw, s)
	return j, err
}

func unsupportedJob(r *response) error {
	refuse := func(format string, a ...any) error {
		return &refusal{failure: job.Configuration, text: fmt.Sprintf(format, a...)}
	}
	if len(r.Secrets) > 0 {
		return refuse("the job uses secrets: of an external provider, which this runner does not support. Use CI/CD variables instead.")
	}
	if s := strings.TrimSpace(string(r.Run)); s != "" && s != "null" && s != `""` && s != "[]" {
		return refuse("the job uses run:, which this runner does not support. Use script: instead.")
	}
	return nil
}

// plainError is a decoder's error without what it read.
func plainError(err error) string {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Sprintf("not JSON from byte %d on", syntax.Offset)
	case errors.As(err, &kind):
		word, _, _ := strings.Cut(kind.Value, " ")
		return fmt.Sprintf("%s: a JSON %s, expected %s", kind.Field, word, kind.Type)
	}
	return err.Error()
}

func (r *response) spec(s Source) (*job.CiJob, error) {
	repo, err := withoutCredentials(r.GitInfo.RepoURL)
	if err != nil {
		return nil, err
	}
	j := &job.CiJob{
		Kind: job.KindGitLabCI, ServerURL: s.ServerURL, ServerCAPEM: s.ServerCAPEM, Token: r.Token, TimeoutSecs: r.RunnerInfo.Timeout,
		Job: job.Info{
			ID: r.ID, Name: r.JobInfo.Name, Stage: r.JobInfo.Stage, PipelineID: r.JobInfo.PipelineID,
			ProjectID: r.JobInfo.ProjectID, ProjectName: r.JobInfo.ProjectName, ProjectPath: r.JobInfo.ProjectFullPath,
			NamespaceID: r.JobInfo.NamespaceID, RootNamespaceID: r.JobInfo.RootNamespaceID, UserID: r.JobInfo.UserID,
			RunnerID: s.RunnerID, RunnerName: s.RunnerName, SystemID: s.SystemID, CorrelationID: s.RequestID,
		},
		Sources: job.Sources{
			RepoURL: repo, ObjectFormat: cmp.Or(r.GitInfo.ObjectFormat, "sha1"), Ref: r.GitInfo.Ref, SHA: r.GitInfo.SHA, BeforeSHA: r.GitInfo.BeforeSHA,
			RefType: r.GitInfo.RefType, Refspecs: orEmpty(r.GitInfo.Refspecs), Depth: max(r.GitInfo.Depth, 0), Protected: r.GitInfo.Protected, AllowFetch: r.AllowGitFetch,
		},
		Variables: append(variables(r.Variables), s.variables()...),
		Trace:     job.Trace{Sections: r.Features.TraceSections, TokenMaskPrefixes: r.Features.TokenMaskPrefixes, LimitBytes: s.OutputLimit},
	}
	if j.TimeoutSecs <= 0 {
		j.TimeoutSecs = 7200 // as gitlab-runner takes a job without one
	}
	for _, st := range r.Steps {
		j.Steps = append(j.Steps, job.Step{Name: st.Name, Script: orEmpty(st.Script), TimeoutSecs: max(st.Timeout, 0), When: when(st.When), AllowFailure: st.AllowFailure})
	}
	for _, h := range r.Hooks {
		j.Hooks = append(j.Hooks, job.Hook{Name: job.HookName(h.Name), Script: orEmpty(h.Script)})
	}
	if r.Image != nil && r.Image.Name != "" {
		i := r.Image.spec()
		j.Image = &i
	}
	for _, i := range r.Services {
		j.Services = append(j.Services, i.spec())
	}
	for _, a := range r.Artifacts {
		j.Artifacts = append(j.Artifacts, job.Artifact{Name: a.Name, Untracked: a.Untracked, Paths: a.Paths, Exclude: a.Exclude, When: when(a.When), Type: a.Type,
			Format: cmp.Or(job.Format(a.Format), job.Zip), ExpireIn: a.ExpireIn})
	}
	r.caches(j)
	for _, c := range r.Credentials {
		if c.Type == "registry" {
			j.RegistryCredentials = append(j.RegistryCredentials, job.RegistryCredential{URL: c.URL, Username: c.Username, Password: c.Password})
		}
	}
	for _, d := range r.Dependencies {
		j.Dependencies = append(j.Dependencies, job.Dependency{ID: d.ID, Token: d.Token, Name: d.Name, Filename: d.ArtifactsFile.Filename, Size: d.ArtifactsFile.Size})
	}
	return j, nil
}

func orEmpty(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func when(s string) job.When { return cmp.Or(job.When(s), job.OnSuccess) }

func withoutCredentials(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	u, err := url.Parse(s)
	if err != nil { // whose text holds the credentials
		return "", errors.New("git_info.repo_url is no URL")
	}
	u.User = nil
	return u.String(), nil
}

func variables(list []variable) []job.Variable {
	var out []job.Variable
	for _, v := range list {
		out = append(out, job.Variable(v))
	}
	return out
}

// variables are the runner's own, in gitlab-runner's order.
func (s *Source) variables() []job.Variable {
	var out []job.Variable
	for _, v := range [][2]string{
		{"CI_RUNNER_SHORT_TOKEN", s.ShortToken},
		{"CI_RUNNER_VERSION", s.Info.Version}, {"CI_RUNNER_REVISION", s.Info.Revision},
		{"CI_RUNNER_EXECUTABLE_ARCH", s.Info.Platform + "/" + s.Info.Architecture},
	} {
		out = append(out, job.Variable{Key: v[0], Value: v[1], Public: true})
	}
	return out
}

func (i *image) spec() job.Image {
	out := job.Image{Name: i.Name, Entrypoint: i.Entrypoint, Command: i.Command, Variables: variables(i.Variables), PullPolicies: i.PullPolicies,
		Platform: i.Options.Platform, User: i.Options.User, Aliases: strings.Fields(strings.ReplaceAll(i.Alias, ",", " "))}
	for _, p := range i.Ports {
		out.Ports = append(out.Ports, job.Port(p))
	}
	return out
}

// values are a job's variables as a daemon can tell them: a file's path and
// what only a node sets expand to nothing.
type values map[string]string

func valuesOf(list []job.Variable) values {
	plain, v := values{}, values{}
	for _, x := range list {
		plain[x.Key] = x.Value
		if x.File {
			plain[x.Key] = ""
		}
	}
	for _, x := range list {
		v[x.Key] = plain[x.Key]
		if !x.Raw {
			v[x.Key] = plain.expand(plain[x.Key])
		}
	}
	return v
}

// expand replaces $NAME and ${NAME}; $$ is a dollar.
func (v values) expand(s string) string {
	return os.Expand(s, func(key string) string {
		if key == "$" {
			return "$"
		}
		return v[key]
	})
}

// isTrue reads a variable as gitlab-runner reads its switches.
func (v values) isTrue(key string) bool {
	if b, err := strconv.ParseBool(strings.ToLower(v[key])); err == nil {
		return b
	}
	n, err := strconv.ParseInt(v[key], 10, 32)
	return err == nil && n == 1
}

// timestamps says whether the job's trace has them: on unless FF_TIMESTAMPS
// says otherwise.
func timestamps(list []job.Variable) bool {
	on, err := strconv.ParseBool(valuesOf(list)["FF_TIMESTAMPS"])
	return on || err != nil
}

// caches expands and sanitizes the keys.
func (r *response) caches(j *job.CiJob) {
	v := valuesOf(j.Variables)
	hashed := v.isTrue("FF_HASH_CACHE_KEYS")
	key := func(written string) (string, []string) {
		raw := path.Join("/", r.JobInfo.Name, r.GitInfo.Ref)[1:]
		if written != "" {
			raw = v.expand(written)
		}
		if hashed {
			return raw, nil
		}
		clean := CacheKey(raw)
		switch {
		case clean == "" && raw != "":
			return "", []string{fmt.Sprintf("cache key %q could not be sanitized", raw)}
		case clean != raw:
			return clean, []string{fmt.Sprintf("cache key %q sanitized to %q", raw, clean)}
		}
		return clean, nil
	}
	for _, c := range r.Cache {
		out := job.Cache{Untracked: c.Untracked, Policy: cmp.Or(job.Policy(c.Policy), job.PullPush), Paths: c.Paths, When: when(c.When)}
		out.Key, out.Warnings = key(c.Key)
		fallback := func(written string, blocked string) {
			k, w := key(written)
			switch {
			case blocked != "" && strings.HasSuffix(strings.TrimRight(k, ". "), blocked):
				out.FallbackWarnings = append(out.FallbackWarnings, fmt.Sprintf("CACHE_FALLBACK_KEY %q not allowed to end in %q", k, blocked))
				out.FallbackWarnings = append(out.FallbackWarnings, w...)
				return
			case k == "":
				w = append(w, job.SkippedFallback)
			default:
				out.FallbackKeys = append(out.FallbackKeys, k)
			}
			out.FallbackWarnings = append(out.FallbackWarnings, w...)
		}
		for _, f := range c.FallbackKeys {
			if f = v.expand(f); f != "" { // it would be the key of a cache without one
				fallback(f, "")
			}
		}
		if f := v["CACHE_FALLBACK_KEY"]; f != "" {
			fallback(f, protectedSuffix)
		}
		j.Caches = append(j.Caches, out)
	}
}

// protectedSuffix ends the keys of protected refs, which no job may name as a
// fallback by a variable.
const protectedSuffix = "-protected"

// CacheKey is a cache's key as it is used: a relative path that leads nowhere
// up, without white space at its end; "" when nothing of it is left.
func CacheKey(s string) string {
	s = strings.NewReplacer("%2f", "/", "%2F", "/", "%2e", ".", "%2E", ".", `\`, "/").Replace(s)
	s = path.Clean("/" + s)
	// A last part of nothing but white space goes, and then the one before it.
	for s != "" {
		cut := strings.TrimRightFunc(s, unicode.IsSpace)
		cut = strings.TrimRight(cut, "/")
		if cut == s {
			break
		}
		s = cut
	}
	return strings.TrimPrefix(s, "/")
}
