package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
	"virtkit/core/version"
)

// record is what is written down of an exercise, as fleet-design.txt's
// "Prototype exit criteria" ask: the versions, the configuration, what was
// broken, what hub and operators saw come of it, and the audit log. It is
// evidence.json of the test's artifacts (go test -artifacts keeps them), and
// its lines are logged.
type record struct {
	f     *fleet
	began time.Time

	mu     sync.Mutex
	doc    evidence
	last   map[string]string
	faults int
}

type evidence struct {
	Schema        string            `json:"schema"` // vk.exercise/1
	Exercise      string            `json:"exercise"`
	Began         time.Time         `json:"began"`
	Versions      map[string]string `json:"versions"`
	Configuration string            `json:"configuration"` // hub.toml
	Events        []event           `json:"events"`
	Audit         []hub.AuditLine   `json:"audit"`
}

// maxLogged is how many events are logged; all are in the file.
const maxLogged = 200

// event is a fault, or what a node became in the hub's eyes.
type event struct {
	AtMillis int64  `json:"at_ms"` // since the beginning
	Kind     string `json:"kind"`  // fault or transition
	Node     string `json:"node,omitempty"`
	Text     string `json:"text"`
}

// record begins to write down. What it has at the test's end must name a fault,
// a transition and audit lines, or the exercise proves nothing.
func (f *fleet) record(exercise string) *record {
	f.t.Helper()
	conf, err := os.ReadFile(f.conf)
	if err != nil {
		f.t.Fatal(err)
	}
	r := &record{f: f, began: time.Now(), last: map[string]string{}}
	r.doc = evidence{Schema: "vk.exercise/1", Exercise: exercise, Began: r.began, Configuration: string(conf), Versions: map[string]string{
		"vk": version.String(), "go": runtime.Version(), "protocol": fmt.Sprint(wire.Spoken), "kernel": firstLine("uname", "-sr"),
	}}
	ctx := f.t.Context() // ends before any node is stopped
	var watch sync.WaitGroup
	watch.Go(func() {
		for ctx.Err() == nil {
			r.look(ctx)
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	f.t.Cleanup(func() {
		watch.Wait()
		r.end()
	})
	return r
}

// firstLine is what a program prints, for a version.
func firstLine(argv ...string) string {
	out, err := exec.Command(argv[0], argv[1:]...).Output()
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}

// fault notes what is broken, or mended, from now on.
func (r *record) fault(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults++
	r.add(event{Kind: "fault", Text: fmt.Sprintf(format, args...)})
}

func (r *record) version(what, v string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.doc.Versions[what] = v
}

func (r *record) add(e event) {
	e.AtMillis = time.Since(r.began).Milliseconds()
	r.doc.Events = append(r.doc.Events, e)
}

// look notes what has changed in what the hub shows.
func (r *record) look(ctx context.Context) {
	now := map[string]string{}
	list, err := r.f.admin.Nodes(ctx)
	if err != nil {
		now[""] = "the hub does not answer"
	} else {
		now[""] = "the hub answers"
		for i := range list.Nodes {
			n := &list.Nodes[i]
			now[n.Name] = describe(n)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if r.last[name] != now[name] && ctx.Err() == nil {
			r.last[name] = now[name]
			r.add(event{Kind: "transition", Node: name, Text: now[name]})
		}
	}
}

func describe(n *hubadmin.Node) string {
	s := fmt.Sprintf("%s, sync %s, %d pending, asked generation %d ceiling %d stop %v", n.Reach, n.Sync, n.Pending, n.Desired.Generation, n.Desired.Policy.Ceiling, n.Desired.Policy.Stop)
	if n.Conflict != nil {
		s += ", recovery conflict"
	}
	st := n.Reported
	if st == nil {
		return s + "; nothing reported"
	}
	s += fmt.Sprintf("; reported %s, %s", st.Node, st.Acquisition)
	if a := st.Applied; a != nil {
		s += fmt.Sprintf(", applied generation %d ceiling %d stop %v", a.Generation, a.Policy.Ceiling, a.Policy.Stop)
	}
	if d := st.Drain; d != nil {
		s += fmt.Sprintf(", drain waits for: runner exited %v, admission idle %v, %d jobs", d.RunnerExited, d.AdmissionIdle, d.Jobs)
	}
	return s
}

func (r *record) end() {
	t := r.f.t
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	audit, err := r.f.admin.Audit(ctx, "", hub.AuditKept)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		t.Errorf("the audit log of the exercise: %v", err)
	} else {
		r.doc.Audit = audit.Lines
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", " ")
	if err := e.Encode(r.doc); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(t.ArtifactDir(), "evidence.json"), b.Bytes(), 0o644); err != nil {
		t.Error(err)
	}
	transitions := 0
	for i, v := range r.doc.Events {
		if v.Kind == "transition" && v.Node != "" {
			transitions++
		}
		if i < maxLogged {
			t.Logf("%6d ms %-10s %s: %s", v.AtMillis, v.Kind, v.Node, v.Text)
		}
	}
	t.Logf("%s: %v; %d faults, %d transitions, %d audit lines", r.doc.Exercise, r.doc.Versions, r.faults, transitions, len(r.doc.Audit))
	if !t.Failed() && (r.faults == 0 || transitions == 0 || len(r.doc.Audit) == 0) {
		t.Error("nothing was recorded of a fault, a transition or an audit line")
	}
}
