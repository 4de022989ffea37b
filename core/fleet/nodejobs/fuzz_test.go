package nodejobs_test

import (
	"bytes"
	"os"
	"testing"

	"virtkit/core/fleet/wire"
)

// FuzzSession has a hub say anything of placed jobs, a message a line: what is
// answered can be sent, and the next node takes up what this one wrote.
func FuzzSession(f *testing.F) {
	res, id := wire.NewID(), wire.NewID()
	spec, err := os.ReadFile("../job/testdata/job.json")
	if err != nil {
		f.Fatal(err)
	}
	for _, m := range []wire.Message{
		&wire.Offer{Reservation: res, Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 1}, LeaseSecs: 60},
		&wire.Start{Job: id, Reservation: res, Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 1}, Spec: spec},
		&wire.Renew{Reservation: res, LeaseSecs: 60}, &wire.GiveBack{Reservation: res}, &wire.Cancel{Job: id, Mode: "now"},
		&wire.OutputAck{Job: id, Offset: 7}, &wire.JobRecorded{Job: id},
	} {
		b, err := wire.Encode(wire.VersionEgress, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(b, '\n'))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := newRig(t)
		for line := range bytes.SplitSeq(data, []byte("\n")) {
			m, err := wire.Decode(wire.FromHub, wire.VersionEgress, line)
			if err != nil {
				break // the session ends
			}
			if a := r.s.Handle(t.Context(), m); a != nil {
				if _, err := wire.Encode(wire.VersionEgress, a); err != nil {
					t.Errorf("%s is answered by %+v, which cannot be sent: %v", line, a, err)
				}
			}
		}
		for range 10 {
			m := r.s.Next()
			if m == nil {
				break
			}
			if _, err := wire.Encode(wire.VersionEgress, m); err != nil {
				t.Errorf("%+v cannot be sent: %v", m, err)
			}
		}
		held := r.connect()
		r.stop()
		r.begin()
		if now := r.connect(); len(now.Jobs) != len(held.Jobs) {
			t.Errorf("it held %v, and the next node holds %v", held.Jobs, now.Jobs)
		}
		r.stop()
	})
}
