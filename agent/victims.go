package agent

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
)

// victims reads from the kernel's log whom it killed for memory.
func (s *server) victims() (guestwire.Victims, error) {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return guestwire.Victims{}, &os.PathError{Op: "open", Path: "/dev/kmsg", Err: err}
	}
	defer unix.Close(fd)
	return readVictims(kmsg(fd))
}

// kmsg is /dev/kmsg, of which each read is one record.
type kmsg int

func (k kmsg) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(k), p)
		switch err {
		case nil:
			return n, nil
		case unix.EINTR, unix.EPIPE: // EPIPE: records were overwritten, the next ones are there
		case unix.EAGAIN:
			return 0, io.EOF
		default:
			return 0, err
		}
	}
}

// readVictims reads records until io.EOF, in the format of the kernel's
// Documentation/ABI/testing/dev-kmsg: "priority,sequence,microseconds,flags;text".
func readVictims(r io.Reader) (guestwire.Victims, error) {
	var v guestwire.Victims
	buf := make([]byte, 8<<10) // the kernel's limit on a record is below
	for {
		n, err := r.Read(buf)
		if errors.Is(err, io.EOF) {
			return v, nil
		}
		if err != nil {
			return v, err
		}
		head, text, ok := bytes.Cut(buf[:n], []byte(";"))
		if !ok {
			continue
		}
		text, _, _ = bytes.Cut(text, []byte("\n"))
		f := strings.Split(string(head), ",")
		prio, perr := strconv.Atoi(f[0])
		// A facility other than the kernel's is a program's that writes here.
		if perr != nil || prio>>3 != 0 || len(f) < 3 {
			continue
		}
		one, ok := parseVictim(string(text))
		if !ok {
			continue
		}
		us, _ := strconv.ParseInt(f[2], 10, 64)
		one.UptimeMS = us / 1000
		if v.Total++; len(v.List) < guestwire.MaxVictims {
			v.List = append(v.List, one)
		}
	}
}

// parseVictim reads the line with which mm/oom_kill.c tells of a kill, of the
// whole machine or of a control group.
func parseVictim(text string) (v guestwire.Victim, ok bool) {
	_, rest, ok := strings.Cut(text, "Killed process ")
	if !ok {
		return v, false
	}
	pid, rest, ok := strings.Cut(rest, " (")
	n, err := strconv.Atoi(pid)
	if !ok || err != nil {
		return v, false
	}
	name, rest, ok := strings.Cut(rest, ") total-vm:") // a name may have parentheses
	if !ok {
		return v, false
	}
	_, rest, ok = strings.Cut(rest, "anon-rss:")
	kib, _, ok2 := strings.Cut(rest, "kB")
	rss, err := strconv.ParseInt(kib, 10, 64)
	if !ok || !ok2 || err != nil {
		return v, false
	}
	return guestwire.Victim{Name: name, PID: n, RSS: rss << 10}, true
}
