package hubconf

import (
	"fmt"
	"time"

	"virtkit/core/conf"
	"virtkit/core/fleet/hub"
)

// Jobs are the keys of placed jobs (fleet-reference, Placed jobs). Sizes are
// texts such as 256K; "0" keeps none.
type Jobs struct {
	LostAfterSecs     int     `toml:"job_lost_after_secs"`
	History           int     `toml:"job_history"`
	KeptFailureOutput string  `toml:"kept_failure_output"`
	KeptOutput        string  `toml:"kept_output"`
	KeptOutputTotal   string  `toml:"kept_output_total"`
	AffinityMaxLoad   float64 `toml:"image_affinity_max_load"`
	AffinityMaxExtra  float64 `toml:"image_affinity_max_extra_load"`
}

func defaultJobs() Jobs {
	return Jobs{LostAfterSecs: 300, History: hub.DefaultHistory, KeptFailureOutput: "256K", KeptOutput: "1M", KeptOutputTotal: "1G", AffinityMaxLoad: 0.7, AffinityMaxExtra: 0.25}
}

// bound is the most that a size may be, in bytes.
var bounds = []struct {
	key  string
	of   func(*Jobs) string
	most int64
}{
	{"kept_failure_output", func(j *Jobs) string { return j.KeptFailureOutput }, 4 << 20},
	{"kept_output", func(j *Jobs) string { return j.KeptOutput }, 4 << 20},
	{"kept_output_total", func(j *Jobs) string { return j.KeptOutputTotal }, 64 << 30},
}

func size(s string, most int64) (int64, error) {
	if s == "0" {
		return 0, nil
	}
	n, err := conf.ParseSize(s)
	if err == nil && n > most {
		err = fmt.Errorf("%s is more than %s", s, conf.FormatSize(most))
	}
	return n, err
}

func (j *Jobs) validate(bad func(key, format string, a ...any)) {
	if j.LostAfterSecs < 1 || j.LostAfterSecs > 86400 {
		bad("job_lost_after_secs", "%d is not between 1 and 86400", j.LostAfterSecs)
	}
	if j.History < 1 || j.History > hub.MaxHistory {
		bad("job_history", "%d is not between 1 and %d", j.History, hub.MaxHistory)
	}
	for _, b := range bounds {
		if _, err := size(b.of(j), b.most); err != nil {
			bad(b.key, "%v", err)
		}
	}
	if v := j.AffinityMaxLoad; !(v >= 0 && v <= 2) {
		bad("image_affinity_max_load", "%v is not between 0 and 2", v)
	}
	if v := j.AffinityMaxExtra; !(v >= 0 && v <= 1) {
		bad("image_affinity_max_extra_load", "%v is not between 0 and 1", v)
	}
}

// Options are the hub's, of keys that Validate took.
func (j *Jobs) Options() hub.JobOptions {
	o := hub.JobOptions{LostAfter: time.Duration(j.LostAfterSecs) * time.Second, History: j.History, AffinityMaxLoad: none(j.AffinityMaxLoad), AffinityMaxExtra: none(j.AffinityMaxExtra)}
	for i, p := range []*int64{&o.KeptFailure, &o.Kept, &o.KeptTotal} {
		n, _ := size(bounds[i].of(j), bounds[i].most)
		*p = none(n)
	}
	return o
}

// none turns 0 into -1: the hub's options have 0 for the default.
func none[T int64 | float64](n T) T {
	if n == 0 {
		return -1
	}
	return n
}
