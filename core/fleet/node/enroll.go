package node

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

// ParseHub reads a hub's address: https://HOST[:PORT], or http to a loopback
// host alone.
func ParseHub(s string) (*url.URL, error) {
	bad := func(why string) error {
		return fault.Newf(fault.Usage, "hub %q: %s", s, why).Hint("give it as https://HOST or https://HOST:PORT")
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		// url.Parse's error repeats a password that is in the text.
		return nil, fault.New(fault.Usage, "the hub's address is not a URL").Hint("give it as https://HOST or https://HOST:PORT")
	case u.User != nil:
		u.User = nil
		s = u.String()
		return nil, bad("a user or password has no place in it")
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, bad("the scheme is https, or http to a hub on loopback")
	case u.Hostname() == "":
		return nil, bad("there is no host in it")
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, bad("a path, query or fragment has no place in it")
	case u.Scheme == "http" && !loopback(u.Hostname()):
		return nil, bad("http is for a hub on loopback; this one needs https")
	}
	u.Path = ""
	return u, nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

// TLSConfig is what a node speaks to its hub: TLS 1.3 alone, the hub verified
// against ca alone when there is one.
func TLSConfig(ca []byte) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}}
	if len(ca) > 0 {
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(ca) {
			return nil, fault.New(fault.Usage, "the CA bundle holds no certificate in PEM")
		}
	}
	return c, nil
}

// JoinOptions is one enrollment.
type JoinOptions struct {
	StateDir string
	Hub      string // URL
	Token    string // a secret
	CA       []byte // PEM; nil = the system's roots
	Replace  bool   // enroll an enrolled host as a new node
	Hostname string
	VK       string
	Now      func() time.Time
	// Dial replaces a plain TCP dial, in tests.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Joined is what came of it.
type Joined struct {
	Enrollment
	Again    bool   // the key was enrolled before
	Replaced string // where the old identity was moved to
	OldNode  string // to remove from its hub
}

// Join enrolls this host: makes its key, signs the token with it and keeps what
// the hub answers. It holds the node's lock meanwhile. An enrollment whose
// answer was lost is made again with the same key, and gets the same id.
func Join(ctx context.Context, o JoinOptions) (*Joined, error) {
	u, err := ParseHub(o.Hub)
	if err != nil {
		return nil, err
	}
	token := strings.TrimSpace(o.Token)
	if !wire.IsHex(token, wire.TokenLen) {
		return nil, fault.Newf(fault.Usage, "the token is not %d lowercase hex digits", 2*wire.TokenLen).
			Hint("vk-hub token create, on the hub's host, prints one")
	}
	if _, err := TLSConfig(o.CA); err != nil {
		return nil, err
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	dir, err := Own(o.StateDir, true)
	if err != nil {
		return nil, err
	}
	lock, err := Hold(ctx, dir, 10*time.Second)
	if err != nil {
		if errors.Is(err, fsx.ErrLocked) || fault.KindOf(err) == fault.Busy {
			err = fault.Newf(fault.Busy, "a running vk node holds %s", dir).Hint("stop it, or pass --service, which stops it first")
		}
		return nil, err
	}
	defer func() { lock.Close() }()

	j := &Joined{}
	old, err := LoadEnrollment(dir)
	switch {
	case err == nil && !o.Replace:
		return nil, fault.Newf(fault.Conflict, "this host is enrolled already, as node %s of %s", old.Node, old.URL).
			Hint("vk node join --replace enrolls it again, as a new node")
	case err == nil:
		if j.Replaced, dir, err = moveAside(o.StateDir, dir, o.Now()); err != nil {
			return nil, err
		}
		j.OldNode = old.Node
		lock.Close()
		if lock, err = Hold(ctx, dir, time.Second); err != nil {
			return nil, err
		}
	case o.Replace && fault.KindOf(err) != fault.NotFound: // broken: out of the way with it
		if j.Replaced, dir, err = moveAside(o.StateDir, dir, o.Now()); err != nil {
			return nil, err
		}
		lock.Close()
		if lock, err = Hold(ctx, dir, time.Second); err != nil {
			return nil, err
		}
	case fault.KindOf(err) != fault.NotFound:
		return nil, err
	}
	if err := j.enroll(ctx, u, token, dir, o); err != nil {
		if j.Replaced != "" {
			return nil, fmt.Errorf("%w; the old identity is in %s: move it back to %s to go on with it", err, j.Replaced, dir)
		}
		return nil, err
	}
	return j, nil
}

// moveAside keeps the old identity: nothing of it is deleted.
func moveAside(stateDir, dir string, now time.Time) (aside, fresh string, err error) {
	aside = filepath.Join(stateDir, Dir+".replaced-"+now.UTC().Format("20060102T150405Z"))
	if _, err := os.Lstat(aside); !errors.Is(err, fs.ErrNotExist) {
		return "", "", fault.Newf(fault.Conflict, "%s exists already", aside).Hint("try again in a second")
	}
	if err := os.Rename(dir, aside); err != nil {
		return "", "", err
	}
	fresh, err = Own(stateDir, true)
	return aside, fresh, errors.Join(err, fsx.SyncDir(stateDir))
}

func (j *Joined) enroll(ctx context.Context, u *url.URL, token, dir string, o JoinOptions) error {
	key, err := makeKey(filepath.Join(dir, KeyFile))
	if err != nil {
		return err
	}
	public := key.Public().(ed25519.PublicKey)
	b, err := Enroll(ctx, EnrollCall{Hub: u, Path: wire.EnrollPath, CA: o.CA, Dial: o.Dial, As: AsNode, Request: func(channel []byte) any {
		return wire.EnrollRequest{
			Token: token, PublicKey: hex.EncodeToString(public), Hostname: o.Hostname, VK: o.VK,
			Signature: hex.EncodeToString(ed25519.Sign(key, wire.EnrollPayload(token, public, channel))),
		}
	}})
	if err != nil {
		return err
	}
	var reply wire.EnrollReply
	if err := json.Unmarshal(b, &reply); err != nil || reply.Check() != nil {
		return fault.Newf(fault.Unavailable, "%s does not answer as a hub does", u).Because(errors.Join(err, reply.Check()))
	}
	j.Enrollment = Enrollment{URL: u.String(), Hub: reply.Hub, Node: reply.Node, At: o.Now().UTC().Truncate(time.Second), Key: key, CA: o.CA}
	j.Again = reply.Again
	return SaveEnrollment(dir, j.CA, j.Enrollment)
}

// enrollTime bounds the whole exchange.
const enrollTime = 30 * time.Second

// EnrollCall is one request of an enrollment, of a node or of another peer.
type EnrollCall struct {
	Hub  *url.URL
	Path string
	CA   []byte // PEM; nil = the system's roots
	As   Peer
	// Request makes the body, for the connection that a signature in it is bound
	// to. It is encoded as JSON.
	Request func(channel []byte) any
	// Dial replaces a plain TCP dial, in tests.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Enroll sends the request and returns the body of the hub's answer with status
// 200; a refusal is an error of Peer.Refused. The request can only be written
// once the connection is there, since what is signed names it: it is made when
// the transport has one.
func Enroll(ctx context.Context, o EnrollCall) ([]byte, error) {
	u := o.Hub
	conf, err := TLSConfig(o.CA)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, enrollTime)
	defer cancel()
	body := &lazyBody{}
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		body.make = func() ([]byte, error) {
			var state *tls.ConnectionState
			if c, ok := i.Conn.(*tls.Conn); ok {
				s := c.ConnectionState()
				state = &s
			} else if u.Scheme == "https" {
				return nil, errors.New("the connection is not TLS")
			}
			channel, err := wire.Channel(state)
			if err != nil {
				return nil, err
			}
			return json.Marshal(o.Request(channel))
		}
	}})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String()+o.Path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{
		// No proxy: http.Transport uses one only where Proxy is set.
		Transport: &http.Transport{TLSClientConfig: conf, DialContext: o.Dial, DisableKeepAlives: true, DisableCompression: true,
			TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if err != nil {
		if e, ok := errors.AsType[*url.Error](err); ok {
			err = e.Err
		}
		return nil, explainTLS(u, err)
	}
	defer resp.Body.Close()
	return o.readReply(resp)
}

func explainTLS(u *url.URL, err error) error {
	e := fault.Newf(fault.Unavailable, "enrolling with %s", u).Because(err)
	var alert tls.AlertError
	switch {
	case errors.As(err, &alert) || strings.Contains(err.Error(), "protocol version"):
		return e.Hint("the hub must speak TLS 1.3")
	case errors.As(err, new(x509.UnknownAuthorityError)), errors.As(err, new(*tls.CertificateVerificationError)):
		return e.Hint("--ca FILE names the certificates that the hub is verified against")
	case errors.As(err, new(tls.RecordHeaderError)):
		return e.Hint("what answers there does not speak TLS")
	}
	return e
}

func (o *EnrollCall) readReply(resp *http.Response) ([]byte, error) {
	u := o.Hub
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return nil, fault.Newf(fault.Unavailable, "reading the answer of %s", u).Because(err)
	}
	if resp.StatusCode >= 300 && resp.StatusCode < 400 {
		return nil, fault.Newf(fault.Denied, "%s answered with a redirect, which enrollment does not follow", u).
			Hint("give the address that the hub itself listens on")
	}
	if resp.StatusCode == http.StatusOK {
		return b, nil
	}
	var r wire.EnrollRefused
	if json.Unmarshal(b, &r) != nil || r.Code == "" {
		return nil, fault.Newf(fault.Unavailable, "%s answered HTTP %d, and not as a hub does", u, resp.StatusCode)
	}
	return nil, o.As.Refused(u.String(), r.Code, r.Message)
}

// Peer is what enrolls with a hub, as the texts of refusals name it.
type Peer struct {
	Name  string // such as "node"
	Token string // the command that makes a token for one
	Join  string // the command that enrolls it as a new one
}

// AsNode is a node.
var AsNode = Peer{Name: "node", Token: "vk-hub token create", Join: "vk node join --replace"}

// Refused is a hub's refusal as an error, with what to do about it.
func (p Peer) Refused(hub string, code wire.Refusal, message string) error {
	text, hint, kind := "", "", fault.Denied
	newToken := p.Token + ", on the hub's host, prints a new one"
	again := "enroll it as a new " + p.Name + ": " + p.Join + ", with a new token"
	switch code {
	case wire.TokenInvalid:
		text, hint = "the hub did not give out this token", newToken
	case wire.TokenUsed:
		text, hint = "the token was used already", "a token enrolls one "+p.Name+": "+newToken
	case wire.TokenExpired:
		text, hint = "the token has expired", newToken
	case wire.KeyRevoked:
		text, hint = "the hub has removed the "+p.Name+" with this key", again
	case wire.NotEnrolled:
		text, hint = "the hub knows no such "+p.Name, again
	case wire.Revoked:
		text, hint = "the hub has removed this "+p.Name, again
	case wire.BadSignature:
		text = "the hub refuses the signature"
		hint = "a proxy in front of the hub must pass TLS through: terminating it breaks what is signed; or the key is not the one that was enrolled"
	case wire.NoVersion:
		text, hint, kind = "the hub speaks no protocol version that this vk speaks", "update the older of the two", fault.Unavailable
	case wire.Superseded:
		text, kind = "a newer session of this "+p.Name+" took over", fault.Unavailable
	case wire.Overloaded, wire.Shutdown, wire.Internal, wire.Silent:
		text, kind = "the hub ended it: "+string(code), fault.Unavailable
	default:
		text, kind = "the hub refuses with "+wire.Clean(string(code), 64), fault.Unavailable
	}
	if m := wire.Clean(message, wire.MaxText); m != "" {
		text += " (" + m + ")"
	}
	return fault.Newf(kind, "%s: %s", hub, text).Hint("%s", hint).Because(refusal(code))
}

// refusal is found by errors.As in what Refused returns.
type refusal wire.Refusal

func (r refusal) Error() string { return string(r) }

// RefusalOf is the code in an error of Refused, or "".
func RefusalOf(err error) wire.Refusal {
	if r, ok := errors.AsType[refusal](err); ok {
		return wire.Refusal(r)
	}
	return ""
}

// lazyBody is a request's body that is made when it is first read, which the
// transport does once it has a connection.
type lazyBody struct {
	make func() ([]byte, error)
	r    *bytes.Reader
}

func (b *lazyBody) Read(p []byte) (int, error) {
	if b.r == nil {
		if b.make == nil {
			return 0, errors.New("the body was read before there was a connection")
		}
		data, err := b.make()
		if err != nil {
			return 0, fmt.Errorf("signing the request: %w", err)
		}
		b.r = bytes.NewReader(data)
	}
	return b.r.Read(p)
}
