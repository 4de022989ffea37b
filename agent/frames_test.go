package agent_test

import (
	"context"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/agent"
	"virtkit/agent/agenttest"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

// tallied counts what is written to it.
type tallied struct {
	net.Conn
	writes atomic.Int32
}

func (c *tallied) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// Each write of an agent is an exit of its guest and wakes the host: that
// streams were accepted, how the program ended and that they end are one.
func TestShortExecIsAnsweredAtOnce(t *testing.T) {
	ours, theirs := agenttest.Socketpair(t)
	conn, err := net.FileConn(theirs)
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	count := &tallied{Conn: conn}
	ln := &once{conn: make(chan net.Conn, 1), done: make(chan struct{})}
	ln.conn <- count
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- agent.Serve(ctx, ln, agent.Options{Log: os.Stderr}) }()
	c := guestclient.New(ours)
	t.Cleanup(func() {
		c.Close()
		cancel()
		<-served
	})
	// Now and then a busy machine has the start told, or the end of the output
	// before the program's.
	eventually(t, "a program that prints nothing is answered by one write", func() bool {
		before := count.writes.Load()
		res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{Out: io.Discard}, nil)
		if err != nil || res.Code != 0 {
			t.Fatalf("Exec = %+v, %v", res, err)
		}
		return count.writes.Load() == before+1
	})
}

// What is longer than the window that a stream begins with needs the frame that
// accepts it.
func TestLongRequests(t *testing.T) {
	c := agenttest.Start(t).Client
	long := strings.Repeat("x", 100<<10)
	res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true", long, long, long, long, long}}, guestclient.Stdio{}, nil)
	if err != nil || res.Code != 0 {
		t.Errorf("long arguments: %+v, %v", res, err)
	}
	silent := guestwire.ExecRequest{Argv: []string{"sh", "-c", "test $(wc -c) = 3000000"}}
	if res, err := c.Exec(ctxFor(t), silent, guestclient.Stdio{In: strings.NewReader(strings.Repeat("y", 3000000))}, nil); err != nil || res.Code != 0 {
		t.Errorf("long input: %+v, %v", res, err)
	}
}

// A program that ends its output and goes on has its reader told so.
func TestOutputEndsBeforeItsProgram(t *testing.T) {
	c := agenttest.Start(t).Client
	ctx := ctxFor(t)
	req := guestwire.ExecRequest{ID: guestclient.NewExecID(), Argv: []string{"sh", "-c", "echo out; exec >&-; exec sleep 1000"}, Stdout: true}
	open := func(op string, body any) net.Conn {
		conn, err := c.Open(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetDeadline(time.Now().Add(time.Minute))
		if err := guestwire.Open(conn, op, body); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	ctl := open(guestwire.OpExec, req)
	out := open(guestwire.OpStdio, guestwire.Stdio{ID: req.ID, FD: 1})
	if b, err := io.ReadAll(out); string(b) != "out\n" || err != nil {
		t.Errorf("output %q, %v", b, err)
	}
	if err := guestwire.Send(ctl, guestwire.ExecControl{Kill: true}); err != nil {
		t.Fatal(err)
	}
	for {
		var ev guestwire.ExecEvent
		if err := guestwire.Recv(ctl, &ev); err != nil {
			t.Fatal(err)
		}
		if ev.Exited {
			if ev.Signal != 9 {
				t.Errorf("it ended with %+v", ev)
			}
			return
		}
	}
}
