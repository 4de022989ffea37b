// Package customdriver replays recorded jobs of a real gitlab-runner against a
// custom executor's driver: the environment, the job response and the stage
// scripts are the recorded ones, byte for byte; what the driver answers is
// compared with what the runner stored.
package customdriver

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
)

// Recording is one folder of vectors/.
type Recording struct {
	Name     string
	Jobs     []Job
	Response []byte
	Worktree []string // lines of worktree.txt: PATH TYPE MODE SIZE
}

// Job is one job of a recording: its calls from config to cleanup. A job
// whose preparation was tried three times is one Job with three Attempts.
type Job struct {
	Vars     map[string]string // as prepare was given, but for job_env's
	JobEnv   map[string]string
	Stages   []runnerside.Stage
	Attempts int
	Want     map[string]Output // by stage
	Masked   []string          // values that the trace shows as [MASKED]
}

// Output is what a stage's trace lines hold, by stream.
type Output struct{ Stdout, Stderr []string }

// Find looks for the recordings: in the checkout beside this one, whole, or
// else the copies in testdata, which lack the stage scripts. scripts tells
// which.
func Find(root string) (dir string, scripts bool, err error) {
	for _, d := range []string{os.Getenv("VIRTKIT_VECTORS"), filepath.Join(root, "../shared/vectors"), filepath.Join(root, "testdata/vectors")} {
		if d == "" {
			continue
		}
		if m, _ := filepath.Glob(filepath.Join(d, "custom-*", "custom")); len(m) > 0 {
			s, _ := filepath.Glob(filepath.Join(d, "custom-*", "stages", "*.sh"))
			return d, len(s) > 0, nil
		}
	}
	return "", false, fmt.Errorf("no recordings: neither ../shared/vectors nor testdata/vectors has custom-*/custom")
}

// List names the recordings of a custom executor below dir.
func List(dir string) ([]string, error) {
	m, err := filepath.Glob(filepath.Join(dir, "custom-*"))
	for i := range m {
		m[i] = filepath.Base(m[i])
	}
	return m, err
}

var callFile = regexp.MustCompile(`^(\d+)-(config|prepare|cleanup|run-(.+))\.env$`)

// Load reads one recording.
func Load(dir, name string) (*Recording, error) {
	base := filepath.Join(dir, name)
	r := &Recording{Name: name}
	var err error
	if r.Response, err = os.ReadFile(filepath.Join(base, "custom", "JOB_RESPONSE_FILE.json")); err != nil {
		return nil, err
	}
	if b, err := os.ReadFile(filepath.Join(base, "worktree.txt")); err == nil {
		r.Worktree = strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	}
	scripts, err := filepath.Glob(filepath.Join(base, "stages", "*.sh"))
	if err != nil {
		return nil, err
	}
	slices.Sort(scripts)
	entries, err := os.ReadDir(filepath.Join(base, "custom"))
	if err != nil {
		return nil, err
	}
	var config map[string]string
	cleaned := true
	for _, e := range entries {
		m := callFile.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		env, err := readEnv(filepath.Join(base, "custom", e.Name()))
		if err != nil {
			return nil, err
		}
		switch {
		case m[2] == "config":
			if n := len(r.Jobs); cleaned && (n == 0 || r.Jobs[n-1].Vars["CI_JOB_ID"] != env[execdrv.EnvPrefix+"CI_JOB_ID"]) {
				r.Jobs = append(r.Jobs, Job{Want: map[string]Output{}})
			}
			r.Jobs[len(r.Jobs)-1].Attempts++
			config, cleaned = env, false
		case m[2] == "prepare":
			j := &r.Jobs[len(r.Jobs)-1]
			j.Vars, j.JobEnv = map[string]string{}, map[string]string{}
			for k, v := range env {
				if name, ok := strings.CutPrefix(k, execdrv.EnvPrefix); ok {
					j.Vars[name] = v
				} else if _, had := config[k]; !had {
					j.JobEnv[k] = v
				}
			}
		case m[2] == "cleanup":
			cleaned = true
		default:
			j := &r.Jobs[len(r.Jobs)-1]
			st := runnerside.Stage{Name: m[3]}
			if len(scripts) > 0 {
				if !strings.HasSuffix(scripts[0], "-"+m[3]+".sh") {
					return nil, fmt.Errorf("%s: call %s has script %s", name, e.Name(), scripts[0])
				}
				if st.Script, err = os.ReadFile(scripts[0]); err != nil {
					return nil, err
				}
				scripts = scripts[1:]
			}
			j.Stages = append(j.Stages, st)
		}
	}
	return r, r.readTraces(base)
}

func (r *Recording) readTraces(base string) error {
	for i := range r.Jobs {
		path := filepath.Join(base, "trace.norm.txt")
		if len(r.Jobs) > 1 {
			path = filepath.Join(base, "trace-"+strconv.Itoa(i+1)+".norm.txt")
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		r.Jobs[i].Want = ParseTrace(b)
		for _, k := range []string{"CI_JOB_TOKEN", "CI_REGISTRY_PASSWORD", "SECRET"} {
			if v := r.Jobs[i].Vars[k]; v != "" {
				r.Jobs[i].Masked = append(r.Jobs[i].Masked, v)
			}
		}
	}
	return nil
}

var assignment = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*=`)

// readEnv reads the output of `env`: a line that is no assignment continues
// the value before it.
func readEnv(path string) (map[string]string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	env := map[string]string{}
	last := ""
	for line := range strings.SplitSeq(strings.TrimSuffix(string(b), "\n"), "\n") {
		if assignment.MatchString(line) {
			k, v, _ := strings.Cut(line, "=")
			env[k], last = v, k
		} else if last != "" {
			env[last] += "\n" + line
		}
	}
	return env, nil
}

var traceLine = regexp.MustCompile(`^\S+ (\d\d)([OE])([ +])(.*)$`)

// ParseTrace splits a stored trace with timestamps into the lines of each
// stage's own output (stream 01).
func ParseTrace(b []byte) map[string]Output {
	out := map[string]Output{}
	stage := ""
	for line := range bytes.SplitSeq(b, []byte("\n")) {
		m := traceLine.FindSubmatch(line)
		if m == nil {
			continue
		}
		text := string(m[4])
		if string(m[1]) == "00" {
			if name, ok := strings.CutPrefix(text, "section_start:0:"); ok {
				stage = strings.TrimSuffix(name, "\r\x1b[0K")
				if stage == execdrv.StageScriptNewNames {
					stage = execdrv.StageBuild
				}
			}
			continue
		}
		o := out[stage]
		lines := &o.Stdout
		if string(m[2]) == "E" {
			lines = &o.Stderr
		}
		if string(m[3]) == "+" && len(*lines) > 0 {
			(*lines)[len(*lines)-1] += text
		} else {
			*lines = append(*lines, text)
		}
		out[stage] = o
	}
	return out
}

var (
	sectionTime = regexp.MustCompile(`section_(start|end):\d+:`)
	hideTime    = regexp.MustCompile(`hide_duration=[a-z]+`)
)

// Normalise makes a stage's output comparable with a recorded trace: masked
// values, times of sections.
func (j *Job) Normalise(out []byte) []string {
	s := string(out)
	masked := slices.Clone(j.Masked)
	slices.SortFunc(masked, func(a, b string) int { return len(b) - len(a) })
	for _, m := range masked {
		s = strings.ReplaceAll(s, m, "[MASKED]")
	}
	s = sectionTime.ReplaceAllString(s, "section_$1:0:")
	s = hideTime.ReplaceAllString(s, "hide_duration=X")
	if s == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(s, "\n"), "\n")
}
