package relay_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

const (
	fuzzRelay = "000000000000000000000000000000aa"
	fuzzHub   = "00000000000000000000000000000001"
)

// answering dials a hub that answers each request with those bytes.
func answering(raw []byte) func(context.Context, string, string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		near, far := net.Pipe()
		go func() {
			defer far.Close()
			r, err := http.ReadRequest(bufio.NewReader(far))
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = far.Write(raw)
		}()
		return near, nil
	}
}

func answer(status int, header, body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 %d x\r\n%sContent-Length: %d\r\n\r\n%s", status, header, len(body), body)
}

// FuzzAnswers has the relay's hub answer its calls with anything, headers and
// all: a call gives an error, or what its caller relies upon.
func FuzzAnswers(f *testing.F) {
	id := wire.NewID()
	view := `{"id":"` + id + `","state":"finished","revision":3,"node":"n","output_len":7,"result":{"failure":"script","exit_code":1,"output_len":7,"artifacts":[]}}`
	for call, a := range [][]byte{
		answer(200, "", `{"slots":3,"revision":7}`),
		answer(201, "", `{"reservation":"`+id+`","node":"n","lease_secs":60}`),
		answer(200, "", `{"reservation":"`+id+`","lease_secs":60}`),
		answer(204, "", ""), answer(201, "", view), answer(200, "", view),
		answer(200, dispatch.HeaderOffset+": 3\r\n"+dispatch.HeaderLength+": 8\r\n"+dispatch.HeaderComplete+": true\r\n", "hello"),
		answer(202, "", view), answer(204, "", ""),
	} {
		f.Add(uint8(call), a)
	}
	f.Add(uint8(1), answer(503, "Retry-After: 99999999999999999999\r\n", `{"code":"no_capacity","error":"full\u001b[0m","retry_after_secs":-5}`))
	f.Add(uint8(5), answer(410, "Retry-After: 7\r\n", `<html>`))
	f.Add(uint8(6), answer(200, dispatch.HeaderOffset+": 3\r\n"+dispatch.HeaderLength+": 9223372036854775807\r\n", ""))
	f.Add(uint8(0), []byte("HTTP/1.1 100 x\r\n\r\nHTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"))
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, call uint8, raw []byte) {
		synctest.Test(t, func(t *testing.T) { // an answer that never ends is given up after a minute
			c, err := relay.NewClient(&relay.Enrollment{URL: "http://127.0.0.1:1", Hub: fuzzHub, Relay: fuzzRelay, Key: key}, answering(raw))
			if err != nil {
				t.Fatal(err)
			}
			var out any
			switch call % 9 {
			case 0:
				out, err = c.Capacity(t.Context(), dispatch.CapacityRequest{})
			case 1:
				var g dispatch.ReservationGrant
				g, err = c.Reserve(t.Context(), dispatch.ReservationRequest{})
				if out = g; err == nil && !wire.IsHex(g.Reservation, wire.IDLen) {
					t.Errorf("granted %q", g.Reservation)
				}
			case 2:
				out, err = c.Renew(t.Context(), id, 60)
			case 3:
				err = c.Release(t.Context(), id)
			case 4:
				var v dispatch.JobView
				v, err = c.Submit(t.Context(), &dispatch.JobSubmission{})
				if out = v; err == nil && !wire.IsHex(v.ID, wire.IDLen) {
					t.Errorf("the job is %q", v.ID)
				}
			case 5:
				out, err = c.Job(t.Context(), id, 1, 1)
			case 6:
				var o relay.Output
				o, err = c.Output(t.Context(), id, 3, 1)
				if out = o; err == nil && (o.Offset != 3 || o.Length < 3+int64(len(o.Data)) || len(o.Data) > dispatch.MaxRead) {
					t.Errorf("output at %d of %d: %d bytes", o.Offset, o.Length, len(o.Data))
				}
			case 7:
				out, err = c.Cancel(t.Context(), id, wire.CancelGraceful)
			case 8:
				err = c.Settle(t.Context(), id)
			}
			if e, ok := errors.AsType[*dispatch.Error](err); ok {
				if e.Status < 300 || e.Text != wire.Clean(e.Text, wire.MaxReason) {
					t.Errorf("refused: %+v", e)
				}
				if w := relay.DefaultPace(time.Second).After(e.RetryAfterSecs); w < 0 || w > time.Hour {
					t.Errorf("asked to wait for %s", w)
				}
			} else if _, jerr := json.Marshal(out); err == nil && jerr != nil {
				t.Errorf("taken, and cannot be kept: %v", jerr)
			}
		})
	})
}

// FuzzJoin has a hub answer a relay's enrollment with anything: nothing of it
// is kept unless it is a hub's answer.
func FuzzJoin(f *testing.F) {
	good := `{"relay":"` + fuzzRelay + `","hub":"` + fuzzHub + `"}`
	f.Add(answer(200, "", good))
	f.Add(answer(403, "", `{"code":"token_invalid","message":"no\u001b"}`))
	f.Add(answer(302, "Location: http://127.0.0.1:2/\r\n", good))
	f.Add(answer(200, "", `{"relay":"","hub":null}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		dir := filepath.Join(t.TempDir(), "state")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := relay.Join(ctx, relay.JoinOptions{StateDir: dir, Hub: "http://127.0.0.1:1", Token: strings.Repeat("0", 2*wire.TokenLen), Hostname: "gw", Dial: answering(raw)})
		e, lerr := relay.LoadEnrollment(dir)
		if (err == nil) != (lerr == nil) {
			t.Errorf("the join: %v; what is kept: %v", err, lerr)
		}
		if lerr == nil && (!wire.IsHex(e.Relay, wire.IDLen) || !wire.IsHex(e.Hub, wire.IDLen)) {
			t.Errorf("kept: %+v", e)
		}
	})
}

// FuzzTalk has the relay's hub say anything in its session, from the handshake
// on, a message a line: the session ends, and a hub that proves nothing but its
// ID gets no other signature than that over its own challenge.
func FuzzTalk(f *testing.F) {
	challenge, err := wire.Encode(0, &wire.Challenge{Nonce: hex.EncodeToString(make([]byte, wire.NonceLen)), Versions: dispatch.Versions, Version: dispatch.Versions.Max})
	if err != nil {
		f.Fatal(err)
	}
	welcome, err := wire.Encode(1, &wire.Welcome{HeartbeatSecs: 5, Hub: fuzzHub})
	if err != nil {
		f.Fatal(err)
	}
	for _, m := range []dispatch.Message{&dispatch.Ping{}, &dispatch.ServerStatus{Status: dispatch.Approved, Name: "gl"}, &dispatch.Closing{Code: wire.Revoked, Message: "x"}} {
		b, err := dispatch.Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(bytes.Join([][]byte{challenge, welcome, b, b}, []byte("\n")))
	}
	f.Add([]byte(`{"type":"refused","code":"revoked","message":"no"}`))
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		synctest.Test(t, func(t *testing.T) {
			c := &script{lines: bytes.Split(data, []byte("\n"))}
			err := relay.Talk(t.Context(), c, &relay.Enrollment{URL: "http://127.0.0.1:1", Hub: fuzzHub, Relay: fuzzRelay, Key: key}, logx.Discard())
			if err == nil {
				t.Error("the session does not end")
			}
			if n := c.signed; n > 1 {
				t.Errorf("%d signatures were given", n)
			}
		})
	})
}

// script is a connection to a hub that says its lines.
type script struct {
	lines  [][]byte
	signed int
}

func (c *script) Read(ctx context.Context) ([]byte, error) {
	if len(c.lines) == 0 {
		return nil, io.EOF
	}
	b := c.lines[0]
	c.lines = c.lines[1:]
	return b, nil
}

func (c *script) Write(_ context.Context, b []byte) error {
	if bytes.Contains(b, []byte(strconv.Quote("signature"))) {
		c.signed++
	}
	return nil
}
func (c *script) Channel() ([]byte, error) { return wire.Plaintext, nil }
func (c *script) Close(string) error       { return nil }
func (c *script) CloseNow()                {}
