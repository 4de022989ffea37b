package vkcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/fleet/nodehost"
	fleet "virtkit/core/fleet/wire"
)

// workloadsOptions are the flags of vk workloads.
type workloadsOptions struct {
	watch    bool
	json     bool
	interval int // seconds
	mem      int // seconds; 0 = the configuration's
}

func newWorkloads(a *app) *cli.Command {
	o := workloadsOptions{interval: 2}
	return &cli.Command{
		Name:  "workloads",
		Usage: "list this host's running VMs for a program",
		Description: "Prints the list as one line of JSON (vk.workloads/1), as a node reports it to its\n" +
			"hub: CI jobs first, then the newest of the rest, at most 256. With --watch another\n" +
			"line each time the list or a figure of it changes, until standard input closes. For\n" +
			"people there is vk list.",
		Flags: []cli.Flag{
			cliutil.Bool(&o.watch, "watch", "print a line each time it changes, until standard input closes"),
			cliutil.Bool(&o.json, "json", "print JSON, as without it: for who passes it to every command"),
			cliutil.Int(&o.interval, "interval-secs", "N", "time between two looks with --watch, in seconds", 1, 3600),
			cliutil.Int(&o.mem, "mem-secs", "N", "time between two measurements of memory, in seconds, instead of [node] workload_mem_secs", 1, 86400),
		},
		Action: func(ctx context.Context, _ *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			return a.workloads(ctx, h, o, time.Duration(o.interval)*time.Second)
		},
	}
}

// workloadsLine is one line of the output; its fields are only ever added to.
type workloadsLine struct {
	Schema    string           `json:"schema"` // "vk.workloads/1"
	Workloads []fleet.Workload `json:"workloads"`
	Omitted   int              `json:"omitted"` // entries left out by the bounds
	// Memory is the host memory of each, by its id, in bytes; of one that was not
	// measured yet there is none.
	Memory map[string]int64 `json:"memory_bytes"`
}

func (a *app) workloads(ctx context.Context, h *wire.Host, o workloadsOptions, every time.Duration) error {
	host := h.Workloads(time.Duration(o.mem) * time.Second)
	if !o.watch {
		line, err := a.workloadsNow(ctx, host, func(err error) { a.warn("%v", err) })
		if err == nil {
			_, err = a.env.Stdout.Write(line)
		}
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		io.Copy(io.Discard, a.env.Stdin)
		close(ended)
	}()
	told := map[string]bool{}
	warn := func(err error) {
		if text := err.Error(); !told[text] && len(told) < 1000 {
			told[text] = true
			a.warn("%v", err)
		}
	}
	var last []byte
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		line, err := a.workloadsNow(ctx, host, warn)
		if err != nil {
			return err
		}
		if !bytes.Equal(line, last) {
			if _, err := a.env.Stdout.Write(line); err != nil {
				return err // whoever watched has gone
			}
			last = line
		}
		select {
		case <-ended:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.C:
		}
	}
}

func (a *app) workloadsNow(ctx context.Context, host *nodehost.Host, warn func(error)) ([]byte, error) {
	list, problems, err := host.Workloads(ctx)
	for _, p := range problems {
		warn(p)
	}
	if err != nil {
		return nil, err
	}
	l := workloadsLine{Schema: "vk.workloads/1", Memory: map[string]int64{}}
	l.Workloads, l.Omitted = fleet.BoundWorkloads(nodehost.Plain(list))
	memory := host.Memory(ctx, list)
	for _, w := range l.Workloads {
		if n, ok := memory[w.ID]; ok {
			l.Memory[w.ID] = n
		}
	}
	b, err := json.Marshal(l)
	if err != nil {
		return nil, fmt.Errorf("encoding the list: %w", err)
	}
	return append(b, '\n'), nil
}
