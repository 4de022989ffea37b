package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
)

// Message is one of the types of this package that Types lists.
type Message interface {
	// Check says what is wrong with the fields: the first look at what a peer
	// sent, and at what is about to be sent.
	Check() error
}

// Side is one end of a session.
type Side string

// Sides.
const (
	FromNode Side = "node"
	FromHub  Side = "hub"
)

// Type describes a message.
type Type struct {
	Type  string // the JSON's "type"
	Kind  string // of type "job": the JSON's "kind"
	From  Side
	Since int // first version that has it; 0 = the handshake, before one is picked
	make  func() Message
}

// New makes an empty message of the type.
func (t Type) New() Message { return t.make() }

// Name is TYPE or TYPE-KIND.
func (t Type) Name() string {
	if t.Kind == "" {
		return t.Type
	}
	return t.Type + "-" + t.Kind
}

// Types are all messages. Names are only ever added; one that is removed stays
// reserved. Reserved: restart, redeploy, rotate, config.
var Types = []Type{
	{"hello", "", FromNode, 0, func() Message { return new(Hello) }},
	{"challenge", "", FromHub, 0, func() Message { return new(Challenge) }},
	{"auth", "", FromNode, 0, func() Message { return new(Auth) }},
	{"refused", "", FromHub, 0, func() Message { return new(Refused) }},
	{"welcome", "", FromHub, 1, func() Message { return new(Welcome) }},
	{"closing", "", FromHub, 1, func() Message { return new(Closing) }},
	{"ping", "", FromHub, 1, func() Message { return new(Ping) }},
	{"inventory", "", FromNode, 1, func() Message { return new(Inventory) }},
	{"heartbeat", "", FromNode, 1, func() Message { return new(Heartbeat) }},
	{"report", "", FromNode, 1, func() Message { return new(Report) }},
	{"desired", "", FromHub, 2, func() Message { return new(Desired) }},
	{"command", "", FromHub, 2, func() Message { return new(Command) }},
	{"ack", "", FromNode, 2, func() Message { return new(Ack) }},
	{"recorded", "", FromHub, 2, func() Message { return new(Recorded) }},
	{"job", "offer", FromHub, 3, func() Message { return new(Offer) }},
	{"job", "renew", FromHub, 3, func() Message { return new(Renew) }},
	{"job", "release", FromHub, 3, func() Message { return new(GiveBack) }},
	{"job", "start", FromHub, 3, func() Message { return new(Start) }},
	{"job", "output_ack", FromHub, 3, func() Message { return new(OutputAck) }},
	{"job", "cancel", FromHub, 3, func() Message { return new(Cancel) }},
	{"job", "recorded", FromHub, 3, func() Message { return new(JobRecorded) }},
	{"job", "held", FromNode, 3, func() Message { return new(Held) }},
	{"job", "offer_reply", FromNode, 3, func() Message { return new(OfferReply) }},
	{"job", "lease", FromNode, 3, func() Message { return new(Lease) }},
	{"job", "job", FromNode, 3, func() Message { return new(JobState) }},
	{"job", "output", FromNode, 3, func() Message { return new(Output) }},
	{"job", "result", FromNode, 3, func() Message { return new(Result) }},
	{"job", "egress", FromNode, 6, func() Message { return new(EgressReport) }},
}

// index finds a type by its Go type, and by side and name.
var index = sync.OnceValue(func() (x struct {
	byGo   map[reflect.Type]*Type
	byName map[string]*Type
}) {
	x.byGo, x.byName = map[reflect.Type]*Type{}, map[string]*Type{}
	for i := range Types {
		t := &Types[i]
		x.byGo[reflect.TypeOf(t.New())] = t
		x.byName[string(t.From)+" "+t.Type+" "+t.Kind] = t
	}
	return x
})

// TypeOf is a message's type; ok is false for what is not a pointer to one of
// this package's messages.
func TypeOf(m Message) (t Type, ok bool) {
	p := index().byGo[reflect.TypeOf(m)]
	if p == nil {
		return Type{}, false
	}
	return *p, true
}

// ErrProtocol is in the chain of every error of Decode: the peer sent what the
// protocol does not have.
var ErrProtocol = errors.New("wire: not in the protocol")

// Encode writes m for a session of a version. Fields of later versions are
// left out; a message of a later version, one that fails its Check and one
// over MaxMessage are errors of the caller's. m is not changed.
func Encode(version int, m Message) ([]byte, error) {
	t, ok := TypeOf(m)
	if !ok {
		return nil, fmt.Errorf("%T is not a message", m)
	}
	if version < t.Since {
		return nil, fmt.Errorf("%s is of version %d, the session of %d", t.Name(), t.Since, version)
	}
	if err := m.Check(); err != nil {
		return nil, fmt.Errorf("%s: %w", t.Name(), err)
	}
	body, err := json.Marshal(trimmed(version, m))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.Name(), err)
	}
	out := append(make([]byte, 0, len(body)+48), `{"type":"`+t.Type+`"`...)
	if t.Kind != "" {
		out = append(out, `,"kind":"`+t.Kind+`"`...)
	}
	if len(body) > 2 {
		out = append(out, ',')
	}
	out = append(out, body[1:]...)
	if len(out) > MaxMessage {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are allowed", t.Name(), len(out), MaxMessage)
	}
	return out, nil
}

// Decode reads a message that from sent in a session of a version; version 0
// is the handshake, and refused may come at any time. The result passed its
// Check, its lists are cut and its texts cleaned (see Clean), and it holds no
// field of a later version.
func Decode(from Side, version int, data []byte) (Message, error) {
	if len(data) > MaxMessage {
		return nil, fmt.Errorf("%w: a message of %d bytes, at most %d are allowed", ErrProtocol, len(data), MaxMessage)
	}
	var tag struct {
		Type string `json:"type"`
		Kind string `json:"kind"`
	}
	if fast, ok := typeFirst(data); ok {
		tag.Type = fast
	} else if err := json.Unmarshal(data, &tag); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	if tag.Type != "job" {
		tag.Kind = ""
	}
	t := index().byName[string(from)+" "+tag.Type+" "+tag.Kind]
	switch {
	case t == nil:
		return nil, fmt.Errorf("%w: %s sent a message of type %q kind %q", ErrProtocol, from, Clean(tag.Type, 32), Clean(tag.Kind, 32))
	case t.Since > version:
		return nil, fmt.Errorf("%w: %s is of version %d, the session of %d", ErrProtocol, t.Name(), t.Since, version)
	}
	m := t.New()
	if err := json.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrProtocol, t.Name(), err)
	}
	m = trimmed(version, m)
	if from == FromNode {
		tidy(reflect.ValueOf(m).Elem(), MaxText, false)
	} else {
		tidyHub(m)
	}
	if r, ok := m.(*Report); ok {
		kept, omitted := BoundWorkloads(r.Workloads)
		r.Workloads, r.Omitted = kept, max(r.Omitted, 0)+omitted
	}
	if err := m.Check(); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrProtocol, t.Name(), err)
	}
	return m, nil
}

// typeFirst reads the tag of what Encode wrote without parsing the rest.
func typeFirst(data []byte) (string, bool) {
	rest, ok := bytes.CutPrefix(data, []byte(`{"type":"`))
	if !ok {
		return "", false
	}
	i := bytes.IndexByte(rest, '"')
	if i <= 0 || i > 16 || bytes.IndexByte(rest[:i], '\\') >= 0 {
		return "", false
	}
	name := string(rest[:i])
	return name, name != "job"
}

// tidyHub cleans the texts that a node logs of what its hub says.
func tidyHub(m Message) {
	switch m := m.(type) {
	case *Refused:
		m.Code, m.Message = Refusal(Clean(string(m.Code), MaxText)), Clean(m.Message, MaxReason)
	case *Closing:
		m.Code, m.Message = Refusal(Clean(string(m.Code), MaxText)), Clean(m.Message, MaxReason)
	case *Command:
		m.Op = Op(Clean(string(m.Op), MaxText))
	}
}

// tidy cuts a node's lists to MaxList and cleans its texts in place. A field's
// tag max is another length of its text, lines keeps its line ends, and raw
// leaves it alone. Workloads have bounds of their own.
func tidy(v reflect.Value, n int, lines bool) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			tidy(v.Elem(), n, lines)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if _, raw := f.Tag.Lookup("raw"); raw || f.Type == workloads || f.Type == rawJSON {
				continue
			}
			limit := n
			if s, ok := f.Tag.Lookup("max"); ok {
				limit, _ = strconv.Atoi(s)
			}
			_, keep := f.Tag.Lookup("lines")
			tidy(v.Field(i), limit, keep)
		}
	case reflect.Slice:
		// What a node holds is no list of an inventory: cut, the hub would
		// release the rest.
		if v.Len() > MaxList && v.Type().Elem().Kind() != reflect.Uint8 && v.Type() != ids {
			v.Set(v.Slice3(0, MaxList, MaxList))
		}
		for i := range v.Len() {
			tidy(v.Index(i), n, lines)
		}
	case reflect.String:
		if s := v.String(); len(s) > n || !plain(s) {
			if lines {
				v.SetString(cleanLines(s, n))
			} else {
				v.SetString(Clean(s, n))
			}
		}
	}
}

func cleanLines(s string, n int) string {
	out := strings.Split(s, "\n")
	for i, l := range out {
		out[i] = Clean(l, n)
		n = max(0, n-len(out[i])-1)
	}
	return strings.TrimRight(strings.Join(out, "\n"), "\n")
}

var (
	workloads = reflect.TypeFor[[]Workload]()
	rawJSON   = reflect.TypeFor[json.RawMessage]()
	ids       = reflect.TypeFor[IDs]()
)

// trimmed is m without the fields of versions after version: m itself when it
// has none. Only what leads to such a field is copied.
func trimmed(version int, m Message) Message {
	t := reflect.TypeOf(m).Elem()
	if latest(t) <= version {
		return m
	}
	c := reflect.New(t)
	c.Elem().Set(reflect.ValueOf(m).Elem())
	trim(c.Elem(), version)
	return c.Interface().(Message)
}

func trim(v reflect.Value, version int) {
	for i := range v.NumField() {
		f, tf := v.Field(i), v.Type().Field(i)
		if since(tf) > version {
			f.SetZero()
			continue
		}
		if latest(tf.Type) <= version {
			continue
		}
		switch f.Kind() {
		case reflect.Pointer:
			if !f.IsNil() {
				c := reflect.New(tf.Type.Elem())
				c.Elem().Set(f.Elem())
				trim(c.Elem(), version)
				f.Set(c)
			}
		case reflect.Struct:
			trim(f, version)
		}
	}
	// Version 5 gave a host without a runner a word of its own.
	if s, ok := v.Addr().Interface().(*State); ok && version < VersionNone && s.Runner == RunnerNone {
		s.Runner = RunnerExternal
	}
}

func since(f reflect.StructField) int {
	n, _ := strconv.Atoi(f.Tag.Get("since"))
	return n
}

var latests sync.Map // reflect.Type → int

// latest is the highest version that a field of t, or below it, begins with.
// Fields behind lists and maps have no version of their own.
func latest(t reflect.Type) (n int) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return 0
	}
	if v, ok := latests.Load(t); ok {
		return v.(int)
	}
	for i := range t.NumField() {
		n = max(n, since(t.Field(i)), latest(t.Field(i).Type))
	}
	if t == reflect.TypeFor[State]() {
		n = max(n, VersionNone)
	}
	latests.Store(t, n)
	return n
}
