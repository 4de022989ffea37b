package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/version"
)

// errNoAgent says that there is no session with the agent.
var errNoAgent = errors.New("supervise: no connection to the guest's agent")

// channel is the multiplexed connection to a guest's agent. The byte stream
// below is one for the machine's life; a session over it that broke (the agent
// closed it, garbage came) is replaced by a new one.
type channel struct {
	conn net.Conn
	// streams serves those that the guest opens, on each session; nil refuses
	// them. See settle.
	streams func(*yamux.Session)

	mu      sync.Mutex
	sess    *yamux.Session
	use     *keepOpen // sess's
	settled bool
}

// maxOffered bounds the streams of a guest that nobody has accepted yet, where
// it may open any; each may hold 256 KiB. More are reset.
const maxOffered = 256

// keepOpen is one session's use of the byte stream: its Close ends that use,
// not the stream, waking whoever reads or writes. A failed write does not end
// the session, because a guest that died may have left bytes to read: the
// reader's end does.
type keepOpen struct {
	net.Conn
	rmu, wmu sync.Mutex // held while reading, writing
	once     sync.Once
	closed   atomic.Bool
	dead     bool // below wmu: a write failed
}

func (k *keepOpen) Close() error {
	k.once.Do(func() {
		k.closed.Store(true)
		k.SetDeadline(time.Unix(1, 0))
	})
	return nil
}

// leave is Close that returns when nobody reads or writes for this session any
// more.
func (k *keepOpen) leave() {
	k.Close()
	k.rmu.Lock()
	k.wmu.Lock()
	//lint:ignore SA2001 taken to wait for those who hold it
	k.wmu.Unlock()
	k.rmu.Unlock()
}

func (k *keepOpen) Read(p []byte) (int, error) {
	k.rmu.Lock()
	defer k.rmu.Unlock()
	if k.closed.Load() {
		return 0, net.ErrClosed
	}
	return k.Conn.Read(p)
}

func (k *keepOpen) Write(p []byte) (int, error) {
	k.wmu.Lock()
	defer k.wmu.Unlock()
	if k.closed.Load() {
		return 0, net.ErrClosed
	}
	if !k.dead {
		n, err := k.Conn.Write(p)
		if err == nil || k.closed.Load() {
			return n, err
		}
		k.dead = true
	}
	return len(p), nil
}

func newChannel(conn net.Conn, streams func(*yamux.Session)) (*channel, error) {
	c := &channel{conn: conn, streams: streams}
	return c, c.renew()
}

// renew ends the session, if there is one, and begins another.
func (c *channel) renew() error {
	c.mu.Lock()
	old, use := c.sess, c.use
	c.mu.Unlock()
	if old != nil {
		old.Close()
		use.leave() // a session that ended by itself may still be at it
		// One that is closed by now ends the new session at once, and what has
		// ended with it is told by who watches the machine.
		if err := c.conn.SetDeadline(time.Time{}); err != nil && !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("beginning another session with the agent: %w", err)
		}
	}
	use = &keepOpen{Conn: c.conn}
	cfg := guestwire.MuxConfig()
	if c.streams != nil {
		cfg.AcceptBacklog = maxOffered
	}
	sess, err := yamux.Client(guestwire.JoinFrames(use), cfg)
	if err != nil {
		return fmt.Errorf("beginning a session with the agent: %w", err)
	}
	c.mu.Lock()
	c.sess, c.use = sess, use
	settled := c.settled
	c.mu.Unlock()
	if settled {
		c.greet(sess)
	}
	return nil
}

// settle says what becomes of streams that the guest opens, now and on later
// sessions. Before it nothing but our own agent runs in the guest, which opens
// none; and what is said of this would stay with the saved state of a guest that
// becomes a template for others.
func (c *channel) settle() {
	c.mu.Lock()
	sess, was := c.sess, c.settled
	c.settled = true
	c.mu.Unlock()
	if !was {
		c.greet(sess)
	}
}

func (c *channel) greet(sess *yamux.Session) {
	if c.streams != nil {
		go c.streams(sess)
		return
	}
	// A guest that opens streams all the same may not make the host hold their
	// bytes. Apart, because the guest may not read yet.
	go sess.GoAway()
}

func (c *channel) session() *yamux.Session {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess
}

// bounded runs f until it ends or ctx does. A write to a guest that does not
// read heeds no deadline once the buffers below are full; f then ends with the
// session.
func bounded(ctx context.Context, f func(ctx context.Context) error) error {
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	// f may have ended by ctx too, and knows more.
	select {
	case err := <-done:
		return err
	case <-time.After(50 * time.Millisecond):
		return context.Cause(ctx)
	}
}

// open opens a stream. It is guestclient's Opener.
func (c *channel) open(ctx context.Context) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	s, err := c.session().OpenStream()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	return &agentStream{Stream: s}, nil
}

// agentStream gives a yamux stream the half-close and close of a socket.
type agentStream struct {
	*yamux.Stream
	once sync.Once
}

// CloseWrite sends EOF; reading goes on.
func (a *agentStream) CloseWrite() error { return a.Stream.Close() }

// Close sends EOF and throws away what still comes, lest a writer in the
// guest wait for ever for a window.
func (a *agentStream) Close() error {
	err := a.Stream.Close()
	a.once.Do(func() {
		a.Stream.SetReadDeadline(time.Time{})
		go func() {
			buf := copyBuffers.Get().(*[]byte)
			defer copyBuffers.Put(buf)
			for {
				if _, err := a.Stream.Read(*buf); err != nil {
					return
				}
			}
		}()
	})
	return err
}

// client asks the agent through whatever session there is.
func (c *channel) client() *guestclient.Client { return guestclient.FromOpener(c.open) }

// contact says hello, again and again until ctx ends: a channel that refuses,
// closes or stays silent at first is one whose agent is not up yet.
func (c *channel) contact(ctx context.Context, try time.Duration) (guestwire.HelloReply, error) {
	client := c.client()
	var last error
	wait := 20 * time.Millisecond
	for {
		tctx, cancel := context.WithTimeout(ctx, try)
		type hello struct {
			r   guestwire.HelloReply
			err error
		}
		got := make(chan hello, 1)
		err := bounded(tctx, func(ctx context.Context) error {
			r, err := client.Hello(ctx)
			got <- hello{r, err}
			return err
		})
		cancel()
		var r guestwire.HelloReply
		select {
		case h := <-got:
			r, err = h.r, h.err
		default:
		}
		if err == nil || r.Build != version.Build && r.Kernel != "" {
			return r, err // another build does not become ours by asking again
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return r, fmt.Errorf("%w (last try: %w)", context.Cause(ctx), last)
		case <-time.After(wait):
		}
		wait = min(2*wait, time.Second)
		if c.session().IsClosed() || errors.Is(err, yamux.ErrRemoteGoAway) {
			if err := c.renew(); err != nil {
				return r, err
			}
		}
	}
}

// close ends the session. Its streams read what they had received, then EOF.
func (c *channel) close() { c.session().Close() }
