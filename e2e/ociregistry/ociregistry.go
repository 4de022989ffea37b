// Package ociregistry runs Debian's docker-registry, the OCI registry that tests
// and showings of virtkit push to and pull from.
package ociregistry

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"virtkit/core/fault"
)

// Program is the registry's name on PATH.
const Program = "docker-registry"

// Server is a registry that runs.
type Server struct {
	Addr string // host:port of plain HTTP on loopback
	cmd  *exec.Cmd
	said bytes.Buffer
}

// Start runs bin with its files below dir, and returns once it answers, within a
// minute. It ends with this process, or by Close. A bin of "" is looked for on
// PATH; fault.NotFound when it is not there.
func Start(ctx context.Context, bin, dir string) (*Server, error) {
	if bin == "" {
		var err error
		if bin, err = exec.LookPath(Program); err != nil {
			return nil, fault.New(fault.NotFound, "no "+Program+" on PATH").Because(err).Hint("apt-get install docker-registry")
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &Server{Addr: l.Addr().String()}
	l.Close() // the program takes no descriptor
	conf := filepath.Join(dir, "registry.yml")
	body := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %q}}\nhttp: {addr: %q}\n", filepath.Join(dir, "registry"), s.Addr)
	if err := os.WriteFile(conf, []byte(body), 0o600); err != nil {
		return nil, err
	}
	s.cmd = exec.Command(bin, "serve", conf)
	s.cmd.Stdout, s.cmd.Stderr = &s.said, &s.said
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", bin, err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.Addr+"/v2/", nil)
		if err != nil {
			s.Close()
			return nil, err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			resp.Body.Close()
			return s, nil
		}
		select {
		case <-ctx.Done():
			s.Close()
			return nil, fmt.Errorf("%s does not answer: %w\n%s", bin, err, s.said.Bytes())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Close ends the registry; its files stay.
func (s *Server) Close() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}
