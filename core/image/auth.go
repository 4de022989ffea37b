package image

// Auth holds the places where credentials of registries are looked for, in
// GitLab's order: DockerAuthConfig, ConfigFile, Job. The first that knows the
// registry is used.
type Auth struct {
	DockerAuthConfig string // JSON of the job's variable DOCKER_AUTH_CONFIG
	ConfigFile       string // a docker config.json; see DefaultConfigFile
	Job              []Credential
}

// Credential is one of a job response's credentials of type "registry".
type Credential struct {
	Registry string // host[:port], or a URL
	Username string
	Password string
}
