package conf

// For tests: the same functions with the system's places replaced.
var (
	LoadAt            = load
	ResolveStateDirAt = resolveStateDir
)
