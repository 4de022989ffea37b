// Package relayconf is the configuration of vk-gitlab: a GitLab server, and the
// runners of it that the fleet serves, each with where its jobs are placed.
//
// A mistake is never ignored: every problem of a file is reported, with file,
// line and key. Parsing does no I/O; Load reads one file, Runner.ReadToken
// another. Tokens are in files of their own and never in the configuration.
//
// Spec: gitlab-dispatch, "A runner in vk-gitlab's configuration names its
// placement".
package relayconf

import (
	"bytes"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"virtkit/core/conf"
	"virtkit/core/fault"
)

// Where things are unless told otherwise.
const (
	DefaultFile     = "/etc/vk-gitlab/config.toml"
	DefaultStateDir = "/var/lib/vk-gitlab"
	// EnvFile names the file in the environment.
	EnvFile = "VIRTKIT_GITLAB_CONFIG"
)

// Bounds of the values.
const (
	MaxRunners     = 200
	MaxConcurrency = 64       // of one runner's requests for jobs
	MaxOutput      = 64 << 20 // bytes: a hub keeps no more of a job's output
	DefaultOutput  = 4 << 20
	MaxURL         = 256 // characters of a GitLab's URL that a hub takes
)

// Config is the file. Counts that are 0 are unbounded unless their comment
// says otherwise.
type Config struct {
	File string `toml:"-"` // where it was read, "" = nowhere

	Concurrent      int    `toml:"concurrent"`       // jobs at once, of all runners
	CheckInterval   int    `toml:"check_interval"`   // seconds between requests for a job that were answered at once
	ShutdownTimeout int    `toml:"shutdown_timeout"` // seconds that running jobs have to end after SIGTERM
	StateDir        string `toml:"state_dir"`
	LogFormat       string `toml:"log_format"` // text or json

	GitLab  GitLab   `toml:"gitlab"`
	Runners []Runner `toml:"runners"`
}

// GitLab is [gitlab]: the one server.
type GitLab struct {
	URL       string `toml:"url"`
	TLSCAFile string `toml:"tls_ca_file"` // PEM that it is verified against alone; "" = the system's roots
}

// Runner is one of [[runners]].
type Runner struct {
	Name      string `toml:"name"` // "" = the short form of its token
	TokenFile string `toml:"token_file"`

	Pool     string   `toml:"pool"`
	Labels   []string `toml:"labels"`
	Envelope Envelope `toml:"envelope"`

	Limit              int `toml:"limit"`               // jobs at once
	RequestConcurrency int `toml:"request_concurrency"` // requests for jobs at once
	Output             any `toml:"output_limit"`        // KiB as in gitlab-runner, or a size

	OutputLimit int64 `toml:"-"` // bytes
}

// Envelope is what each job of a runner may use.
type Envelope struct {
	Mem  string `toml:"mem"`
	CPUs int    `toml:"cpus"`
	Disk string `toml:"disk"`

	Memory    int64 `toml:"-"` // bytes
	DiskBytes int64 `toml:"-"`
}

// Check is the check interval.
func (c *Config) Check() time.Duration { return time.Duration(c.CheckInterval) * time.Second }

// Shutdown is the shutdown timeout.
func (c *Config) Shutdown() time.Duration { return time.Duration(c.ShutdownTimeout) * time.Second }

// Default is a configuration without a file: it has no runners.
func Default(getenv func(string) string) *Config {
	dir := DefaultStateDir
	if d := getenv("VIRTKIT_STATE_DIR"); filepath.IsAbs(d) {
		dir = filepath.Join(d, "vk-gitlab")
	}
	return &Config{CheckInterval: 3, ShutdownTimeout: 30, StateDir: dir, LogFormat: "text"}
}

// maxFile is more than any configuration needs.
const maxFile = 1 << 20

const lists = "docs/relay.md lists the keys"

// Load reads a file.
func Load(file string, getenv func(string) string) (*Config, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fault.New(fault.Usage, "reading vk-gitlab's configuration").Because(err).
			Hint("docs/relay.md has one to begin with; --config names the file, %s unless told otherwise", DefaultFile)
	}
	if len(data) > maxFile {
		return nil, fault.Newf(fault.Usage, "%s: has %d bytes, at most %d are allowed", file, len(data), maxFile)
	}
	return Parse(file, data, getenv)
}

// Parse reads a configuration; file is its name in messages.
func Parse(file string, data []byte, getenv func(string) string) (*Config, error) {
	c := Default(getenv)
	c.File = file
	err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(c)
	var ps conf.Problems
	if s, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		for _, e := range s.Errors {
			ps = append(ps, unknown(file, &e))
		}
		err = nil
	}
	if e, ok := errors.AsType[*toml.DecodeError](err); ok {
		row, col := e.Position()
		ps = append(ps, conf.Problem{File: file, Line: row, Col: col, Key: strings.Join(e.Key(), "."), Text: strings.TrimPrefix(e.Error(), "toml: ")})
		err = nil
	} else if len(ps) == 0 || err == nil {
		v := validator{c: c, lines: positions(data)}
		v.all()
		ps = append(ps, v.problems...)
	}
	if err != nil {
		return nil, fault.Newf(fault.Usage, "%s", file).Because(err)
	}
	if len(ps) > 0 {
		slices.SortStableFunc(ps, func(a, b conf.Problem) int { return a.Line - b.Line })
		return nil, fault.New(fault.Usage, "").Because(ps).Hint(lists)
	}
	return c, nil
}

// moved says of keys that gitlab-runner's configuration has where they went.
var moved = map[string]string{
	"runners.url":      "is no key of a runner: the one server is [gitlab] url",
	"runners.token":    "is no key: a token is in a file of its own, which token_file names",
	"runners.executor": "is no key: jobs run in virtkit's microVMs, on the fleet's nodes",
	"runners.tls-ca-file": "is no key of a runner: the one server's certificates are " +
		"[gitlab] tls_ca_file",
	"runners.tags": "is no key: a runner's tags are set in GitLab; pool and labels say where its jobs run",
}

func unknown(file string, e *toml.DecodeError) conf.Problem {
	row, col := e.Position()
	key := strings.Join(e.Key(), ".")
	p := conf.Problem{File: file, Line: row, Col: col, Key: key, Text: "is no key of vk-gitlab's configuration"}
	if m := moved[key]; m != "" {
		p.Text = m
	}
	return p
}

// CheckURL says what is wrong with a GitLab's URL.
func CheckURL(s string) error {
	u, err := url.Parse(s)
	switch {
	case s == "":
		return errors.New("is missing: it is where GitLab is, such as https://gitlab.example.com")
	case err != nil:
		return errors.New("is not a URL") // the parser's error may show a password
	case u.User != nil:
		return errors.New("holds a user or password, which have no place in it")
	case u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "":
		return errors.New("is not http:// or https:// with a host")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return errors.New("has a query or fragment, which have no place in it")
	case len(s) > MaxURL:
		return fmt.Errorf("has %d characters, a hub takes at most %d", len(s), MaxURL)
	}
	for _, r := range s {
		if r <= ' ' || r >= 0x7f {
			return errors.New("holds a character that is not printable ASCII")
		}
	}
	return nil
}

// ReadToken reads the runner's token. Its text is in no error.
func (r *Runner) ReadToken() (conf.Secret, error) {
	b, err := os.ReadFile(r.TokenFile)
	if err != nil {
		return "", fault.New(fault.Usage, "reading a runner's token_file").Because(err)
	}
	token, rest, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	bad := func(text string) (conf.Secret, error) {
		return "", fault.Newf(fault.Usage, "token_file %s %s", r.TokenFile, text).
			Hint("it holds the runner authentication token alone, glrt-…, as GitLab shows it once when a runner is created")
	}
	switch {
	case token == "":
		return bad("is empty")
	case rest != "" || len(token) > 512:
		return bad("holds more than one token")
	case strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		return bad("holds a character that no token has")
	}
	return conf.Secret(token), nil
}

// Short is the part of a token that may be shown: what follows its prefix, 9
// characters of it, as gitlab-runner shortens one.
func Short(token string) string {
	for _, p := range []string{"glrt-", "glrtr-", "GR1348941"} {
		if rest, ok := strings.CutPrefix(token, p); ok {
			token = rest
			break
		}
	}
	if len(token) > 3 && token[0] == 't' && token[2] == '_' { // the kind of runner, as in t1_
		token = token[3:]
	}
	return token[:min(len(token), 9)]
}
