package runner

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/supervise"
)

// RecordFile is the name of a job's Record in its directory.
const RecordFile = "job.json"

// Record is what a job is: for `run`, for `vk list` and for the reaper. It
// holds no value of any variable that could be a secret.
type Record struct {
	Schema   string `json:"schema"` // "vk.job/1"
	ID       string `json:"id"`     // the directory's name
	JobID    int64  `json:"job_id"`
	Name     string `json:"name"`
	Stage    string `json:"stage"`
	Project  string `json:"project"`
	Pipeline string `json:"pipeline,omitempty"`
	URL      string `json:"url,omitempty"`
	// Page is the job's on the GitLab that it was taken from; "" where only the
	// job's own variables would name that.
	Page       string          `json:"page,omitempty"`
	Ref        string          `json:"ref,omitempty"`
	SHA        string          `json:"sha,omitempty"`
	Image      string          `json:"image"`
	Digest     string          `json:"digest,omitempty"`
	CPUs       int             `json:"cpus"`
	MemMiB     int             `json:"mem_mib"`
	User       string          `json:"user,omitempty"`
	Workdir    string          `json:"workdir,omitempty"`
	Entrypoint []string        `json:"entrypoint,omitempty"`
	Runner     supervise.Owner `json:"runner"` // zero when unknown
	Created    time.Time       `json:"created"`
	Deadline   time.Time       `json:"deadline,omitzero"`
	Services   []ServiceRecord `json:"services,omitempty"`
	// HostSources says that the job's sources were got on the host: get_sources
	// tells of that and runs the job's hooks.
	HostSources bool `json:"host_sources,omitempty"`
	// Site is the key of the job's history (SiteOf), and SiteJob its name there,
	// both by the runner's own account of the job; "" when it gives none.
	Site    string `json:"site,omitempty"`
	SiteJob string `json:"site_job,omitempty"`
}

// ServiceRecord is what one of the job's services is.
type ServiceRecord struct {
	Name   string `json:"name"` // of its directory below services/
	Image  string `json:"image"`
	Digest string `json:"digest,omitempty"`
	CPUs   int    `json:"cpus"`
	MemMiB int    `json:"mem_mib"`
}

// TotalMemMiB is the memory of the job's guest and of its services'.
func (r Record) TotalMemMiB() int {
	n := r.MemMiB
	for _, s := range r.Services {
		n += s.MemMiB
	}
	return n
}

const recordSchema = "vk.job/1"

// WriteRecord puts the record into a job's directory.
func WriteRecord(dir string, r Record) error {
	r.Schema = recordSchema
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", RecordFile, err)
	}
	return fsx.WriteFile(filepath.Join(dir, RecordFile), append(b, '\n'), 0o600)
}

// recordMax is the largest record, in bytes.
const recordMax = 4 << 20

// ReadRecord reads the record of a job's directory.
func ReadRecord(dir string) (Record, error) {
	path := filepath.Join(dir, RecordFile)
	b, err := fsx.ReadFile(path, recordMax)
	if err != nil {
		return Record{}, err
	}
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("decoding %s: %w", path, err)
	}
	if r.Schema != recordSchema {
		return r, fmt.Errorf("%s has schema %q, expected %q", path, r.Schema, recordSchema)
	}
	return r, nil
}

// Identity says which job a call is about.
type Identity struct {
	JobID int64
	ID    string // name of its directory
}

// maxSlug bounds the readable part of a directory's name, in bytes.
const maxSlug = 48

// Identify makes a job's directory name of what every call is given: GitLab's
// job id, a readable slug, and a digest of what tells two jobs apart that have
// the same id (two GitLab servers, two runners, an attempt before).
func Identify(c *execdrv.Call) (Identity, error) {
	v := c.Var("CI_JOB_ID")
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 1 {
		return Identity{}, fault.Newf(fault.System, "%sCI_JOB_ID is %q, expected the job's number", execdrv.EnvPrefix, v).
			Hint("vk gitlab config|prepare|run|cleanup are called by gitlab-runner; `vk gitlab check` tries them")
	}
	h := sha256.New()
	for _, s := range []string{c.Var("CI_SERVER_URL"), v, c.Var("CI_RUNNER_ID"), c.Var("CI_RUNNER_SHORT_TOKEN"), c.Var("CI_CONCURRENT_ID"), c.TmpDir} {
		fmt.Fprintf(h, "%d:%s,", len(s), s)
	}
	slug := slugOf(c.Var("CI_PROJECT_PATH") + "/" + c.Var("CI_JOB_NAME"))
	if slug != "" {
		slug += "-"
	}
	return Identity{n, fmt.Sprintf("%d-%s%s", n, slug, hex.EncodeToString(h.Sum(nil))[:8])}, nil
}

func slugOf(s string) string {
	var b strings.Builder
	for _, c := range s {
		switch {
		case b.Len() >= maxSlug:
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_':
			b.WriteRune(c)
		case c == '/' || c == '-':
			b.WriteByte('-')
		default:
			b.WriteByte('_')
		}
	}
	return strings.Trim(b.String(), "-.")
}
