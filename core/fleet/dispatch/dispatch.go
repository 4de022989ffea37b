// Package dispatch is what vk-gitlab (a relay) and a hub say to each other:
// the client API under /v1/, how its requests are signed, a relay's
// enrollment, and its session at SessionPath.
//
// The client API is HTTP/1.1 with JSON bodies on the hub's node listener, TLS
// 1.3 (plain text to a hub on loopback alone). Every request is signed by the
// relay's key over its own TLS connection (see Request), so that each goes on
// a connection of its own. An error is a Failure whose code is one of Codes.
// Fields are only ever added; a decoder ignores those that it does not know.
//
// The session is a WebSocket. It opens with the handshake of package wire
// (hello, challenge, auth, welcome or refused, all encoded for version 0, but
// welcome for version 1) with the relay's ID as hello's node and Versions as
// its range; then come the messages of this package (Encode, Decode): from the
// relay its Inventory first, a Heartbeat each interval and a RunnerState
// whenever a runner's changes; from the hub a ServerStatus after each
// inventory and whenever it changes, a Ping each interval and, before it ends
// the session, Closing.
//
// Vocabulary: a placement is where a runner's jobs may run (a pool, labels)
// and what each may use (an envelope); fits counts envelopes that nodes have
// room for; a reservation is an envelope that a node has set aside under a
// lease; a job is submitted, settled once its outcome is GitLab's.
//
// Units as in package wire: bytes, seconds, Unix seconds, lowercase hex.
//
// Spec: gitlab-dispatch (client API), fleet-reference (GitLab relays, A relay
// on the client API).
package dispatch

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"

	"virtkit/core/fleet/wire"
)

// Paths of the client API and of relays.
const (
	CapacityPath     = "/v1/capacity"
	ReservationsPath = "/v1/reservations" // then /<id>, /<id>/renew
	JobsPath         = "/v1/jobs"         // then /<id>, /<id>/output, /cancel, /settle
	ClientsPath      = "/v1/clients"
	EnrollPath       = "/v1/gitlab/enroll"
	SessionPath      = "/v1/gitlab/session"
)

// RenewPath is where a reservation is renewed.
func RenewPath(id string) string { return ReservationsPath + "/" + id + "/renew" }

// ReservationPath is a reservation's, to delete it.
func ReservationPath(id string) string { return ReservationsPath + "/" + id }

// JobPath is a job's view. With wait > 0 it is held until the view's revision
// passes after, or that many seconds.
func JobPath(id string, after uint64, wait int) string {
	return JobsPath + "/" + id + query("after", after, wait)
}

// OutputPath is a job's output from an offset. With wait > 0 it is held until
// there are bytes past it, the output is complete, or that many seconds.
func OutputPath(id string, offset int64, wait int) string {
	return JobsPath + "/" + id + "/output" + query("offset", uint64(offset), wait)
}

// CancelPath is where a job is canceled.
func CancelPath(id string) string { return JobsPath + "/" + id + "/cancel" }

// SettlePath is where a job is settled.
func SettlePath(id string) string { return JobsPath + "/" + id + "/settle" }

func query(key string, n uint64, wait int) string {
	q := "?" + key + "=" + strconv.FormatUint(n, 10)
	if wait > 0 {
		q += "&wait=" + strconv.Itoa(wait)
	}
	return q
}

// Headers of an answer with output.
const (
	HeaderOffset   = "vk-output-offset"   // of the body's first byte
	HeaderLength   = "vk-output-length"   // of the output so far
	HeaderComplete = "vk-output-complete" // "true": the job has ended and the body reaches its end
)

// Limits of the client API.
const (
	MaxBody         = 64 << 10  // bytes of a request but a submission
	MaxSubmission   = 576 << 10 // bytes of a submission
	MaxSpec         = 512 << 10 // bytes of its spec
	MaxRead         = 1 << 20   // bytes of output in an answer
	MaxWaitSecs     = 60        // of a long poll
	MaxReserveSecs  = 600       // that a reservation may wait for a node
	MaxPlaceSecs    = 24 * 3600 // that a job may wait for a node
	MaxLabels       = 32
	IdempotentSecs  = 24 * 3600 // that a request_id is remembered
	RequestIDLen    = 16        // bytes of a request_id, as hex
	MaxServerURL    = 256       // characters
	MaxRunners      = 256       // of a relay
	PlaceRetrySecs  = 5         // retry_after_secs of no_capacity and of a full hub
	DefaultLease    = 90        // seconds; renewed each third of it
	DefaultPlace    = 300       // seconds that vk-gitlab gives a job to be placed
	DefaultTraceCap = 4 << 20   // bytes of a job's output unless its spec says otherwise
)

// Placement is where a runner's jobs may run and what one may use.
type Placement struct {
	Pool     string        `json:"pool"`
	Labels   []string      `json:"labels,omitempty"` // a node has all of them
	Envelope wire.Envelope `json:"envelope"`
}

// Check says what is wrong with a placement.
func (p *Placement) Check() error {
	switch {
	case p.Pool == "" || len(p.Pool) > 63:
		return errors.New("placement.pool is missing or longer than 63 characters")
	case len(p.Labels) > MaxLabels:
		return fmt.Errorf("placement has %d labels, at most %d are allowed", len(p.Labels), MaxLabels)
	case p.Envelope.Memory <= 0 || p.Envelope.CPUs <= 0 || p.Envelope.Disk < 0:
		return errors.New("placement.envelope needs mem_bytes and cpus above 0")
	case p.Envelope.Memory > 1<<50 || p.Envelope.CPUs > 1<<16 || p.Envelope.Disk > 1<<60:
		return errors.New("placement.envelope is larger than any node")
	}
	for _, l := range p.Labels {
		if l == "" || len(l) > wire.MaxText {
			return fmt.Errorf("placement has a label that is empty or longer than %d characters", wire.MaxText)
		}
	}
	return nil
}

// CapacityRequest asks how many envelopes would fit now. With WaitSecs it is
// held until the answer's revision passes After.
type CapacityRequest struct {
	Placement Placement `json:"placement"`
	After     uint64    `json:"after,omitempty"`
	WaitSecs  int       `json:"wait_secs,omitempty"`
}

// Check says what is wrong with the request.
func (r *CapacityRequest) Check() error {
	return errors.Join(r.Placement.Check(), seconds("wait_secs", r.WaitSecs, 0, MaxPlaceSecs))
}

// Capacity answers it. The revision moves whenever fits of the placement may
// have changed.
type Capacity struct {
	Revision uint64 `json:"revision"`
	Fits     int    `json:"fits"`
}

// ReservationRequest asks for an envelope to be set aside within WaitSecs.
type ReservationRequest struct {
	RequestID string    `json:"request_id"`
	Placement Placement `json:"placement"`
	LeaseSecs int       `json:"lease_secs"`
	WaitSecs  int       `json:"wait_secs,omitempty"`
}

// Check says what is wrong with the request.
func (r *ReservationRequest) Check() error {
	return errors.Join(requestID(r.RequestID), r.Placement.Check(), seconds("lease_secs", r.LeaseSecs, 1, wire.MaxLeaseSecs), seconds("wait_secs", r.WaitSecs, 0, MaxPlaceSecs))
}

// ReservationGrant answers it, with 201, and a renewal, with 200.
type ReservationGrant struct {
	Reservation string        `json:"reservation"`
	Node        string        `json:"node"`
	Envelope    wire.Envelope `json:"envelope"`
	LeaseSecs   int           `json:"lease_secs"` // as the node granted it
}

// RenewRequest extends a lease from now.
type RenewRequest struct {
	LeaseSecs int `json:"lease_secs"`
}

// Check says what is wrong with the request.
func (r *RenewRequest) Check() error {
	return seconds("lease_secs", r.LeaseSecs, 1, wire.MaxLeaseSecs)
}

// JobSubmission hands a job to the hub. Reservation "" has it placed afresh.
type JobSubmission struct {
	RequestID       string          `json:"request_id"`
	Placement       Placement       `json:"placement"`
	Reservation     string          `json:"reservation,omitempty"`
	PlaceWithinSecs int             `json:"place_within_secs"`
	Spec            json.RawMessage `json:"spec"` // a job spec, package job
}

// Check says what is wrong with the request, but for its spec.
func (r *JobSubmission) Check() error {
	err := errors.Join(requestID(r.RequestID), r.Placement.Check(), seconds("place_within_secs", r.PlaceWithinSecs, 0, MaxPlaceSecs))
	if r.Reservation != "" && !wire.IsHex(r.Reservation, wire.IDLen) {
		err = errors.Join(err, errors.New("reservation is not 32 lowercase hex digits"))
	}
	if len(r.Spec) == 0 {
		err = errors.Join(err, errors.New("spec is missing"))
	}
	return err
}

// State is where a job is.
type State string

// States.
const (
	Queued   State = "queued"   // waits for a node
	Starting State = "starting" // sent to one, which has not answered
	Running  State = "running"  // accepted
	Finished State = "finished" // the result is there
)

// JobView is a job as its producer sees it. The revision moves with every
// change but the output's length.
type JobView struct {
	ID        string          `json:"id"`
	Revision  uint64          `json:"revision"`
	State     State           `json:"state"`
	Node      string          `json:"node,omitempty"`
	Stage     string          `json:"stage,omitempty"`
	OutputLen int64           `json:"output_len"`
	Cancel    wire.CancelMode `json:"cancel,omitempty"` // as it was asked for
	Result    *wire.JobResult `json:"result,omitempty"` // once finished
}

// CancelRequest stops a job. A later immediate overrides a graceful.
type CancelRequest struct {
	Mode wire.CancelMode `json:"mode"`
}

// ClientHello is what another client than a relay says of itself.
type ClientHello struct {
	Program  string `json:"program"`
	Version  string `json:"version"`
	Hostname string `json:"hostname,omitempty"`
}

// Code is why a request is refused. One that is not known reads as Other.
type Code string

// The codes.
const (
	Invalid         Code = "invalid"
	Unauthorized    Code = "unauthorized"
	Forbidden       Code = "forbidden"
	ApprovalPending Code = "approval_pending"
	ProjectRejected Code = "project_rejected"
	NotFound        Code = "not_found"
	Conflict        Code = "conflict"
	ReservationGone Code = "reservation_gone"
	TooLarge        Code = "too_large"
	Internal        Code = "internal"
	NoCapacity      Code = "no_capacity"
	Unavailable     Code = "unavailable"
	Other           Code = "other"
)

// Meaning is what a code's answer is like.
type Meaning struct {
	Status int
	Retry  bool // the same request may succeed later
}

// Codes are all codes that a hub answers with. NotFound comes with 410 too, of
// a create whose job has left the hub's history.
var Codes = map[Code]Meaning{
	Invalid:         {400, false},
	Unauthorized:    {401, false},
	Forbidden:       {403, false},
	ApprovalPending: {403, false},
	ProjectRejected: {403, false},
	NotFound:        {404, false},
	Conflict:        {409, false},
	ReservationGone: {410, false}, // reserve again
	TooLarge:        {413, false},
	Internal:        {500, true},
	NoCapacity:      {503, true},
	Unavailable:     {503, true},
}

// Failure is the body of an error.
type Failure struct {
	Text           string `json:"error"`
	Code           Code   `json:"code"`
	RetryAfterSecs int    `json:"retry_after_secs,omitempty"`
}

// Error is a Failure with its status, as a client meets it.
type Error struct {
	Status int
	Failure
}

// Error is CODE: TEXT.
func (e *Error) Error() string { return string(e.Code) + ": " + e.Text }

// Retry says whether the same request may succeed later. A code that is not
// known is judged by its status.
func (e *Error) Retry() bool {
	if m, ok := Codes[e.Code]; ok {
		return m.Retry
	}
	return e.Status >= 500
}

// ReadError makes an Error of an answer that is none of success. A body that
// is no Failure gives the code Other.
func ReadError(status int, body []byte) *Error {
	e := &Error{Status: status}
	if json.Unmarshal(body, &e.Failure) != nil || e.Code == "" {
		e.Failure = Failure{Text: fmt.Sprintf("the hub answered HTTP %d", status), Code: Other}
	}
	e.Text = wire.Clean(e.Text, wire.MaxReason)
	if _, ok := Codes[e.Code]; !ok {
		e.Code = Other
	}
	return e
}

func requestID(s string) error {
	if !wire.IsHex(s, RequestIDLen) {
		return fmt.Errorf("request_id is not %d lowercase hex digits", 2*RequestIDLen)
	}
	return nil
}

func seconds(field string, n, lo, hi int) error {
	if n < lo || n > hi {
		return fmt.Errorf("%s %d is not between %d and %d", field, n, lo, hi)
	}
	return nil
}

// ServerURL checks and normalizes the URL of a GitLab server, so that two that
// mean the same server are equal: lower-case scheme and host, no default port,
// no user, query or fragment, no slash at the end.
func ServerURL(s string) (string, error) {
	if len(s) > MaxServerURL {
		return "", fmt.Errorf("the server's URL has more than %d characters", MaxServerURL)
	}
	if s != wire.Clean(s, MaxServerURL) {
		return "", errors.New("the server's URL has characters that cannot be printed")
	}
	u, err := url.Parse(s)
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("%q is no http or https URL", s)
	}
	// A host may be written with escapes that stand for what no host has.
	n := normalURL(u)
	if again, err := url.Parse(n); err != nil || n != wire.Clean(n, MaxServerURL) || again.Hostname() == "" || normalURL(again) != n {
		return "", fmt.Errorf("%q is no http or https URL", s)
	}
	return n, nil
}
