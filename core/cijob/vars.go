package cijob

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
	"virtkit/core/lazyre"
)

// place is where the job runs: what only the node knows of its environment.
type place struct {
	builds, project     string // directories in the guest
	concurrent          int    // CI_CONCURRENT_ID
	concurrentInProject int
}

// tmp is the directory of file variables and of GITLAB_ENV, beside the
// project's.
func (p place) tmp() string { return p.project + ".tmp" }

// envFile is GITLAB_ENV.
func (p place) envFile() string { return p.tmp() + "/gitlab_runner_env" }

// gitConfig is what git is told of the job, in a file of its own that is gone
// before the job's end.
func (p place) gitConfig() string { return p.tmp() + "/.gitlab-runner.ext.conf" }

// variables are the job's, in the order in which a stage exports them, with
// what they refer to replaced.
type variables struct {
	list []job.Variable
	tmp  string
}

// newVariables adds the environment's own variables to the job's.
func newVariables(j *job.CiJob, p place, status string) variables {
	var all []job.Variable
	add := func(key, value string) {
		all = append(all, job.Variable{Key: key, Value: value, Public: true, Raw: true})
	}
	for _, f := range flags {
		add(f.name, strconv.FormatBool(flagOn(j.Variables, f.name)))
	}
	add("CI_BUILDS_DIR", p.builds)
	add("CI_PROJECT_DIR", p.project)
	add("CI_CONCURRENT_ID", strconv.Itoa(p.concurrent))
	add("CI_CONCURRENT_PROJECT_ID", strconv.Itoa(p.concurrentInProject))
	add("CI_SERVER", "yes")
	add("CI_JOB_STATUS", status)
	add("CI_JOB_TIMEOUT", strconv.FormatInt(j.TimeoutSecs, 10))
	// A flag in the words that the job wrote it in would be there twice.
	for _, v := range j.Variables {
		if !slices.ContainsFunc(flags, func(f flag) bool { return f.name == v.Key }) {
			all = append(all, v)
		}
	}
	if !slices.ContainsFunc(j.Variables, func(v job.Variable) bool { return v.Key == "CI_JOB_TOKEN" }) {
		all = append(all, job.Variable{Key: "CI_JOB_TOKEN", Value: j.Token, Masked: true, Raw: true})
	}
	if j.Image != nil {
		all = append(all, job.Variable{Key: "CI_JOB_IMAGE", Value: j.Image.Name, Public: true})
	}
	if j.ServerCAPEM != "" {
		all = append(all, job.Variable{Key: "CI_SERVER_TLS_CA_FILE", Value: j.ServerCAPEM, Public: true, File: true, Raw: true})
	}
	add("CI_SHARED_ENVIRONMENT", "true")
	add("RUNNER_TEMP_PROJECT_DIR", p.tmp())
	add("GITLAB_ENV", p.envFile())
	vs := variables{list: all, tmp: p.tmp()}
	return vs.expanded()
}

// expanded replaces references, once: what a variable refers to is the other
// one's text as written, and a file's path. The last of a key counts.
func (v variables) expanded() variables {
	last := map[string]job.Variable{}
	for _, x := range v.list {
		last[x.Key] = x
	}
	out := slices.Clone(v.list)
	for i, x := range out {
		if x.Raw {
			continue
		}
		out[i].Value = os.Expand(x.Value, func(name string) string {
			to, ok := last[name]
			switch {
			case name == "$":
				return "$"
			case ok && to.File:
				return v.path(to.Key)
			}
			return to.Value
		})
	}
	return variables{list: out, tmp: v.tmp}
}

// path is the file of a variable that is one.
func (v variables) path(key string) string { return v.tmp + "/" + key }

// lookup is a variable's value, for a file its path.
func (v variables) lookup(key string) (string, bool) {
	for _, x := range slices.Backward(v.list) {
		if x.Key == key {
			if x.File {
				return v.path(key), true
			}
			return x.Value, true
		}
	}
	return "", false
}

func (v variables) value(key string) string { s, _ := v.lookup(key); return s }

// expand replaces the variables in a text of the job's.
func (v variables) expand(text string) string {
	return os.Expand(text, func(name string) string {
		if name == "$" {
			return "$"
		}
		return v.value(name)
	})
}

// masked are the values that the trace must not show.
func (v variables) masked(j *job.CiJob) []string {
	out := j.Secrets()
	for _, x := range v.list {
		if x.Masked {
			out = append(out, x.Value)
		}
	}
	// As a request carries them, which a server's answer may repeat.
	basic := func(user, password string) {
		out = append(out, base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
	}
	basic("gitlab-ci-token", j.Token)
	for _, c := range j.RegistryCredentials {
		if c.Password != "" {
			basic(c.Username, c.Password)
			out = append(out, url.QueryEscape(c.Password))
		}
	}
	// Under xtrace a shell quotes what it shows: once where it runs it, once
	// more where it shows the text that it is about to run.
	for i, s := range out {
		out[i] = strings.TrimSpace(s)
	}
	for _, s := range slices.Clone(out) {
		if strings.Contains(s, "'") {
			once := strings.ReplaceAll(s, "'", `'\''`)
			out = append(out, once, strings.ReplaceAll(once, "'", `'\''`))
		}
	}
	return slices.DeleteFunc(out, func(s string) bool { return s == "" })
}

// debug tells whether the job's shells show what they do.
func (v variables) debug() bool {
	on, _ := strconv.ParseBool(v.value("CI_DEBUG_TRACE"))
	return on
}

// environ is the environment of the executor's commands: every variable by its
// name behind a prefix, files by their content.
func (v variables) environ(j *job.CiJob) []string {
	values := map[string]string{}
	var order []string
	set := func(k, s string) {
		if _, had := values[k]; !had {
			order = append(order, k)
		}
		values[k] = strings.ReplaceAll(s, "\x00", "") // no environment can hold it
	}
	for _, x := range v.list {
		set(x.Key, x.Value)
	}
	set(execdrv.EnvServices, v.services(j))
	if u := userOf(j); u != "" && values[execdrv.VarUser] == "" {
		set(execdrv.VarUser, u)
	}
	mem, cpus := sizeHint(j)
	if mem != "" && values[execdrv.VarMem] == "" {
		set(execdrv.VarMem, mem)
	}
	if cpus != "" && values[execdrv.VarCPUs] == "" {
		set(execdrv.VarCPUs, cpus)
	}
	out := make([]string, 0, len(order))
	for _, k := range order {
		out = append(out, execdrv.EnvPrefix+k+"="+values[k])
	}
	return out
}

func userOf(j *job.CiJob) string {
	if j.Image == nil {
		return ""
	}
	return j.Image.User
}

// hint is a line of a script that sizes the job's guest.
var hint = lazyre.New(`^\s*#\s*vk:(.*)$`)

// sizeHint reads `# vk: mem=2G cpus=4` in a step's script; the first of each
// counts.
func sizeHint(j *job.CiJob) (mem, cpus string) {
	for _, s := range j.Steps {
		for _, command := range s.Script {
			for line := range strings.SplitSeq(command, "\n") {
				m := hint.FindStringSubmatch(line)
				if m == nil {
					continue
				}
				for word := range strings.FieldsSeq(m[1]) {
					switch k, val, _ := strings.Cut(word, "="); {
					case k == "mem" && mem == "":
						mem = val
					case k == "cpus" && cpus == "":
						cpus = val
					}
				}
			}
		}
	}
	return mem, cpus
}

// services is CI_JOB_SERVICES.
func (v variables) services(j *job.CiJob) string {
	type service struct {
		Name       string            `json:"name"`
		Alias      string            `json:"alias"`
		Entrypoint []string          `json:"entrypoint"`
		Command    []string          `json:"command"`
		Variables  map[string]string `json:"variables,omitempty"`
	}
	var out []service
	for _, s := range j.Services {
		x := service{Name: v.expand(s.Name), Alias: v.expand(strings.Join(s.Aliases, ",")), Entrypoint: s.Entrypoint, Command: s.Command}
		for _, own := range s.Variables {
			if x.Variables == nil {
				x.Variables = map[string]string{}
			}
			value := own.Value
			if !own.Raw {
				value = v.expand(value)
			}
			x.Variables[own.Key] = value
		}
		out = append(out, x)
	}
	if out == nil {
		return ""
	}
	b, err := json.Marshal(out)
	if err != nil {
		return "" // plain texts: cannot be
	}
	return string(b)
}

// response is JOB_RESPONSE_FILE: the job as the executor reads it, without its
// token, which is among the variables.
func response(j *job.CiJob, v variables) ([]byte, error) {
	r := execdrv.Response{
		ID: j.Job.ID, AllowFetch: j.Sources.AllowFetch,
		JobInfo:    execdrv.JobInfo{Name: j.Job.Name, Stage: j.Job.Stage, ProjectID: j.Job.ProjectID, ProjectName: j.Job.ProjectName, ProjectPath: j.Job.ProjectPath},
		RunnerInfo: execdrv.RunnerInfo{Timeout: j.TimeoutSecs},
		GitInfo: execdrv.GitInfo{RepoURL: j.Sources.RepoURL, Format: j.Sources.ObjectFormat, Ref: j.Sources.Ref, SHA: j.Sources.SHA,
			Refspecs: j.Sources.Refspecs, Depth: j.Sources.Depth},
	}
	for _, x := range j.Variables {
		r.Variables = append(r.Variables, execdrv.Variable{Key: x.Key, Value: x.Value, Public: x.Public, File: x.File, Raw: x.Raw})
	}
	if j.Image != nil {
		r.Image = imageOf(*j.Image)
		r.Image.Name = v.expand(r.Image.Name)
	}
	for _, s := range j.Services {
		r.Services = append(r.Services, imageOf(s))
	}
	for _, c := range j.RegistryCredentials {
		r.Credentials = append(r.Credentials, execdrv.Credential{Type: "registry", URL: c.URL, Username: c.Username, Password: c.Password})
	}
	for _, h := range j.Hooks {
		r.Hooks = append(r.Hooks, execdrv.Hook{Name: string(h.Name), Script: h.Script})
	}
	return json.Marshal(r)
}

func imageOf(i job.Image) execdrv.Image {
	out := execdrv.Image{Name: i.Name, Alias: strings.Join(i.Aliases, ","), Entrypoint: i.Entrypoint, Command: i.Command, PullPolicies: i.PullPolicies}
	for _, x := range i.Variables {
		out.Variables = append(out.Variables, execdrv.Variable{Key: x.Key, Value: x.Value, Public: x.Public, File: x.File, Raw: x.Raw})
	}
	out.ExecutorOpts.Docker.Platform = i.Platform
	if i.User != "" {
		out.ExecutorOpts.Docker.User, _ = json.Marshal(i.User)
	}
	return out
}
