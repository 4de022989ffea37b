// Command sickagent is a guest's agent that behaves badly at first, for tests
// of how a host bears it. What it does is the word after the last "sick=" of its
// own file, put there by the test:
//
//	sick=silent      never opens the channel
//	sick=late:SECS   sleeps before it becomes the agent
//	sick=closing     closes the channel after the host's first words
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"virtkit/agent"
	"virtkit/agent/mount"
	"virtkit/core/guestwire"
)

func main() {
	if os.Getpid() == 1 {
		beSick()
	}
	os.Exit(agent.Main(context.Background(), os.Args, os.Stdin, os.Stdout, os.Stderr))
}

func beSick() {
	self, err := os.ReadFile("/init")
	if err != nil {
		fmt.Println("sickagent:", err)
		return
	}
	// In two parts, lest the program itself holds the words.
	what := string(self[bytes.LastIndex(self, []byte("sick"+"="))+5:])
	fmt.Println("sickagent:", what)
	secs, late := strings.CutPrefix(what, "late:")
	switch {
	case what == "silent":
		for {
			time.Sleep(time.Hour)
		}
	case late:
		n, err := strconv.Atoi(secs)
		if err != nil {
			fmt.Println("sickagent:", err)
		}
		time.Sleep(time.Duration(n) * time.Second)
	case what == "closing":
		if err := hearAndClose(); err != nil {
			fmt.Println("sickagent:", err)
		}
	}
}

// hearAndClose opens the channel, reads what the host says first, and closes.
func hearAndClose() error {
	if err := mount.Early(); err != nil {
		fmt.Println("sickagent:", err)
	}
	if err := mount.Modules("order"); err != nil {
		fmt.Println("sickagent:", err)
	}
	buf := make([]byte, 4096)
	for range 600 {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, f := range names {
			b, _ := os.ReadFile(f)
			if strings.TrimSpace(string(b)) != guestwire.PortName {
				continue
			}
			port, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(f)), os.O_RDWR, 0)
			if err != nil {
				break
			}
			n, _ := port.Read(buf)
			port.Close()
			if n > 0 {
				fmt.Println("sickagent: closed after", n, "bytes")
				return nil
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("the host said nothing")
}
