package conf

import "strings"

// row is one key. Its default is a TOML literal put through the same setter
// as the file's, so that defaults are checked too.
type row struct {
	name    string
	kind    kind
	at      func(*Config) any // pointer to the field
	def     string            // TOML literal; "" = not set
	example string            // TOML literal for the example file when def is ""
	words   []string          // enum's values, or an amount's words
	min     int64             // of numbers, seconds and sizes
	max     int64             // 0 = none
	check   func(string) error
	env     string
	acted   bool     // false = "not yet" warning when set
	later   []string // values that are not acted on yet, of a key that is
	doc     string
}

func (r *row) section() string { s, _ := split(r.name); return s }
func (r *row) last() string    { _, l := split(r.name); return l }

func split(name string) (section, last string) {
	i := strings.LastIndexByte(name, '.')
	if i < 0 {
		return "", name
	}
	return name[:i], name[i+1:]
}

func lookup(name string) *row {
	for i := range table {
		if table[i].name == name {
			return &table[i]
		}
	}
	return nil
}

// sections, in the order of the documentation.
var sections = []struct{ name, doc string }{
	{"", "Keys before the first section."},
	{"vmm", "How guests are run."},
	{"net", "The network of guests."},
	{"local", "Image bundles in a directory of this host: `local/<name>`."},
	{"registry", "Image bundles in a registry: `virtkit/<name>`."},
	{"docker", "Images of any OCI registry: `docker/<name>`, and a plain `image:`."},
	{"images", "The store of pulled and built images."},
	{"executor", "Jobs of GitLab CI."},
	{"executor.vm", "The guest of a job. A job's own `MICROVM_*` variables come before, held under the ceilings here."},
	{"executor.schedule", "Admission: which jobs may run at the same time, and who waits."},
	{"executor.share", "Directories of this host that every job's guest sees read-only. Each key is a path in the guest (quoted), its value a directory of the host."},
	{"build", "Guests that build images."},
	{"gc", "What `vk gc` removes."},
	{"numa", "Placement of guests on the memory nodes of this host."},
	{"egress", "What the guests of a job may reach while the job runs. An absent list leaves its dimension unrestricted, an empty one denies it; once one of the two is set, the other denies all."},
	{"egress.build", "The same for the steps that build an image."},
	{"node", "This host as a node of a fleet."},
}

func isSection(name string) bool {
	for _, s := range sections {
		if s.name == name {
			return true
		}
	}
	return false
}

const seven = "604800"

// fortnight is in seconds.
const fortnight = "1209600"

// table is every key there is. A key is added with its default keeping the
// old behaviour, and with acted = true once something reads it.
var table = []row{
	{name: "state_dir", kind: kPath, at: func(c *Config) any { return &c.StateDir }, example: `"/var/lib/virtkit"`, env: "VIRTKIT_STATE_DIR", acted: true,
		doc: "Where this host keeps images, job directories, locks and history. Not set: `/var/lib/virtkit`, or `$XDG_STATE_HOME/virtkit` (`~/.local/state/virtkit`) when that cannot be written."},

	{name: "vmm.accel", kind: kEnum, at: func(c *Config) any { return &c.VMM.Accel }, def: `"auto"`, words: []string{"auto", "kvm", "tcg"}, env: "VIRTKIT_ACCEL", acted: true,
		doc: "Processor virtualization. `auto` boots a guest under KVM once and remembers whether it worked; `tcg` emulates, which is slow and works everywhere."},
	{name: "vmm.channel", kind: kEnum, at: func(c *Config) any { return &c.VMM.Channel }, def: `"auto"`, words: []string{"auto", "serial", "vsock"}, acted: true, later: []string{"vsock"},
		doc: "How host and guest talk: `serial` is virtio-serial, and what `auto` takes; `vsock` is vhost-vsock."},
	{name: "vmm.templates", kind: kEnum, at: func(c *Config) any { return &c.VMM.Templates }, def: `"auto"`, words: []string{"auto", "off"}, env: "VIRTKIT_TEMPLATES", acted: true,
		doc: "`auto`: a guest starts from the saved state of one like it that has booted, where that is tried and tested (under tcg); the first of a kind leaves its state, 50 to 100 MB. `off`: every guest boots."},
	{name: "vmm.qemu", kind: kProgram, at: func(c *Config) any { return &c.VMM.QEMU }, example: `"qemu-system-x86_64"`, acted: true,
		doc: "QEMU's program, by name or absolute path. Not set: the one on `PATH`."},
	{name: "vmm.kernel", kind: kProgram, at: func(c *Config) any { return &c.VMM.Kernel }, example: `"tuned"`, acted: true,
		doc: "The guest's kernel, by the name `vk check` shows or by absolute path. Not set: the best one installed."},
	{name: "vmm.boot_timeout_secs", kind: kSecs, at: func(c *Config) any { return &c.VMM.BootTimeout }, def: "120", min: 1, acted: true,
		doc: "A guest whose agent has not answered by then is ended, with its last console lines."},
	{name: "vmm.hang_timeout_secs", kind: kSecs, at: func(c *Config) any { return &c.VMM.HangTimeout }, def: "300", acted: true,
		doc: "A guest whose agent has been silent for so long is ended; 0 = never."},
	{name: "vmm.disk", kind: kSize, at: func(c *Config) any { return &c.VMM.Disk }, def: `"16G"`, min: 64 << 20, acted: true,
		doc: "Capacity of a guest's writable layer. It takes room on the host only as it is written."},

	{name: "net.mode", kind: kEnum, at: func(c *Config) any { return &c.Net.Mode }, def: `"switch"`, words: []string{"switch", "none", "tap", "pool"}, acted: true,
		doc: "`switch`: a user-space switch of the job's own, no rights needed. `none`: no network device at all. `tap`: a tap device of the host for each guest, made and removed with it, which the host's kernel routes; needs CAP_NET_ADMIN. `pool`: tap devices that stay, one guest at a time on each. Services, egress lists and the host's loopback need `switch`."},
	{name: "net.host_loopback", kind: kPorts, at: func(c *Config) any { return &c.Net.HostLoopback }, example: "[8080]", acted: true,
		doc: "TCP ports of this host's 127.0.0.1 that guests may reach. Not set: none."},
	{name: "net.dns", kind: kStrings, at: func(c *Config) any { return &c.Net.DNS }, example: `["192.0.2.53"]`, check: checkResolver, acted: true,
		doc: "Resolvers that guests' lookups are forwarded to: IP addresses, a port other than 53 as `IP:port`. Not set: those of the host's `/etc/resolv.conf`."},

	{name: "net.subnet", kind: kString, at: func(c *Config) any { return &c.Net.Subnet }, example: `"10.200.7.0/24"`, check: checkSubnet, acted: true,
		doc: "The IPv4 network that guests are in, /16 to /28; of `tap` and `pool`, each guest is in a /30 of it. Not set: the first private one that overlaps none of the host's networks."},
	{name: "net.pool", kind: kStrings, at: func(c *Config) any { return &c.Net.Pool }, example: `["ci0", "ci1=192.0.2.50/24 via 192.0.2.1"]`, check: checkTapDevice, acted: true,
		doc: "Devices of `mode = \"pool\"`, made by the administrator for the user that vk runs as. The guest's address is told from the device's own, else given here. Not set: devices of vk's own, `pool_size` of them, made where they are missing; needs CAP_NET_ADMIN."},
	{name: "net.pool_size", kind: kInt, at: func(c *Config) any { return &c.Net.PoolSize }, def: "8", min: 1, max: 256, acted: true,
		doc: "How many devices vk's own pool has, and so how many guests at once."},

	{name: "local.dir", kind: kPath, at: func(c *Config) any { return &c.Local.Dir }, example: `"/var/lib/virtkit/local"`, acted: true,
		doc: "The directory of `local/<name>` bundles. Not set: `<state_dir>/local`."},

	{name: "registry.repo", kind: kString, at: func(c *Config) any { return &c.Registry.Repo }, example: `"registry.example.com/virtkit"`, check: checkRepo, acted: true,
		doc: "Registry and path before the name of a `virtkit/<name>` bundle, and of job caches."},
	{name: "registry.guest_credential", kind: kEnum, at: func(c *Config) any { return &c.Registry.GuestCredential }, example: `"node"`, words: []string{"node", "job"},
		doc: "Whose credential the registry proxy of a guest uses. `job`: only the token of the job itself."},

	{name: "docker.repo", kind: kString, at: func(c *Config) any { return &c.Docker.Repo }, example: `"registry.example.com/mirror"`, check: checkRepo, acted: true,
		doc: "Registry and path before the name of a `docker/<name>` image. Not set: the registry that the reference names."},

	{name: "images.idle_secs", kind: kSecs, at: func(c *Config) any { return &c.Images.Idle }, example: "1800", acted: true,
		doc: "`vk gc` removes an image that nothing has used for so long. Not set: `[executor] image_cache_idle_secs`."},

	{name: "executor.builds_dir", kind: kPath, at: func(c *Config) any { return &c.Executor.BuildsDir }, def: `"/builds"`, acted: true,
		doc: "Where jobs find their sources, in the guest."},
	{name: "executor.cache_dir", kind: kPath, at: func(c *Config) any { return &c.Executor.CacheDir }, def: `"/cache"`, acted: true,
		doc: "Where jobs keep their caches, in the guest."},
	{name: "executor.tools_dir", kind: kPath, at: func(c *Config) any { return &c.Executor.ToolsDir }, example: `"/var/lib/virtkit/tools/current"`, acted: true,
		doc: "A directory of static tools (git, git-remote-http, git-lfs, gitlab-runner) that every job's guest sees; those its image lacks are linked onto its `PATH`. It is read at each job's start, and has to belong to root or to the runner's user."},
	{name: "executor.host_checkout", kind: kBool, at: func(c *Config) any { return &c.Executor.HostCheckout }, def: "false", acted: true,
		doc: "Fetch a job's sources on the host instead of in the guest ([checkouts.md](checkouts.md))."},
	{name: "executor.checkout_dir", kind: kPath, at: func(c *Config) any { return &c.Executor.CheckoutDir }, example: `"/builds"`, acted: true,
		doc: "Where host checkouts are kept (below `vk/`). Not set: `<state_dir>/checkouts`."},
	{name: "executor.checkout_cache_idle_secs", kind: kSecs, at: func(c *Config) any { return &c.Executor.CheckoutCacheIdle }, example: "1800", acted: true,
		doc: "A host checkout unused for so long is removed. Not set: `image_cache_idle_secs`."},
	{name: "executor.checkout_overlay", kind: kBool, at: func(c *Config) any { return &c.Executor.CheckoutOverlay }, def: "true", acted: true,
		doc: "What a job writes below its sources is in the guest's memory. Off: on the guest's disk, `[vmm] disk`. The host's tree is never written by a job."},
	{name: "executor.checkout_overlay_size", kind: kAmount, at: func(c *Config) any { return &c.Executor.CheckoutOverlaySize }, def: `"80%"`, acted: true,
		doc: "The most that layer may hold, as a size or a share of the guest's memory."},
	{name: "executor.checkout_tmpfs", kind: kBool, at: func(c *Config) any { return &c.Executor.CheckoutTmpfs }, def: "true", acted: true,
		doc: "Changes nothing: the work tree is always packed into a disk of the guest's own, which is as fast."},
	{name: "executor.checkout_mirror", kind: kBool, at: func(c *Config) any { return &c.Executor.CheckoutMirror }, def: "true", acted: true,
		doc: "Keep one bare repository of each repository below `<state_dir>/mirrors`, which host checkouts share their objects with."},
	{name: "executor.checkout_mirror_idle_secs", kind: kSecs, at: func(c *Config) any { return &c.Executor.CheckoutMirrorIdle }, def: fortnight, min: 1, acted: true,
		doc: "`vk gc` removes a mirror that no job has used for so long."},
	{name: "executor.image_cache_idle_secs", kind: kSecs, at: func(c *Config) any { return &c.Executor.ImageCacheIdle }, def: "1800", acted: true,
		doc: "A pulled or built image unused for so long may be removed."},
	{name: "executor.windows_cache_idle_secs", kind: kSecs, at: func(c *Config) any { return &c.Executor.WindowsCacheIdle }, def: seven, min: 1,
		doc: "The same for layers, installations and media of Windows."},
	{name: "executor.services_timeout_secs", kind: kSecs, at: func(c *Config) any { return &c.Executor.ServicesTimeout }, def: "30", acted: true,
		doc: "How long a job waits for the TCP ports that the images of its services expose, from each service's start; under emulation 4 times as long; 0 = not at all. A service that is not there by then is warned of, and the job goes on."},
	{name: "executor.guest_service_exec", kind: kBool, at: func(c *Config) any { return &c.Executor.GuestServiceExec }, def: "true", acted: true,
		doc: "A job may run commands in its own services (`vk-agent exec --service`)."},
	{name: "executor.atop", kind: kBool, at: func(c *Config) any { return &c.Executor.Atop }, def: "true", acted: true,
		doc: "Each job's guest records its own processors, memory, disks and processes."},
	{name: "executor.atop_interval_secs", kind: kSecs, at: func(c *Config) any { return &c.Executor.AtopInterval }, def: "10", min: 1, acted: true,
		doc: "Time between two samples of that recording."},
	{name: "executor.atop_retention_days", kind: kInt, at: func(c *Config) any { return &c.Executor.AtopRetentionDays }, def: "14", max: 36500, acted: true,
		doc: "Whole UTC days that recordings are kept beside today's; 0 = today's alone."},

	{name: "executor.vm.cpus", kind: kInt, at: func(c *Config) any { return &c.Executor.VM.CPUs }, def: "2", min: 1, max: 1024, acted: true,
		doc: "Processors of a job's guest (`MICROVM_CPUS`)."},
	{name: "executor.vm.mem", kind: kSize, at: func(c *Config) any { return &c.Executor.VM.Mem }, def: `"2G"`, min: 64 << 20, acted: true,
		doc: "Memory of a job's guest (`MICROVM_MEM`)."},
	{name: "executor.vm.max_cpus", kind: kInt, at: func(c *Config) any { return &c.Executor.VM.MaxCPUs }, example: "8", min: 1, max: 1024, acted: true,
		doc: "The most processors a job gets, whatever it asks for. Not set: no ceiling."},
	{name: "executor.vm.max_mem", kind: kSize, at: func(c *Config) any { return &c.Executor.VM.MaxMem }, example: `"16G"`, min: 64 << 20, acted: true,
		doc: "The most memory a job gets, whatever it asks for. Not set: no ceiling."},
	{name: "executor.vm.hostname", kind: kString, at: func(c *Config) any { return &c.Executor.VM.Hostname }, def: `"runner"`, check: checkHostname, acted: true,
		doc: "Host name of a job's guest; its process on the host is named `vk:<hostname>`."},
	{name: "executor.vm.user", kind: kString, at: func(c *Config) any { return &c.Executor.VM.User }, example: `"build"`, check: checkUser, acted: true,
		doc: "User that jobs run as in the guest (`MICROVM_USER`). Not set: the image's."},
	{name: "executor.vm.nested", kind: kBool, at: func(c *Config) any { return &c.Executor.VM.Nested }, def: "false", acted: true,
		doc: "Let every job's guest run guests of its own. For trusted pipelines only: it reaches KVM's nested paths."},
	{name: "executor.vm.reclaim", kind: kAmount, at: func(c *Config) any { return &c.Executor.VM.Reclaim }, def: `"auto"`, words: []string{"auto", "off"}, acted: true,
		doc: "Give the guest's idle file cache back to the host: by age, or all above a size or a share of the guest's memory."},
	{name: "executor.vm.balloon", kind: kBool, at: func(c *Config) any { return &c.Executor.VM.Balloon }, def: "true", acted: true,
		doc: "Give memory that the guest frees back to the host. `reclaim` needs it."},
	{name: "executor.vm.dax", kind: kString, at: func(c *Config) any { return &c.Executor.VM.DAX }, def: `"8G"`, check: checkDAX, acted: true,
		doc: "Window through which a guest reads each share from the host's page cache: `off`, a size, `SIZE:always` or `SIZE:inode=SIZE`. QEMU offers no window, and jobs read the host's files from disks: a value other than `off` is accepted and each job's trace says that it has no effect."},

	{name: "executor.schedule.mem_budget", kind: kAmount, at: func(c *Config) any { return &c.Executor.Schedule.MemBudget }, example: `"50%"`, acted: true,
		doc: "Memory of all admitted guests together, as a size or a share of the host's, which is rounded up to whole GiB. Not set: no admission by memory."},
	{name: "executor.schedule.wait_timeout_secs", kind: kSecs, at: func(c *Config) any { return &c.Executor.Schedule.WaitTimeout }, def: "600", acted: true,
		doc: "A job that has waited so long for admission gives up, as a system failure; 0 = at once."},
	{name: "executor.schedule.from_history", kind: kBool, at: func(c *Config) any { return &c.Executor.Schedule.FromHistory }, def: "false", acted: true,
		doc: "Reserve what a job has been using instead of what it declares."},
	{name: "executor.schedule.disk_admission", kind: kBool, at: func(c *Config) any { return &c.Executor.Schedule.DiskAdmission }, def: "true", acted: true,
		doc: "A job also waits for room on the filesystem of its directory."},
	{name: "executor.schedule.disk_default", kind: kSize, at: func(c *Config) any { return &c.Executor.Schedule.DiskDefault }, example: `"8G"`, min: 1 << 20, acted: true,
		doc: "What a job without a history is expected to write. Not set: 8G, or the size of the filesystem when that is smaller."},
	{name: "executor.schedule.max_concurrency", kind: kInt, at: func(c *Config) any { return &c.Executor.Schedule.MaxConcurrency }, example: "8", min: 1, max: 10000, acted: true,
		doc: "The most jobs at once that this host asks for. Not set: no ceiling."},

	{name: "executor.share", kind: kTable, at: func(c *Config) any { return &c.Executor.Share }, example: `"/opt/sdk" = "/srv/sdk"`, acted: true,
		doc: "Guest path to host directory, shared by virtio-fs: such guests always boot, as no template has a share."},

	{name: "build.cpus", kind: kInt, at: func(c *Config) any { return &c.Build.CPUs }, example: "4", min: 1, max: 1024,
		doc: "Processors of one stage's guest. Not set: the host's, shared out among the stages running at once, 2 to 4 each."},
	{name: "build.mem", kind: kSize, at: func(c *Config) any { return &c.Build.Mem }, def: `"4G"`, min: 64 << 20,
		doc: "Memory of one stage's guest; a stage overrides it with `# vk: mem=…`."},
	{name: "build.jobs", kind: kInt, at: func(c *Config) any { return &c.Build.Jobs }, example: "4", min: 1, max: 1024,
		doc: "Stages built at once. Not set: as many as fit in 80 % of the host's memory, at most 16."},
	{name: "build.no_mem_gate", kind: kBool, at: func(c *Config) any { return &c.Build.NoMemGate }, def: "false",
		doc: "Do not let a stage wait for free memory; `jobs` alone bounds the build."},
	{name: "build.cache_registry", kind: kString, at: func(c *Config) any { return &c.Build.CacheRegistry }, example: `"registry.example.com/cache"`, check: checkRepo,
		doc: "Registry that shares built layers among hosts."},

	{name: "gc.build_cache_retention_days", kind: kInt, at: func(c *Config) any { return &c.GC.BuildCacheRetentionDays }, def: "14", max: 36500, acted: true,
		doc: "Entries of the local build cache unused for so long are removed by `vk gc`; 0 = whatever their age they stay."},
	{name: "gc.build_cache_max", kind: kAmount, at: func(c *Config) any { return &c.GC.BuildCacheMax }, example: `"none"`, words: []string{"none"}, acted: true,
		doc: "The most the local build cache may hold, as a size or a share of its filesystem. Not set: 10 %, at most 50 GiB."},

	{name: "numa.mode", kind: kEnum, at: func(c *Config) any { return &c.NUMA.Mode }, def: `"auto"`, words: []string{"auto", "off", "interleave"}, acted: true,
		doc: "`auto`: each guest on the node with the most room that it fits on. `off`: the kernel decides. `interleave`: across all nodes."},

	{name: "egress.allow_ip", kind: kStrings, at: func(c *Config) any { return &c.Egress.AllowIP }, example: `["10.10.140.49/32", "192.0.2.0/24:443"]`, check: checkCIDR, acted: true,
		doc: "Networks that jobs may reach by address: IPv4 CIDR, one port alone as `CIDR:port`."},
	{name: "egress.allow_name", kind: kStrings, at: func(c *Config) any { return &c.Egress.AllowName }, example: `["example.com", "debian.org"]`, check: checkSuffix, acted: true,
		doc: "Names that jobs may look up and reach: DNS suffixes, so `example.com` also allows `www.example.com`."},
	{name: "egress.audit", kind: kBool, at: func(c *Config) any { return &c.Egress.Audit }, def: "false", acted: true,
		doc: "List what each job contacted at the end of its trace."},
	{name: "egress.dry_run", kind: kBool, at: func(c *Config) any { return &c.Egress.DryRun }, def: "false", acted: true,
		doc: "Report what the lists would deny, and deny nothing. A hub's rules are enforced all the same."},
	{name: "egress.strict_names", kind: kBool, at: func(c *Config) any { return &c.Egress.StrictNames }, def: "false", acted: true,
		doc: "Hold each flow to an allowed name's address also to the name it asks for, where the switch can read it: a TLS hello's server name, plain HTTP's `Host`."},
	{name: "egress.build.allow_ip", kind: kStrings, at: func(c *Config) any { return &c.Egress.Build.AllowIP }, example: `[]`, check: checkCIDR,
		doc: "As `[egress] allow_ip`."},
	{name: "egress.build.allow_name", kind: kStrings, at: func(c *Config) any { return &c.Egress.Build.AllowName }, example: `["debian.org"]`, check: checkSuffix,
		doc: "As `[egress] allow_name`."},
	{name: "egress.build.audit", kind: kBool, at: func(c *Config) any { return &c.Egress.Build.Audit }, def: "false",
		doc: "List what each build contacted."},

	{name: "node.runner", kind: kEnum, at: func(c *Config) any { return &c.Node.Runner }, example: `"none"`, words: []string{"managed", "external", "none"}, acted: true,
		doc: "`managed`: the node runs gitlab-runner itself. `external`: something else does. `none`: this host takes jobs placed by a hub alone. Not set: found out."},
	{name: "node.runner_config", kind: kPath, at: func(c *Config) any { return &c.Node.RunnerConfig }, example: `"/home/ci/.gitlab-runner/config.toml"`, acted: true,
		doc: "The runner's configuration, whose `concurrent` the node sets. Not set: `~/.gitlab-runner/config.toml` for a managed runner."},
	{name: "node.gitlab_runner", kind: kProgram, at: func(c *Config) any { return &c.Node.GitlabRunner }, example: `"gitlab-runner"`, acted: true,
		doc: "The gitlab-runner program, by name or absolute path."},
	{name: "node.validate", kind: kStrings, at: func(c *Config) any { return &c.Node.Validate }, example: `["/usr/local/lib/vk/smoke-test"]`,
		doc: "Command, as a list of words, that must exit 0 before an updated node takes jobs again."},
	{name: "node.validate_timeout_secs", kind: kSecs, at: func(c *Config) any { return &c.Node.ValidateTimeout }, def: "600", min: 1,
		doc: "Time that command has."},
	{name: "node.release_keys", kind: kStrings, at: func(c *Config) any { return &c.Node.ReleaseKeys }, example: `["AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="]`, check: checkKey,
		doc: "ed25519 public keys, base64, that sign the releases this node may update to."},
	{name: "node.require_signed", kind: kOptBool, at: func(c *Config) any { return &c.Node.RequireSigned }, example: "true",
		doc: "Refuse a release that none of the keys signed. Not set: true when there is a key."},
	{name: "node.allow_downgrade", kind: kBool, at: func(c *Config) any { return &c.Node.AllowDowngrade }, def: "false",
		doc: "Let a hub put an older release than the running one on this node."},
	{name: "node.labels", kind: kStrings, at: func(c *Config) any { return &c.Node.Labels }, example: `["large-memory"]`, check: checkLabel, acted: true,
		doc: "Labels that placed jobs can ask for."},
	{name: "node.workload_mem_secs", kind: kSecs, at: func(c *Config) any { return &c.Node.WorkloadMem }, def: "30", min: 1, acted: true,
		doc: "Time between two measurements of a guest's host memory."},
	{name: "node.jobs_speed", kind: kString, at: func(c *Config) any { return &c.Node.JobsSpeed }, example: `"fast"`, check: checkLabel, acted: true,
		doc: "Speed class of the filesystem of job directories, as the hub shows it."},
	{name: "node.checkouts_speed", kind: kString, at: func(c *Config) any { return &c.Node.CheckoutsSpeed }, example: `"fast"`, check: checkLabel, acted: true,
		doc: "Speed class of the filesystem of checkouts."},
}
