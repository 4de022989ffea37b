package relay

import (
	"time"

	"virtkit/core/gitlab"
)

// OnWrite has f called before and after each write of a state file of daemons
// opened with o.
func OnWrite(o *Options, f func(done bool)) { o.writing = f }

// Translate is translate, with what it refuses as a text.
var Translate = translate

var _ gitlab.Log = (*spool)(nil)

// ReadState is what a state file holds, as the daemon reads it.
func ReadState(path string) ([]Record, error) {
	f, err := readState(path)
	if err != nil {
		return nil, err
	}
	return (&store{path: path, f: f}).records(), nil
}

// Redial and After are waits of a pace.
func (p Pace) Redial(wait time.Duration) time.Duration { return p.redial(wait) }

// After is what the hub asked for.
func (p Pace) After(secs int) time.Duration { return p.after(secs) }
