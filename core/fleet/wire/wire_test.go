package wire_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/wire"
)

func TestNegotiate(t *testing.T) {
	for _, c := range []struct {
		a, b wire.Range
		want int
		ok   bool
	}{
		{wire.Range{Min: 1, Max: 6}, wire.Range{Min: 1, Max: 6}, 6, true},
		{wire.Range{Min: 1, Max: 6}, wire.Range{Min: 1, Max: 2}, 2, true},
		{wire.Range{Min: 1, Max: 1}, wire.Range{Min: 1, Max: 6}, 1, true},
		{wire.Range{Min: 3, Max: 6}, wire.Range{Min: 1, Max: 2}, 2, false},
		{wire.Range{Min: 2, Max: 9}, wire.Range{Min: 5, Max: 7}, 7, true},
	} {
		for _, flip := range []bool{false, true} {
			a, b := c.a, c.b
			if flip {
				a, b = b, a
			}
			if v, ok := wire.Negotiate(a, b); ok != c.ok || ok && v != c.want {
				t.Errorf("Negotiate(%v, %v) = %d, %v", a, b, v, ok)
			}
		}
	}
	for _, r := range []wire.Range{{}, {Min: 0, Max: 3}, {Min: 3, Max: 2}, {Min: 1, Max: 1 << 20}} {
		if r.Check() == nil {
			t.Errorf("%v passes for a range", r)
		}
	}
}

func TestClamp(t *testing.T) {
	for secs, want := range map[int]time.Duration{0: time.Second, -5: time.Second, 1: time.Second, 5: 5 * time.Second, 300: 300 * time.Second, 301: 300 * time.Second, 1 << 62: 300 * time.Second} {
		if got := wire.Clamp(secs); got != want {
			t.Errorf("Clamp(%d) = %v, want %v", secs, got, want)
		}
	}
}

func TestHex(t *testing.T) {
	good := strings.Repeat("0f", 16)
	for s, want := range map[string]bool{good: true, strings.ToUpper(good): false, good[:31]: false, good + "0": false, "": false, good[:31] + "g": false, " " + good[1:]: false} {
		if wire.IsHex(s, 16) != want {
			t.Errorf("IsHex(%q) is not %v", s, want)
		}
	}
	secret := strings.Repeat("Z", 64)
	if _, err := wire.ParseHex("token", secret, 32); err == nil || strings.Contains(err.Error(), "ZZ") {
		t.Errorf("the error is %v; it names the field and not the value", err)
	}
	if a, b := wire.NewID(), wire.NewID(); a == b || !wire.IsHex(a, wire.IDLen) {
		t.Errorf("NewID gives %s and %s", a, b)
	}
}

// TestRefused: what a session of a version, or a direction, does not have.
func TestRefused(t *testing.T) {
	enc := func(v int, m wire.Message) string {
		b, err := wire.Encode(v, m)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	all := samples()
	for name, c := range map[string]struct {
		from    wire.Side
		version int
		data    string
	}{
		"empty":                 {wire.FromNode, 6, ""},
		"no object":             {wire.FromNode, 6, "[]"},
		"null":                  {wire.FromNode, 6, "null"},
		"no type":               {wire.FromNode, 6, "{}"},
		"unknown type":          {wire.FromNode, 6, `{"type":"shell"}`},
		"unknown kind":          {wire.FromNode, 6, `{"type":"job","kind":"shell"}`},
		"two documents":         {wire.FromHub, 6, `{"type":"ping"}{"type":"ping"}`},
		"the hub's from a node": {wire.FromNode, 6, enc(6, all["command"])},
		"a node's from the hub": {wire.FromHub, 6, enc(6, all["report"])},
		"command at 1":          {wire.FromHub, 1, enc(2, all["command"])},
		"desired at 1":          {wire.FromHub, 1, enc(2, all["desired"])},
		"ack at 1":              {wire.FromNode, 1, enc(2, all["ack"])},
		"job at 2":              {wire.FromHub, 2, enc(3, all["job-offer"])},
		"egress at 5":           {wire.FromNode, 5, enc(6, all["job-egress"])},
		"report in a handshake": {wire.FromNode, 0, enc(1, all["report"])},
		"too long":              {wire.FromNode, 6, `{"type":"heartbeat","x":"` + strings.Repeat("a", wire.MaxMessage) + `"}`},
		"upper case id":         {wire.FromNode, 0, strings.ReplaceAll(enc(0, all["hello"]), "aa", "AA")},
		"wrong type of a field": {wire.FromNode, 6, `{"type":"heartbeat","admission":{"running":"3"}}`},
		"generation 0":          {wire.FromHub, 2, `{"type":"desired","generation":0,"policy":{}}`},
		"ceiling below 0":       {wire.FromHub, 2, `{"type":"desired","generation":1,"policy":{"ceiling":-1}}`},
		"ceiling beyond int":    {wire.FromHub, 2, `{"type":"desired","generation":1,"policy":{"ceiling":9223372036854775808}}`},
		"ceiling too high":      {wire.FromHub, 2, `{"type":"desired","generation":1,"policy":{"ceiling":9999999999}}`},
		"update without itself": {wire.FromHub, 2, `{"type":"command","id":"` + commandID + `","op":"update","expires_at":5}`},
		"no expiry":             {wire.FromHub, 2, `{"type":"command","id":"` + commandID + `","op":"drain"}`},
		"picked out of range":   {wire.FromHub, 0, `{"type":"challenge","nonce":"` + h("e", 32) + `","versions":{"min":1,"max":2},"version":3}`},
		"unknown outcome":       {wire.FromNode, 2, `{"type":"ack","command":"` + commandID + `","outcome":"perhaps"}`},
		"unknown node state":    {wire.FromNode, 2, `{"type":"report","vms":[],"state":{"node":"dancing","acquisition":"taking","runner":"none"}}`},
		"big chunk":             {wire.FromNode, 3, `{"type":"job","kind":"output","job":"` + commandID + `","offset":0,"data":"` + strings.Repeat("AAAA", wire.MaxOutput/3+2) + `"}`},
	} {
		m, err := wire.Decode(c.from, c.version, []byte(c.data))
		if !errors.Is(err, wire.ErrProtocol) || m != nil {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
	if _, err := wire.Encode(1, all["command"]); err == nil {
		t.Error("a command was encoded for version 1")
	}
	if _, err := wire.Encode(6, &wire.Desired{}); err == nil {
		t.Error("a desired state without a generation was encoded")
	}
}

// TestUnknownFields: a newer peer's fields are passed over, wherever the type
// stands in the object.
func TestUnknownFields(t *testing.T) {
	m, err := wire.Decode(wire.FromHub, 2, []byte(`{"shell":"rm -rf /","policy":{"ceiling":3,"later":{"x":[1]}},"generation":7,"type":"desired"}`))
	if d, ok := m.(*wire.Desired); err != nil || !ok || d.Generation != 7 || d.Policy != (wire.Policy{Ceiling: 3}) {
		t.Fatalf("%+v, %v", m, err)
	}
}

// TestTrim: a session is what its version says, whatever the peer sends, and a
// message that is encoded for an old peer is not changed by it.
func TestTrim(t *testing.T) {
	r := samples()["report"].(*wire.Report)
	full, err := wire.Encode(6, r)
	if err != nil {
		t.Fatal(err)
	}
	for v, want := range map[int]struct {
		state, placed, tools, egress bool
		runner                       wire.RunnerMode
	}{
		1: {},
		2: {state: true, runner: wire.RunnerExternal},
		3: {state: true, placed: true, egress: true, runner: wire.RunnerExternal},
		4: {state: true, placed: true, egress: true, tools: true, runner: wire.RunnerExternal},
		5: {state: true, placed: true, egress: true, tools: true, runner: wire.RunnerNone},
		6: {state: true, placed: true, egress: true, tools: true, runner: wire.RunnerNone},
	} {
		old, err := wire.Encode(v, r)
		if err != nil {
			t.Fatal(err)
		}
		for _, data := range [][]byte{old, full} { // an honest peer, and one that says too much
			m, err := wire.Decode(wire.FromNode, v, data)
			if err != nil {
				t.Fatal(err)
			}
			s := m.(*wire.Report).State
			if (s != nil) != want.state {
				t.Fatalf("version %d: state %v", v, s)
			}
			if s != nil && ((s.Placed != nil) != want.placed || (s.Tools != nil) != want.tools || (s.Applied.Policy.Egress != nil) != want.egress || s.Runner != want.runner) {
				t.Errorf("version %d: %+v", v, s)
			}
		}
	}
	if r.State == nil || r.State.Runner != wire.RunnerNone || r.State.Applied.Policy.Egress == nil {
		t.Error("encoding changed the message")
	}
}

// TestTidy: what a node reports is cut and cleaned before a page or a terminal
// shows it.
func TestTidy(t *testing.T) {
	inv := &wire.Inventory{Hostname: "ci\x1b[31m-7\n" + strings.Repeat("é", 400)}
	for i := range 200 {
		inv.Labels = append(inv.Labels, fmt.Sprint(i))
		inv.Checks = append(inv.Checks, wire.Check{Name: "k", Text: "\x07\u202e\u200bok"})
		inv.Filesystems = append(inv.Filesystems, wire.Filesystem{})
		inv.MemoryNodes = append(inv.MemoryNodes, wire.MemoryNode{})
	}
	data, err := wire.Encode(6, inv)
	if err != nil {
		t.Fatal(err)
	}
	m, err := wire.Decode(wire.FromNode, 6, data)
	if err != nil {
		t.Fatal(err)
	}
	got := m.(*wire.Inventory)
	if len(got.Labels) != 64 || len(got.Checks) != 64 || len(got.Filesystems) != 64 || len(got.MemoryNodes) != 64 || got.Labels[63] != "63" {
		t.Errorf("lists of %d, %d, %d and %d", len(got.Labels), len(got.Checks), len(got.Filesystems), len(got.MemoryNodes))
	}
	if want := "ci[31m-7" + strings.Repeat("é", 256-8); got.Hostname != want || got.Checks[0].Text != "ok" {
		t.Errorf("%q, %q", got.Hostname, got.Checks[0].Text)
	}
	held := &wire.Held{Reservations: wire.IDs{}, Jobs: wire.IDs{}}
	for range 200 {
		held.Jobs = append(held.Jobs, wire.NewID())
	}
	data, err = wire.Encode(3, held)
	if err != nil {
		t.Fatal(err)
	}
	if m, err := wire.Decode(wire.FromNode, 3, data); err != nil || len(m.(*wire.Held).Jobs) != 200 {
		t.Errorf("what a node holds was cut: %v", err)
	}
	long := &wire.Ack{Command: commandID, Outcome: wire.Failed, Message: strings.Repeat("x", 5000)}
	data, err = wire.Encode(3, long)
	if err != nil {
		t.Fatal(err)
	}
	if m, err := wire.Decode(wire.FromNode, 3, data); err != nil || len(m.(*wire.Ack).Message) != 2048 {
		t.Errorf("a reason is not cut to 2048: %v", err)
	}
	rep := samples()["report"].(*wire.Report)
	rep.State.Tools.Output = "a\n\x1bb\n" + strings.Repeat("c", 9000)
	data, err = wire.Encode(6, rep)
	if err != nil {
		t.Fatal(err)
	}
	m, err = wire.Decode(wire.FromNode, 6, data)
	if out := m.(*wire.Report).State.Tools.Output; err != nil || !strings.HasPrefix(out, "a\nb\nccc") || len(out) > 8192 {
		t.Errorf("output of %d bytes, %q…, %v", len(out), out[:8], err)
	}
}

// vectors of what is signed: they may never change.
func TestPayloads(t *testing.T) {
	all := samples()
	hello, challenge := all["hello"].(*wire.Hello), all["challenge"].(*wire.Challenge)
	channel := bytes.Repeat([]byte{7}, wire.ChannelLen)
	auth, err := wire.AuthPayload(hello, challenge, channel)
	if err != nil {
		t.Fatal(err)
	}
	u64 := func(n byte) string { return "\x00\x00\x00\x00\x00\x00\x00" + string(n) }
	want := "vk-fleet node-auth v1" + u64(32) + strings.Repeat("\xee", 32) + u64(32) + hello.Node + u64(32) + hello.Incarnation +
		u64(1) + u64(6) + u64(1) + u64(6) + u64(6) + u64(32) + string(channel)
	if string(auth) != want {
		t.Errorf("auth:\n%q\n%q", auth, want)
	}
	dig := bytes.Repeat([]byte{0xdd}, 32)
	got := map[string][]byte{
		"enroll":   wire.EnrollPayload(digest, dig, wire.Plaintext),
		"download": wire.ReleasePayload(nodeID, dig, 1780000000, channel),
		"tools":    wire.ToolsPayload(nodeID, dig, 1780000000, channel),
		"release":  wire.ReleaseKeyPayload(dig, "0.2.0"),
		"relay":    wire.RelayEnrollPayload(digest, dig, wire.Plaintext),
		"request":  wire.RequestPayload(nodeID, "POST", "/v1/jobs", dig, 1780000000, channel),
		"auth":     auth,
	}
	for name, want := range map[string]string{
		"enroll":   "abcb2421dd41105a9a930e48d4ec97cfd4bcc1f8eba345660902737b923c727a",
		"download": "670277510fb2108948383fa3ec68cbafb0806db31d96bd9d025619042d7e0f4d",
		"tools":    "eaa0ec9cb6561402fb0c3f934e8df6aaa1e2fb2e9aecec29c84ad413d7c6a0aa",
		"release":  "d949160ab9e7eb5b23dfda59dba26c7c271b0592c5046ffea513b64eabc765e6",
		"relay":    "80ccca4babf8872a24c4a5e57e82a7ee6c3a75d2877d3335a6e0a3560f210a35",
		"request":  "deed79fe06e7ca3c15a45eb5b187489cdbcc5a669db100e4ec4953fc470c07ab",
		"auth":     "50178f8130c91847d2aa0faa1ed43e852ed0db5da320d80178c88ca5886dcf29",
	} {
		sum := sha256.Sum256(got[name])
		if hex.EncodeToString(sum[:]) != want {
			t.Errorf("%s: %x, want %s", name, sum, want)
		}
		for other, p := range got {
			if other != name && bytes.HasPrefix(p, got[name][:21]) {
				t.Errorf("%s begins as %s does", other, name)
			}
		}
	}
	// Every part counts: a change of any of them is another payload.
	key := ed25519.NewKeyFromSeed(make([]byte, 32))
	sig := ed25519.Sign(key, auth)
	pub := key.Public().(ed25519.PublicKey)
	changes := []func(*wire.Hello, *wire.Challenge, *[]byte){
		func(h *wire.Hello, _ *wire.Challenge, _ *[]byte) { h.Node = wire.NewID() },
		func(h *wire.Hello, _ *wire.Challenge, _ *[]byte) { h.Incarnation = wire.NewID() },
		func(h *wire.Hello, _ *wire.Challenge, _ *[]byte) { h.Versions.Min = 2 },
		func(h *wire.Hello, _ *wire.Challenge, _ *[]byte) { h.Versions.Max = 7 },
		func(_ *wire.Hello, c *wire.Challenge, _ *[]byte) { c.Nonce = wire.NewHex(32) },
		func(_ *wire.Hello, c *wire.Challenge, _ *[]byte) { c.Versions.Min = 2 },
		func(_ *wire.Hello, c *wire.Challenge, _ *[]byte) { c.Versions.Max = 7 },
		func(_ *wire.Hello, c *wire.Challenge, _ *[]byte) { c.Version = 5 },
		func(_ *wire.Hello, _ *wire.Challenge, ch *[]byte) { *ch = wire.Plaintext },
	}
	for i, change := range changes {
		h2, c2, ch := *hello, *challenge, channel
		change(&h2, &c2, &ch)
		p, err := wire.AuthPayload(&h2, &c2, ch)
		if err != nil || ed25519.Verify(pub, p, sig) {
			t.Errorf("change %d leaves the signature good, %v", i, err)
		}
	}
	if _, err := wire.AuthPayload(&wire.Hello{}, challenge, channel); err == nil {
		t.Error("an empty hello can be signed")
	}
}

func TestFinal(t *testing.T) {
	for r, want := range map[wire.Refusal]bool{wire.NotEnrolled: true, wire.BadSignature: true, wire.Revoked: true, wire.Superseded: false, wire.NoVersion: false, "newer_word": false, wire.Overloaded: false} {
		if r.Final() != want {
			t.Errorf("%s.Final() is not %v", r, want)
		}
	}
	for o, want := range map[wire.Outcome]bool{wire.Accepted: false, wire.Done: true, wire.Failed: true, wire.Declined: true, wire.Expired: true} {
		if o.Final() != want {
			t.Errorf("%s.Final() is not %v", o, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, m := range samples() {
		b, err := wire.Encode(6, m)
		if err != nil {
			f.Fatal(err)
		}
		t, _ := wire.TypeOf(m)
		f.Add(t.From == wire.FromHub, 6, b)
		f.Add(t.From == wire.FromHub, 1, b)
	}
	f.Add(false, 6, []byte(`{"kind":"held","type":"job","jobs":[null],"reservations":null}`))
	f.Fuzz(func(t *testing.T, hub bool, version int, data []byte) {
		from := wire.FromNode
		if hub {
			from = wire.FromHub
		}
		m, err := wire.Decode(from, version, data)
		if err != nil {
			if !errors.Is(err, wire.ErrProtocol) {
				t.Fatalf("%v is not a protocol error", err)
			}
			return
		}
		// What was accepted can be sent on, and is then the same message.
		out, err := wire.Encode(version, m)
		if err != nil {
			if strings.Contains(err.Error(), "at most") { // escapes made it longer
				return
			}
			t.Fatalf("accepted, and not encoded: %v", err)
		}
		back, err := wire.Decode(from, version, out)
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		again, err := json.Marshal(back)
		first, err2 := json.Marshal(m)
		if err != nil || err2 != nil || !bytes.Equal(again, first) {
			t.Fatalf("%s\n%s\n%v %v", first, again, err, err2)
		}
	})
}
