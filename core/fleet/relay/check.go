package relay

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/relayconf"
	"virtkit/core/gitlab"
)

// Finding is one thing that Check looked at.
type Finding struct {
	What string // such as "runner ci: token"
	Text string // how it is
	Err  error  // what is wrong, with a hint
}

// checkTime bounds each look.
const checkTime = 20 * time.Second

// Check looks at what Run needs: the identity, the tokens with GitLab, and the
// hub's room for each runner. It asks for no job and reserves nothing, and may
// be used beside a running vk-gitlab.
func Check(ctx context.Context, o Options) []Finding {
	var out []Finding
	add := func(what, text string, err error) bool {
		out = append(out, Finding{what, text, err})
		return err == nil
	}
	d := &Daemon{conf: o.Conf, stateDir: o.Conf.StateDir, info: o.Info, now: time.Now, pace: DefaultPace(o.Conf.Check()), changed: newSignal(), hub: o.Hub}
	d.pace.Request = checkTime
	if !add("state dir", d.stateDir, own(d.stateDir, false)) {
		return out
	}
	var err error
	d.enrollment, err = LoadEnrollment(d.stateDir)
	if err != nil {
		add("enrollment", "", err)
		return out
	}
	add("enrollment", fmt.Sprintf("relay %s of %s", d.enrollment.Relay, d.enrollment.URL), nil)
	if d.systemID, err = SystemID(d.stateDir); err != nil {
		add("system id", "", err)
		return out
	}
	if err := d.connect(o); err != nil {
		add("clients", "", err)
		return out
	}
	for i := range d.conf.Runners {
		out = append(out, d.checkRunner(ctx, i)...)
	}
	return out
}

func (d *Daemon) checkRunner(ctx context.Context, i int) []Finding {
	c := &d.conf.Runners[i]
	name := c.Name
	token, err := c.ReadToken()
	if name == "" {
		if name = relayconf.Short(token.Reveal()); name == "" {
			name = fmt.Sprintf("[%d]", i)
		}
	}
	what := "runner " + name
	if err != nil {
		return []Finding{{what + ": token", "", err}}
	}
	token0 := Finding{What: what + ": token"}
	asking, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	v, err := d.client.Verify(asking, token.Reveal(), d.systemID)
	se, answered := errors.AsType[*gitlab.StatusError](err)
	switch {
	case err == nil:
		token0.Text = fmt.Sprintf("taken by %s, runner %d", d.conf.GitLab.URL, v.ID)
		if v.ExpiresAt != nil {
			token0.Text += ", until " + v.ExpiresAt.UTC().Format(time.DateTime) + "Z"
			if !v.ExpiresAt.After(d.now()) {
				token0.Err = fault.New(fault.Denied, "the token has expired").Hint("create the runner again in GitLab")
			}
		}
	case answered && se.Status == http.StatusForbidden:
		token0.Err = fault.Newf(fault.Denied, "%s refuses the token", d.conf.GitLab.URL).Because(err).
			Hint("create the runner again in GitLab, and write its token to %s", c.TokenFile)
	default:
		token0.Err = fault.Newf(fault.Unavailable, "%s does not answer as GitLab does", d.conf.GitLab.URL).Because(err).Hint("check [gitlab] url and tls_ca_file")
	}
	room := Finding{What: what + ": placement"}
	p := placementOf(c)
	asking2, cancel2 := context.WithTimeout(ctx, checkTime)
	defer cancel2()
	a, err := d.hub.Capacity(asking2, dispatch.CapacityRequest{Placement: p})
	switch _, answered := errors.AsType[*dispatch.Error](err); {
	case err == nil:
		room.Text = fmt.Sprintf("pool %s has room for %d jobs now", p.Pool, a.Fits)
	case answered:
		room.Err = fault.New(fault.Denied, "the hub does not tell its capacity").Because(explain(err))
	default:
		room.Err = fault.Newf(fault.Unavailable, "the hub %s cannot be reached", d.enrollment.URL).Because(err)
	}
	return []Finding{token0, room}
}
