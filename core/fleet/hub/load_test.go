package hub

import "testing"

// TestLoad is the largest of the three measures of gitlab-dispatch, Placement.
func TestLoad(t *testing.T) {
	for name, tt := range map[string]struct {
		s    spot
		room int
		want float64
	}{
		"idle":            {spot{cpus: 4}, 3, 0},
		"its work":        {spot{cpus: 4, placed: 1}, 3, 0.25},
		"no room":         {spot{cpus: 4, placed: 2}, 0, 1},
		"its vCPUs":       {spot{cpus: 4, placed: 1, vcpus: 3}, 3, 0.75},
		"its own work":    {spot{cpus: 4, placed: 1, vcpus: 2, load1: 3.2, hasLoad: true}, 3, 0.8},
		"an older node":   {spot{cpus: 4, load1: 3.2}, 3, 0},
		"no CPUs told":    {spot{vcpus: 2}, 3, 2},
		"load below work": {spot{cpus: 4, placed: 3, load1: 0.4, hasLoad: true}, 1, 0.75},
	} {
		if got := tt.s.load(tt.room); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
