package atop_test

import (
	"testing"

	"virtkit/core/atop"
)

// hung is a sample of one process of three threads at a time.
func hung(at int64, mod func(*atop.Sample)) *atop.Sample {
	s := &atop.Sample{Epoch: at, Interval: 10, Reset: at == 0, Procs: []atop.Proc{{
		PID: 412, Name: "ruff", Cmdline: "ruff check .", State: 'S', Threads: 3, Sleeping: 3, Hertz: 100, Start: 5, User: 3, IO: true,
	}}}
	if mod != nil {
		mod(s)
	}
	return s
}

var both = []atop.Waits{{PID: 412, Name: "ruff", Channels: []atop.Channel{{Name: "futex_do_wait", Threads: 2}, {Name: "hrtimer_nanosleep", Threads: 1}}}}

func TestStalls(t *testing.T) {
	begin := func(s *atop.Sample) { s.Waits = both }
	for _, tc := range []struct {
		name   string
		mod    map[int64]func(*atop.Sample)
		always func(*atop.Sample)
		since  int64 // of the stall; -1 = none
	}{
		{"still", nil, nil, 10},
		{"a poller caught running", map[int64]func(*atop.Sample){200: func(s *atop.Sample) {
			s.Procs[0].Running = 1
			s.Waits = []atop.Waits{{PID: 412, Channels: both[0].Channels[:1]}}
		}, 210: begin}, nil, 10},
		{"counts change", map[int64]func(*atop.Sample){200: func(s *atop.Sample) {
			s.Waits = []atop.Waits{{PID: 412, Channels: []atop.Channel{{Name: "futex_do_wait", Threads: 1}, {Name: "hrtimer_nanosleep", Threads: 2}}}}
		}}, nil, 10},
		{"another channel", map[int64]func(*atop.Sample){100: func(s *atop.Sample) {
			s.Waits = []atop.Waits{{PID: 412, Channels: []atop.Channel{{Name: "ep_poll", Threads: 3}}}}
		}}, nil, 100},
		{"work", map[int64]func(*atop.Sample){100: func(s *atop.Sample) { s.Procs[0].User = 100 }}, nil, 100},
		{"disk", map[int64]func(*atop.Sample){100: func(s *atop.Sample) { s.Procs[0].WSect = 8 }}, nil, 100},
		{"disk at the end", map[int64]func(*atop.Sample){390: func(s *atop.Sample) { s.Procs[0].WSect = 8 }}, nil, 10},
		{"never worked", nil, func(s *atop.Sample) { s.Procs[0].User = 0 }, -1},
		{"one thread", nil, func(s *atop.Sample) { s.Procs[0].Threads = 1 }, -1},
		{"the recorder", nil, func(s *atop.Sample) { s.Procs[0].PID = 1; s.Waits = nil }, -1},
		{"no channels", nil, func(s *atop.Sample) { s.Waits = nil }, -1},
		{"another process of the number", map[int64]func(*atop.Sample){200: nil}, func(s *atop.Sample) { s.Procs[0].Start = s.Epoch / 200 }, -1},
	} {
		st := atop.NewStalls()
		since, fresh := int64(-1), 0
		for at := int64(0); at <= 400; at += 10 {
			s := hung(at, func(s *atop.Sample) {
				if at == 10 {
					s.Waits = both
				}
				if f := tc.mod[at]; f != nil {
					f(s)
				}
				if tc.always != nil {
					tc.always(s)
				}
			})
			st.Add(s, func(x atop.Stalled) {
				since = x.Since
				if x.New {
					fresh++
				}
				if x.Until-x.Since < atop.StallAfter || x.Title != "ruff check ." {
					t.Errorf("%s: %+v", tc.name, x)
				}
			})
		}
		if since != tc.since || since >= 0 && fresh != 1 {
			t.Errorf("%s: stalled since %d, %d times new; want %d", tc.name, since, fresh, tc.since)
		}
	}
}
