package supervise

import (
	"time"

	"virtkit/core/fault"
)

// The protocol of sup.sock
//
// Each connection carries one request: the client writes one frame (see
// guestwire.Send), a request; then
//
//	guest      nothing is answered: the connection now is a fresh stream of the
//	           guest's agent, half-closes included. When there is no agent the
//	           connection is closed at once.
//	state      one answer with State.
//	wait       an answer with State at once and at each change, the last one
//	           when the phase asked for (Until) is reached or the guest ended.
//	stop       answers as wait until the end. The connection then closes when
//	           the supervisor's process is gone.
//	kill       as stop, without asking the guest.
//	reboot     answers as wait until the guest runs again.
//	begin      answers as wait until the guest runs. From then on the guest is
//	           the user's: it is not booted anew when it falls silent.
//	publish    one answer with Publish, as it was opened.
//	unpublish  one answer.
//	sample     one answer, once the guest's recording reaches to now.
//	egress     one answer, once egress.json holds all that was recorded so far.
//	           Stage, when given, names the stage that begins.
//	usage      one answer with Usage, once the guest was asked.
//
// The last answer of a request has Done set, and Err when it failed. The
// client may close at any time. A peer whose uid is neither the supervisor's
// nor root's is refused by closing.
const (
	opGuest     = "guest"
	opState     = "state"
	opWait      = "wait"
	opStop      = "stop"
	opKill      = "kill"
	opReboot    = "reboot"
	opBegin     = "begin"
	opPublish   = "publish"
	opUnpublish = "unpublish"
	opSample    = "sample"
	opEgress    = "egress"
	opUsage     = "usage"
	opAdopt     = "adopt" // on the launcher's pipe alone
	opEnv       = "env"   // likewise, first: the command's environment, or Service's, which no file may hold
)

type request struct {
	Op      string        `json:"op"`
	Until   Phase         `json:"until,omitempty"`
	Grace   time.Duration `json:"grace,omitempty"`
	Publish *Publish      `json:"publish,omitempty"`
	Env     []string      `json:"env,omitempty"`
	Service string        `json:"service,omitempty"`
	Stage   string        `json:"stage,omitempty"`
}

type answer struct {
	State   *State   `json:"state,omitempty"`
	Publish *Publish `json:"publish,omitempty"`
	Usage   *Usage   `json:"usage,omitempty"`
	Done    bool     `json:"done,omitempty"`
	Err     string   `json:"err,omitempty"`
	Kind    string   `json:"kind,omitempty"` // fault.Kind of Err
	Hint    string   `json:"hint,omitempty"` // of Err
}

// fault is the error that Err tells of.
func (a answer) fault() error {
	e := fault.New(fault.Kind(a.Kind), a.Err)
	if a.Hint != "" {
		e = e.Hint("%s", a.Hint)
	}
	return e
}
