package agent

import (
	"fmt"
	"net"
	"os"

	"virtkit/core/guestwire"
)

// Where programs of the guest ask for commands in the job's services.
const (
	servicesSocket = "/run/vk/services.sock" // there when they may
	servicesWord   = "/run/vk/services"      // guestwire.ServiceExec, in a word
)

// maxAsking bounds the connections to servicesSocket; the host allows fewer.
const maxAsking = 64

// stepServices opens the way to the job's services.
func (g *guest) stepServices(m *guestwire.Setup) error {
	if err := os.WriteFile(servicesWord, []byte(m.Services+"\n"), 0o644); err != nil {
		return err
	}
	if m.Services != guestwire.ServiceExecOn {
		return nil
	}
	ln, err := net.Listen("unix", servicesSocket)
	if err != nil {
		return fmt.Errorf("listening for commands in services: %w", err)
	}
	// The job's script may be any user, and may act as any in a service.
	if err := os.Chmod(servicesSocket, 0o666); err != nil {
		ln.Close()
		return err
	}
	g.srv.guard("services", func() { g.srv.relay(ln) })
	return nil
}

// relay joins each connection of ln to a stream to the host, which decides what
// it may ask.
func (s *server) relay(ln net.Listener) {
	slots := make(chan struct{}, maxAsking)
	for {
		slots <- struct{}{}
		c, err := ln.Accept()
		if err != nil {
			s.logf("services: %v", err)
			return
		}
		s.guard("service", func() {
			defer func() { <-slots }()
			defer c.Close()
			s.mu.Lock()
			sess := s.sess
			s.mu.Unlock()
			if sess == nil {
				return
			}
			st, err := sess.OpenStream()
			if err != nil {
				s.logf("services: %v", err)
				return
			}
			splice(st, c)
		})
	}
}
