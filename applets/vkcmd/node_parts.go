package vkcmd

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	fleet "virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// nodeParts makes the host and the runner of a node. metrics is the address that
// its metrics are served at; "" = nowhere.
func (a *app) nodeParts(ctx context.Context, h *wire.Host, log *slog.Logger, metrics string) (nodeParts, error) {
	o := wire.NodeOptions{Log: log, Checks: func(ctx context.Context) []fleet.Check {
		var out []fleet.Check
		for _, f := range a.gateChecks(ctx, h) {
			out = append(out, fleet.Check{Name: f.Name, OK: f.Verdict != checkFail, Text: f.Text})
		}
		return out
	}}
	var reg *prometheus.Registry
	if metrics != "" {
		reg = prometheus.NewRegistry()
		reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		o.Registry = reg
	}
	n, err := h.Node(ctx, o)
	if err != nil {
		return nodeParts{}, err
	}
	if reg != nil {
		if err := serveMetrics(ctx, reg, metrics, log); err != nil {
			return nodeParts{}, err
		}
	}
	log.Info("runner", "mode", string(n.Detection.Mode), "why", n.Detection.Why)
	return nodeParts{host: n.Host, runner: n.Runner, jobs: n.Jobs, warnings: n.Warnings}, nil
}

// serveMetrics serves a registry at http://ADDR/metrics until ctx ends.
func serveMetrics(ctx context.Context, reg *prometheus.Registry, addr string, log *slog.Logger) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fault.Newf(fault.Usage, "--metrics %s cannot be listened at", addr).Because(err).Hint("give an address of this host and a free port, such as 127.0.0.1:9469")
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute}
	context.AfterFunc(ctx, func() { s.Close() })
	go func() {
		if err := s.Serve(l); err != nil && ctx.Err() == nil {
			log.Error("serving metrics", logx.Err, err)
		}
	}()
	log.Info("metrics", "url", fmt.Sprintf("http://%s/metrics", l.Addr()))
	return nil
}
