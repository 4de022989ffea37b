package supervise

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
)

// What a guest may ask of its host
//
// A guest whose Spec.ServiceExec is on may open streams, each with one
// guestwire.Service: an exec, or a stdio stream of one, in a service of the same
// job. Nothing else is answered. The bytes that follow go to the service's own
// agent as they are, so what a hostile guest can say there is what root of the
// job could do in the service anyway.

const (
	// maxServiceStreams bounds the streams that are served or refused at one
	// time: those of the execs that are allowed, and a few to say no on. While
	// there are as many, none is accepted, and channel's maxOffered resets the
	// rest.
	maxServiceStreams = 4*guestwire.MaxServiceExecs + 8
	// serviceHeader is how long a stream may take to say what it is.
	serviceHeader = 10 * time.Second
	// refusalLimit is how long a guest may take to hear that it is refused.
	refusalLimit = 10 * time.Second
)

// serviceRequests serves the streams that the guest opens on a session until
// that ends.
func (s *supervisor) serviceRequests(sess *yamux.Session) {
	slots := make(chan struct{}, maxServiceStreams)
	for {
		slots <- struct{}{}
		st, err := sess.AcceptStream()
		if err != nil {
			return
		}
		go func() {
			defer func() { <-slots }()
			s.serviceRequest(&agentStream{Stream: st})
		}()
	}
}

// serviceRequest serves one stream.
func (s *supervisor) serviceRequest(st *agentStream) {
	defer st.Close()
	st.SetReadDeadline(time.Now().Add(serviceHeader))
	var h guestwire.Header
	var m guestwire.Service
	err := guestwire.Recv(st, &h)
	if err == nil && h.Op != guestwire.OpService {
		err = fmt.Errorf("op %q is not for guests", h.Op)
	}
	if err == nil {
		err = json.Unmarshal(h.Body, &m)
	}
	if err == nil && m.Request.Op != guestwire.OpExec && m.Request.Op != guestwire.OpStdio {
		err = fmt.Errorf("op %q is not for services", m.Request.Op)
	}
	if err != nil {
		s.log.Debug("refused a stream of the guest", "why", err)
		refuse(st)
		return
	}
	v, why := s.serviceNamed(m.Name)
	if why == "" && m.Request.Op == guestwire.OpExec {
		if !s.serviceExecs.enter() {
			why = fmt.Sprintf("%d commands run in services already, as many as may", guestwire.MaxServiceExecs)
		} else {
			defer s.serviceExecs.leave()
		}
	}
	if why != "" {
		if m.Request.Op == guestwire.OpExec {
			st.SetWriteDeadline(time.Now().Add(refusalLimit))
			guestwire.Send(st, guestwire.ExecEvent{Exited: true, Code: 125, Err: why})
		}
		refuse(st)
		return
	}
	st.SetReadDeadline(time.Time{})
	ctx, cancel := contextFor(serviceHeader)
	conn, err := v.client.connect(ctx)
	cancel()
	if err == nil {
		defer conn.Close()
		if err = guestwire.Send(conn, request{Op: opGuest}); err == nil {
			err = guestwire.Send(conn, m.Request)
		}
	}
	if err != nil {
		if m.Request.Op == guestwire.OpExec {
			guestwire.Send(st, guestwire.ExecEvent{Exited: true, Code: 125, Err: fmt.Sprintf("service %s does not run any more", v.spec.Spec.ID)})
		}
		refuse(st)
		return
	}
	splice(conn, st)
	outlast(st)
}

// refuse ends a stream.
func refuse(st *agentStream) {
	st.CloseWrite()
	st.SetReadDeadline(time.Time{})
	outlast(st)
}

// outlast takes in what the guest still sends until it closes its side: bytes
// that nobody reads stay in memory as long as the session. Who never closes
// keeps its slot, and so runs out of them.
func outlast(st *agentStream) { io.Copy(io.Discard, st.Stream) }

// serviceNamed finds a service by any of its names, or says why there is none.
func (s *supervisor) serviceNamed(name string) (*service, string) {
	var known []string
	for _, v := range s.services {
		if !v.spec.named(name) {
			known = append(known, v.spec.Spec.ID)
			continue
		}
		select {
		case <-v.started:
		default:
			return nil, fmt.Sprintf("service %s is still starting", v.spec.Spec.ID)
		}
		if v.client == nil {
			return nil, fmt.Sprintf("service %s could not be started", v.spec.Spec.ID)
		}
		if x := s.board.get().Services[v.n].Exit; x != nil {
			return nil, fmt.Sprintf("service %s has ended: %s", v.spec.Spec.ID, x.words())
		}
		return v, ""
	}
	return nil, fmt.Sprintf("this job has no service %.64q; it has: %s", name, strings.Join(known, ", "))
}

// limiter counts up to guestwire.MaxServiceExecs.
type limiter struct {
	mu sync.Mutex
	n  int
}

func (l *limiter) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == guestwire.MaxServiceExecs {
		return false
	}
	l.n++
	return true
}

func (l *limiter) leave() { l.mu.Lock(); l.n--; l.mu.Unlock() }

// Service is the supervisor of a service of this job, by any of its names.
func (c *Client) Service(name string) (*Client, error) {
	spec, err := ReadSpec(c.dir)
	if err != nil {
		return nil, err
	}
	dir, err := spec.ServiceDir(c.dir, name)
	if err != nil {
		return nil, err
	}
	return Dial(dir)
}

// ServiceDir is the directory of a service, by any of its names, in the guest's.
func (s Spec) ServiceDir(jobdir, name string) (string, error) {
	var known []string
	for _, v := range s.Services {
		if v.named(name) {
			return ServiceDir(jobdir, v.Spec.ID), nil
		}
		known = append(known, v.Spec.ID)
	}
	if known == nil {
		return "", fault.Newf(fault.NotFound, "guest %s has no services", s.Name)
	}
	return "", fault.Newf(fault.NotFound, "guest %s has no service %q", s.Name, name).Hint("it has: %s", strings.Join(known, ", "))
}

// named tells whether a service goes by this name.
func (v Service) named(name string) bool {
	return v.Spec.ID == name || slices.ContainsFunc(v.Spec.Net.Names, func(n string) bool { return strings.EqualFold(n, name) })
}
