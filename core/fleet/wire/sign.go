package wire

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
)

// ExporterLabel is the label under which both ends of a TLS 1.3 connection
// export the ChannelLen bytes (RFC 8446, 7.5; no context) that every signature
// made on it covers. A proxy that terminates TLS has two connections, whose
// exports differ: the hub refuses the signature.
const (
	ExporterLabel = "EXPERIMENTAL-vk-fleet-node-auth"
	ChannelLen    = 32
)

// Plaintext is what stands for the export on a plain text connection to a hub
// on loopback.
var Plaintext = []byte("plaintext loopback, not bound to a channel")

// Channel is what binds a signature to a connection; a nil state is plain text.
func Channel(s *tls.ConnectionState) ([]byte, error) {
	if s == nil {
		return Plaintext, nil
	}
	if s.Version != tls.VersionTLS13 {
		return nil, fmt.Errorf("the connection speaks %s, TLS 1.3 is needed", tls.VersionName(s.Version))
	}
	return s.ExportKeyingMaterial(ExporterLabel, nil, ChannelLen)
}

// Labels begin what is signed, so that a signature for one purpose is none for
// another. No label is a prefix of another one.
const (
	labelAuth     = "vk-fleet node-auth v1"
	labelEnroll   = "vk-fleet enroll v1"
	labelDownload = "vk-fleet release-download v1"
	labelTools    = "vk-fleet tools-download v1"
	labelRelay    = "vk-fleet gitlab-enroll v1"
	labelRequest  = "vk-fleet client-request v1"
	labelRelease  = "vk-fleet release v1" // by a release key, over a binary's sha256 and version
)

// signed builds what is signed: the label, then numbers as big-endian u64, and
// parts of variable length after their length as such a number.
type signed []byte

func begin(label string) signed { return signed(label) }

func (s signed) num(n uint64) signed { return binary.BigEndian.AppendUint64(s, n) }
func (s signed) part(b []byte) signed {
	return append(s.num(uint64(len(b))), b...)
}

// AuthPayload is what a node signs to open a session. It fails on a message
// that fails its Check.
func AuthPayload(h *Hello, c *Challenge, channel []byte) ([]byte, error) {
	if err := h.Check(); err != nil {
		return nil, err
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	nonce, err := ParseHex("nonce", c.Nonce, NonceLen)
	if err != nil {
		return nil, err
	}
	return begin(labelAuth).part(nonce).part([]byte(h.Node)).part([]byte(h.Incarnation)).
		num(uint64(h.Versions.Min)).num(uint64(h.Versions.Max)).
		num(uint64(c.Versions.Min)).num(uint64(c.Versions.Max)).
		num(uint64(c.Version)).part(channel), nil
}

// EnrollPayload is what a node signs to enroll: that it holds the key, for this
// token, on this connection.
func EnrollPayload(token string, publicKey, channel []byte) []byte {
	return begin(labelEnroll).part([]byte(token)).part(publicKey).part(channel)
}

// RelayEnrollPayload is what a relay signs to enroll.
func RelayEnrollPayload(token string, publicKey, channel []byte) []byte {
	return begin(labelRelay).part([]byte(token)).part(publicKey).part(channel)
}

// RequestPayload is what a relay signs of a client API request: its ID, the
// method, path and query, the body's sha256, the time and the connection's
// export.
func RequestPayload(relay, method, target string, body []byte, unix int64, channel []byte) []byte {
	return begin(labelRequest).part([]byte(relay)).part([]byte(method)).part([]byte(target)).part(body).num(uint64(unix)).part(channel)
}

// DownloadMaxSkewSecs is how far a download's or a request's time may be from the hub's clock.
const DownloadMaxSkewSecs = 300

// Headers of a signed download.
const (
	HeaderNode      = "vk-node"
	HeaderTime      = "vk-time" // Unix seconds, decimal
	HeaderSignature = "vk-signature"
)

// ReleasePayload is what a node signs to download a release.
func ReleasePayload(node string, digest []byte, unix int64, channel []byte) []byte {
	return download(labelDownload, node, digest, unix, channel)
}

// ToolsPayload is what a node signs to download a tools definition.
func ToolsPayload(node string, digest []byte, unix int64, channel []byte) []byte {
	return download(labelTools, node, digest, unix, channel)
}

// ReleaseKeyPayload is what a release key signs, offline: a binary's sha256 and
// its version.
func ReleaseKeyPayload(digest []byte, version string) []byte {
	return begin(labelRelease).part(digest).part([]byte(version))
}

func download(label, node string, digest []byte, unix int64, channel []byte) []byte {
	return begin(label).part([]byte(node)).part(digest).num(uint64(unix)).part(channel)
}
