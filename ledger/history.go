package ledger

import (
	"bufio"
	"bytes"
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
	"virtkit/core/usage"
)

// History is what jobs have been using:
//
//	history/<project id>-<slug>/<job>-<digest>   one job's runs, oldest first
//	history/.lock                                held while one is changed
//
// A file is lines of JSON: the first one says what it is, each other one is a
// usage.Run. It is replaced whole. Nothing depends on it: a file may be deleted
// at any time, and its job is unknown for one run. What cannot be read is
// reported and skipped, a line or a file at a time.
type History struct{ dir string }

// OpenHistory is the history of a state directory. It makes nothing.
func OpenHistory(stateDir string) *History {
	return &History{dir: filepath.Join(stateDir, "history")}
}

const (
	historySchema   = "vk.history/1"
	historyMax      = 16 << 20 // bytes of a file; MaxRuns need well under a tenth
	historyLockTime = 10 * time.Second
)

type historyHead struct {
	Schema string `json:"schema"` // "vk.history/1"
	Job    string `json:"job"`    // its name as written
}

// errForeign is in the chain of a file that is not ours to replace.
var errForeign = errors.New("left alone")

// path is the file of a key, which is <project>/<job>.
func (h *History) path(key string) (string, error) {
	project, job, ok := strings.Cut(key, "/")
	if !ok || !ValidName(project) || !ValidName(job) {
		return "", fmt.Errorf("%q is no key of a job's history", key)
	}
	return filepath.Join(h.dir, project, job), nil
}

// Job is what is remembered under a key; the error tells of what could not be
// read, and the job has the rest.
func (h *History) Job(key string) (usage.Job, error) {
	path, err := h.path(key)
	if err != nil {
		return usage.Job{}, err
	}
	j, err := readHistory(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return j, err
}

// Add remembers a run of the job called name. What of the file cannot be read
// is dropped from it, unless it is somebody else's file.
func (h *History) Add(key, name string, r usage.Run) error {
	path, err := h.path(key)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err != nil {
		return fmt.Errorf("remembering a run: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), historyLockTime)
	defer cancel()
	lock, err := fsx.AcquireLock(ctx, filepath.Join(h.dir, lockName), false)
	if err != nil {
		return fmt.Errorf("remembering a run: %w", err)
	}
	defer lock.Close()
	j, err := readHistory(path)
	if errors.Is(err, errForeign) {
		return fault.New(fault.System, "remembering a run").Because(err).Hint("move that file away, and the job's history begins anew")
	}
	j.Name = name
	j.Add(r)
	b, err := encodeHistory(j)
	if err == nil {
		removeStaging(filepath.Dir(path))
		err = fsx.WriteFile(path, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("remembering a run: %w", err)
	}
	return nil
}

// removeStaging removes what killed processes left beside histories. The lock
// over changes is held.
func removeStaging(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, ".*.tmp-*"))
	for _, p := range left {
		os.Remove(p)
	}
}

func encodeHistory(j usage.Job) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	if err := enc.Encode(historyHead{historySchema, j.Name}); err != nil {
		return nil, err
	}
	for _, r := range j.Runs {
		if err := enc.Encode(r); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

// readHistory reads a file; the error joins what of it could not be read.
func readHistory(path string) (usage.Job, error) {
	var j usage.Job
	foreign := func(why error) (usage.Job, error) {
		return j, fmt.Errorf("%s is no history of a job: %w: %w", path, why, errForeign)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return foreign(errors.New("it is a symbolic link"))
	}
	if err != nil {
		return j, err
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return j, err
	case !st.Mode().IsRegular():
		return foreign(errors.New("it is no regular file"))
	case st.Size() > historyMax:
		return foreign(fmt.Errorf("it has %d bytes, a history at most %d", st.Size(), historyMax))
	case st.Size() == 0:
		return j, nil
	}
	r := bufio.NewReader(io.LimitReader(f, historyMax))
	line, err := r.ReadBytes('\n')
	if err != nil && err != io.EOF {
		return j, fmt.Errorf("reading %s: %w", path, err)
	}
	var head historyHead
	if jerr := json.Unmarshal(line, &head); jerr != nil {
		return foreign(fmt.Errorf("line 1: %w", jerr))
	}
	if head.Schema != historySchema {
		return foreign(fmt.Errorf("line 1: its schema is %q, expected %q", head.Schema, historySchema))
	}
	j.Name = head.Job
	var problems []error
	for n := 2; err == nil; n++ {
		if line, err = r.ReadBytes('\n'); len(line) == 0 {
			break
		}
		var run usage.Run
		jerr := json.Unmarshal(line, &run)
		if jerr == nil && (run.Ended.IsZero() || run.CeilingMiB <= 0 || run.Memory < 0) {
			jerr = errors.New("it lacks when the run ended, its ceiling or its memory")
		}
		if jerr != nil {
			problems = append(problems, fmt.Errorf("%s line %d is skipped: %w", path, n, jerr))
			continue
		}
		j.Runs = append(j.Runs, run)
	}
	if err != nil && err != io.EOF {
		problems = append(problems, fmt.Errorf("reading %s: %w", path, err))
	}
	slices.SortStableFunc(j.Runs, func(a, b usage.Run) int { return a.Ended.Compare(b.Ended) })
	return j, errors.Join(problems...)
}

// Project is what is remembered of the project with that directory name,
// exactly. Problems are what could not be read; fs.ErrNotExist is in the error's
// chain when there is nothing of it.
func (h *History) Project(name string) (p usage.Project, problems []error, err error) {
	if !ValidName(name) {
		return p, nil, fmt.Errorf("%q is no project's directory: %w", name, fs.ErrNotExist)
	}
	p.Name = name
	dir := filepath.Join(h.dir, name)
	ents, err := os.ReadDir(dir)
	if err != nil {
		return p, nil, fmt.Errorf("reading a project's history: %w", err)
	}
	for _, e := range ents {
		if strings.HasPrefix(e.Name(), ".") {
			continue // being written
		}
		j, err := readHistory(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			problems = append(problems, err)
		}
		if len(j.Runs) > 0 {
			p.Jobs = append(p.Jobs, j)
		}
	}
	return p, problems, nil
}

// Projects are the names of projects' directories that part is a part of.
func (h *History) Projects(part string) ([]string, error) {
	ents, err := os.ReadDir(h.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading the history: %w", err)
	}
	var out []string
	for _, e := range ents {
		if e.IsDir() && ValidName(e.Name()) && strings.Contains(e.Name(), part) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}
