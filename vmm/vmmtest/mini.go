package vmmtest

import (
	"bufio"
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// MiniAgent is what the suite talks to, for the Fake; testinit is the same for
// real guests. It reads one command a line from the control channel:
//
//	echo TEXT   answers the line
//	say TEXT    writes TEXT to the console, answers "said"
//	keep WORD   remembers WORD, answers "kept"; recall answers the word
//	flood N     writes N KiB to the console, answers "flooded"
//	dump N      writes N bytes
//	poweroff, reboot, panic
//	hang        answers "hanging" and nothing ever after
func MiniAgent(g *Guest) {
	in := bufio.NewReader(g.Control)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		line = strings.TrimSpace(line)
		cmd, arg, _ := strings.Cut(line, " ")
		n, _ := strconv.Atoi(arg)
		switch cmd {
		case "echo":
			fmt.Fprintf(g.Control, "%s\n", line)
		case "say":
			fmt.Fprintf(g.Console(), "%s\r\n", arg)
			fmt.Fprintln(g.Control, "said")
		case "keep":
			g.setWord(arg)
			fmt.Fprintln(g.Control, "kept")
		case "recall":
			fmt.Fprintln(g.Control, g.word())
		case "flood":
			g.Flood(int64(n) << 10)
			fmt.Fprintln(g.Control, "flooded")
		case "dump":
			g.Control.Write(bytes.Repeat([]byte("d"), n))
		case "poweroff":
			return
		case "reboot":
			g.Reboot()
			return
		case "panic":
			g.Panic("sysrq triggered crash")
			return
		case "hang":
			fmt.Fprintln(g.Control, "hanging")
			<-g.Over()
			return
		default:
			fmt.Fprintf(g.Control, "unknown %q\n", cmd)
		}
	}
}

func (g *Guest) setWord(w string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.memory = w
}

func (g *Guest) word() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.memory
}
