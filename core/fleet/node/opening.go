package node

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"fmt"
	"time"

	"virtkit/core/fleet/wire"
)

// Opening is what a client of a hub, node or relay, says of itself as it opens
// a session (fleet-design, "Hub ↔ node protocol").
type Opening struct {
	As          Peer
	ID          string // that the hub gave it
	Incarnation string
	VK          string
	Key         ed25519.PrivateKey
	Versions    wire.Range
	URL         string // of its hub, for texts
	Hub         string // ID of the hub it is enrolled with
}

// On opens the session: the client proves on this very connection that it
// holds its key. It returns the version that both speak.
func (o *Opening) On(ctx context.Context, conn Conn) (version int, w *wire.Welcome, err error) {
	hello := &wire.Hello{Node: o.ID, Incarnation: o.Incarnation, Versions: o.Versions, VK: o.VK}
	if err := say(ctx, conn, 0, hello); err != nil {
		return 0, nil, err
	}
	challenge, err := step[*wire.Challenge](ctx, o, conn, 0)
	if err != nil {
		return 0, nil, err
	}
	if v, ok := wire.Negotiate(o.Versions, challenge.Versions); !ok || v != challenge.Version {
		return 0, nil, fmt.Errorf("%w: the hub picked version %d; it speaks %v, this %s %v", wire.ErrProtocol, challenge.Version, challenge.Versions, o.As.Name, o.Versions)
	}
	channel, err := conn.Channel()
	if err != nil {
		return 0, nil, err
	}
	payload, err := wire.AuthPayload(hello, challenge, channel)
	if err != nil {
		return 0, nil, err
	}
	if err := say(ctx, conn, 0, &wire.Auth{Signature: hex.EncodeToString(ed25519.Sign(o.Key, payload))}); err != nil {
		return 0, nil, err
	}
	welcome, err := step[*wire.Welcome](ctx, o, conn, challenge.Version)
	if err != nil {
		return 0, nil, err
	}
	if welcome.Hub != "" && welcome.Hub != o.Hub {
		// What a client keeps, generations, commands, jobs, counts for one hub:
		// nothing of this one may be applied to what was kept for the other.
		return 0, nil, fmt.Errorf("%w: this is hub %s, the %s is enrolled with hub %s", wire.ErrProtocol, welcome.Hub, o.As.Name, o.Hub)
	}
	return challenge.Version, welcome, nil
}

// Ended is the error of a message by which the hub ends the session, nil for
// any other.
func (o *Opening) Ended(m wire.Message) error {
	switch m := m.(type) {
	case *wire.Refused:
		return o.As.Refused(o.URL, m.Code, m.Message)
	case *wire.Closing:
		return o.As.Refused(o.URL, m.Code, m.Message)
	}
	return nil
}

// step is one message of the handshake; refused is an error.
func step[T wire.Message](ctx context.Context, o *Opening, conn Conn, version int) (m T, err error) {
	ctx, cancel := context.WithTimeout(ctx, wire.HandshakeStep)
	defer cancel()
	data, err := conn.Read(ctx)
	if err != nil {
		return m, err
	}
	got, err := wire.Decode(wire.FromHub, version, data)
	if err != nil {
		return m, err
	}
	if err := o.Ended(got); err != nil {
		return m, err
	}
	m, ok := got.(T)
	if !ok {
		return m, fmt.Errorf("%w: the hub sent %T, %T was to come", wire.ErrProtocol, got, m)
	}
	return m, nil
}

// say sends a message of the handshake.
func say(ctx context.Context, conn Conn, version int, m wire.Message) error {
	data, err := wire.Encode(version, m)
	if err != nil {
		return err
	}
	return Write(ctx, conn, 0, data)
}

// Write sends one message of a session whose heartbeat is every so often. The
// error of a connection that is broken has errWrite in its chain.
func Write(ctx context.Context, conn Conn, every time.Duration, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, max(wire.HandshakeStep, wire.MissedBeats*every))
	defer cancel()
	if err := conn.Write(ctx, data); err != nil {
		return fmt.Errorf("%w: %w", errWrite, err)
	}
	return nil
}
