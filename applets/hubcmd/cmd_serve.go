package hubcmd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/urfave/cli/v3"
	"golang.org/x/sync/errgroup"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubconf"
	"virtkit/core/fleet/outstore"
	"virtkit/core/logx"
	"virtkit/core/version"
	"virtkit/hubdb"
	"virtkit/web"
)

func newServe(a *app) *cli.Command {
	var verbose bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:  "serve",
		Usage: "be the hub: serve nodes, and the other commands of vk-hub",
		Description: "Serves nodes at addr (127.0.0.1:8443 unless hub.toml says otherwise) over TLS 1.3,\n" +
			"or over plain text on loopback when there are no tls_cert and tls_key. Its database is\n" +
			"<data_dir>/hub.sqlite. With ui_addr in hub.toml it serves the web UI there. Runs in the\n" +
			"foreground until SIGTERM or SIGINT, which ends the nodes' sessions; nodes go on by what\n" +
			"they last applied, and come back by themselves.",
		Flags: []cli.Flag{cliutil.Bool(&verbose, "verbose", "log more").Short("v")},
		Action: func(ctx context.Context, _ *cli.Command) error {
			c, err := a.load()
			if err != nil {
				return err
			}
			level := slog.LevelInfo
			if verbose {
				level = slog.LevelDebug
			}
			return serve(ctx, c, a.now, logx.New(a.env.Stderr, level, c.LogFormat == "json"))
		},
	}, cliutil.Arity{}), cliutil.Status{Code: "11", Means: "another hub runs on the same data_dir, or the address is taken"})
}

// serve runs the hub until ctx ends; now is its wall clock.
func serve(ctx context.Context, c *hubconf.Config, now func() time.Time, log *slog.Logger) (err error) {
	if err := c.MakeDataDir(); err != nil {
		return err
	}
	var cert *web.Certificate
	if c.TLSCert != "" {
		if cert, err = web.LoadCertificate(c.TLSCert, c.TLSKey, log); err != nil {
			return err
		}
	}
	pages, err := newFace(c, log)
	if err != nil {
		return err
	}
	token, err := c.MetricsToken()
	if err != nil {
		return err
	}
	db, err := hubdb.Open(ctx, c.Database())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	outputs, err := outstore.Open(c.Outputs())
	if err != nil {
		return err
	}
	jobs := c.Options()
	jobs.Outputs, jobs.EgressRules = outputs, c.Rules.EgressRules
	h, err := hub.New(ctx, db, hub.Options{Heartbeat: time.Duration(c.HeartbeatSecs) * time.Second, Log: log, Jobs: jobs, People: people(c), Now: now})
	if err != nil {
		return err
	}
	for _, w := range h.RuleWarnings() {
		log.Warn(w)
	}
	l, err := net.Listen("tcp", c.Addr)
	if err != nil {
		return listenError("addr", c.Addr, err)
	}
	defer l.Close()
	nodes := web.NewNodes(h, log, l)
	adminL, err := web.ListenAdmin(c.AdminSocket())
	if err != nil {
		return fmt.Errorf("listening at the admin socket: %w", err)
	}
	defer adminL.Close()
	admin := &web.Admin{Hub: h, Log: log, Backup: db.Backup, Status: status(c, db, nodes, l.Addr().String(), now().Unix())}

	if pages != nil {
		if err := pages.listen(h, now); err != nil {
			return err
		}
		defer pages.l.Close()
		admin.UI = pages.origin
	}

	// Sessions end before the writer, so that what they wait for is stored.
	writing, stopWriting := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWriting()
	var writer errgroup.Group
	writer.Go(func() error { return h.Run(writing) })
	writer.Go(func() error { return outputs.Run(writing, h.Synced) })
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return nodes.Serve(gctx, cert) })
	g.Go(func() error { return admin.Serve(gctx, adminL) })
	if pages != nil {
		g.Go(func() error { return pages.serve(gctx) })
	}
	if c.MetricsAddr != "" {
		ml, err := net.Listen("tcp", c.MetricsAddr)
		if err != nil {
			return listenError("metrics_addr", c.MetricsAddr, err)
		}
		defer ml.Close()
		g.Go(func() error { return web.ServeMetrics(gctx, ml, web.Metrics(h, nodes, token)) })
		log.Info("metrics", "addr", ml.Addr().String())
	}
	log.Info("the hub serves", "addr", l.Addr().String(), "tls", cert != nil, "data_dir", c.DataDir, "hub", h.ID(), "nodes", len(h.Snapshot().Nodes))
	err = g.Wait()
	stopWriting()
	err = errors.Join(err, writer.Wait())
	log.Info("the hub has stopped")
	return err
}

// status fills in what is known of the process and its files.
func status(c *hubconf.Config, db *hubdb.DB, n *web.Nodes, addr string, started int64) func(*hubadmin.StatusReply) {
	size := func(file string) int64 {
		info, err := os.Stat(file)
		if err != nil {
			return 0
		}
		return info.Size()
	}
	return func(s *hubadmin.StatusReply) {
		s.Version, s.Addr, s.TLS, s.Metrics, s.Started = version.Version, addr, c.TLSCert != "", c.MetricsAddr, started
		s.Database, s.DatabaseBytes, s.LogBytes = c.Database(), size(c.Database()), size(c.Database()+"-wal")
		s.Unauthed = n.Unauthenticated()
	}
}
