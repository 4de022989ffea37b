package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/agent/mount"
	"virtkit/agent/netup"
	"virtkit/agent/reap"
	"virtkit/core/guestwire"
)

// binDir is where the agent is found in the job's root.
const binDir = "/run/vk/bin"

// Limits of a guest's programs where the kernel's own are too small for what
// CI jobs run. The soft one stays moderate, because some programs close every
// descriptor up to it.
const (
	nofileSoft = 65536
	nofileHard = 1048576
)

// guest is PID 1's state. Its exported methods are agent.System.
type guest struct {
	console *os.File
	reaper  *reap.Reaper
	srv     *server
	kernel  func() error // waits for mountKernel

	mu      sync.Mutex
	net     *guestwire.Net // as last applied
	upperFD int            // keeps the writable layer reachable; -1 = tmpfs or none
	ending  bool
}

// runInit is PID 1. It never returns.
func runInit() {
	g := &guest{console: os.Stderr, reaper: reap.New(true), upperFD: -1}
	defer func() {
		if v := recover(); v != nil {
			g.fatal(v, debug.Stack())
		}
	}()
	// One goroutine at a time: what this process does is short, and under
	// emulation processors that wake each other cost more than they gain. (A
	// stream out of a guest of two processors took a fifth less of the host's.)
	runtime.GOMAXPROCS(1)
	g.catchSignals()
	early := mount.Early()
	g.openConsole()
	g.stage("init")
	if early != nil {
		g.say("%v", early)
	}
	timer := g.checkTimer() // before anything sleeps
	if err := mount.Modules("order"); err != nil {
		g.say("%v", err)
	}
	syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: nofileSoft, Max: nofileHard})
	os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
	go g.reaper.Run()
	g.srv = newServer(Options{
		Reaper: g.reaper, System: g, LastPath: binDir, Log: g, Fatal: g.fatal,
	}, nil)
	g.srv.timerKHz = timer
	g.kernel = g.beside("kernel", g.mountKernel)
	g.listen()
}

// listen serves one session after another, for ever.
func (g *guest) listen() {
	ln, err := g.channel()
	for err != nil {
		g.say("channel: %v", err)
		time.Sleep(time.Second)
		ln, err = g.channel()
	}
	g.stage("listening")
	for {
		conn, err := ln.Accept()
		if err != nil {
			g.say("channel: %v", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		g.srv.guard("session", func() { g.srv.session(context.Background(), conn) })
	}
}

// channel opens what the kernel's command line names.
func (g *guest) channel() (net.Listener, error) {
	b, _ := os.ReadFile("/proc/cmdline")
	for _, w := range strings.Fields(string(b)) {
		if w == "vk.channel=vsock" {
			return listenVsock(guestwire.VsockPort)
		}
	}
	return &serialListener{name: guestwire.PortName, say: g.say}, nil
}

// openConsole makes the console the place where this process prints.
func (g *guest) openConsole() {
	var st unix.Stat_t
	if unix.Fstat(2, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(5, 1) {
		// The kernel has opened it for us already, by the initramfs's node.
	} else if f, err := os.OpenFile("/dev/console", os.O_WRONLY|unix.O_NOCTTY, 0); err == nil {
		g.console = f
		unix.Dup3(int(f.Fd()), 2, 0) // where the runtime reports a panic
		unix.Dup3(int(f.Fd()), 1, 0)
	}
	if null, err := os.OpenFile("/dev/null", os.O_RDWR, 0); err == nil {
		unix.Dup3(int(null.Fd()), 0, 0)
		null.Close()
	}
}

// stage tells the console how far the boot has come.
func (g *guest) stage(name string) { io.WriteString(g.console, "vk-agent: stage "+name+"\n") }

// say tells the console what went wrong.
func (g *guest) say(format string, a ...any) {
	text := strings.ReplaceAll(fmt.Sprintf(format, a...), "\n", "; ")
	io.WriteString(g.console, "vk-agent: "+text+"\n")
}

// Write is the log of the server.
func (g *guest) Write(p []byte) (int, error) { return g.console.Write(p) }

// fatal reports a panic and powers the guest off: without its agent it has no
// purpose, and a host must not wait for it.
func (g *guest) fatal(v any, stack []byte) {
	fmt.Fprintf(g.console, "vk-agent: panic: %v\n%s\n", v, stack)
	unix.Sync()
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// catchSignals keeps every signal that a process of the guest can send from
// ending PID 1. Those by which reboot(8), poweroff(8) and halt(8) of busybox
// and systemd ask for an end do end the guest, in order.
func (g *guest) catchSignals() {
	ch := make(chan os.Signal, 16)
	var all []os.Signal
	for s := 1; s < 65; s++ {
		switch s := syscall.Signal(s); s {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGCHLD, unix.SIGURG, 32, 33, 34:
			// Not to be caught, agent/reap's, or the runtime's and libc's own.
		default:
			all = append(all, s)
		}
	}
	signal.Notify(ch, all...)
	const rtmin = 34 // of libc
	go func() {
		for s := range ch {
			switch s {
			case unix.SIGTERM, unix.SIGINT, syscall.Signal(rtmin + 5):
				go g.end(true, 5*time.Second)
			case unix.SIGUSR1, unix.SIGUSR2, syscall.Signal(rtmin + 3), syscall.Signal(rtmin + 4):
				go g.end(false, 5*time.Second)
			}
		}
	}()
}

func (g *guest) end(reboot bool, grace time.Duration) {
	g.Shutdown(&guestwire.Shutdown{Reboot: reboot, Grace: grace}, func() { g.srv.lastWords(func() {}) })
}

// Resume implements System.
func (g *guest) Resume(r *guestwire.Resume) error {
	var errs []error
	if r.UnixNano > 0 {
		errs = append(errs, setClock(r.UnixNano))
	}
	if len(r.Entropy) > 0 {
		errs = append(errs, addEntropy(r.Entropy))
	}
	if r.Hostname != "" {
		errs = append(errs, setHostname(r.Hostname))
	}
	if r.MachineID != "" {
		errs = append(errs, replaceFile("/etc/machine-id", r.MachineID+"\n", 0o444))
	}
	if r.Net != nil {
		err := netup.Apply(r.Net, 2*time.Second)
		if err == nil {
			g.mu.Lock()
			g.net = r.Net
			g.mu.Unlock()
			err = writeResolv(r.Net)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Shutdown implements System.
func (g *guest) Shutdown(m *guestwire.Shutdown, reply func()) error {
	g.mu.Lock()
	if g.ending {
		g.mu.Unlock()
		return errors.New("the guest is shutting down already")
	}
	g.ending = true
	g.mu.Unlock()
	g.stage("shutdown")
	g.srv.execs.GoingDown()
	syscall.Kill(-1, syscall.SIGTERM)
	// A stopped process takes its SIGTERM only when it goes on.
	syscall.Kill(-1, syscall.SIGCONT)
	g.wait(m.Grace)
	syscall.Kill(-1, syscall.SIGKILL)
	g.wait(2 * time.Second)
	unix.Sync()
	unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	if g.upperFD >= 0 {
		// Clean, so that a guest that reboots need not replay its journal.
		unix.Mount("", fmt.Sprintf("/proc/self/fd/%d", g.upperFD), "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	unix.Sync()
	reply()
	cmd := unix.LINUX_REBOOT_CMD_POWER_OFF
	if m.Reboot {
		cmd = unix.LINUX_REBOOT_CMD_RESTART
	}
	err := unix.Reboot(cmd)
	return fmt.Errorf("reboot: %w", err)
}

// wait returns when no process is left below PID 1, or after limit.
func (g *guest) wait(limit time.Duration) {
	deadline := time.Now().Add(limit)
	for !g.reaper.Barren() && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
}
