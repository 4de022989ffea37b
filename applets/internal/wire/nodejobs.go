package wire

import (
	"cmp"
	"log/slog"
	"runtime"

	"virtkit/core/cijob"
	"virtkit/core/cijob/artifact"
	"virtkit/core/cijob/cache"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/nodejobs"
	"virtkit/core/image"
	"virtkit/core/logx"
	"virtkit/core/version"
	"virtkit/ledger"
)

// driverEnv are the variables of this process that a job's driver gets, beside
// those of this host's configuration. All else may be a secret of whoever
// started the node.
var driverEnv = []string{"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR"}

// nodeJobs are the jobs that a hub places on this host. own tells which
// gitlab-runner of its own excludes them; "" = none.
func (h *Host) nodeJobs(own string, log *slog.Logger) (node.Jobs, error) {
	log = log.With(logx.Comp, "jobs")
	journal, err := jobdir.Open(h.StateDir)
	if err != nil {
		return nil, err
	}
	o, err := h.admitOptions()
	if err != nil {
		return nil, err
	}
	o.Say = func(line string) { log.Info(line) }
	gate, err := h.Jobs.Admissions(o)
	if err != nil {
		return nil, err
	}
	env := h.supervisorEnv()
	for _, k := range driverEnv {
		if v, ok := h.Env.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	vm := h.Conf.Executor.VM
	return nodejobs.New(nodejobs.Config{
		Journal: journal, Ledger: gate,
		Drivers: &nodejobs.Processes{
			Argv: []string{h.Env.Exe, "node", "job"}, CleanupArgv: []string{h.Env.Exe, "node", "job", "--cleanup"}, Env: env, Log: log,
		},
		MaxCPUs: cmp.Or(vm.MaxCPUs, vm.CPUs), Limit: h.Conf.Executor.Schedule.MaxConcurrency,
		Runner: own, ImageIdle: h.Conf.Executor.ImageCacheIdle, Log: log,
	})
}

var _ nodejobs.Ledger = (*ledger.Admissions)(nil)

// Artifacts moves a placed job's artifacts.
func (h *Host) Artifacts() cijob.Artifacts {
	return &artifact.Client{Agent: "vk " + version.Version + " (" + runtime.GOOS + "/" + runtime.GOARCH + ")"}
}

// Caches keeps a placed job's caches in this host's registry, with this host's
// credential.
func (h *Host) Caches() cijob.Caches {
	return &cache.Registry{
		Repo: h.Conf.Registry.Repo, Auth: h.Auth(),
		Options: image.Options{Log: h.Log.With(logx.Comp, "cache"), Getenv: h.Env.Getenv},
	}
}
