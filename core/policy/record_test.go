package policy_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/policy"
)

func ask(name string) policy.Flow {
	return policy.Flow{Port: "build", Proto: policy.DNS, Name: name}
}

var (
	allowed = policy.Judgement{Verdict: policy.Verdict{Allow: true}}
	refused = policy.Judgement{Verdict: policy.Verdict{Layer: policy.LayerJob, Reason: "outside the job's list"}}
)

// TestLogIsBounded: past 8 MiB of denials, and as much of contacts, new ones
// are only counted, while those kept go on counting.
func TestLogIsBounded(t *testing.T) {
	r := policy.NewRecorder(policy.Run)
	r.Judged("", ask("first.example"), refused, false, t0)
	pad := strings.Repeat("x", 60)
	name := func(i int) string { return fmt.Sprintf("%s.%s.%s.n%d.example", pad, pad, pad, i) }
	for i := range 20000 {
		r.Judged("", ask(name(i)), refused, false, t0)
	}
	r.Judged("", ask("contact.example"), allowed, false, t0)
	r.Judged("", ask("first.example"), refused, false, t0.Add(time.Hour))
	s := r.Snapshot()
	kept := len(s.Entries) - 2
	if kept < 5000 || kept > 19000 || s.Uncounted != (policy.Counts{Blocked: uint64(20000 - kept)}) {
		t.Errorf("%d denials kept, %+v only counted", kept, s.Uncounted)
	}
	if e := s.Entries[0]; e.Count != 2 || !e.Last.Equal(t0.Add(time.Hour)) || !e.First.Equal(t0) {
		t.Errorf("an entry kept stopped counting: %+v", e)
	}
	if e := s.Entries[len(s.Entries)-1]; e.Outcome != policy.Observed {
		t.Errorf("a full log of denials takes no contact: %+v", e)
	}
	got := lines(policy.DenialLines(s, nil))
	if want := fmt.Sprintf("virtkit: egress: %d more blocked or that would be, only counted: the log is full\n", 20000-kept); !strings.HasSuffix(got, want) {
		t.Errorf("the trace does not end with %q", want)
	}
	if n := strings.Count(got, "\n"); n != 53 {
		t.Errorf("a trace of %d lines", n)
	}
}

func TestSince(t *testing.T) {
	r := policy.NewRecorder(policy.Run)
	r.SetStage("prepare")
	r.Judged("", ask("a.example"), refused, false, t0)
	r.Judged("", ask("b.example"), refused, false, t0)
	first := r.Snapshot()
	r.SetStage("step_script")
	r.Judged("", ask("b.example"), refused, false, t0)
	r.Judged("db", ask("b.example"), refused, false, t0)
	type row struct {
		service, dest, stage string
		count                uint64
	}
	var got []row
	// As from another process: through JSON.
	b, err := json.Marshal(first)
	if err != nil {
		t.Fatal(err)
	}
	var read policy.Record
	if err := json.Unmarshal(b, &read); err != nil {
		t.Fatal(err)
	}
	for _, e := range r.Snapshot().Since(read).Entries {
		got = append(got, row{e.Service, e.Dest, e.Stage, e.Count})
	}
	want := []row{{"", "b.example", "prepare", 1}, {"db", "b.example", "step_script", 1}}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(row{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if s := r.Snapshot().Since(policy.Record{}); len(s.Entries) != 3 {
		t.Errorf("since the beginning: %d entries", len(s.Entries))
	}
}

func TestReportBounds(t *testing.T) {
	build := func(r *policy.Recorder) policy.Report {
		return policy.BuildReport(policy.ReportInput{Run: &policy.PhaseInput{Record: r.Snapshot()}})
	}
	dests := func(r policy.Report) (out []string) {
		for _, l := range [][]policy.ReportEntry{r.Blocked, r.WouldBlock, r.Observed} {
			for _, e := range l {
				out = append(out, e.Destination.Domain)
			}
		}
		return out
	}
	pad := strings.Repeat("x", 60)
	for _, c := range []struct {
		what, name string
		full       bool // the 256 KiB come first
	}{{"short names", "n%d.example", false}, {"long names", pad + "." + pad + "." + pad + ".n%d.example", true}} {
		t.Run(c.what, func(t *testing.T) {
			r := policy.NewRecorder(policy.Run)
			at := t0
			step := time.Second
			more := func(from, to int, j policy.Judgement) {
				for i := from; i < to; i++ {
					at = at.Add(step)
					r.Judged("", ask(fmt.Sprintf(c.name, i)), j, false, at)
				}
			}
			more(0, 300, refused)
			more(300, 600, allowed)
			early := build(r)
			// Counts and times take more room as they grow.
			step = time.Millisecond
			for range 100 {
				more(0, 300, refused)
				more(300, 600, allowed)
			}
			more(600, 1200, refused)
			more(1200, 1500, allowed)
			late := build(r)
			b, err := json.Marshal(late)
			if err != nil || len(b) > 256<<10 {
				t.Errorf("a report of %d bytes, %v", len(b), err)
			}
			if n := len(late.Blocked); n > 512 || !c.full && n != 512 {
				t.Errorf("%d denials", n)
			}
			if n := len(late.Observed); n > 512 || !c.full && n != 512 {
				t.Errorf("%d contacts", n)
			}
			had := map[string]bool{}
			for _, d := range dests(late) {
				had[d] = true
			}
			for _, d := range dests(early) {
				if !had[d] {
					t.Fatalf("%s was in a report and is not in a later one", d)
				}
			}
			o := late.Run.OmittedEntries
			if int(o.Blocked) != 900-len(late.Blocked) || int(o.Observed) != 600-len(late.Observed) || late.Run.Coverage != policy.Partial {
				t.Errorf("%d and %d of 900 and 600 listed, %+v", len(late.Blocked), len(late.Observed), late.Run)
			}
			if late.Run.OmittedEvents.Blocked < o.Blocked {
				t.Errorf("%+v events in the entries omitted", late.Run.OmittedEvents)
			}
		})
	}
}

func TestReportOfNothing(t *testing.T) {
	r := policy.BuildReport(policy.ReportInput{Revision: 1, Run: &policy.PhaseInput{}, Build: &policy.PhaseInput{Coverage: policy.Unavailable}})
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"revision":1,"rules":[],"blocked":[],"would_block":[],"observed":[],"run":{"coverage":"complete"},"build":{"coverage":"unavailable"}}`; string(b) != want {
		t.Errorf("%s, want %s", b, want)
	}
	next := policy.BuildReport(policy.ReportInput{Revision: 2, Run: &policy.PhaseInput{}, Build: &policy.PhaseInput{Coverage: policy.Unavailable}})
	if !r.Same(next) || r.Same(policy.BuildReport(policy.ReportInput{Revision: 1})) {
		t.Error("Same tells reports apart by their revision, or not by anything")
	}
	full := policy.ReportInput{}
	for i := range 600 {
		full.Refusals = append(full.Refusals, policy.Refusal{Variable: "MICROVM_EGRESS_ALLOW_NAME", Entry: fmt.Sprint(i)})
	}
	if r := policy.BuildReport(full); len(r.Refusals) != 512 || r.RefusalsOmitted != 88 {
		t.Errorf("%d refusals, %d omitted", len(r.Refusals), r.RefusalsOmitted)
	}
}

// TestHostileStrings: what a guest or a job's author wrote cannot steer a
// terminal, and stays short.
func TestHostileStrings(t *testing.T) {
	e := policy.NewEngine(policy.EngineConfig{Policy: &policy.Policy{Phase: policy.Run}, JobPort: "build", Now: func() time.Time { return t0 }})
	for _, n := range []string{"", ".", "a\n\x1b[2Jb.example", "\u202eevil", strings.Repeat("ab.", 3000), "bücher.example", "\xff\xfe", "[x](http://y)"} {
		e.Decide(ask(n))
		e.Asked(policy.Flow{Port: "build\nx", Proto: policy.TCP, Dst: netip.MustParseAddrPort("192.0.2.1:1")}, n)
	}
	s := e.Recorder().Snapshot()
	all := lines(policy.AuditLines(s, "a\nb")) + lines(policy.DenialLines(s, []string{"a\nb"})) + policy.Suggest(s, []string{"x\ny"}, nil).TOML()
	for _, l := range strings.Split(all, "\n") {
		if len(l) > 1200 || strings.ContainsFunc(l, func(r rune) bool { return r < ' ' || r > '~' && r != '…' }) {
			t.Errorf("a line of %d bytes: %.200q", len(l), l)
		}
	}
	for _, e := range s.Entries {
		if len(e.Dest) > 253 || e.Kind == policy.KindDomain {
			t.Errorf("%+v", e)
		}
	}
	if got := policy.CleanText(strings.Repeat("é", 200), 64); len(got) > 64 || !strings.HasSuffix(got, "…") {
		t.Errorf("CleanText leaves %d bytes", len(got))
	}
}

func TestStanding(t *testing.T) {
	s, err := policy.DecodeStanding(nil)
	if err != nil {
		t.Fatal(err)
	}
	s.Add("", []string{"github.com"}, t0)
	if !s.Add("", []string{"deb.debian.org", "GitHub.com"}, t0) || s.Add("", []string{"github.com"}, t0) {
		t.Error("Add does not tell what is new")
	}
	// The lines that the specification quotes.
	if got, want := s.Line(""), "virtkit: names this job has contacted under unrestricted egress: deb.debian.org, github.com"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := s.Line("a379a6f61c4b8e02"), "virtkit: names this job has contacted under egress policy a379a6f61c4b8e02: none"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	s.Add("a379a6f61c4b8e02", []string{"deb.debian.org", "a b.example"}, t0.Add(time.Hour))
	b, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if s, err = policy.DecodeStanding(b); err != nil {
		t.Fatal(err)
	}
	if got, want := s.Line("a379a6f61c4b8e02"), "virtkit: names this job has contacted under egress policy a379a6f61c4b8e02: a?b.example, deb.debian.org"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	var many []string
	for i := range 212 {
		many = append(many, fmt.Sprintf("n%03d.example", i))
	}
	s.Add("b", many, t0)
	if got := s.Line("b"); !strings.HasSuffix(got, ", n199.example, and 12 more not shown") {
		t.Errorf("…%s", got[len(got)-80:])
	}
	for i := range 3000 {
		many = append(many, fmt.Sprintf("m%05d.example", i))
	}
	s.Add("b", many, t0)
	if got := s.Line("b"); !strings.HasSuffix(got, ", and at least 1800 more not shown") || len(s.Names("b")) != 2000 {
		t.Errorf("%d names, …%s", len(s.Names("b")), got[len(got)-80:])
	}
	for i := range 10 {
		s.Add(fmt.Sprint("p", i), nil, t0.Add(time.Duration(i+2)*time.Hour))
	}
	if len(s.Policies) != 8 || s.Policies[0].Policy != "p9" || s.Names("") != nil {
		t.Errorf("%d policies, the latest %q", len(s.Policies), s.Policies[0].Policy)
	}
	for _, bad := range []string{"{", `{"version":2}`, `{"version":"x"}`} {
		if _, err := policy.DecodeStanding([]byte(bad)); err == nil {
			t.Errorf("%s is read", bad)
		}
	}
}

// TestSuggestionWorks: what is suggested from a run without a policy, read
// back from both forms, allows all that the run did, and its trace is empty.
func TestSuggestionWorks(t *testing.T) {
	run := func(p *policy.Policy) *policy.Engine {
		e := policy.NewEngine(policy.EngineConfig{Policy: p, JobPort: "build", Now: func() time.Time { return t0 }})
		for i := range 40 {
			port := []string{"build", "db"}[i%2]
			name := fmt.Sprintf("N%d.example", i%7)
			if e.Decide(policy.Flow{Port: port, Proto: policy.DNS, Name: name}).Allow {
				e.Opened(port, []string{name}, []netip.Addr{addr(i % 7)}, 0)
			}
			e.Decide(policy.Flow{Port: port, Proto: policy.TCP, Dst: netip.AddrPortFrom(addr(i%7), 443)})
			e.Decide(policy.Flow{Port: port, Proto: policy.UDP, Dst: netip.AddrPortFrom(addr(100+i%3), 53)})
			e.Decide(policy.Flow{Port: port, Proto: policy.ICMP, Dst: netip.AddrPortFrom(addr(200), 0)})
		}
		return e
	}
	free := &policy.Policy{Phase: policy.Run}
	s := policy.Suggest(run(free).Recorder().Snapshot(), nil, free)
	if len(s.Names) != 7 || len(s.IPs) != 4 || len(s.Left)+len(s.Refused) != 0 {
		t.Fatalf("%+v", s)
	}
	vars := map[string]string{}
	key := ""
	for _, l := range strings.Split(s.YAML(), "\n")[1:] {
		if k, ok := strings.CutSuffix(l, ": |"); ok {
			key = strings.TrimSpace(k)
		} else {
			vars[key] += l + "\n"
		}
	}
	held, bad := policy.ParseVariables(policy.Run, "", func(k string) (string, bool) { v, ok := vars[k]; return v, ok })
	if bad != nil {
		t.Fatal(policy.Refuse(bad))
	}
	e := run(&policy.Policy{Phase: policy.Run, Job: held})
	if l := policy.DenialLines(e.Recorder().Snapshot(), nil); l != nil {
		t.Errorf("under the suggested lists:\n%s", lines(l))
	}
	again := policy.Suggest(e.Recorder().Snapshot(), nil, &policy.Policy{Phase: policy.Run, Job: held})
	if again.TOML() != s.TOML() {
		t.Errorf("the suggestion changes when it is followed:\n%s", cmp.Diff(s.TOML(), again.TOML()))
	}
}

func TestWhatIsNotSuggested(t *testing.T) {
	r := policy.NewRecorder(policy.Build)
	for _, n := range []string{"dev", "7.2.0.192.in-addr.arpa", "a b.example", "ok.example"} {
		r.Judged("", ask(n), allowed, false, t0)
	}
	r.Judged("", ask("ok.example"), policy.Judgement{Verdict: policy.Verdict{Allow: true}, Would: []policy.Would{{Layer: policy.LayerHub, Rule: "r"}}}, false, t0)
	s := policy.Suggest(r.Snapshot(), []string{"localhost"}, nil)
	want := `[egress.build]
allow_name = [
  "ok.example", # dns, 2 times
]
allow_ip = []
# left out, as no entry should allow it:
#   7.2.0.192.in-addr.arpa  dns, once
#   a?b.example  dns, once
#   dev  dns, once
#   localhost  in an earlier run
`
	if d := cmp.Diff(want, s.TOML()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if got := policy.Suggest(policy.Record{Phase: policy.Run}, nil, nil).YAML(); got != "# nothing was contacted: there is nothing to allow\n" {
		t.Errorf("%q", got)
	}
	// What was blocked is told of where it is all there was.
	r = policy.NewRecorder(policy.Run)
	r.Judged("", ask("evil.example"), policy.Judgement{Verdict: policy.Verdict{Layer: policy.LayerJob, Reason: "not listed"}}, false, t0)
	want = "# there is nothing to propose\n# blocked, and not proposed:\n#   evil.example  dns, once; refused now: not listed\n"
	if got := policy.Suggest(r.Snapshot(), nil, nil).YAML(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestEngineFromManyGoroutines(t *testing.T) {
	w := newWorld(t, false, true)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			port := []string{"build", "db"}[g%2]
			for i := range 200 {
				name := fmt.Sprintf("n%d.debian.org", i%50)
				at := policy.Flow{Port: port, Proto: policy.TCP, Dst: netip.AddrPortFrom(addr(i%50), 443)}
				if w.engine.Decide(policy.Flow{Port: port, Proto: policy.DNS, Name: name}).Allow {
					w.engine.Opened(port, []string{name}, []netip.Addr{addr(i % 50)}, 0)
				}
				if w.engine.Decide(at).Allow {
					w.engine.Asked(at, name)
				}
				if i%50 == 0 {
					w.engine.Recorder().Snapshot()
				}
			}
		})
	}
	wg.Wait()
	var jobs, service uint64
	for _, e := range w.engine.Recorder().Snapshot().Entries {
		switch {
		case e.Service == "db" && e.Outcome == policy.Blocked:
			service += e.Count
		case e.Service == "" && e.Proto == policy.DNS && e.Outcome == policy.Observed:
			jobs += e.Count
		case e.Service == "" && e.Outcome == policy.Blocked:
			t.Errorf("the job's VM was refused %+v", e)
		}
	}
	if jobs != 800 || service != 1600 {
		t.Errorf("%d lookups of the job's VM, %d refusals of the service's", jobs, service)
	}
}

func TestEngineUnreadable(t *testing.T) {
	w := newWorld(t, false, false)
	var d policy.Decider = w.engine
	_, opens := d.(policy.Opener)
	_, sees := d.(policy.Witness)
	_, holds := d.(policy.Asker)
	if !opens || !sees || !holds {
		t.Errorf("the engine is no Opener (%v), Witness (%v) or Asker (%v)", opens, sees, holds)
	}
	if v := w.engine.Unreadable("db"); v.Allow {
		t.Errorf("%+v", v)
	}
	e := w.engine.Recorder().Snapshot().Entries
	if len(e) != 1 || e[0].Dest != "?" || e[0].Kind != policy.KindText || e[0].Service != "db" || e[0].Outcome != policy.Blocked {
		t.Errorf("%+v", e)
	}
	free := policy.NewEngine(policy.EngineConfig{Policy: &policy.Policy{Phase: policy.Run}, JobPort: "build"})
	if v := free.Unreadable("build"); !v.Allow || len(free.Recorder().Snapshot().Entries) != 0 {
		t.Errorf("unrestricted: %+v", v)
	}
}

func TestContactedNames(t *testing.T) {
	w := newWorld(t, true, false)
	w.traffic(t)
	got := w.engine.Recorder().Snapshot().ContactedNames()
	if want := []string{"??31mx?.debian.org", "deb.debian.org", "evil.example", "ok.example"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
