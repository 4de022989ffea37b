package wire

import (
	"cmp"
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"unicode"
)

// Bounds of a list of workloads.
const (
	MaxWorkloads     = 256
	MaxWorkloadBytes = 256 << 10 // of its JSON
	MaxURL           = 256       // bytes of a job's page
)

// WorkloadKind is what a VM is for.
type WorkloadKind string

// Workload kinds. One that is not known is kept and shown as it is.
const (
	KindJob WorkloadKind = "job" // of CI
	KindDev WorkloadKind = "dev" // a development environment
	KindRun WorkloadKind = "run" // a pinned vk run
)

// Workload is a VM that runs on a host.
type Workload struct {
	ID       string       `json:"id"` // 16 hex digits, derived from the state dir
	Kind     WorkloadKind `json:"kind"`
	Project  string       `json:"project,omitempty"`
	Job      string       `json:"job,omitempty"` // its name
	JobID    string       `json:"job_id,omitempty"`
	JobURL   string       `json:"job_url,omitempty"`
	Space    string       `json:"workspace,omitempty"`
	Env      string       `json:"environment,omitempty"`
	SSHAlias string       `json:"ssh_alias,omitempty"`
	GuestDir string       `json:"guest_workspace,omitempty"`
	Image    string       `json:"image,omitempty"`
	Dir      string       `json:"dir,omitempty"` // of the project on the host
	PID      int          `json:"pid,omitempty"` // of the process that manages it
	CPUs     int          `json:"cpus,omitempty"`
	Reserved int64        `json:"reserved_bytes,omitempty"`
	Started  int64        `json:"started_at,omitempty"`
	StateDir string       `json:"state_dir"`
}

// BoundWorkloads holds a list to what may be reported and shown: jobs first,
// then the newest of the rest, at most MaxWorkloads and MaxWorkloadBytes,
// stopping at the first that does not fit. It is applied by the node and again
// by the hub. What is left out is counted. The argument is not changed.
func BoundWorkloads(list []Workload) (kept []Workload, omitted int) {
	sorted := make([]Workload, 0, min(len(list), 2*MaxWorkloads))
	for _, w := range list {
		if IsHex(w.ID, WorkloadLen) {
			sorted = append(sorted, bound(w))
		}
	}
	slices.SortStableFunc(sorted, func(a, b Workload) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(b.Started, a.Started), strings.Compare(a.ID, b.ID))
	})
	kept = []Workload{}
	size := 2
	for _, w := range sorted {
		b, err := json.Marshal(w)
		if size += len(b) + 1; err != nil || size > MaxWorkloadBytes || len(kept) == MaxWorkloads {
			break
		}
		kept = append(kept, w)
	}
	return kept, len(list) - len(kept)
}

func rank(w Workload) int {
	if w.Kind == KindJob {
		return 0
	}
	return 1
}

func bound(w Workload) Workload {
	w.Kind = WorkloadKind(Clean(string(w.Kind), MaxText))
	for _, s := range []*string{&w.Project, &w.Job, &w.JobID, &w.Space, &w.Env, &w.Image, &w.Dir, &w.StateDir} {
		*s = Clean(*s, MaxText)
	}
	// These two are typed into a shell or an editor as they stand.
	for _, s := range []*string{&w.SSHAlias, &w.GuestDir} {
		if Clean(*s, MaxText) != *s {
			*s = ""
		}
	}
	if !PlainURL(w.JobURL) {
		w.JobURL = ""
	}
	w.PID, w.CPUs, w.Reserved, w.Started = max(w.PID, 0), max(w.CPUs, 0), max(w.Reserved, 0), max(w.Started, 0)
	return w
}

// PlainURL says whether s is a web page's address that may be made a link:
// http or https, a host, no userinfo, printable ASCII without what ends an
// attribute or a tag, at most MaxURL bytes.
func PlainURL(s string) bool {
	if len(s) > MaxURL || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("\"'<>\\`", r) }) {
		return false
	}
	u, err := url.Parse(s)
	return err == nil && (strings.HasPrefix(s, "https://") || strings.HasPrefix(s, "http://")) && u.Hostname() != "" && u.User == nil
}

// Clean takes control and invisible characters and invalid UTF-8 out of s and
// cuts it to n characters.
func Clean(s string, n int) string {
	if len(s) <= n && plain(s) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if n == 0 {
			break
		}
		if r == unicode.ReplacementChar || r != ' ' && !unicode.IsGraphic(r) || unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Other_Default_Ignorable_Code_Point, r) {
			continue
		}
		b.WriteRune(r)
		n--
	}
	return b.String()
}

func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
