// Package failpoint has named places in the life of a placed job at which a test
// can end a process: at exactly that instruction, where a kill at random seldom
// comes.
//
// A point does nothing unless this process was given a hook by Set, which only
// test files call (this package's test looks through the others): no setting,
// file or variable of a built vk reaches it. What a point costs then is one
// comparison.
//
// The points of a placed job, in the order in which it meets them, are Placing.
package failpoint

// Places in the hub (hub.), the node's loop (node.) and the job's driver
// (driver.).
const (
	OfferSending   = "hub.offer.sending"     // the reservation is in the hub's memory
	OfferClaimed   = "node.offer.claimed"    // the ledger has the room, nobody was told
	OfferAccepted  = "hub.offer.accepted"    // the node has said so, vk-gitlab was not told
	Submitting     = "hub.job.submitting"    // nothing is stored
	Recorded       = "hub.job.recorded"      // stored, no answer
	StartSending   = "hub.start.sending"     // the job is stored as starting
	StartReceived  = "node.start.received"   // nothing is journaled
	HalfJournaled  = "node.start.half"       // written, without its name
	Journaled      = "node.start.journaled"  // durable, no driver
	DriverStarted  = "node.driver.started"   // not told accepted
	AcceptedStored = "hub.accepted.stored"   // the job runs, for the hub
	DriverBegun    = "driver.begun"          // nothing was booted
	Prepared       = "driver.prepared"       // the guest answers
	StageBegun     = "driver.stage"          // of one of the job's own steps
	OutputStored   = "hub.output.stored"     // synced, not acked
	BeforeResult   = "driver.result.before"  // all is printed
	ResultWritten  = "driver.result.written" // the journal still has its secrets
	ResultSending  = "node.result.sending"   // nobody was told
	ResultStored   = "hub.result.stored"     // the node was not told
	RecordedTold   = "node.recorded"         // its journal is to be removed
	Settled        = "hub.job.settled"       // no answer
)

// Placing are all points, in order.
var Placing = []string{OfferSending, OfferClaimed, OfferAccepted, Submitting, Recorded, StartSending, StartReceived, HalfJournaled, Journaled, DriverStarted, AcceptedStored,
	DriverBegun, Prepared, StageBegun, OutputStored, BeforeResult, ResultWritten, ResultSending, ResultStored, RecordedTold, Settled}

var hook func(point string)

// Set has every point call h from now on. It is for tests, at the beginning of
// a process.
func Set(h func(point string)) { hook = h }

// At is a point.
func At(point string) {
	if hook != nil {
		hook(point)
	}
}
