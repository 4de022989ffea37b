package image

import (
	"log/slog"
	"time"

	"virtkit/core/fsx"
)

// Policy says when a registry is asked.
type Policy string

// The policies, with GitLab's meaning of the words.
const (
	Always       Policy = "always"         // ask what the tag means now; unpack only what is new
	IfNotPresent Policy = "if-not-present" // ask only when the reference was never resolved here
	Never        Policy = "never"          // use what is kept, or end in fault.NotFound
)

// Options configure a Store. The zero value is usable.
type Options struct {
	Log *slog.Logger // nil = discard

	LocalDir     string   // [local] dir; "" = "local" beside the store's directory
	RegistryRepo string   // [registry] repo: where virtkit/<name> lives; "" = such references are refused
	DockerRepo   string   // [docker] repo: where docker/<name> without a host lives; "" = the registry it names
	Insecure     []string // registries ("host" or "host:port") that may be spoken to without TLS or with an unknown certificate

	Parallel int           // layers downloaded at once; 0 = 4
	Stall    time.Duration // a connection that gives less than leastPace this long is cut and resumed; 0 = 30 s
	Small    time.Duration // for the bytes of a manifest or a configuration to come; 0 = 10 min
	Retries  int           // attempts per request and per cut of a layer; 0 = 6
	// Patience is how long a registry that answers nothing but that it is busy is
	// waited for in all, however often and long it asks to be: a job that waits
	// for its image holds its place. Any other answer begins anew. 0 = 5 min.
	Patience time.Duration
	NoSweep  bool  // Open leaves what crashed processes left
	MaxBytes int64 // largest unpacked image; 0 = 128 GiB
	Getenv   func(string) string
}

// ResolveOptions are one call's wishes.
type ResolveOptions struct {
	Auth     Auth
	Platform string // "os/arch[/variant]"; "" = linux/<this machine's>
	Policy   Policy // "" = Always
	Progress func(Progress)
}

// Progress is one thing that happened. Events are delivered one at a time.
type Progress struct {
	Stage string `json:"stage"`           // resolve, wait, pull, unpack, build, done
	Text  string `json:"text,omitempty"`  // a line for people; "" for mere counting
	Layer string `json:"layer,omitempty"` // digest, when of one layer
	Done  int64  `json:"done,omitempty"`  // bytes of the layer, or of the whole when Layer is ""
	Total int64  `json:"total,omitempty"` // 0 = unknown

	AllDone  int64 `json:"all_done,omitempty"`  // bytes of all layers
	AllTotal int64 `json:"all_total,omitempty"` // 0 = unknown
}

// Config is what an image says about how its programs are to be run.
type Config struct {
	Env          []string          `json:"env,omitempty"` // NAME=VALUE
	User         string            `json:"user,omitempty"`
	WorkingDir   string            `json:"working_dir,omitempty"`
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	Volumes      []string          `json:"volumes,omitempty"`       // absolute paths, sorted
	ExposedPorts []string          `json:"exposed_ports,omitempty"` // "80/tcp", sorted
	Labels       map[string]string `json:"labels,omitempty"`
	StopSignal   string            `json:"stop_signal,omitempty"`
}

// Image is a root that is ready to boot and held until Close.
type Image struct {
	Ref    string // canonical form of what was asked for
	Digest string // sha256:… of the manifest, of the bundle or of the recipe
	Path   string // one read-only filesystem image
	FSType string // "ext4"
	Config Config
	Size   int64 // bytes of Path, holes included

	Platform string // "os/arch[/variant]" that its programs are for; "" = not told

	Hold     *fsx.Lock // shared lock that keeps the image from GC
	LockPath string    // the file it is on; another process may take its own shared lock
}

// Close ends the hold. Safe to call twice.
func (i *Image) Close() error {
	if i == nil {
		return nil
	}
	return i.Hold.Close()
}

// Info describes a kept image, for listings.
type Info struct {
	Ref      string    `json:"ref"`              // one that means it, "" when none does any more
	Refs     []string  `json:"refs"`             // all references that mean it
	Former   string    `json:"former,omitempty"` // the one it was made for, when that means another now
	Digest   string    `json:"digest"`
	Kind     string    `json:"kind"` // image, bundle or default
	Platform string    `json:"platform,omitempty"`
	Size     int64     `json:"size"`      // bytes of the root, holes included
	DiskSize int64     `json:"disk_size"` // bytes it takes on disk
	Created  time.Time `json:"created"`   // when it was unpacked here
	Used     time.Time `json:"used"`      // last use
	InUse    bool      `json:"in_use"`
	Path     string    `json:"path"`
	Config   Config    `json:"config"`
}

// Report is what GC removed, or would remove in a dry run.
type Report struct {
	DryRun  bool     `json:"dry_run"`
	Images  []Info   `json:"images,omitempty"`
	Blobs   int      `json:"blobs"`
	Staging int      `json:"staging"`
	Locks   int      `json:"locks"`
	Refs    int      `json:"refs"`
	Bytes   int64    `json:"bytes"` // disk space freed
	Held    int      `json:"held"`  // images and bundles left because they are in use
	Skipped []string `json:"skipped,omitempty"`
}
