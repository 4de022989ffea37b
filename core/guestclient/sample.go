package guestclient

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"

	"virtkit/core/guestwire"
)

// Sample asks the agent for a sample of the guest (core/atop), of at most limit
// bytes. Setup.Record must have been set.
func (c *Client) Sample(ctx context.Context, limit int64) ([]byte, error) {
	var out []byte
	err := c.with(ctx, func(conn net.Conn) error {
		if err := guestwire.Open(conn, guestwire.OpSample, nil); err != nil {
			return err
		}
		if err := recvReply(conn, guestwire.OpSample); err != nil {
			return err
		}
		b := bytes.NewBuffer(make([]byte, 0, 64<<10)) // most are smaller
		if _, err := b.ReadFrom(io.LimitReader(conn, limit+1)); err != nil {
			return err
		}
		if out = b.Bytes(); int64(len(out)) > limit {
			return fmt.Errorf("the guest's sample is over the limit of %d bytes", limit)
		}
		return nil
	})
	return out, err
}
