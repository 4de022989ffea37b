//lint:file-ignore SA1019 the design card names this path; its last release is the same code as its successor's

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
