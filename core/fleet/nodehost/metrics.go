package nodehost

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"virtkit/core/fleet/wire"
)

// Metrics are the node's own, for Prometheus: what its heartbeats carry, in base
// units. A nil *Metrics takes no readings.
type Metrics struct {
	info                        *prometheus.GaugeVec
	committed, budget, disk     prometheus.Gauge
	jobs, stages                *prometheus.GaugeVec
	available, load             prometheus.Gauge
	free, inodes                *prometheus.GaugeVec
	pressure                    *prometheus.GaugeVec
	await, busy                 *prometheus.GaugeVec
	vms, vmMemory               prometheus.Gauge
	estimate, effective, failed prometheus.Gauge
	ceiling                     *prometheus.GaugeVec
	beats                       prometheus.Counter
	last                        prometheus.Gauge
}

const namespace, subsystem = "vk", "node"

// NewMetrics makes them in a registry of the caller's. runner is what the host's
// runner does; status, when it is not nil, is of a managed one.
func NewMetrics(reg prometheus.Registerer, version string, status func() ManagedStatus) *Metrics {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help})
		reg.MustRegister(g)
		return g
	}
	vec := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help}, labels)
		reg.MustRegister(g)
		return g
	}
	m := &Metrics{
		info:      vec("info", "The node's vk, always 1.", "version"),
		committed: gauge("admission_committed_bytes", "Memory of guests that the ledger has granted."),
		budget:    gauge("admission_budget_bytes", "Memory budget of guests; 0 without one."),
		disk:      gauge("admission_disk_claimed_bytes", "Disk space that admitted jobs are expected to use."),
		jobs:      vec("admission_jobs", "Jobs of the ledger, admitted (running) and waiting.", "state"),
		stages:    vec("jobs", "CI jobs by what they do.", "stage"),
		available: gauge("memory_available_bytes", "Memory of the host that is available."),
		load:      gauge("load1", "Load average of the last minute."),
		free:      vec("filesystem_free_bytes", "Free space of the filesystems of jobs and checkouts.", "role"),
		inodes:    vec("filesystem_free_inodes", "Free inodes of those filesystems.", "role"),
		pressure:  vec("pressure_stalled_ratio", "Share of the last 10 and 60 seconds in which some or all tasks waited for a resource.", "resource", "tasks", "window"),
		await:     vec("disk_request_seconds", "Mean time that a disk took for a request since the heartbeat before.", "role", "operation"),
		busy:      vec("disk_busy_ratio", "Share of the time since the heartbeat before in which the disk was busy.", "role"),
		vms:       gauge("vms", "Guests whose host memory is measured."),
		vmMemory:  gauge("vms_memory_bytes", "Host memory of all of them."),
		estimate:  gauge("concurrency_estimate", "Jobs that the host has room for, by the node's estimate; 0 without a budget."),
		effective: gauge("concurrency", "Jobs that the runner is asked to accept; 0 when nothing is asked."),
		failed:    gauge("concurrency_failed", "Whether the runner's concurrency cannot be set."),
		ceiling:   vec("concurrency_ceiling", "Ceilings of the concurrency; 0 = none.", "of"),
		beats:     prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: "heartbeats_total", Help: "Heartbeats whose readings were taken."}),
		last:      gauge("last_heartbeat_timestamp_seconds", "When the last readings were taken."),
	}
	reg.MustRegister(m.beats)
	m.info.WithLabelValues(version).Set(1)
	if status != nil {
		fn := func(name, help string, value func(ManagedStatus) float64) {
			reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help},
				func() float64 { return value(status()) }))
		}
		fn("runner_up", "Whether the managed gitlab-runner runs.", func(s ManagedStatus) float64 { return truth(s.PID != 0) })
		fn("runner_quitting", "Whether it was told to quit and its jobs are waited for.", func(s ManagedStatus) float64 { return truth(s.Quitting) })
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: "runner_restarts_total",
			Help: "Starts of gitlab-runner by this node after the first."}, func() float64 { return float64(status().Restarts) }))
	}
	return m
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Heartbeat takes readings over. What was not read keeps no old value.
func (m *Metrics) Heartbeat(b wire.Heartbeat) {
	if m == nil {
		return
	}
	m.beats.Inc()
	m.last.Set(float64(b.Clock))
	m.committed.Set(float64(b.Admission.Committed))
	m.budget.Set(float64(b.Admission.Budget))
	m.disk.Set(float64(b.Admission.DiskClaimed))
	m.jobs.WithLabelValues("running").Set(float64(b.Admission.Running))
	m.jobs.WithLabelValues("waiting").Set(float64(b.Admission.Waiting))
	if s := b.Stages; s != nil {
		for stage, n := range map[string]int{"preparing": s.Preparing, "waiting": s.Waiting, "running": s.Running, "cleaning": s.Cleaning} {
			m.stages.WithLabelValues(stage).Set(float64(n))
		}
	}
	m.available.Set(float64(b.MemAvailable))
	m.load.Set(math.NaN())
	if b.Load1 != nil {
		m.load.Set(*b.Load1)
	}
	for _, v := range []*prometheus.GaugeVec{m.free, m.inodes, m.pressure, m.await, m.busy} {
		v.Reset()
	}
	for _, f := range b.Filesystems {
		m.free.WithLabelValues(f.Role).Set(float64(f.Free))
		m.inodes.WithLabelValues(f.Role).Set(float64(f.FreeInodes))
	}
	if p := b.Pressure; p != nil {
		for resource, s := range map[string]*wire.Stall{"cpu": p.CPU, "memory": p.Memory, "io": p.IO} {
			if s == nil {
				continue
			}
			m.pressure.WithLabelValues(resource, "some", "10s").Set(s.Some10 / 100)
			m.pressure.WithLabelValues(resource, "some", "60s").Set(s.Some60 / 100)
			m.pressure.WithLabelValues(resource, "full", "10s").Set(s.Full10 / 100)
			m.pressure.WithLabelValues(resource, "full", "60s").Set(s.Full60 / 100)
		}
	}
	for _, d := range b.Disks {
		m.await.WithLabelValues(d.Role, "read").Set(d.ReadMS / 1000)
		m.await.WithLabelValues(d.Role, "write").Set(d.WriteMS / 1000)
		m.busy.WithLabelValues(d.Role).Set(d.Busy / 100)
	}
	sum := int64(0)
	for _, n := range b.VMs {
		sum += n
	}
	m.vms.Set(float64(len(b.VMs)))
	m.vmMemory.Set(float64(sum))
}

// Concurrency takes a pass over.
func (m *Metrics) Concurrency(c wire.Concurrency) {
	if m == nil {
		return
	}
	m.estimate.Set(float64(c.Estimate))
	m.effective.Set(float64(c.Effective))
	m.ceiling.WithLabelValues("hub").Set(float64(c.HubCeiling))
	m.ceiling.WithLabelValues("local").Set(float64(c.LocalCeiling))
	m.failed.Set(truth(c.Error != ""))
}
