package wire

import (
	"errors"
	"fmt"
)

// Hello is a node's first message.
type Hello struct {
	Node        string `json:"node"`
	Incarnation string `json:"incarnation"` // new at each start of vk node run
	Versions    Range  `json:"versions"`
	VK          string `json:"vk,omitempty"` // version of the program, for the log of a refusal
}

// Check is Message's.
func (m *Hello) Check() error {
	return errors.Join(checkHex("node", m.Node, IDLen), checkHex("incarnation", m.Incarnation, IDLen), m.Versions.Check())
}

// Challenge asks a node to prove that it holds its key.
type Challenge struct {
	Nonce    string `json:"nonce"`
	Versions Range  `json:"versions"` // of the hub
	Version  int    `json:"version"`  // picked: Negotiate of both
}

// Check is Message's.
func (m *Challenge) Check() error {
	err := errors.Join(checkHex("nonce", m.Nonce, NonceLen), m.Versions.Check())
	if !m.Versions.Has(m.Version) {
		err = errors.Join(err, fmt.Errorf("version %d was picked out of %v", m.Version, m.Versions))
	}
	return err
}

// Auth answers a Challenge.
type Auth struct {
	Signature string `json:"signature"` // of AuthPayload
}

// Check is Message's.
func (m *Auth) Check() error { return checkHex("signature", m.Signature, SignatureLen) }

// Welcome opens the session.
type Welcome struct {
	Hub           string `json:"hub,omitempty"` // id of the hub's database
	HeartbeatSecs int    `json:"heartbeat_secs"`
	Time          int64  `json:"time,omitempty"` // the hub's clock: expiries are told by it
}

// Check is Message's.
func (m *Welcome) Check() error { return optHex("hub", m.Hub, IDLen) }

// Refused ends a handshake.
type Refused struct {
	Code    Refusal `json:"code"`
	Message string  `json:"message,omitempty"` // for the operator
}

// Check is Message's.
func (m *Refused) Check() error { return needText("code", string(m.Code)) }

// Closing is the hub's last message of a session.
type Closing struct {
	Code    Refusal `json:"code"`
	Message string  `json:"message,omitempty"`
}

// Check is Message's.
func (m *Closing) Check() error { return needText("code", string(m.Code)) }

// Ping is the hub's sign of life, each interval. Nothing answers it: the
// node's heartbeats are its own.
type Ping struct{}

// Check is Message's.
func (m *Ping) Check() error { return nil }

// Refusal is why a hub refuses or ends something. One that is not known reads
// as a passing trouble: it is tried again.
type Refusal string

// Refusals.
const (
	NotEnrolled  Refusal = "not_enrolled"  // no such node
	BadSignature Refusal = "bad_signature" // by another key, or over another connection
	Revoked      Refusal = "revoked"       // the node was removed
	NoVersion    Refusal = "no_version"    // the two speak no version in common
	ProtocolErr  Refusal = "protocol"      // a message that must not be
	Superseded   Refusal = "superseded"    // a newer session of the same node
	Silent       Refusal = "silent"        // too many missed heartbeats
	Shutdown     Refusal = "shutdown"      // the hub stops
	Overloaded   Refusal = "busy"          // try again later
	Internal     Refusal = "internal"      // the hub's own failure; tried again

	// Of enrollment:
	TokenInvalid Refusal = "token_invalid" // not one that this hub gave out
	TokenUsed    Refusal = "token_used"
	TokenExpired Refusal = "token_expired"
	KeyRevoked   Refusal = "key_revoked" // a removed node's key: join --replace
	BadRequest   Refusal = "bad_request"
)

// Final says whether a node must not try again with what it has: its vk node
// run ends. Spec: fleet-reference, "A hub refusal of not_enrolled, …".
func (r Refusal) Final() bool { return r == NotEnrolled || r == BadSignature || r == Revoked }

// EnrollRequest is the body of a POST to EnrollPath, JSON.
type EnrollRequest struct {
	Token     string `json:"token"`
	PublicKey string `json:"public_key"`
	Signature string `json:"signature"` // of EnrollPayload, by that key
	Hostname  string `json:"hostname,omitempty"`
	VK        string `json:"vk,omitempty"`
}

// Check says what is wrong with the request.
func (m *EnrollRequest) Check() error {
	return errors.Join(checkHex("token", m.Token, TokenLen), checkHex("public_key", m.PublicKey, KeyLen), checkHex("signature", m.Signature, SignatureLen))
}

// EnrollReply answers it with status 200.
type EnrollReply struct {
	Node string `json:"node"`
	Hub  string `json:"hub"`
	// Again says that the key was enrolled before: the node has its old id.
	Again bool `json:"again,omitempty"`
}

// Check says what is wrong with the reply.
func (m *EnrollReply) Check() error {
	return errors.Join(checkHex("node", m.Node, IDLen), checkHex("hub", m.Hub, IDLen))
}

// EnrollRefused answers it with a status of 400 or more. Downloads are refused
// with it too.
type EnrollRefused struct {
	Code    Refusal `json:"code"`
	Message string  `json:"message"`
}

func needText(field, s string) error {
	if s == "" {
		return fmt.Errorf("%s is missing", field)
	}
	return nil
}
