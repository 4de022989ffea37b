package qmp_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/vmm/internal/qmp"
)

// monitor answers as QEMU's does; cmds not in answers get an error.
func monitor(c net.Conn, answers map[string]string) {
	fmt.Fprint(c, `{"QMP": {"version": {}, "capabilities": []}}`+"\r\n")
	s := bufio.NewScanner(c)
	for s.Scan() {
		var m struct {
			Execute string
			ID      int
		}
		if json.Unmarshal(s.Bytes(), &m) != nil {
			return
		}
		a, ok := answers[m.Execute]
		switch {
		case m.Execute == "qmp_capabilities":
			a, ok = `{}`, true
		case m.Execute == "quit":
			c.Close()
			return
		}
		if ok {
			fmt.Fprintf(c, `{"event": "BETWEEN", "data": {"of": %q}}`+"\r\n"+`{"return": %s, "id": %d}`+"\r\n", m.Execute, a, m.ID)
		} else {
			fmt.Fprintf(c, `{"error": {"class": "CommandNotFound", "desc": "no %s"}, "id": %d}`+"\r\n", m.Execute, m.ID)
		}
	}
}

func TestClient(t *testing.T) {
	ours, theirs := net.Pipe()
	go monitor(theirs, map[string]string{"query-status": `{"running": true}`})
	var mu sync.Mutex
	var events []string
	c := qmp.New(ours, func(e qmp.Event) { mu.Lock(); defer mu.Unlock(); events = append(events, e.Name) })
	ended := make(chan error, 1)
	go func() { ended <- c.Run() }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 3 {
		got, err := c.Do(ctx, "query-status", nil)
		if err != nil || string(got) != `{"running": true}` {
			t.Fatalf("%s, %v", got, err)
		}
	}
	if _, err := c.Do(ctx, "nonsense", map[string]int{"a": 1}); err == nil || !strings.Contains(err.Error(), "no nonsense") {
		t.Errorf("error %v", err)
	}
	if _, err := c.Do(ctx, "quit", nil); !errors.Is(err, io.EOF) {
		t.Errorf("quit: %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	if _, err := c.Do(ctx, "query-status", nil); err == nil {
		t.Error("a command ran on a monitor that is gone")
	}
	mu.Lock()
	defer mu.Unlock()
	if len(events) < 4 {
		t.Errorf("events %v", events)
	}
}

func TestDoGivesUp(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	go io.Copy(io.Discard, theirs)
	c := qmp.New(ours, func(qmp.Event) {})
	go c.Run()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.Do(ctx, "query-status", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// garbage is a connection that reads what it was given, then ends.
type garbage struct {
	io.Reader
	io.Writer
}

func (garbage) Close() error { return nil }

func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"QMP": {}}` + "\n" + `{"return": {}, "id": 0}` + "\n" + `{"event": "X"}`))
	f.Add([]byte("\x00\n{}\n[]\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := qmp.New(garbage{strings.NewReader(string(b)), io.Discard}, func(e qmp.Event) {
			if e.Name == "" {
				t.Error("an event without a name")
			}
		})
		c.Run()
		select {
		case <-c.Gone():
		default:
			t.Error("Run ended and Gone is open")
		}
	})
}
