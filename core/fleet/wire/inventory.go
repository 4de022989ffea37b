package wire

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Inventory is the facts of a host, sent when they change. Each list is cut to
// MaxList entries.
type Inventory struct {
	Hostname    string       `json:"hostname"`
	CPUs        int          `json:"cpus"`
	CPUModel    string       `json:"cpu_model,omitempty"`
	RAM         int64        `json:"ram_bytes"`
	MemoryNodes []MemoryNode `json:"memory_nodes,omitempty"`
	Checks      []Check      `json:"checks,omitempty"`
	Filesystems []Filesystem `json:"filesystems,omitempty"`
	VK          string       `json:"vk"`
	VKSHA256    string       `json:"vk_sha256,omitempty" since:"2"` // of the program that runs
	GuestKernel string       `json:"guest_kernel,omitempty"`
	HostKernel  string       `json:"host_kernel,omitempty"`
	ConfigHash  string       `json:"config_hash,omitempty"` // sha256 of the effective configuration
	Runner      *Runner      `json:"runner,omitempty"`
	Labels      []string     `json:"labels,omitempty" since:"3"` // [node] labels
	// Features are what the node does for placed jobs beyond its version:
	// egress_rules, egress_reports; and egress_fallback, for its gitlab-runner's.
	Features []string `json:"features,omitempty" since:"3"`
	Registry string   `json:"registry,omitempty" since:"3"` // [registry] base URL
	// Egress is the node's own caps, a policy.Caps.
	Egress json.RawMessage `json:"egress,omitempty" since:"3"`
	Tools  *Tools          `json:"tools,omitempty" since:"4"`
}

// Features of a node.
const (
	FeatureEgressRules = "egress_rules" // it holds placed jobs to a start's egress_layer
	// FeatureEgressFallback: it holds the jobs of its own gitlab-runner to the
	// egress_layer of its desired state.
	FeatureEgressFallback = "egress_fallback"
	FeatureEgressReports  = "egress_reports" // it reports what placed jobs reached and were refused
)

// MemoryNode is a NUMA node.
type MemoryNode struct {
	ID     int   `json:"id"`
	Memory int64 `json:"bytes"`
	CPUs   int   `json:"cpus,omitempty"`
}

// Check is a result of vk check that gates enrollment.
type Check struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	Text string `json:"text,omitempty"`
}

// Roles of filesystems.
const (
	RoleJobs      = "jobs"
	RoleCheckouts = "checkouts"
)

// Filesystem is one that jobs use: its facts.
type Filesystem struct {
	Role   string `json:"role"`
	Path   string `json:"path,omitempty"`
	Device string `json:"device"`
	FSType string `json:"fstype,omitempty"`
	Size   int64  `json:"size_bytes"`
	Tmpfs  bool   `json:"tmpfs,omitempty"`
	Speed  string `json:"speed,omitempty"` // as declared by [node] jobs_speed, checkouts_speed
}

// Runner is gitlab-runner as its configuration has it.
type Runner struct {
	Config     string   `json:"config"`
	Concurrent int      `json:"concurrent"`
	Names      []string `json:"names,omitempty"`
	Version    string   `json:"version,omitempty"`
}

// Tools are the CI tools that are current.
type Tools struct {
	SHA256   string    `json:"sha256"`
	Label    string    `json:"label,omitempty"`
	Versions []Version `json:"versions,omitempty"`
	InUse    bool      `json:"in_use"` // [executor] tools_dir names them
}

// Version is the first line that a tool prints for --version.
type Version struct {
	Tool string `json:"tool"`
	Text string `json:"text"`
}

// Check is Message's.
func (m *Inventory) Check() error {
	err := errors.Join(optHex("vk_sha256", m.VKSHA256, DigestLen), optHex("config_hash", m.ConfigHash, DigestLen))
	if m.CPUs < 0 || m.RAM < 0 {
		err = errors.Join(err, fmt.Errorf("%d CPUs and %d bytes of RAM are no host", m.CPUs, m.RAM))
	}
	if m.Tools != nil {
		err = errors.Join(err, checkHex("tools.sha256", m.Tools.SHA256, DigestLen))
	}
	return err
}

// Heartbeat is a host's readings. A pointer that is nil could not be read.
type Heartbeat struct {
	Admission    Admission   `json:"admission"`
	Concurrency  int         `json:"concurrency,omitempty"` // last asked of the runner; 0 = none
	MemAvailable int64       `json:"mem_available_bytes,omitempty"`
	Filesystems  []FSReading `json:"filesystems,omitempty"`
	// VMs is each VM's host memory in bytes, by the workload's id. At most
	// MaxWorkloads.
	VMs   map[string]int64 `json:"vms,omitempty"`
	Load1 *float64         `json:"load1,omitempty"`
	// Beyond the reference:
	Pressure *Pressure     `json:"pressure,omitempty"`
	Disks    []DiskReading `json:"disks,omitempty"`
	Stages   *Stages       `json:"stages,omitempty"`
	Clock    int64         `json:"clock,omitempty"` // the node's, Unix seconds
}

// Admission is the ledger's totals.
type Admission struct {
	Committed   int64 `json:"committed_bytes"`
	Budget      int64 `json:"budget_bytes,omitempty"` // 0 = none is set
	Running     int   `json:"running"`
	Waiting     int   `json:"waiting"`
	DiskClaimed int64 `json:"disk_claimed_bytes,omitempty"`
}

// FSReading is what is free.
type FSReading struct {
	Role       string `json:"role"`
	Free       int64  `json:"free_bytes"`
	FreeInodes int64  `json:"free_inodes"`
}

// Pressure is the kernel's pressure stall information (PSI,
// Documentation/accounting/psi.rst): percent of the last 10 and 60 seconds in
// which some, or all, tasks waited.
type Pressure struct {
	CPU    *Stall `json:"cpu,omitempty"`
	Memory *Stall `json:"memory,omitempty"`
	IO     *Stall `json:"io,omitempty"`
}

// Stall is one resource's.
type Stall struct {
	Some10 float64 `json:"some10"`
	Some60 float64 `json:"some60"`
	Full10 float64 `json:"full10"`
	Full60 float64 `json:"full60"`
}

// DiskReading is the mean time that a disk took for a request since the last
// heartbeat (await of iostat), in milliseconds, and how busy it was, in percent.
type DiskReading struct {
	Role    string  `json:"role"`
	Device  string  `json:"device"`
	ReadMS  float64 `json:"read_ms"`
	WriteMS float64 `json:"write_ms"`
	Busy    float64 `json:"busy_percent"`
}

// Stages counts the jobs of the host by what they do.
type Stages struct {
	Preparing int `json:"preparing"`
	Waiting   int `json:"waiting"` // for admission
	Running   int `json:"running"`
	Cleaning  int `json:"cleaning"`
}

// Check is Message's.
func (m *Heartbeat) Check() error {
	if len(m.VMs) > MaxWorkloads {
		return fmt.Errorf("%d VMs are more than %d", len(m.VMs), MaxWorkloads)
	}
	for id := range m.VMs {
		if err := checkHex("a VM's id", id, WorkloadLen); err != nil {
			return err
		}
	}
	return nil
}
