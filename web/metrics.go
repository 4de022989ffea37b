package web

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// fleetCollector makes metrics of a hub's snapshot as it is scraped: nothing
// is kept beside it. Names follow Prometheus' conventions (base units, _total
// for counters); a test runs promlint over them. Per-node series carry the
// node's ID and hostname.
type fleetCollector struct {
	h *hub.Hub
	n *Nodes
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("vk_hub_"+name, help, labels, nil)
}

var byNode = []string{"node", "hostname"}

// metric is a value of a node.
type metric struct {
	d *prometheus.Desc
	f func(*hub.Node) (float64, bool)
}

func beat(f func(*wire.Heartbeat) float64) func(*hub.Node) (float64, bool) {
	return func(n *hub.Node) (float64, bool) {
		b := n.Live.Beat()
		// Readings of a node that is away are old: no sample rather than those.
		if b == nil || !n.Live.Connected() {
			return 0, false
		}
		return f(b.Beat), true
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func nodeMetrics(now func() time.Time) []metric {
	return []metric{
		{desc("node_up", "Whether the node has a session.", byNode...), func(n *hub.Node) (float64, bool) { return truth(n.Live.Connected()), true }},
		{desc("node_last_seen_timestamp_seconds", "When the node was last heard of.", byNode...), func(n *hub.Node) (float64, bool) {
			t := n.Live.Seen()
			return float64(t.UnixMilli()) / 1000, !t.IsZero()
		}},
		{desc("node_in_sync", "Whether the node has applied what the hub asks.", byNode...), func(n *hub.Node) (float64, bool) {
			return truth(n.Sync() == "ok" || n.Sync() == "-"), true
		}},
		{desc("node_recovery_conflict", "Whether the node holds what this hub has no record of.", byNode...), func(n *hub.Node) (float64, bool) { return truth(n.Conflict != nil), true }},
		{desc("node_ceiling_jobs", "The hub's ceiling; absent when there is none.", byNode...), func(n *hub.Node) (float64, bool) {
			return float64(n.Desired.Policy.Ceiling), n.Desired.Policy.Ceiling > 0
		}},
		{desc("node_acquisition_stopped", "Whether the hub has stopped the node's acquisition.", byNode...), func(n *hub.Node) (float64, bool) { return truth(n.Desired.Policy.Stop), true }},
		{desc("node_concurrency_jobs", "The runner's concurrency that the node asked for last.", byNode...), beat(func(b *wire.Heartbeat) float64 { return float64(b.Concurrency) })},
		{desc("node_commands_pending", "Commands that the node has not finished.", byNode...), func(n *hub.Node) (float64, bool) { return float64(n.Pending(now())), true }},
		{desc("node_vms", "Running VMs.", byNode...), func(n *hub.Node) (float64, bool) { return float64(n.VMs + n.Omitted), n.Live.Connected() }},
		{desc("node_jobs_running", "Jobs that hold memory.", byNode...), beat(func(b *wire.Heartbeat) float64 { return float64(b.Admission.Running) })},
		{desc("node_jobs_waiting", "Jobs that wait for admission.", byNode...), beat(func(b *wire.Heartbeat) float64 { return float64(b.Admission.Waiting) })},
		{desc("node_memory_committed_bytes", "Memory that admission has given out.", byNode...), beat(func(b *wire.Heartbeat) float64 { return float64(b.Admission.Committed) })},
		{desc("node_memory_budget_bytes", "Memory that admission may give out.", byNode...), beat(func(b *wire.Heartbeat) float64 { return float64(b.Admission.Budget) })},
		{desc("node_memory_available_bytes", "Memory available on the host.", byNode...), beat(func(b *wire.Heartbeat) float64 { return float64(b.MemAvailable) })},
	}
}

var (
	nodeState   = desc("node_state", "1 for the state that the node reported last.", "node", "hostname", "state")
	nodesDesc   = desc("nodes", "Enrolled nodes by reach.", "reach")
	unauthDesc  = desc("unauthenticated_connections", "Connections that have not authenticated.")
	turnedDesc  = desc("turned_away_connections_total", "Connections closed because too many had not authenticated.")
	sickDesc    = desc("store_writable", "Whether the last change could be stored.")
	storeDesc   = desc("store_write_seconds_total", "Time spent storing.")
	countedDesc = map[string]*prometheus.Desc{
		"sessions_total": desc("sessions_total", "Sessions that were begun."), "refused_sessions_total": desc("refused_sessions_total", "Handshakes that failed."),
		"superseded_sessions_total": desc("superseded_sessions_total", "Sessions that a newer one replaced."), "silent_sessions_total": desc("silent_sessions_total", "Sessions ended for silence."),
		"received_messages_total": desc("received_messages_total", "Messages from nodes."), "received_bytes_total": desc("received_bytes_total", "Bytes of messages from nodes."),
		"store_batches_total": desc("store_batches_total", "Transactions of the database."), "store_errors_total": desc("store_errors_total", "Transactions that failed."),
		"changes_total": desc("changes_total", "Changes made."), "outcomes_recorded_total": desc("outcomes_recorded_total", "Outcomes of commands that were new."),
	}
)

// Describe is prometheus.Collector's.
func (c fleetCollector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect is prometheus.Collector's.
func (c fleetCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v)
	}
	reach := map[hub.Reach]int{hub.Connected: 0, hub.Unreachable: 0, hub.Never: 0}
	ms := nodeMetrics(c.h.Now)
	for _, n := range c.h.Snapshot().Sorted() {
		reach[n.Reach()]++
		for _, m := range ms {
			if v, ok := m.f(n); ok {
				gauge(m.d, v, n.ID, n.Name)
			}
		}
		if n.State != nil {
			gauge(nodeState, 1, n.ID, n.Name, string(n.State.Node))
		}
	}
	for r, k := range reach {
		gauge(nodesDesc, float64(k), string(r))
	}
	if c.n != nil {
		gauge(unauthDesc, float64(c.n.Unauthenticated()))
		counter(turnedDesc, float64(c.n.Turned()))
	}
	gauge(sickDesc, truth(c.h.Sick() == ""))
	s := &c.h.Stats
	counter(storeDesc, float64(s.StoreNanos.Load())/1e9)
	for name, v := range map[string]uint64{"sessions_total": s.Sessions.Load(), "refused_sessions_total": s.Refused.Load(), "superseded_sessions_total": s.Superseded.Load(),
		"silent_sessions_total": s.Silent.Load(), "received_messages_total": s.Messages.Load(), "received_bytes_total": s.Bytes.Load(), "store_batches_total": s.Batches.Load(),
		"store_errors_total": s.StoreErrors.Load(), "changes_total": s.Changes.Load(), "outcomes_recorded_total": s.Recorded.Load()} {
		counter(countedDesc[name], float64(v))
	}
}

// Metrics serves /metrics of a hub. Who does not bear token, unless that is
// empty, gets 401.
func Metrics(h *hub.Hub, n *Nodes, token string) http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(fleetCollector{h, n}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	serve := promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 30 * time.Second})
	mux := http.NewServeMux()
	want := sha256.Sum256([]byte(token))
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")))
		if token != "" && subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", `Bearer realm="metrics"`)
			http.Error(w, "a bearer token is needed", http.StatusUnauthorized)
			return
		}
		serve.ServeHTTP(w, r)
	})
	return mux
}

// ServeMetrics serves a handler until ctx ends.
func ServeMetrics(ctx context.Context, l net.Listener, handler http.Handler) error {
	s := &http.Server{Handler: handler, ReadHeaderTimeout: wire.HandshakeStep, ReadTimeout: wire.HandshakeStep, IdleTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	err := s.Serve(l)
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("serving metrics: %w", err)
}
