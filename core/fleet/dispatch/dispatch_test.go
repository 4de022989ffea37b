package dispatch_test

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
)

var update = flag.Bool("update", false, "write the golden files")

func id(c string) string { return strings.Repeat(c, 32) }

func ptr[T any](v T) *T { return &v }

var place = dispatch.Placement{Pool: "ci", Labels: []string{"large-memory"}, Envelope: wire.Envelope{Memory: 16 << 30, CPUs: 8, Disk: 16 << 30}}

// samples are one of each type, every field set.
func samples() map[string]any {
	return map[string]any{
		"capacity-request":    &dispatch.CapacityRequest{Placement: place, After: 7, WaitSecs: 60},
		"capacity":            &dispatch.Capacity{Revision: 8, Fits: 3},
		"reservation-request": &dispatch.ReservationRequest{RequestID: id("1"), Placement: place, LeaseSecs: 90, WaitSecs: 30},
		"reservation-grant":   &dispatch.ReservationGrant{Reservation: id("2"), Node: id("3"), Envelope: place.Envelope, LeaseSecs: 90},
		"renew-request":       &dispatch.RenewRequest{LeaseSecs: 90},
		"job-submission":      &dispatch.JobSubmission{RequestID: id("1"), Placement: place, Reservation: id("2"), PlaceWithinSecs: 300, Spec: json.RawMessage(`{"kind":"gitlab_ci"}`)},
		"job-view": &dispatch.JobView{ID: id("4"), Revision: 5, State: dispatch.Finished, Node: id("3"), Stage: "step_script", OutputLen: 4102, Cancel: wire.CancelGraceful,
			Result: &wire.JobResult{Failure: "script", ExitCode: ptr(1), Message: "exit status 1", OutputLen: 4102, Artifacts: []wire.ArtifactResult{{Name: "junit", Outcome: "uploaded"}},
				Usage: &wire.JobUsage{WallMS: 1000, CPUMS: ptr(int64(500)), PeakMem: ptr(int64(1 << 30)), CPUs: 2, MemMiB: 4096}, Egress: json.RawMessage(`{"revision":2}`),
				Events: []wire.JobEvent{{Kind: "oom_kill", Count: 2, First: "process 7 (cc1)", At: 1780000000}}}},
		"cancel-request": &dispatch.CancelRequest{Mode: wire.CancelImmediate},
		"client-hello":   &dispatch.ClientHello{Program: "batch", Version: "1", Hostname: "build-1"},
		"failure":        &dispatch.Failure{Text: "no node accepted in time", Code: dispatch.NoCapacity, RetryAfterSecs: 5},
		"enroll-request": &dispatch.EnrollRequest{Token: strings.Repeat("a", 64), PublicKey: strings.Repeat("b", 64), Signature: strings.Repeat("c", 128), Hostname: "gw-1", Version: "0.2.0"},
		"enroll-reply":   &dispatch.EnrollReply{Relay: id("5"), Hub: id("6"), Again: true},
		"session-inventory": &dispatch.Inventory{Version: "0.2.0", Hostname: "gw-1", SystemID: "s_0123456789ab", Concurrent: 10, ServerURL: "https://gitlab.example.com",
			ServerKey: strings.Repeat("d", 64), ServerVersion: "19.5.0", Runners: []dispatch.Runner{{Name: "ci", ID: 12, Placement: place, Limit: 4, Verified: true}}},
		"session-heartbeat": &dispatch.Heartbeat{Runners: []dispatch.RunnerBeat{{Name: "ci", Requests: 1, Jobs: 2, LastStatus: 204, LastAt: 1780000000}}},
		"session-runner":    &dispatch.RunnerState{Runner: "ci", State: dispatch.WaitingCapacity, Message: "the pool has no room"},
		"session-server":    &dispatch.ServerStatus{Status: dispatch.Rebound, Name: "gl", Bound: "https://old.example.com", Message: "enroll again"},
		"session-ping":      &dispatch.Ping{},
		"session-closing":   &dispatch.Closing{Code: wire.Shutdown, Message: "the hub is stopping"},
	}
}

// TestGolden: the JSON of each type. What a file has must stay: fields and
// names are only ever added.
func TestGolden(t *testing.T) {
	for name, v := range samples() {
		if empty := emptyField(reflect.ValueOf(v)); empty != "" {
			t.Errorf("%s: %s is not set", name, empty)
		}
		b, err := json.Marshal(v)
		if strings.HasPrefix(name, "session-") {
			b, err = dispatch.Encode(v.(dispatch.Message))
		}
		if err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		if err := json.Indent(&got, b, "", "  "); err != nil {
			t.Fatal(err)
		}
		got.WriteByte('\n')
		file := filepath.Join("testdata", name+".json")
		if *update {
			if err := os.WriteFile(file, got.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(want), got.String()); d != "" {
			t.Errorf("%s (-golden +now):\n%s", file, d)
		}
		back := reflect.New(reflect.TypeOf(v).Elem()).Interface()
		if err := json.Unmarshal(want, back); err != nil {
			t.Fatal(err)
		}
		var tight bytes.Buffer
		json.Compact(&tight, want)
		again, err := json.Marshal(back)
		if m, ok := back.(dispatch.Message); ok && strings.HasPrefix(name, "session-") {
			again, err = dispatch.Encode(m)
		}
		if err != nil || !bytes.Equal(again, tight.Bytes()) {
			t.Errorf("%s decoded and encoded again is %s, %v", name, again, err)
		}
		if c, ok := v.(interface{ Check() error }); ok {
			if err := c.Check(); err != nil {
				t.Errorf("Check of the %s: %v", name, err)
			}
		}
	}
	files, _ := filepath.Glob("testdata/*.json")
	if len(files) != len(samples()) {
		t.Errorf("%d golden files of %d types", len(files), len(samples()))
	}
}

// emptyField is the first field below v that is zero.
func emptyField(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Pointer:
		return emptyField(v.Elem())
	case reflect.Slice:
		if v.Len() > 0 {
			return emptyField(v.Index(0))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if v.Field(i).IsZero() || f.Tag.Get("json") == "" && f.Name != "Closing" {
				return f.Name
			}
			if s := emptyField(v.Field(i)); s != "" {
				return f.Name + "." + s
			}
		}
	}
	return ""
}

func TestSessionMessages(t *testing.T) {
	for _, ty := range dispatch.Types {
		m := samples()["session-"+ty.Name].(dispatch.Message)
		b, err := dispatch.Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		back, err := dispatch.Decode(ty.From, b)
		if err != nil || !reflect.DeepEqual(back, m) {
			t.Errorf("%s came back as %+v, %v", ty.Name, back, err)
		}
		other := dispatch.FromHub
		if ty.From == other {
			other = dispatch.FromRelay
		}
		if _, err := dispatch.Decode(other, b); !errors.Is(err, wire.ErrProtocol) {
			t.Errorf("%s from the wrong side: %v", ty.Name, err)
		}
	}
	for _, s := range []string{"", "{}", `{"type":"nothing"}`, `{"type":"inventory","server_url":"ftp://x"}`, `{"type":"heartbeat","runners":3}`, `{"type":"inventory","runners":[` + strings.Repeat(`{},`, dispatch.MaxRunners) + `{}],"server_url":"http://x"}`} {
		if m, err := dispatch.Decode(dispatch.FromRelay, []byte(s)); !errors.Is(err, wire.ErrProtocol) {
			t.Errorf("%.60s decodes to %+v, %v", s, m, err)
		}
	}
}

func TestSignature(t *testing.T) {
	key := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))
	good := dispatch.Request{Relay: id("5"), Method: "POST", Target: "/v1/jobs?x=1", Body: []byte(`{}`), Unix: 1780000000, Channel: bytes.Repeat([]byte{1}, wire.ChannelLen)}
	// Another implementation signs the same bytes.
	const message = "766b2d666c65657420636c69656e742d72657175657374207631" + // vk-fleet client-request v1
		"0000000000000020" + "3535353535353535353535353535353535353535353535353535353535353535" +
		"0000000000000004" + "504f5354" + "000000000000000c" + "2f76312f6a6f62733f783d31" +
		"0000000000000020" + "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a" +
		"000000006a18a500" + "0000000000000020" + "0101010101010101010101010101010101010101010101010101010101010101"
	if got := hex.EncodeToString(good.Message()); got != message {
		t.Errorf("signed\n%s\nwant\n%s", got, message)
	}
	h := http.Header{}
	good.Sign(key, h)
	pub := key.Public().(ed25519.PublicKey)
	relay, unix, err := dispatch.Claim(h, time.Unix(good.Unix+200, 0))
	if err != nil || relay != good.Relay || unix != good.Unix {
		t.Errorf("Claim = %s, %d, %v", relay, unix, err)
	}
	if err := good.Verify(pub, h); err != nil {
		t.Error(err)
	}
	for what, change := range map[string]func(*dispatch.Request){
		"another relay":      func(r *dispatch.Request) { r.Relay = id("6") },
		"another method":     func(r *dispatch.Request) { r.Method = "GET" },
		"another target":     func(r *dispatch.Request) { r.Target = "/v1/jobs" },
		"another body":       func(r *dispatch.Request) { r.Body = nil },
		"another time":       func(r *dispatch.Request) { r.Unix++ },
		"another connection": func(r *dispatch.Request) { r.Channel = wire.Plaintext },
	} {
		r := good
		change(&r)
		if err := r.Verify(pub, h); err == nil {
			t.Errorf("the signature is good for %s", what)
		}
	}
	for _, change := range []func(http.Header){
		func(h http.Header) { h.Del(dispatch.HeaderRelay) }, func(h http.Header) { h.Set(dispatch.HeaderTime, "now") }, func(h http.Header) { h.Set(dispatch.HeaderTime, "1779999000") },
	} {
		bad := h.Clone()
		change(bad)
		if _, _, err := dispatch.Claim(bad, time.Unix(good.Unix, 0)); err == nil {
			t.Errorf("Claim takes %v", bad)
		}
	}
	enroll := dispatch.NewEnrollRequest(strings.Repeat("a", 64), key, wire.Plaintext, "gw", "1")
	sig, _ := hex.DecodeString(enroll.Signature)
	if enroll.Check() != nil || !ed25519.Verify(pub, wire.RelayEnrollPayload(enroll.Token, pub, wire.Plaintext), sig) || ed25519.Verify(pub, wire.EnrollPayload(enroll.Token, pub, wire.Plaintext), sig) {
		t.Error("an enrollment's signature is not a relay's, or is a node's too")
	}
}

func TestServerURL(t *testing.T) {
	for in, want := range map[string]string{
		"https://GitLab.example.com/":         "https://gitlab.example.com",
		"HTTPS://gitlab.example.com:443":      "https://gitlab.example.com",
		"http://gitlab.example.com:80/gl/":    "http://gitlab.example.com/gl",
		"http://127.0.0.1:8080":               "http://127.0.0.1:8080",
		"https://[::1]/x?y#z":                 "https://[::1]/x",
		"https://u:p@host/":                   "https://host",
		"ftp://host":                          "",
		"gitlab.example.com":                  "",
		"https://":                            "",
		"http://:":                            "",
		"http://%80":                          "",
		"https://:443/x":                      "",
		"https://host/\x1b[31m":               "",
		"https://" + strings.Repeat("x", 300): "",
	} {
		got, err := dispatch.ServerURL(in)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("ServerURL(%q) = %q, %v, want %q", in, got, err, want)
		}
	}
}

func TestChecks(t *testing.T) {
	bad := map[string]interface{ Check() error }{
		"no pool":          &dispatch.CapacityRequest{Placement: dispatch.Placement{Envelope: place.Envelope}},
		"no memory":        &dispatch.CapacityRequest{Placement: dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{CPUs: 1}}},
		"a huge envelope":  &dispatch.CapacityRequest{Placement: dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{CPUs: 1, Memory: 1 << 60}}},
		"an empty label":   &dispatch.CapacityRequest{Placement: dispatch.Placement{Pool: "ci", Labels: []string{""}, Envelope: place.Envelope}},
		"a negative wait":  &dispatch.CapacityRequest{Placement: place, WaitSecs: -1},
		"a short id":       &dispatch.ReservationRequest{RequestID: "1", Placement: place, LeaseSecs: 90},
		"no lease":         &dispatch.ReservationRequest{RequestID: id("1"), Placement: place},
		"a long lease":     &dispatch.RenewRequest{LeaseSecs: 601},
		"no spec":          &dispatch.JobSubmission{RequestID: id("1"), Placement: place},
		"no reservation":   &dispatch.JobSubmission{RequestID: id("1"), Placement: place, Reservation: "x", Spec: json.RawMessage("{}")},
		"two days to wait": &dispatch.JobSubmission{RequestID: id("1"), Placement: place, PlaceWithinSecs: 2 * 86400, Spec: json.RawMessage("{}")},
	}
	for what, c := range bad {
		if c.Check() == nil {
			t.Errorf("%s passes", what)
		}
	}
}

func TestErrors(t *testing.T) {
	for _, code := range slices.Sorted(maps.Keys(dispatch.Codes)) {
		m := dispatch.Codes[code]
		b, _ := json.Marshal(dispatch.Failure{Text: "why", Code: code, RetryAfterSecs: 5})
		e := dispatch.ReadError(m.Status, b)
		if e.Code != code || e.Retry() != m.Retry || e.RetryAfterSecs != 5 || e.Error() != string(code)+": why" {
			t.Errorf("%s reads as %+v", code, e)
		}
	}
	for status, retry := range map[int]bool{502: true, 418: false} {
		if e := dispatch.ReadError(status, []byte("<html>")); e.Code != dispatch.Other || e.Retry() != retry || e.Text == "" {
			t.Errorf("HTTP %d with no body of ours reads as %+v", status, e)
		}
	}
	if e := dispatch.ReadError(451, []byte(`{"error":"x\u001b[31m","code":"new_one"}`)); e.Code != dispatch.Other || strings.Contains(e.Text, "\x1b") {
		t.Errorf("a code of tomorrow reads as %+v", e)
	}
}

func FuzzDecode(f *testing.F) {
	for name, v := range samples() {
		if strings.HasPrefix(name, "session-") {
			b, _ := dispatch.Encode(v.(dispatch.Message))
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, side := range []dispatch.Side{dispatch.FromRelay, dispatch.FromHub} {
			if m, err := dispatch.Decode(side, b); err == nil && m.Check() != nil {
				t.Errorf("%q decodes to what fails its Check", b)
			}
		}
	})
}
