// Package hubconf is hub.toml, the configuration of vk-hub serve. Every key is
// optional, and one that is not known is an error, with its file and line.
//
// Spec: fleet-reference, "hub.toml sets …".
package hubconf

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
)

// Config is hub.toml.
type Config struct {
	File string `toml:"-"` // where it was read, "" = nowhere

	Addr    string `toml:"addr"`     // HOST:PORT of the node listener
	TLSCert string `toml:"tls_cert"` // PEM files; none = plain text, on loopback alone
	TLSKey  string `toml:"tls_key"`
	DataDir string `toml:"data_dir"`

	UI
	OIDC *OIDC `toml:"oidc"` // nil = nobody signs in through a provider

	// Beyond the reference.
	HeartbeatSecs    int    `toml:"heartbeat_secs"`     // asked of nodes
	MetricsAddr      string `toml:"metrics_addr"`       // HOST:PORT of /metrics; "" = off
	MetricsTokenFile string `toml:"metrics_token_file"` // whose first line a scraper must bear
	LogFormat        string `toml:"log_format"`         // text or json

	Jobs
	// Rules are the keys of [jobs].
	Rules Rules `toml:"jobs"`
}

// Rules is [jobs].
type Rules struct {
	EgressRules bool `toml:"egress_rules"` // jobs are held to the hub's egress rules
}

// later are keys of the reference that this version does not act on.
var later = map[string]string{
	"release_repository": "releases", "max_job_token_secs": "registry tokens",
}

// DefaultAddr is where a hub listens unless told otherwise.
const DefaultAddr = "127.0.0.1:8443"

// MetricsTokenMin is the fewest characters of a metrics token.
const MetricsTokenMin = 16

// Default is a configuration without a file. getenv and home name data_dir:
// $XDG_DATA_HOME/virtkit/hub, else ~/.local/share/virtkit/hub.
func Default(getenv func(string) string, home string) *Config {
	data := getenv("XDG_DATA_HOME")
	if !filepath.IsAbs(data) {
		data = filepath.Join(home, ".local/share")
	}
	return &Config{Addr: DefaultAddr, DataDir: filepath.Join(data, "virtkit/hub"), HeartbeatSecs: int(wire.DefaultHeartbeat / time.Second), LogFormat: "text", Jobs: defaultJobs()}
}

// maxFile is more than any hub.toml has.
const maxFile = 1 << 20

// Load reads a file over the defaults; "" reads none.
func Load(file string, getenv func(string) string, home string) (*Config, error) {
	c := Default(getenv, home)
	if file == "" {
		return c, c.Validate()
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fault.New(fault.Usage, "reading the hub's configuration").Because(err).Hint("correct --config, or leave it out: every key is optional")
	}
	if len(data) > maxFile {
		return nil, fault.Newf(fault.Usage, "%s: has %d bytes, at most %d are allowed", file, len(data), maxFile)
	}
	return c, c.parse(file, data)
}

func (c *Config) parse(file string, data []byte) error {
	c.File = file
	err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(c)
	if s, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		var ps conf.Problems
		for _, e := range s.Errors {
			ps = append(ps, problem(file, &e))
		}
		return fault.New(fault.Usage, "").Because(ps).Hint("docs/hub.md lists the keys of hub.toml")
	}
	if e, ok := errors.AsType[*toml.DecodeError](err); ok {
		p := problem(file, e)
		p.Text = strings.TrimPrefix(e.Error(), "toml: ")
		return fault.New(fault.Usage, "").Because(conf.Problems{p}).Hint("docs/hub.md lists the keys of hub.toml")
	}
	if err != nil {
		return fault.Newf(fault.Usage, "%s", file).Because(err)
	}
	if err := c.validate(data); err != nil {
		return err
	}
	return nil
}

func problem(file string, e *toml.DecodeError) conf.Problem {
	row, col := e.Position()
	key := strings.Join(e.Key(), ".")
	p := conf.Problem{File: file, Line: row, Col: col, Key: key, Text: "is no key of hub.toml"}
	if len(e.Key()) > 0 {
		if what := later[e.Key()[0]]; what != "" {
			p.Text = "belongs to " + what + ", which this version does not have"
		}
	}
	return p
}

// Validate says everything that is wrong with the values.
func (c *Config) Validate() error { return c.validate(nil) }

func (c *Config) validate(data []byte) error {
	var ps conf.Problems
	bad := func(key, format string, a ...any) {
		ps = append(ps, conf.Problem{File: c.File, Line: line(data, key), Key: key, Text: fmt.Sprintf(format, a...)})
	}
	if err := checkAddr(c.Addr); err != nil {
		bad("addr", "%v", err)
	} else if c.TLSCert == "" && c.TLSKey == "" && !Loopback(c.Addr) {
		bad("addr", "%s is not on loopback, and without tls_cert and tls_key a hub serves on loopback alone", c.Addr)
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		bad("tls_cert", "tls_cert and tls_key go together")
	}
	if !filepath.IsAbs(c.DataDir) {
		bad("data_dir", "%q is not an absolute path", c.DataDir)
	}
	if lo, hi := int(wire.MinHeartbeat/time.Second), int(wire.MaxHeartbeat/time.Second); c.HeartbeatSecs < lo || c.HeartbeatSecs > hi {
		bad("heartbeat_secs", "%d is not between %d and %d", c.HeartbeatSecs, lo, hi)
	}
	if c.MetricsAddr != "" {
		if err := checkAddr(c.MetricsAddr); err != nil {
			bad("metrics_addr", "%v", err)
		} else if !Loopback(c.MetricsAddr) && c.MetricsTokenFile == "" {
			bad("metrics_addr", "%s is not on loopback, so that metrics_token_file is needed", c.MetricsAddr)
		}
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		bad("log_format", "%q is neither text nor json", c.LogFormat)
	}
	c.Jobs.validate(bad)
	c.validateUI(bad)
	if len(ps) > 0 {
		return fault.New(fault.Usage, "").Because(ps).Hint("docs/hub.md lists the keys of hub.toml")
	}
	return nil
}

// line finds a key's line in a file that was parsed, or a table's. No two tables
// have a key in common.
func line(data []byte, key string) int {
	key = key[strings.LastIndexByte(key, '.')+1:]
	for n, l := range strings.Split(string(data), "\n") {
		if l = strings.TrimSpace(l); strings.HasPrefix(l, "["+key+"]") {
			return n + 1
		}
		if k, _, ok := strings.Cut(l, "="); ok && strings.Trim(strings.TrimSpace(k), `"'`) == key {
			return n + 1
		}
	}
	return 0
}

func checkAddr(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil || port == "" {
		return fmt.Errorf("%q is not HOST:PORT", s)
	}
	if host == "" {
		return fmt.Errorf("%q names no host; 0.0.0.0 or [::] stands for all", s)
	}
	if _, err := net.LookupPort("tcp", port); err != nil {
		return fmt.Errorf("%q is no port", port)
	}
	return nil
}

// Loopback says whether an address can only be reached from this host.
func Loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// MetricsToken reads the token, "" when none is wanted.
func (c *Config) MetricsToken() (string, error) {
	if c.MetricsTokenFile == "" {
		return "", nil
	}
	b, err := os.ReadFile(c.MetricsTokenFile)
	if err != nil {
		return "", fault.New(fault.Usage, "reading metrics_token_file").Because(err)
	}
	token, _, _ := strings.Cut(string(b), "\n")
	if token = strings.TrimSpace(token); len(token) < MetricsTokenMin {
		return "", fault.Newf(fault.Usage, "metrics_token_file %s: its first line has fewer than %d characters", c.MetricsTokenFile, MetricsTokenMin)
	}
	return token, nil
}

// MakeDataDir makes data_dir 0700, and refuses one that others can enter.
func (c *Config) MakeDataDir() error {
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return fault.New(fault.Usage, "making data_dir").Because(err).Hint("name one that this user can write in hub.toml")
	}
	info, err := os.Stat(c.DataDir)
	if err != nil {
		return err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return fault.Newf(fault.Usage, "data_dir %s is open to others (mode %04o)", c.DataDir, info.Mode().Perm()).Hint("chmod 700 %s", c.DataDir)
	}
	return nil
}

// Database is the file of the hub's database.
func (c *Config) Database() string { return filepath.Join(c.DataDir, "hub.sqlite") }

// Outputs is the directory of jobs' outputs.
func (c *Config) Outputs() string { return filepath.Join(c.DataDir, "jobs") }

// AdminSocket is where vk-hub's other commands reach the running hub.
func (c *Config) AdminSocket() string { return filepath.Join(c.DataDir, "admin.sock") }

// Missing says whether an error is of a file that is not there.
func Missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
