package wire_test

import (
	"encoding/base64"
	"encoding/json"
	"strings"

	"virtkit/core/fleet/wire"
)

func h(c string, n int) string { return strings.Repeat(c, 2*n) }

func ptr[T any](v T) *T { return &v }

var (
	nodeID    = h("a", wire.IDLen)
	commandID = h("c", wire.IDLen)
	digest    = h("d", wire.DigestLen)
	policy    = wire.Policy{Ceiling: 4, Stop: true, Egress: &wire.EgressRule{
		Run:   &wire.EgressLists{Names: []string{"example.com"}, IPs: []string{"192.0.2.0/24:443"}},
		Build: &wire.EgressLists{Names: []string{"debian.org"}, IPs: []string{}},
	}, Layer: &layer}
	layer = json.RawMessage(`{"rules":["default"],"run":{"names":["example.com"],"ips":[]},"build":{}}`)
)

// samples hold a message of each type with every field set; a test proves it.
// Some types need more than one.
func samples() map[string]wire.Message {
	env := wire.Envelope{Memory: 4 << 30, CPUs: 2, Disk: 10 << 30}
	progress := func(p wire.Phase) *wire.Progress {
		return &wire.Progress{Command: commandID, Target: digest, Phase: p, Reason: "because", Output: "line 1\nline 2"}
	}
	stall := &wire.Stall{Some10: 1.5, Some60: 2, Full10: 0.25, Full60: 0.5}
	job, res := h("5", wire.IDLen), h("6", wire.IDLen)
	return map[string]wire.Message{
		"hello":     &wire.Hello{Node: nodeID, Incarnation: h("b", wire.IDLen), Versions: wire.Range{Min: 1, Max: 6}, VK: "0.1.0"},
		"challenge": &wire.Challenge{Nonce: h("e", wire.NonceLen), Versions: wire.Range{Min: 1, Max: 6}, Version: 6},
		"auth":      &wire.Auth{Signature: h("f", wire.SignatureLen)},
		"welcome":   &wire.Welcome{Hub: h("9", wire.IDLen), HeartbeatSecs: 5, Time: 1780000000},
		"refused":   &wire.Refused{Code: wire.Revoked, Message: "node aaaa was removed"},
		"closing":   &wire.Closing{Code: wire.Superseded, Message: "a newer session took over"},
		"ping":      &wire.Ping{},
		"inventory": &wire.Inventory{
			Hostname: "ci-7", CPUs: 16, CPUModel: "Some CPU @ 2.5GHz", RAM: 64 << 30,
			MemoryNodes: []wire.MemoryNode{{ID: 1, Memory: 32 << 30, CPUs: 8}},
			Checks:      []wire.Check{{Name: "kvm", OK: true, Text: "works"}},
			Filesystems: []wire.Filesystem{{Role: wire.RoleJobs, Path: "/var/lib/virtkit/jobs", Device: "8:1", FSType: "ext4", Size: 1 << 40, Tmpfs: true, Speed: "fast"}},
			VK:          "0.1.0", VKSHA256: digest, GuestKernel: "6.12.0", HostKernel: "6.1.0", ConfigHash: digest,
			Runner: &wire.Runner{Config: "/home/ci/.gitlab-runner/config.toml", Concurrent: 4, Names: []string{"big"}, Version: "19.5.0"},
			Labels: []string{"large-memory"}, Features: []string{"egress_rules"}, Egress: json.RawMessage(`{"run":{"fingerprint":"00"}}`), Registry: "https://registry.example.com",
			Tools: &wire.Tools{SHA256: digest, Label: "7", Versions: []wire.Version{{Tool: "git", Text: "git version 2"}}, InUse: true},
		},
		"heartbeat": &wire.Heartbeat{
			Admission: wire.Admission{Committed: 1 << 30, Budget: 2 << 30, Running: 3, Waiting: 1, DiskClaimed: 5}, Concurrency: 4, MemAvailable: 7 << 30,
			Filesystems: []wire.FSReading{{Role: wire.RoleJobs, Free: 9, FreeInodes: 8}}, VMs: map[string]int64{h("1", wire.WorkloadLen): 512 << 20}, Load1: ptr(0.5),
			Pressure: &wire.Pressure{CPU: stall, Memory: stall, IO: stall}, Disks: []wire.DiskReading{{Role: wire.RoleJobs, Device: "8:1", ReadMS: 0.5, WriteMS: 1.5, Busy: 12.5}},
			Stages: &wire.Stages{Preparing: 1, Waiting: 2, Running: 3, Cleaning: 4}, Clock: 1780000000,
		},
		"report": &wire.Report{
			Workloads: []wire.Workload{{ID: h("1", wire.WorkloadLen), Kind: wire.KindJob, Project: "acme/web", Job: "test", JobID: "77", JobURL: "https://gitlab.example.com/acme/web/-/jobs/77",
				Space: "w", Env: "e", SSHAlias: "w.e", GuestDir: "/work", Image: "docker/debian", Dir: "/srv/web", PID: 4711, CPUs: 2, Reserved: 1 << 30, Started: 1780000000, StateDir: "/var/lib/virtkit/jobs/77"}},
			Omitted: 2,
			State: &wire.State{
				Node: wire.Draining, Applied: &wire.Applied{Generation: 3, ID: h("4", wire.IDLen), Policy: policy}, Acquisition: wire.Quitting, Runner: wire.RunnerNone,
				LastCommand: commandID, Unsupported: []string{"the runner may still take jobs"}, Concurrency: &wire.Concurrency{Estimate: 5, HubCeiling: 4, LocalCeiling: 8, Effective: 4, Error: "permission denied"},
				Drain: &wire.Drain{RunnerExited: true, AdmissionIdle: true, Jobs: 1}, Conflict: "the hub's state is another one of the same generation",
				Update: progress(wire.PhaseRolledBack), Reset: progress(wire.PhaseDone), Tools: progress(wire.PhaseFailed),
				Placed: &wire.Placed{Runner: "gitlab-runner.service", Limit: 8, ImageCacheIdleSecs: 1800, Jobs: 2, ReservationsPending: 1},
			},
		},
		"desired":         &wire.Desired{Generation: 3, ID: h("4", wire.IDLen), Policy: policy},
		"command":         &wire.Command{ID: commandID, Op: wire.OpDrain, Issued: 1780000000, Expires: 1780086400, Sent: 1780000001},
		"command+update":  &wire.Command{ID: commandID, Op: wire.OpUpdate, Issued: 1780000000, Expires: 1780086400, Update: &wire.UpdateSpec{SHA256: digest, Size: 1 << 20, Version: "0.2.0", Signature: base64.StdEncoding.EncodeToString(make([]byte, wire.SignatureLen)), Force: true, WithinSecs: 1800}},
		"command+reset":   &wire.Command{ID: commandID, Op: wire.OpReset, Issued: 1780000000, Expires: 1780086400, Reset: &wire.ResetSpec{KeepImages: true}},
		"command+tools":   &wire.Command{ID: commandID, Op: wire.OpTools, Issued: 1780000000, Expires: 1780086400, Tools: &wire.ToolsSpec{SHA256: digest, Size: 1 << 20}},
		"ack":             &wire.Ack{Command: commandID, Outcome: wire.Failed, Message: "an undrain ended it"},
		"recorded":        &wire.Recorded{Command: commandID, Outcome: wire.Failed},
		"job-offer":       &wire.Offer{Reservation: res, Envelope: env, LeaseSecs: 60},
		"job-renew":       &wire.Renew{Reservation: res, LeaseSecs: 60},
		"job-release":     &wire.GiveBack{Reservation: res},
		"job-start":       &wire.Start{Job: job, Reservation: res, Envelope: env, Spec: json.RawMessage(`{"kind":"gitlab_ci"}`), Egress: policy.Egress, EgressNames: []string{"wab"}, Layer: json.RawMessage(`{"rules":["wab"],"run":{"names":["example.com"],"ips":[]},"build":{}}`)},
		"job-output_ack":  &wire.OutputAck{Job: job, Offset: 4096},
		"job-cancel":      &wire.Cancel{Job: job, Mode: wire.CancelGraceful},
		"job-recorded":    &wire.JobRecorded{Job: job},
		"job-held":        &wire.Held{Reservations: wire.IDs{res}, Jobs: wire.IDs{job}},
		"job-offer_reply": &wire.OfferReply{Reservation: res, Reply: wire.Answer{State: "refused", LeaseSecs: 60, Reason: "memory", Message: "1 GiB short"}},
		"job-lease":       &wire.Lease{Reservation: res, State: wire.LeaseState{State: "gone", RemainingSecs: 30, Why: "expired"}},
		"job-job":         &wire.JobState{Job: job, State: wire.StateOfJob{State: "running", Reason: "r", Message: "m", Stage: "step_script", Activity: "a", Guest: &wire.GuestSize{CPUs: 2, MemMiB: 4096}}},
		"job-output":      &wire.Output{Job: job, Offset: 4096, Data: base64.StdEncoding.EncodeToString([]byte("hello\n"))},
		"job-result": &wire.Result{Job: job, Result: wire.JobResult{Failure: "script", ExitCode: ptr(1), Message: "exit status 1", OutputLen: 4102,
			Artifacts: []wire.ArtifactResult{{Name: "junit", Outcome: "uploaded"}}, Usage: &wire.JobUsage{WallMS: 1000, CPUMS: ptr(int64(500)), PeakMem: ptr(int64(1 << 30)), CPUs: 2, MemMiB: 4096}, Egress: json.RawMessage(`{"revision":2}`),
			Events: []wire.JobEvent{{Kind: "oom_kill", Count: 2, First: "process 7 (cc1)", At: 1780000000}}}},
		"job-egress": &wire.EgressReport{Job: job, Report: json.RawMessage(`{"revision":1}`)},
	}
}
