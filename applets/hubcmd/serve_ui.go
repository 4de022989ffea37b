package hubcmd

import (
	"context"
	"log/slog"
	"net"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubconf"
	"virtkit/web"
	"virtkit/web/auth"
	"virtkit/web/ui"
)

// face is the web UI of a hub that is starting.
type face struct {
	c        *hubconf.Config
	log      *slog.Logger
	origin   string
	cert     *web.Certificate
	provider auth.Provider // nil = none
	l        net.Listener
	handler  *ui.UI
}

// newFace reads the web UI's certificate and the client's secret; nil when
// hub.toml turns no UI on.
func newFace(c *hubconf.Config, log *slog.Logger) (f *face, err error) {
	if c.UIAddr == "" {
		return nil, nil
	}
	f = &face{c: c, log: log}
	if f.origin, err = c.Origin(); err != nil {
		return nil, err
	}
	if cert, key := c.UICertificate(); cert != "" {
		if f.cert, err = web.LoadCertificate(cert, key, log); err != nil {
			return nil, err
		}
	}
	if c.OIDC == nil {
		return f, nil
	}
	secret, warning, err := c.OIDC.Secret()
	if err != nil {
		return nil, err
	}
	if warning != "" {
		log.Warn(warning)
	}
	redirect := f.origin + hubconf.CallbackPath
	log.Info("people sign in through the provider; register this redirect URI there", "issuer", c.OIDC.Issuer, "client_id", c.OIDC.ClientID, "redirect_uri", redirect)
	f.provider, err = auth.NewOIDC(auth.Client{Issuer: c.OIDC.Issuer, ID: c.OIDC.ClientID, Secret: secret, Redirect: redirect})
	return f, err
}

// people are the hub's options of signing in.
func people(c *hubconf.Config) hub.PeopleOptions {
	if c.OIDC == nil {
		return hub.PeopleOptions{}
	}
	return hub.PeopleOptions{OIDC: true, DefaultRole: c.OIDC.Role()}
}

// listen makes the pages of h and takes ui_addr.
func (f *face) listen(h *hub.Hub, now func() time.Time) (err error) {
	o := ui.Options{Hub: h, Origin: f.origin, Log: f.log}
	if f.provider != nil {
		o.Issuer, o.Auth = f.c.OIDC.Issuer, auth.New(f.provider, now)
	}
	if f.handler, err = ui.New(o); err != nil {
		return err
	}
	if f.l, err = net.Listen("tcp", f.c.UIAddr); err != nil {
		return listenError("ui_addr", f.c.UIAddr, err)
	}
	for _, w := range h.PeopleWarnings() {
		f.log.Warn(w)
	}
	f.log.Info("web UI", "addr", f.l.Addr().String(), "ui_url", f.origin, "tls", f.cert != nil)
	return nil
}

// serve serves it until ctx ends.
func (f *face) serve(ctx context.Context) error {
	return web.ServeUI(ctx, f.l, f.cert, f.handler, f.log)
}
