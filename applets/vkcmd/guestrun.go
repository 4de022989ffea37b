package vkcmd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/image"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

// stopLimit bounds the end of a guest that is no longer wanted.
const stopLimit = 30 * time.Second

// guestHost is what `vk run` needs of the host; wire.Host behind hostGuests is
// the real one.
type guestHost interface {
	// resolve makes the image and a kernel ready. The image is held.
	resolve(ctx context.Context, o *runOptions) (*image.Image, error)
	// start boots a guest for s and returns when it runs.
	start(ctx context.Context, s supervise.Spec) (guest, error)
}

// guest is a running guest.
type guest interface {
	exec() execFunc
	state(ctx context.Context) supervise.State
	// end ends it: in order, or at once when nothing of it is wanted.
	end(ctx context.Context, inOrder bool) error
	// egress is what was recorded of what it reached, also after its end.
	egress(ctx context.Context) (supervise.EgressRecord, error)
	id() string
}

// run is `vk run` with its options checked.
func (a *app) run(ctx context.Context, o *runOptions) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	signals, stop := watch()
	defer stop()
	s := &session{stdout: a.env.Stdout, stderr: a.env.Stderr, signals: signals, say: a.say}
	if o.stdin {
		s.stdin = a.env.Stdin
	}
	return a.runIn(ctx, o, &hostGuests{a, h}, h, s)
}

func (a *app) runIn(ctx context.Context, o *runOptions, gh guestHost, h *wire.Host, s *session) error {
	before, release := untilSignal(ctx, s.signals)
	g, img, argv, err := bootGuest(before, o, gh, h)
	release()
	if err != nil {
		if c := context.Cause(before); c != nil {
			return c
		}
		return err
	}
	defer img.Close()
	if o.detach {
		_, err := fmt.Fprintln(a.env.Stdout, g.id())
		return err
	}
	defer func() {
		// What a guest wrote to a share or is to be kept is written out in order;
		// else nobody will miss what is lost.
		inOrder := o.keep || writes(o.parsedShares)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
		defer cancel()
		if err := g.end(ctx, inOrder); err != nil {
			a.warn("ending the guest: %v", err)
		}
	}()
	if c := context.Cause(before); c != nil {
		return c // the signal came as the guest began to run
	}
	s.exec = g.exec()
	res, err := s.run(ctx, o.request(a, img.Config, argv))
	if o.held != nil {
		a.tellEgress(ctx, g)
	}
	if err != nil {
		return lost(err, 1, func() supervise.State { return g.state(ctx) })
	}
	return cliutil.Exit(ended(res, a.say))
}

func writes(shares []supervise.Share) bool {
	for _, s := range shares {
		if !s.ReadOnly {
			return true
		}
	}
	return false
}

// bootGuest makes all ready and boots the guest.
func bootGuest(ctx context.Context, o *runOptions, gh guestHost, h *wire.Host) (guest, *image.Image, []string, error) {
	if err := h.CheckNet(o.netSpec(h.Conf)); err != nil {
		return nil, nil, nil, err
	}
	img, err := gh.resolve(ctx, o)
	if err != nil {
		return nil, nil, nil, err
	}
	fail := func(err error) (guest, *image.Image, []string, error) {
		img.Close()
		return nil, nil, nil, err
	}
	argv, err := o.argv(img.Config)
	if err != nil {
		return fail(err)
	}
	spec, err := o.spec(h.Conf, wire.RootOf(img), img.Config, time.Now())
	if err != nil {
		return fail(err)
	}
	if o.detach {
		spec.Command = &supervise.Command{
			Argv: argv, Env: o.parsedEnv, User: first(o.user, img.Config.User), Dir: first(o.workdir, img.Config.WorkingDir),
		}
	} else if spec.Owner, err = wire.Self(); err != nil {
		return fail(fmt.Errorf("finding this process: %w", err))
	}
	g, err := gh.start(ctx, spec)
	if err != nil {
		return fail(err)
	}
	return g, img, argv, nil
}

// hostGuests runs guests on this host.
type hostGuests struct {
	a *app
	h *wire.Host
}

func (hg *hostGuests) resolve(ctx context.Context, o *runOptions) (*image.Image, error) {
	var img *image.Image
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		store, err := hg.h.Store()
		if err != nil {
			return err
		}
		ref, err := store.Parse(o.image)
		if err != nil {
			return err
		}
		p := hg.a.progress("image " + ref.Text)
		img, err = store.Resolve(gctx, ref, image.ResolveOptions{
			Auth: hg.h.Auth(), Platform: o.platform, Policy: o.policy(), Progress: p.Image,
		})
		p.Done(err)
		return err
	})
	g.Go(func() error {
		// The supervisor finds it again; here it is fetched when there is none,
		// with somebody watching.
		p := hg.a.progress("guest kernel")
		_, err := hg.h.Kernel(gctx, o.kernel, p.Line)
		p.Done(err)
		return err
	})
	if err := g.Wait(); err != nil {
		img.Close()
		return nil, err
	}
	return img, nil
}

func (hg *hostGuests) start(ctx context.Context, s supervise.Spec) (guest, error) {
	r, err := hg.h.Jobs.Reserve(ctx, s)
	if err != nil {
		return nil, err
	}
	client, err := hg.h.Launch(ctx, r, hg.a.bootProgress())
	if err != nil {
		return nil, errors.Join(err, release(r))
	}
	if st, err := client.State(ctx); err == nil {
		if st.NUMA != "" { // there is a choice on this host
			hg.a.say("%s", st.NUMA)
		}
		if hg.a.g.verbose {
			hg.a.say("%s", stepsText(st))
		}
	}
	return &liveGuest{client: client, spec: r.Spec, kept: hg.h.Egress, jobs: hg.h.Jobs}, nil
}

// stepsText says where a start's time went.
func stepsText(st supervise.State) string {
	parts := make([]string, 0, len(st.Steps)+1)
	for _, s := range st.Steps {
		parts = append(parts, fmt.Sprintf("%s %d ms", s.Name, s.Took.Milliseconds()))
	}
	return fmt.Sprintf("started in %d ms: %s", st.BootMS, strings.Join(parts, ", "))
}

// release removes a reservation whose supervisor did not come to life, unless
// its remains are wanted.
func release(r *ledger.Reservation) error {
	if r.Spec.Keep {
		return nil
	}
	return r.Release()
}

type liveGuest struct {
	client *supervise.Client
	spec   supervise.Spec
	kept   *ledger.Egress
	jobs   *ledger.Jobs
}

func (g *liveGuest) id() string { return g.spec.ID }

func (g *liveGuest) exec() execFunc {
	return guestclient.FromOpener(g.client.Opener()).Exec
}

func (g *liveGuest) state(ctx context.Context) supervise.State {
	return endOf(ctx, g.client, 1)
}

// endOf waits for what ended a guest's boot under a command: the guest's end,
// whose state tells why, or the start of the next boot.
func endOf(ctx context.Context, c *supervise.Client, boots int) supervise.State {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	var last supervise.State
	st, err := c.Wait(ctx, supervise.Ended, func(s supervise.State) {
		last = s
		if rebooted(s, boots) {
			cancel()
		}
	})
	if err != nil && st.Exit == nil {
		if errors.Is(err, supervise.ErrSupervisorGone) {
			return killedState(c.Dir(), last)
		}
		return last
	}
	return st
}

// killedState is the state of a guest whose supervisor does not answer any
// more. One that ends by itself writes why before it goes, or takes its
// directory along; one that is killed does neither.
func killedState(dir string, last supervise.State) supervise.State {
	st, err := supervise.ReadState(dir)
	if err != nil {
		return last
	}
	if st.Exit == nil && !supervise.Locked(dir) {
		st.Exit = &supervise.Exit{Reason: "its supervisor was killed", Hint: "the host's kernel log tells whether memory ran out"}
	}
	return st
}

// rebooted says whether s is of a later boot than the one numbered boots.
func rebooted(s supervise.State, boots int) bool {
	return s.Exit == nil && (s.Boots > boots || s.Phase == supervise.Booting)
}

func (g *liveGuest) end(ctx context.Context, inOrder bool) (err error) {
	if inOrder {
		_, err = g.client.Stop(ctx, 0)
	} else {
		_, err = g.client.Kill(ctx)
	}
	if err != nil && !errors.Is(err, supervise.ErrSupervisorGone) || g.spec.Keep {
		return err
	}
	// One that was killed has left its directory. Who else holds that sweeps it.
	if err = g.jobs.Remove(ctx, g.spec.ID); fault.KindOf(err) == fault.Conflict {
		return nil
	}
	return err
}
