// Package conf is the host's configuration: one TOML file, read strictly.
//
// The file is the first of $VIRTKIT_CONFIG, ~/.config/virtkit/config.toml and
// /etc/virtkit/config.toml that exists; a $VIRTKIT_CONFIG that names a missing
// file is an error, no file at all means defaults. Values come from, weakest
// first: defaults, the file, the environment, flags; each remembers its Origin.
//
// Every key is one row of the table in keys.go: its type, default, meaning and
// whether virtkit acts on it yet. Parsing, `vk config show`, docs/config.md
// and packaging/config.example.toml are all made from that table, so they
// cannot differ. A mistyped key is never ignored: all problems of a file are
// reported together, each with file, line, column, key, what was expected and
// the nearest right name.
//
// Parsing does no I/O; Load reads one file; ResolveStateDir alone creates
// something (the state directory).
package conf

import (
	"slices"
	"time"

	"virtkit/core/policy"
)

// Config is the effective configuration. Sizes are bytes. An empty string, a
// zero number and a nil list mean "not set" unless the field says otherwise.
type Config struct {
	StateDir string // "" = decided by ResolveStateDir

	Local    Local
	Registry Registry
	Docker   Docker
	Images   Images
	VMM      VMM
	Net      Net
	Build    Build
	Executor Executor
	NUMA     NUMA
	GC       GC
	Egress   RunEgress
	Node     Node

	// File is the file that was read; "" when there is none.
	File string
	// Warnings are lines for the user, each starting with the file, and the line
	// where there is one.
	Warnings []string

	origins map[string]Origin
}

// Local is [local]: image bundles in a directory.
type Local struct {
	Dir string // "" = <state dir>/local
}

// Registry is [registry]: where virtkit/… bundles are pulled from.
type Registry struct {
	Repo            string // registry host and path prefix
	GuestCredential string // "", "node" or "job"
}

// Docker is [docker]: where docker/… images are pulled from.
type Docker struct {
	Repo string // registry host and path prefix; "" = the registry a reference names
}

// Images is [images].
type Images struct {
	Idle time.Duration // see Config.ImageIdle
}

// VMM is [vmm]: how guests are run.
type VMM struct {
	Accel       string // auto, kvm or tcg
	Templates   string // auto or off
	Channel     string // auto, serial or vsock
	QEMU        string // program name or absolute path
	Kernel      string // name or absolute path; "" = the best one installed
	BootTimeout time.Duration
	HangTimeout time.Duration // 0 = never
	Disk        int64         // capacity of a guest's writable layer
}

// Net is [net].
type Net struct {
	Mode         string   // switch, none, tap or pool
	HostLoopback []int    // ports of the host's 127.0.0.1 that guests may reach
	DNS          []string // IP or IP:port; nil = the host's resolv.conf
	Subnet       string   // IPv4 CIDR; "" = a free private one
	Pool         []string // see ParseTapDevice; nil = devices of vk's own
	PoolSize     int      // how many those are
}

// Build is [build].
type Build struct {
	CPUs          int   // 0 = shared out
	Mem           int64 // of one stage
	Jobs          int   // 0 = from the host's memory
	NoMemGate     bool
	CacheRegistry string
}

// Executor is [executor] with the sections below it.
type Executor struct {
	BuildsDir           string
	CacheDir            string
	ToolsDir            string
	HostCheckout        bool
	CheckoutDir         string
	CheckoutCacheIdle   time.Duration // see Config.CheckoutIdle
	CheckoutOverlay     bool
	CheckoutOverlaySize Amount // of the guest's memory
	CheckoutTmpfs       bool
	CheckoutMirror      bool
	CheckoutMirrorIdle  time.Duration
	ImageCacheIdle      time.Duration
	WindowsCacheIdle    time.Duration
	ServicesTimeout     time.Duration
	GuestServiceExec    bool
	Atop                bool
	AtopInterval        time.Duration
	AtopRetentionDays   int

	VM       VM
	Schedule Schedule
	Share    map[string]string // guest path → host directory, read-only
}

// VM is [executor.vm]: a job's guest.
type VM struct {
	CPUs     int
	Mem      int64
	MaxCPUs  int   // 0 = no ceiling
	MaxMem   int64 // 0 = no ceiling
	Hostname string
	User     string // "" = the image's
	Nested   bool
	Reclaim  Amount // Word "auto" or "off", or a size or a share of the guest's memory
	Balloon  bool
	DAX      string
}

// Schedule is [executor.schedule]: admission of jobs to the host.
type Schedule struct {
	MemBudget      Amount // of the host's memory; zero = no admission by memory
	WaitTimeout    time.Duration
	FromHistory    bool
	DiskAdmission  bool
	DiskDefault    int64 // 0 = 8G or the filesystem's size, whichever is smaller
	MaxConcurrency int   // 0 = no ceiling
}

// NUMA is [numa].
type NUMA struct {
	Mode string // auto, off or interleave
}

// GC is [gc].
type GC struct {
	BuildCacheRetentionDays int    // 0 = whatever their age
	BuildCacheMax           Amount // of its filesystem; zero = 10 %, at most 50 GiB; Word "none" = no limit
}

// Egress is one phase's cap. A nil list leaves its dimension unrestricted, an
// empty one denies it; a phase is unrestricted only when both are nil.
type Egress struct {
	AllowIP   []string // IPv4 CIDR, or CIDR:port
	AllowName []string // DNS suffixes
	Audit     bool
}

// RunEgress is [egress], with [egress.build] below it.
type RunEgress struct {
	Egress
	DryRun      bool
	StrictNames bool
	Build       Egress
}

// Lists are the phase's lists as the policy takes them.
func (e *Egress) Lists(p policy.Phase) policy.Lists {
	l, _ := policy.ParseCap(p, e.AllowName, e.AllowIP, "", "") // every entry was checked as it was read
	return l
}

// Node is [node]: this host as a member of a fleet.
type Node struct {
	Runner          string // "", managed, external or none
	RunnerConfig    string
	GitlabRunner    string
	Validate        []string
	ValidateTimeout time.Duration
	ReleaseKeys     []string
	RequireSigned   *bool // nil = whether there are ReleaseKeys
	AllowDowngrade  bool
	Labels          []string
	WorkloadMem     time.Duration
	JobsSpeed       string
	CheckoutsSpeed  string
}

// ImageIdle is how long an unused image is kept: [images] idle_secs, else
// [executor] image_cache_idle_secs.
func (c *Config) ImageIdle() time.Duration {
	if c.isSet("images.idle_secs") {
		return c.Images.Idle
	}
	return c.Executor.ImageCacheIdle
}

// CheckoutIdle is how long an unused checkout is kept:
// [executor] checkout_cache_idle_secs, else image_cache_idle_secs.
func (c *Config) CheckoutIdle() time.Duration {
	if c.isSet("executor.checkout_cache_idle_secs") {
		return c.Executor.CheckoutCacheIdle
	}
	return c.Executor.ImageCacheIdle
}

func (c *Config) isSet(key string) bool { _, ok := c.origins[key]; return ok }

// Source says who set a value.
type Source string

// The sources, weakest first.
const (
	FromDefault Source = "default"
	FromFile    Source = "file"
	FromEnv     Source = "env"
	FromFlag    Source = "flag"
)

// Origin is where a value comes from.
type Origin struct {
	Source Source `json:"source"`
	File   string `json:"file,omitempty"`
	Line   int    `json:"line,omitempty"`
	Col    int    `json:"col,omitempty"`
	Name   string `json:"name,omitempty"` // environment variable or flag
}

// String is the origin for people: "default", FILE:LINE, $NAME or the flag.
func (o Origin) String() string {
	switch o.Source {
	case FromFile:
		return place(o.File, o.Line, 0)
	case FromEnv:
		return "$" + o.Name
	case FromFlag:
		return o.Name
	}
	return string(FromDefault)
}

// Origin tells where the value of a key ("executor.vm.cpus") comes from.
func (c *Config) Origin(key string) Origin {
	if o, ok := c.origins[key]; ok {
		return o
	}
	return Origin{Source: FromDefault}
}

// Default is the configuration without any file.
func Default() *Config {
	c := &Config{origins: map[string]Origin{}}
	for i := range table {
		r := &table[i]
		if r.def == "" {
			continue
		}
		if err := r.setLiteral(c, r.def); err != nil {
			panic("conf: default of " + r.name + ": " + err.Error()) // a test sets every default
		}
	}
	return c
}

// Set gives a key a value written as text, as a flag or a variable of the
// environment does: lists are separated by commas. The error names o.
func (c *Config) Set(key, text string, o Origin) error {
	r := lookup(key)
	if r == nil {
		return problem{Key: key, Text: "is not a configuration key", Near: nearKey(key)}.err()
	}
	if w := r.setText(c, text); w != nil {
		w.Key = o.String()
		return w.err()
	}
	if c.origins == nil {
		c.origins = map[string]Origin{}
	}
	c.origins[key] = o
	return nil
}

// Key describes one key for people and programs.
type Key struct {
	Name    string   `json:"name"` // with its section: "executor.vm.cpus"
	Type    string   `json:"type"`
	Default string   `json:"default,omitempty"` // TOML; "" = not set
	Words   []string `json:"words,omitempty"`   // values with a meaning of their own
	Env     string   `json:"env,omitempty"`     // variable that overrides it
	Doc     string   `json:"doc"`
	Acted   bool     `json:"acted"` // false = read and checked, but changes nothing yet
}

// Keys lists all keys in the order of the documentation.
func Keys() []Key {
	out := make([]Key, 0, len(table))
	for _, r := range table {
		out = append(out, Key{r.name, r.kind.String(), r.def, slices.Clone(r.words), r.env, r.doc, r.acted})
	}
	return out
}

// Value is the effective value of a key as TOML; "" when it is not set.
func (c *Config) Value(key string) string {
	if r := lookup(key); r != nil {
		return r.literal(c)
	}
	return ""
}
