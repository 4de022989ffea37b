// Package qmp is a client of QEMU's monitor protocol: one JSON object a line,
// commands answered in order, events between them.
package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxLine bounds one message, in bytes.
const maxLine = 1 << 20

// Event is what QEMU tells unasked.
type Event struct {
	Name string
	Data json.RawMessage
}

// Client speaks to one QEMU. Make it with New and let Run read.
type Client struct {
	conn    io.ReadWriteCloser
	onEvent func(Event)
	ready   chan struct{} // closed when QEMU takes commands
	gone    chan struct{} // closed when Run ends

	mu    sync.Mutex
	next  int
	calls map[int]chan message
	err   error
}

type message struct {
	QMP    json.RawMessage `json:"QMP"`
	Event  string          `json:"event"`
	Data   json.RawMessage `json:"data"`
	ID     *int            `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
}

// New makes a client on conn. onEvent is called for each event, in order, by
// Run; it must not call Do.
func New(conn io.ReadWriteCloser, onEvent func(Event)) *Client {
	return &Client{conn: conn, onEvent: onEvent, ready: make(chan struct{}), gone: make(chan struct{}), calls: map[int]chan message{}}
}

// Run reads until the connection ends. A clean end gives nil.
func (c *Client) Run() error {
	err := c.read()
	c.mu.Lock()
	c.err = err
	if c.err == nil {
		c.err = io.EOF
	}
	c.mu.Unlock()
	close(c.gone)
	c.conn.Close()
	return err
}

func (c *Client) read() error {
	s := bufio.NewScanner(c.conn)
	s.Buffer(make([]byte, 0, 4096), maxLine)
	capID := -1
	for s.Scan() {
		var m message
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			return fmt.Errorf("reading from QEMU's monitor: %w", err)
		}
		switch {
		case m.QMP != nil:
			if capID >= 0 {
				return errors.New("QEMU's monitor greeted twice")
			}
			capID = 0
			if err := c.send("qmp_capabilities", nil, 0, nil); err != nil {
				return err
			}
		case m.Event != "":
			c.onEvent(Event{m.Event, m.Data})
		case m.ID != nil && *m.ID == 0:
			if m.Error != nil {
				return fmt.Errorf("QEMU's monitor: %s", m.Error.Desc)
			}
			select {
			case <-c.ready:
			default:
				close(c.ready)
			}
		case m.ID != nil:
			c.mu.Lock()
			ch := c.calls[*m.ID]
			delete(c.calls, *m.ID)
			c.mu.Unlock()
			if ch != nil {
				ch <- m
			}
		}
	}
	if err := s.Err(); !errors.Is(err, syscall.ECONNRESET) { // QEMU ended with a command unread
		return err
	}
	return nil
}

// Ready is closed once QEMU is set up and takes commands.
func (c *Client) Ready() <-chan struct{} { return c.ready }

// Gone is closed once the connection has ended.
func (c *Client) Gone() <-chan struct{} { return c.gone }

func (c *Client) send(cmd string, args any, id int, file *os.File) error {
	b, err := json.Marshal(struct {
		Execute string `json:"execute"`
		Args    any    `json:"arguments,omitempty"`
		ID      int    `json:"id"`
	}{cmd, args, id})
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if file == nil {
		_, err = c.conn.Write(b)
		return err
	}
	u, ok := c.conn.(*net.UnixConn)
	if !ok {
		return errors.New("a descriptor needs a unix socket")
	}
	_, _, err = u.WriteMsgUnix(b, unix.UnixRights(int(file.Fd())), nil)
	return err
}

// Do runs a command and returns its answer. It waits until QEMU is ready.
func (c *Client) Do(ctx context.Context, cmd string, args any) (json.RawMessage, error) {
	return c.do(ctx, cmd, args, nil)
}

// DoFile is Do that sends a descriptor along, for getfd.
func (c *Client) DoFile(ctx context.Context, cmd string, args any, f *os.File) (json.RawMessage, error) {
	return c.do(ctx, cmd, args, f)
}

func (c *Client) do(ctx context.Context, cmd string, args any, f *os.File) (json.RawMessage, error) {
	select {
	case <-c.ready:
	case <-c.gone:
		return nil, fmt.Errorf("%s: QEMU's monitor is gone: %w", cmd, c.lastErr())
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	ch := make(chan message, 1)
	c.mu.Lock()
	c.next++
	id := c.next
	c.calls[id] = ch
	err := c.send(cmd, args, id, f)
	c.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("%s: writing to QEMU's monitor: %w", cmd, err)
	}
	select {
	case m := <-ch:
		if m.Error != nil {
			return nil, fmt.Errorf("%s: QEMU says: %s", cmd, m.Error.Desc)
		}
		return m.Return, nil
	case <-c.gone:
		return nil, fmt.Errorf("%s: QEMU's monitor is gone: %w", cmd, c.lastErr())
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.calls, id)
		c.mu.Unlock()
		return nil, context.Cause(ctx)
	}
}

func (c *Client) lastErr() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}
