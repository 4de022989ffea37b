package cijob

import (
	"fmt"
	"io"
	"time"

	"virtkit/core/fleet/job"
	"virtkit/core/trace"
)

// output is the job's trace.
type output struct {
	t        *trace.Trace
	main     *trace.Stream // the node's own lines
	sections bool
	clock    func() time.Time
}

func newOutput(w io.Writer, j *job.CiJob, v variables, clock func() time.Time) *output {
	t := trace.New(w, trace.Options{
		Secrets: v.masked(j), Prefixes: j.Trace.TokenMaskPrefixes, Limit: j.Trace.LimitBytes,
		FewTokens:  !flagOn(j.Variables, flagMaskTokens),
		Timestamps: flagOn(j.Variables, flagTimestamps), Clock: clock,
	})
	return &output{t: t, main: t.Stream(trace.Executor, trace.Stdout), sections: j.Trace.Sections, clock: clock}
}

// plain writes a line of the node's that begins by clearing what is there.
func (o *output) plain(format string, a ...any) {
	fmt.Fprint(o.main, "\x1b[0K"+fmt.Sprintf(format, a...)+reset+"\n")
}

func (o *output) info(text string)    { fmt.Fprint(o.main, green+text+reset+"\n") }
func (o *output) warning(text string) { fmt.Fprint(o.main, yellow+"WARNING: "+text+reset+"\n") }
func (o *output) error(text string)   { fmt.Fprint(o.main, red+"ERROR: "+text+reset+"\n") }

// begin and end are around a stage. The mark of a section is a write of its
// own: what follows it is another line of the trace.
func (o *output) begin(stage, heading string) {
	o.mark("start", stage)
	o.plain("%s%s%s", cyan, heading, reset)
}

func (o *output) end(stage string) { o.mark("end", stage) }

func (o *output) mark(what, stage string) {
	if o.sections {
		fmt.Fprintf(o.main, "section_%s:%d:%s\r\x1b[0K", what, o.clock().Unix(), stage)
	}
}

// streams are the two outputs of a call; close lets out what they hold back.
func (o *output) streams(id uint8) (out, err *trace.Stream, done func()) {
	out, err = o.t.Stream(id, trace.Stdout), o.t.Stream(id, trace.Stderr)
	return out, err, func() { out.Close(); err.Close() }
}

// last ends the trace with a line that is not the continuation of another.
func (o *output) last(line string) {
	o.main.Close()
	s := o.t.Stream(trace.Executor, trace.Stdout)
	fmt.Fprint(s, line+"\n")
	s.Close()
}

// close ends the output; its error is the first of all that was written.
func (o *output) close() error {
	o.main.Close()
	return o.t.Close()
}
