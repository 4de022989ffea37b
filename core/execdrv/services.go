package execdrv

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/lazyre"
	"virtkit/core/policy"
)

// Sizes of a service's guest that says nothing of them.
const (
	DefaultServiceCPUs   = 2
	DefaultServiceMemMiB = 1024
)

// BuildName is what a job's guest is called by its services, beside its host
// name.
const BuildName = "build"

// EnvServices is the job variable by which a runner tells of services where it
// gives no job response.
const EnvServices = "CI_JOB_SERVICES"

// VarHealthPort is a service's own variable that names the one port to wait for,
// as GitLab documents it.
const VarHealthPort = "HEALTHCHECK_TCP_PORT"

// Service is what a job asks of one of its services, within the limits.
type Service struct {
	Name     string   // its first alias, or one made of the image's name; unique in the job, and safe as a file's name
	Names    []string // what the job's guests may call it, Name's own first
	Hostname string
	Image    string // with variables replaced
	Platform string

	Entrypoint   []string // nil = the image's; [""] = none
	Command      []string // nil = the image's, unless Entrypoint is the job's
	User         string   // "" = the image's
	PullPolicies []string
	Env          []string // KEY=VALUE, sorted; may hold secrets
	Ports        []int    // to wait for; nil = those that the image exposes

	CPUs, MemMiB int

	own map[string]string
}

// Lookup is one of the service's own variables.
func (s *Service) Lookup(name string) (value string, set bool) {
	value, set = s.own[name]
	return value, set
}

// Services are a job's, with the lines for its trace.
type Services struct {
	All      []Service
	JobNames []string // what the services may call the job's guest
	Notes    []string
	Warnings []string
}

// ReadServices reads what the job says of its services. hostname is that of the
// job's guest. Every wrong value is reported, joined in one error of kind
// JobFailed.
//
// Names are those of GitLab's docker executor: the image's name without tag,
// digest and port, once with its slashes as "__" and once as "-", and every
// alias. A name belongs to the first service that has it, and a service without
// a name of its own is not started.
func ReadServices(c *Call, r Response, l Limits, hostname string) (Services, error) {
	defs := r.Services
	if c.ResponseFile == "" {
		var err error
		if defs, err = servicesOfVariable(c.Var(EnvServices)); err != nil {
			return Services{}, err
		}
	}
	var out Services
	var bad []string
	owner := map[string]string{} // name, lower case → the first name of the service that has it
	dirs := map[string]bool{strings.ToLower(hostname): true}
	for _, d := range defs {
		s, err := readService(c, r, d)
		if err != nil {
			bad = append(bad, err...)
			continue
		}
		byImage, own := DefaultNames(s.Image), s.Names[0]
		s.Names = slices.DeleteFunc(s.Names, func(n string) bool {
			first, taken := owner[strings.ToLower(n)]
			// Two services of one image, told apart by their aliases, are no news.
			if taken && (n == own || !slices.Contains(byImage, n)) {
				out.Warnings = append(out.Warnings, fmt.Sprintf("service %s is not called %s: that is service %s", s.Image, n, first))
			}
			return taken
		})
		if len(s.Names) == 0 {
			out.Warnings = append(out.Warnings, fmt.Sprintf("service %s is not started: it has no name of its own, give it an alias", s.Image))
			continue
		}
		for _, n := range s.Names {
			owner[strings.ToLower(n)] = s.Names[0]
		}
		s.Name = uniqueName(s.Names[0], dirs)
		s.Hostname = hostLabel(s.Name)
		notes, warnings, more := s.size(l)
		out.Notes, out.Warnings, bad = append(out.Notes, notes...), append(out.Warnings, warnings...), append(bad, more...)
		out.All = append(out.All, s)
	}
	if bad != nil {
		return Services{}, fault.New(fault.JobFailed, "services: "+strings.Join(bad, "; ")).
			Hint("correct the job's services: in .gitlab-ci.yml")
	}
	for _, n := range []string{hostname, BuildName} {
		if _, taken := owner[strings.ToLower(n)]; !taken && !slices.Contains(out.JobNames, n) {
			out.JobNames = append(out.JobNames, n)
		}
	}
	return out, nil
}

// servicesOfVariable reads CI_JOB_SERVICES, whose variables are an object.
func servicesOfVariable(v string) ([]Image, error) {
	if strings.TrimSpace(v) == "" {
		return nil, nil
	}
	var in []struct {
		Name       string            `json:"name"`
		Alias      string            `json:"alias"`
		Entrypoint []string          `json:"entrypoint"`
		Command    []string          `json:"command"`
		Variables  map[string]string `json:"variables"`
	}
	if err := json.Unmarshal([]byte(v), &in); err != nil {
		return nil, fault.Newf(fault.System, "%s%s is no list of services in JSON", EnvPrefix, EnvServices).
			Hint("a gitlab-runner that sets %s tells of services there", EnvJobResponse)
	}
	var out []Image
	for _, s := range in {
		i := Image{Name: s.Name, Alias: s.Alias, Entrypoint: s.Entrypoint, Command: s.Command}
		for _, k := range slices.Sorted(maps.Keys(s.Variables)) {
			i.Variables = append(i.Variables, Variable{Key: k, Value: s.Variables[k], Raw: true}) // replaced already
		}
		out = append(out, i)
	}
	return out, nil
}

// readService reads one service. The errors are words for people.
func readService(c *Call, r Response, d Image) (s Service, bad []string) {
	s.own = map[string]string{}
	for _, v := range d.Variables {
		if !v.Raw {
			v.Value, _ = expand(v.Value, func(name string) (string, bool) {
				if got, ok := s.own[name]; ok {
					return got, true
				}
				return c.LookupVar(name)
			})
		}
		s.own[v.Key] = v.Value
	}
	var unset []string
	s.Image, unset = expand(strings.TrimSpace(d.Name), c.LookupVar)
	if len(unset) > 0 {
		return s, []string{fmt.Sprintf("name %q: %s", d.Name, notSet(unset))}
	}
	if s.Image == "" {
		return s, []string{"one of them has no name"}
	}
	alias, unset := expand(d.Alias, c.LookupVar)
	if len(unset) > 0 {
		return s, []string{fmt.Sprintf("alias %q of %s: %s", d.Alias, s.Image, notSet(unset))}
	}
	for _, a := range strings.FieldsFunc(alias, func(r rune) bool { return r == ',' || r == ' ' || r == '\t' || r == '\n' }) {
		if !nameSyntax.MatchString(a) {
			bad = append(bad, fmt.Sprintf("alias %.80q of %s is no host name", a, s.Image))
			continue
		}
		s.addName(a)
	}
	if bad != nil {
		return s, bad
	}
	for _, n := range DefaultNames(s.Image) {
		s.addName(n)
	}
	s.Entrypoint, s.Command, s.PullPolicies = d.Entrypoint, d.Command, d.PullPolicies
	s.Platform = d.ExecutorOpts.Docker.Platform
	s.User = d.DockerUser()
	s.Env = serviceEnv(c, r, s.own)
	return s, nil
}

func (s *Service) addName(n string) {
	if !slices.ContainsFunc(s.Names, func(o string) bool { return strings.EqualFold(o, n) }) {
		s.Names = append(s.Names, n)
	}
}

func notSet(names []string) string {
	if len(names) == 1 {
		return "variable " + names[0] + " is not set"
	}
	return "variables " + strings.Join(names, ", ") + " are not set"
}

// expand replaces $NAME and ${NAME} as the runner does, $$ by $, and tells which
// names are not set; those become nothing.
func expand(text string, lookup func(string) (string, bool)) (out string, unset []string) {
	out = os.Expand(text, func(name string) string {
		if name == "$" {
			return name
		}
		v, ok := lookup(name)
		if !ok && !slices.Contains(unset, name) {
			unset = append(unset, name)
		}
		return v
	})
	return out, unset
}

var (
	nameSyntax = lazyre.New(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?$`)
	portSyntax = lazyre.New(`^[0-9]+$`)
)

// only replaces what is neither a letter, a digit nor one of more.
func only(s, more string, by rune) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune(more, r):
			return r
		}
		return by
	}, s)
}

// DefaultNames are the names that a service has by its image alone: without tag,
// digest and registry's port, the slashes as "__", and as "-".
func DefaultNames(image string) []string {
	name, _, _ := strings.Cut(image, "@")
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		name = name[:i]
	}
	if host, rest, ok := strings.Cut(name, "/"); ok {
		if h, port, has := strings.Cut(host, ":"); has && portSyntax.MatchString(port) {
			name = h + "/" + rest
		}
	}
	a, b := strings.ReplaceAll(name, "/", "__"), strings.ReplaceAll(name, "/", "-")
	if a == b {
		return []string{a}
	}
	return []string{a, b}
}

// uniqueName makes a file's name that no other service's directory has.
func uniqueName(name string, taken map[string]bool) string {
	name = strings.TrimLeft(only(name, "._-", '_'), ".-")
	name = name[:min(len(name), 100)]
	for n := 1; ; n++ {
		try := name
		if n > 1 || try == "" {
			try = fmt.Sprintf("%s-%d", name, n)
		}
		if !taken[strings.ToLower(try)] && try[0] != '-' {
			taken[strings.ToLower(try)] = true
			return try
		}
		if name == "" {
			name = "service"
		}
	}
}

// hostLabel is a name as a guest's host name, which sethostname(2) bounds.
func hostLabel(name string) string {
	l := strings.Trim(only(name, "-", '-'), "-")
	if l = strings.TrimRight(l[:min(len(l), 63)], "-"); l == "" {
		return "service"
	}
	return l
}

// serviceEnv is what a service's program is given: the job's public variables and
// the runner's own, with the service's over them. What GitLab keeps from it
// are the job's secrets.
func serviceEnv(c *Call, r Response, own map[string]string) []string {
	vars := map[string]string{}
	for k, v := range c.vars {
		if envName(k) {
			vars[k] = v
		}
	}
	for _, v := range r.Variables {
		if !v.Public || v.File {
			delete(vars, v.Key)
		}
	}
	if r.Variables == nil {
		clear(vars) // nobody told which are secret
	}
	for k, v := range own {
		if envName(k) {
			vars[k] = v
		}
	}
	var out []string
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		out = append(out, k+"="+vars[k])
	}
	return out
}

func envName(k string) bool { return k != "" && !strings.ContainsAny(k, "=\x00") }

// size reads what the service's own variables say to virtkit.
func (s *Service) size(l Limits) (notes, warnings, bad []string) {
	s.CPUs, s.MemMiB = DefaultServiceCPUs, DefaultServiceMemMiB
	if v := strings.TrimSpace(s.own[VarCPUs]); v != "" {
		if n, ok := parseCount(v); ok {
			s.CPUs = n
		} else {
			bad = append(bad, fmt.Sprintf("%s of %s is %q, expected a whole number of at least 1", VarCPUs, s.Name, s.own[VarCPUs]))
		}
	}
	if v := strings.TrimSpace(s.own[VarMem]); v != "" {
		if n, ok := parseMiB(v); ok && n >= MinMemMiB {
			s.MemMiB = n
		} else {
			bad = append(bad, fmt.Sprintf("%s of %s is %q, expected a size of at least %dM, such as 2G or 512M", VarMem, s.Name, s.own[VarMem], MinMemMiB))
		}
	}
	if v := strings.TrimSpace(s.own[VarUser]); v != "" {
		s.User = v
	}
	if s.User != "" && !userSyntax.MatchString(s.User) {
		bad = append(bad, fmt.Sprintf("the user of %s is %q, expected a user name or number, or user:group", s.Name, s.User))
	}
	if v := strings.TrimSpace(s.own[VarHealthPort]); v != "" {
		if n, err := strconv.ParseUint(v, 10, 16); err == nil && n > 0 {
			s.Ports = []int{int(n)}
		} else {
			bad = append(bad, fmt.Sprintf("%s of %s is %q, expected a port from 1 to 65535", VarHealthPort, s.Name, s.own[VarHealthPort]))
		}
	}
	w := Wanted{CPUs: s.CPUs, MemMiB: s.MemMiB, memAsked: strings.TrimSpace(s.own[VarMem]) != ""}
	w.clamp(l)
	for _, n := range w.Notes {
		// A default that is over the ceiling is nobody's wish.
		name, _, _ := strings.Cut(n, " ")
		if strings.TrimSpace(s.own[name]) != "" {
			notes = append(notes, "service "+s.Name+": "+n)
		}
	}
	s.CPUs, s.MemMiB = w.CPUs, w.MemMiB
	known := []string{VarCPUs, VarMem, VarUser, policy.Run.Variable(policy.DimName), policy.Run.Variable(policy.DimIP)}
	for _, k := range slices.Sorted(maps.Keys(s.own)) {
		if strings.HasPrefix(k, VarPrefix) && strings.TrimSpace(s.own[k]) != "" && !slices.Contains(known, k) {
			warnings = append(warnings, fmt.Sprintf("service %s: %s is no variable of a service's; there are %s", s.Name, k, strings.Join(known, ", ")))
		}
	}
	return notes, warnings, bad
}

// ServiceArgv is the command line of a service, as container engines make it: a
// job's entrypoint takes the place of both the image's entrypoint and command.
func ServiceArgv(s Service, imageEntrypoint, imageCommand []string) ([]string, error) {
	entry, cmd := imageEntrypoint, imageCommand
	if len(s.Entrypoint) > 0 {
		entry, cmd = s.Entrypoint, nil
	}
	if len(s.Command) > 0 {
		cmd = s.Command
	}
	if len(entry) == 1 && entry[0] == "" {
		entry = nil
	}
	argv := slices.Concat(entry, cmd)
	if len(argv) == 0 {
		return nil, fault.Newf(fault.JobFailed, "service %s: image %s has no command to run", s.Name, s.Image).
			Hint("give the service a command: or another entrypoint:")
	}
	return argv, nil
}
