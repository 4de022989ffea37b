package ledger

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/policy"
	"virtkit/core/supervise"
)

// Egress is what is kept of what jobs reached, once they are over:
//
//	egress/<id>.json               the last record of a guest (supervise.EgressRecord)
//	sites/<project>/<job>.json     a job's standing list (policy.Standing)
//	sites/.lock                    held while one is changed
//
// Files are replaced whole; what cannot be read is reported and left alone.
type Egress struct {
	records string
	sites   string
}

// OpenEgress is the egress records of a state directory. It makes nothing.
func OpenEgress(stateDir string) *Egress {
	return &Egress{records: filepath.Join(stateDir, "egress"), sites: filepath.Join(stateDir, "sites")}
}

// Bounds of what is kept of ended guests.
const (
	egressMaxAge   = 14 * 24 * time.Hour
	egressMaxFiles = 1000
	egressMaxBytes = 256 << 20
	standingMax    = 8 << 20 // bytes of a standing list's file; Standing itself stays below
	sitesLockTime  = 10 * time.Second
)

// Keep keeps the record of a guest that is over, in place of an earlier one of
// the same id, adds what it contacted to the job's standing list, and drops
// the oldest records past the bounds: 14 days, 1000 records, 256 MiB.
func (e *Egress) Keep(r supervise.EgressRecord) error {
	if !ValidName(r.ID) {
		return fmt.Errorf("keeping an egress record: %q is no guest's id", r.ID)
	}
	_, err := e.contacted(r)
	b, jerr := json.Marshal(r)
	if jerr == nil {
		jerr = os.MkdirAll(e.records, 0o700)
	}
	if jerr == nil {
		jerr = fsx.WriteFile(filepath.Join(e.records, r.ID+".json"), append(b, '\n'), 0o600)
	}
	if jerr != nil {
		err = errors.Join(err, fmt.Errorf("keeping the egress record of %s: %w", r.ID, jerr))
	}
	return errors.Join(err, e.prune(time.Now()))
}

// keepOf keeps the record that is in a job's directory, which is about to be
// removed. Its error is a fault.Partial: what goes wrong with a record must not
// keep a directory from going.
func (e *Egress) keepOf(dir string) error {
	r, err := supervise.ReadEgress(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = e.Keep(r)
	}
	if err != nil {
		return fault.Newf(fault.Partial, "what guest %s reached is not all kept", filepath.Base(dir)).Because(err)
	}
	return nil
}

type recordFile struct {
	path string
	size int64
	at   time.Time
}

func (e *Egress) files() ([]recordFile, error) {
	ents, err := os.ReadDir(e.records)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing egress records: %w", err)
	}
	var out []recordFile
	for _, d := range ents {
		id, is := strings.CutSuffix(d.Name(), ".json")
		if fi, err := d.Info(); is && ValidName(id) && err == nil && fi.Mode().IsRegular() {
			out = append(out, recordFile{filepath.Join(e.records, d.Name()), fi.Size(), fi.ModTime()})
		}
	}
	slices.SortFunc(out, func(a, b recordFile) int { return cmp.Or(b.at.Compare(a.at), cmp.Compare(a.path, b.path)) })
	return out, nil
}

// prune removes the oldest records past the bounds.
func (e *Egress) prune(now time.Time) error {
	files, err := e.files()
	if err != nil {
		return err
	}
	var errs []error
	bytes := int64(0)
	for i, f := range files {
		bytes += f.size
		if i == 0 || i < egressMaxFiles && bytes <= egressMaxBytes && now.Sub(f.at) <= egressMaxAge {
			continue
		}
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Kept lists the kept records, latest first; problems are files that could not
// be read.
func (e *Egress) Kept(ctx context.Context) (out []supervise.EgressRecord, problems []error, err error) {
	files, err := e.files()
	if err != nil {
		return nil, nil, err
	}
	for _, f := range files {
		if ctx.Err() != nil {
			return out, problems, context.Cause(ctx)
		}
		r, err := supervise.ReadEgressFile(f.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			problems = append(problems, err)
		default:
			out = append(out, r)
		}
	}
	return out, problems, nil
}

// Find is the kept record of a guest by its id, GitLab's job id, a name, or
// the unique beginning of an id; of several of one name the latest.
// fault.NotFound when there is none.
func (e *Egress) Find(ctx context.Context, job string) (supervise.EgressRecord, error) {
	if ValidName(job) {
		r, err := supervise.ReadEgressFile(filepath.Join(e.records, job+".json"))
		if !errors.Is(err, fs.ErrNotExist) {
			return r, err
		}
	}
	kept, problems, err := e.Kept(ctx)
	if err != nil {
		return supervise.EgressRecord{}, err
	}
	var prefixed []supervise.EgressRecord
	for _, r := range kept {
		if r.Name == job || r.Kind == "gitlab" && strings.HasPrefix(r.ID, job+"-") {
			return r, nil
		}
		if job != "" && strings.HasPrefix(r.ID, job) {
			prefixed = append(prefixed, r)
		}
	}
	switch {
	case len(prefixed) == 1:
		return prefixed[0], nil
	case len(prefixed) > 1:
		return supervise.EgressRecord{}, fault.Newf(fault.Usage, "%q is the beginning of %d jobs' ids", job, len(prefixed)).
			Hint("`vk egress-report` lists them")
	}
	return supervise.EgressRecord{}, fault.Newf(fault.NotFound, "there is no egress record of %q", job).Because(errors.Join(problems...)).
		Hint("`vk egress-report` lists what there is; guests of vk run are recorded with --audit-egress")
}

// Contacted adds names that a job's guests looked up, under the fingerprint of
// the policy they were under, to its standing list, and returns that.
func (e *Egress) Contacted(site, fingerprint string, names []string) (*policy.Standing, error) {
	path, err := e.sitePath(site)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("keeping the list of contacted names: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), sitesLockTime)
	defer cancel()
	lock, err := fsx.AcquireLock(ctx, filepath.Join(e.sites, lockName), false)
	if err != nil {
		return nil, fmt.Errorf("keeping the list of contacted names: %w", err)
	}
	defer lock.Close()
	s, err := e.Standing(site)
	if err != nil {
		return nil, err
	}
	s.Add(fingerprint, names, time.Now())
	b, err := s.Encode()
	if err == nil {
		err = fsx.WriteFile(path, b, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("keeping the list of contacted names: %w", err)
	}
	return s, nil
}

// contacted is Contacted of a record; nil when it has no site.
func (e *Egress) contacted(r supervise.EgressRecord) (*policy.Standing, error) {
	if r.Egress.Site == "" {
		return nil, nil
	}
	return e.Contacted(r.Egress.Site, r.Egress.Policy.Fingerprint(), r.Record.ContactedNames())
}

// Standing is a job's standing list, an empty one when there is none.
func (e *Egress) Standing(site string) (*policy.Standing, error) {
	path, err := e.sitePath(site)
	if err != nil {
		return nil, err
	}
	b, err := readBounded(path, standingMax)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	s, err := policy.DecodeStanding(b)
	if err != nil {
		return nil, fault.New(fault.System, path).Because(err).
			Hint("remove the file: the list then begins anew")
	}
	return s, nil
}

func (e *Egress) sitePath(site string) (string, error) {
	project, job, ok := strings.Cut(site, "/")
	if !ok || !ValidName(project) || !ValidName(job) {
		return "", fmt.Errorf("%q is no job's key", site)
	}
	return filepath.Join(e.sites, project, job+".json"), nil
}

// readBounded reads a regular file of at most so many bytes. What else may lie
// there is not followed and not waited for.
func readBounded(path string, most int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link", path)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("%s is no regular file", path)
	case fi.Size() > most:
		return nil, fmt.Errorf("%s has %d bytes, expected at most %d", path, fi.Size(), most)
	}
	return io.ReadAll(io.LimitReader(f, most))
}
