package vkcmd

import (
	"context"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"virtkit/core/atop/archive"
	"virtkit/core/atop/view"
	"virtkit/core/fault"
)

// followEvery is how often a followed recording is looked at.
const followEvery = time.Second

// atopPanel walks through a recording on the terminal.
func (a *app) atopPanel(ctx context.Context, run archive.Run, follow bool) error {
	in, inOK := a.env.Stdin.(*os.File)
	out, outOK := a.env.Stdout.(*os.File)
	t := a.env.Getenv("TERM")
	if !inOK || !outOK || !term.IsTerminal(int(in.Fd())) || !term.IsTerminal(int(out.Fd())) || t == "dumb" || t == "" {
		return fault.New(fault.Usage, "--view and --follow need a terminal on standard input and output").
			Hint("vk atop %s --summary prints what the whole job did, --json every sample", run.Name)
	}
	x, err := view.Open(run.Path)
	if err != nil {
		return err
	}
	defer x.Close()
	old, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return err
	}
	defer term.Restore(int(in.Fd()), old)
	const enter, leave = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
	io.WriteString(out, enter)
	defer io.WriteString(out, leave)
	return walk(ctx, in, out, view.New(run.Name, x, follow), follow)
}

// walk shows the panel until it is left.
func walk(ctx context.Context, in, out *os.File, p *view.Panel, follow bool) error {
	keys := make(chan view.Key)
	done := make(chan struct{})
	defer close(done)
	go readKeys(in, keys, done)
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	var tick <-chan time.Time
	if follow {
		t := time.NewTicker(followEvery)
		defer t.Stop()
		tick = t.C
	}
	for {
		draw(out, p)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case k, ok := <-keys:
			if !ok || !p.Press(k) {
				return nil
			}
		case <-resized:
		case <-tick:
			p.Update()
		}
	}
}

func draw(out *os.File, p *view.Panel) {
	w, h, err := term.GetSize(int(out.Fd()))
	if err != nil || w <= 0 || h <= 0 {
		w, h = 80, 24
	}
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, l := range p.Lines(w, h) {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(l + "\x1b[K")
	}
	b.WriteString("\x1b[J")
	io.WriteString(out, b.String())
}

// readKeys turns what a terminal sends into keys. An escape that ends what was
// read is the key of that name.
func readKeys(in io.Reader, to chan<- view.Key, done <-chan struct{}) {
	defer close(to)
	buf := make([]byte, 256)
	for {
		n, err := in.Read(buf)
		for _, k := range keysOf(buf[:n]) {
			select {
			case to <- k:
			case <-done:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// sequences are what terminals send for a key after an escape.
var sequences = map[string]view.Key{
	"[D": view.Left, "[C": view.Right, "[H": view.Home, "[F": view.End, "OD": view.Left, "OC": view.Right, "OH": view.Home, "OF": view.End,
	"[1~": view.Home, "[7~": view.Home, "[4~": view.End, "[8~": view.End,
}

func keysOf(b []byte) (out []view.Key) {
	for len(b) > 0 {
		c := b[0]
		b = b[1:]
		switch {
		case c == 0x1b && len(b) > 0 && (b[0] == '[' || b[0] == 'O'):
			// A sequence ends with its first letter or ~.
			n := 1
			for n < len(b) && !(b[n] >= 'A' && b[n] <= 'Z' || b[n] >= 'a' && b[n] <= 'z' || b[n] == '~') {
				n++
			}
			n = min(n+1, len(b))
			if k, ok := sequences[string(b[:n])]; ok {
				out = append(out, k)
			}
			b = b[n:]
		case c == 0x1b:
			out = append(out, view.Escape)
		case c == '\r', c == '\n':
			out = append(out, view.Enter)
		case c == 0x7f, c == 8:
			out = append(out, view.Backspace)
		default:
			out = append(out, view.Key(c))
		}
	}
	return out
}
