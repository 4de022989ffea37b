package wsx

import (
	"context"

	"nhooyr.io/websocket"
)

// WriteAny sends what Write would refuse.
func WriteAny(ctx context.Context, c *Conn, b []byte, binary bool) {
	typ := websocket.MessageText
	if binary {
		typ = websocket.MessageBinary
	}
	c.c.Write(ctx, typ, b)
}
