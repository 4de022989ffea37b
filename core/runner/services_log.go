package runner

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/fsx"
	"virtkit/core/supervise"
	"virtkit/core/ui"
)

// VarDebugServices has the logs of services shown in the job's trace, as they
// come, each line after "[service:NAME] ".
const VarDebugServices = "CI_DEBUG_SERVICES"

// logPause is how often the logs of services are looked at while a stage runs.
const logPause = 200 * time.Millisecond

// debugServices reads the job's wish; a value that is none is warned of.
func (r *Runner) debugServices(c *execdrv.Call) bool {
	v := strings.TrimSpace(c.Var(VarDebugServices))
	if v == "" {
		return false
	}
	on, err := strconv.ParseBool(v)
	if err != nil {
		r.warn(fmt.Sprintf("%s is %q, expected true or false: the logs of services are not shown", VarDebugServices, c.Var(VarDebugServices)))
	}
	return on
}

// followLogs shows the services' logs from where the call before left off, until
// the returned function is called.
func (r *Runner) followLogs(c *execdrv.Call, rec Record) (stop func()) {
	if len(rec.Services) == 0 || !r.debugServices(c) {
		return func() {}
	}
	var logs []*serviceLog
	for _, s := range rec.Services {
		logs = append(logs, openLog(r.Machines.Dir(rec.ID), s.Name))
	}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			for _, l := range logs {
				l.show(r, false)
			}
			select {
			case <-ctx.Done():
			case <-time.After(logPause):
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
		for _, l := range logs {
			l.show(r, true)
			if err := l.close(); err != nil {
				r.warn("part of the log of service " + l.name + " may be shown again: " + err.Error())
			}
		}
	}
}

// shownFile holds, in a service's directory, how far its log was shown.
const shownFile = "log-shown.json"

// logMark is a place in a log that is replaced by a shorter one when it is full.
type logMark struct {
	Inode  uint64 `json:"inode"`
	Offset int64  `json:"offset"`
}

// serviceLog shows one log.
type serviceLog struct {
	name, dir string
	at        logMark
	f         *os.File
	rest      []byte // an unfinished line
	err       error
}

func openLog(jobdir, name string) *serviceLog {
	l := &serviceLog{name: name, dir: supervise.ServiceDir(jobdir, name)}
	b, err := os.ReadFile(filepath.Join(l.dir, shownFile))
	if err == nil {
		err = json.Unmarshal(b, &l.at)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		l.err = err
	}
	return l
}

// show writes the lines that are new; with all, the unfinished one as well.
func (l *serviceLog) show(r *Runner, all bool) {
	for l.read() {
	}
	end := bytes.LastIndexByte(l.rest, '\n') + 1
	if all {
		end = len(l.rest)
	}
	text := string(l.rest[:end])
	l.rest = l.rest[end:]
	if text == "" {
		return
	}
	var b strings.Builder
	for line := range strings.SplitSeq(strings.TrimSuffix(text, "\n"), "\n") {
		fmt.Fprintf(&b, "[service:%s] %s\n", l.name, ui.CleanLine(strings.TrimSuffix(line, "\r")))
	}
	r.write(b.String())
}

// read takes in what is new; true when there may be more.
func (l *serviceLog) read() bool {
	path := filepath.Join(l.dir, supervise.CommandFile)
	now := inodeOf(path)
	if l.f == nil {
		if now == 0 {
			return false
		}
		f, err := os.Open(path)
		if err != nil {
			return false
		}
		l.f = f
		if now != l.at.Inode {
			l.at = logMark{Inode: now}
		}
	}
	b, err := io.ReadAll(io.NewSectionReader(l.f, l.at.Offset, maxShown))
	if err != nil {
		l.err = err
	}
	l.rest = append(l.rest, b...)
	l.at.Offset += int64(len(b))
	if len(b) < maxShown && now != 0 && now != l.at.Inode { // replaced, and read to its end
		l.f.Close()
		l.f = nil
		return true
	}
	return len(b) == maxShown
}

// maxShown is how much of a log is read at once.
const maxShown = 1 << 20

func inodeOf(path string) uint64 {
	fi, err := os.Stat(path)
	if err != nil {
		return 0
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

// close notes how far the log was shown.
func (l *serviceLog) close() error {
	if l.f != nil {
		l.f.Close()
	}
	b, err := json.Marshal(l.at)
	if err == nil && l.at.Inode != 0 {
		err = fsx.WriteFile(filepath.Join(l.dir, shownFile), b, 0o600)
	}
	return errors.Join(l.err, err)
}
