package image

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"virtkit/core/fault"
	"virtkit/core/lazyre"
)

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

// DefaultConfigFile is where docker keeps the runner's user's credentials:
// $DOCKER_CONFIG/config.json, else ~/.docker/config.json, else "".
func DefaultConfigFile(getenv func(string) string) string {
	if d := getenv("DOCKER_CONFIG"); d != "" {
		return filepath.Join(d, "config.json")
	}
	if h := getenv("HOME"); h != "" {
		return filepath.Join(h, ".docker", "config.json")
	}
	return ""
}

type dockerConfig struct {
	Auths       map[string]authEntry `json:"auths"`
	CredHelpers map[string]string    `json:"credHelpers"`
	CredsStore  string               `json:"credsStore"`
}

// authEntry is authn.AuthConfig without its decoder, which fails the whole
// file for one bad entry of another registry.
type authEntry authn.AuthConfig

// find returns the credentials for a repository and where they come from; a
// zero AuthConfig and "" when no place knows the registry.
func (a Auth) find(ctx context.Context, repo name.Repository) (authn.AuthConfig, string, error) {
	for _, place := range []struct {
		name string
		load func() ([]byte, error)
	}{
		{"DOCKER_AUTH_CONFIG", func() ([]byte, error) { return []byte(a.DockerAuthConfig), nil }},
		{a.ConfigFile, func() ([]byte, error) {
			if a.ConfigFile == "" {
				return nil, nil
			}
			b, err := os.ReadFile(a.ConfigFile)
			if errors.Is(err, fs.ErrNotExist) {
				return nil, nil
			}
			return b, err
		}},
	} {
		b, err := place.load()
		if err != nil {
			return authn.AuthConfig{}, "", fault.New(fault.Usage, "reading registry credentials").
				Hint("make it readable for the user that vk runs as, or set DOCKER_CONFIG to another directory").Because(err)
		}
		if len(bytes.TrimSpace(b)) == 0 {
			continue
		}
		c, from, err := findIn(ctx, b, place.name, repo)
		if err != nil || from != "" {
			return c, from, err
		}
	}
	for _, j := range a.Job {
		if j.Username+j.Password != "" && matches(j.Registry, repo) >= 0 {
			return authn.AuthConfig{Username: j.Username, Password: j.Password}, "the job's own registry credentials", nil
		}
	}
	return authn.AuthConfig{}, "", nil
}

func findIn(ctx context.Context, b []byte, place string, repo name.Repository) (authn.AuthConfig, string, error) {
	var none authn.AuthConfig
	var cfg dockerConfig
	if err := json.Unmarshal(b, &cfg); err != nil {
		// The decoder's own text may quote what it could not read.
		return none, "", fault.Newf(fault.Usage, "%s is not valid docker configuration", place).
			Hint(`it is JSON like {"auths": {"registry.example": {"auth": "…"}}}`)
	}
	if key := best(cfg.CredHelpers, repo); key != "" {
		return askHelper(ctx, cfg.CredHelpers[key], place+" (credHelpers)", repo)
	}
	if key := best(cfg.Auths, repo); key != "" {
		c := authn.AuthConfig(cfg.Auths[key])
		if err := unpackAuth(&c); err != nil {
			return none, "", fault.Newf(fault.Usage, "%s: the auth of %s is not base64 of user:password", place, key)
		}
		if c != none {
			return c, place, nil
		}
	}
	if cfg.CredsStore != "" {
		return askHelper(ctx, cfg.CredsStore, place+" (credsStore)", repo)
	}
	return none, "", nil
}

func unpackAuth(c *authn.AuthConfig) error {
	if c.Auth == "" || c.Username != "" {
		return nil
	}
	b, err := base64.StdEncoding.DecodeString(strings.TrimRight(c.Auth, "\x00"))
	if err != nil {
		return err
	}
	user, pass, ok := strings.Cut(string(b), ":")
	if !ok {
		return errors.New("no colon")
	}
	c.Username, c.Password, c.Auth = user, strings.TrimRight(pass, "\x00"), ""
	return nil
}

// best is the longest key of m that is for repo; "" for none.
func best[V any](m map[string]V, repo name.Repository) string {
	found, length := "", -1
	for k := range m {
		if n := matches(k, repo); n > length {
			found, length = k, n
		}
	}
	return found
}

// matches tells whether a key of "auths" is for repo: a host, a URL, or a host
// with the first parts of a path. The result is how much of it matched, or -1.
func matches(key string, repo name.Repository) int {
	k := strings.ToLower(key)
	for _, p := range []string{"https://", "http://"} {
		k = strings.TrimPrefix(k, p)
	}
	k = strings.TrimSuffix(k, "/")
	for _, p := range []string{"/v1", "/v2"} {
		k = strings.TrimSuffix(k, p)
	}
	host := strings.ToLower(repo.RegistryStr())
	if host == name.DefaultRegistry {
		// docker's own registry goes by several names in these files.
		if _, short, ok := strings.Cut(name.DefaultRegistry, "."); ok && (k == short || strings.HasPrefix(k, short+"/")) {
			k = host + k[len(short):]
		}
	}
	full := host + "/" + strings.ToLower(repo.RepositoryStr())
	if k == host || k == full || strings.HasPrefix(full, k+"/") && strings.HasPrefix(k, host+"/") {
		return len(k)
	}
	return -1
}

var helperName = lazyre.New(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// helperLimit is how long a credential helper may take.
const helperLimit = 30 * time.Second

// askHelper speaks docker's credential helper protocol: the registry on
// stdin, JSON on stdout. A helper that is named but missing is an error: going
// on without it would fail later, with a misleading text, or pull the wrong
// image.
func askHelper(ctx context.Context, helper, place string, repo name.Repository) (authn.AuthConfig, string, error) {
	var none authn.AuthConfig
	if !helperName.MatchString(helper) {
		return none, "", fault.Newf(fault.Usage, "%s names the credential helper %q, which is no name of a program", place, helper)
	}
	prog := "docker-credential-" + helper
	path, err := exec.LookPath(prog)
	if err != nil {
		return none, "", fault.Newf(fault.Usage, "%s names the credential helper %s, which is not in PATH", place, prog).
			Hint("install %s on this host, or take it out of %s", prog, strings.Fields(place)[0])
	}
	ctx, cancel := context.WithTimeoutCause(ctx, helperLimit, fmt.Errorf("no answer within %s", helperLimit))
	defer cancel()
	ask := repo.RegistryStr()
	if ask == name.DefaultRegistry {
		ask = authn.DefaultAuthKey
	}
	cmd := exec.CommandContext(ctx, path, "get")
	cmd.Stdin = strings.NewReader(ask)
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		if strings.Contains(out.String(), "credentials not found") {
			return none, "", nil
		}
		if c := context.Cause(ctx); c != nil {
			err = c
		}
		// What the helper printed stays unsaid: it may be a secret.
		return none, "", fault.Newf(fault.System, "credential helper %s, named by %s", prog, place).
			Hint("run: echo %s | %s get", ask, prog).Because(err)
	}
	var got struct{ Username, Secret string }
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || got.Secret == "" && got.Username == "" {
		return none, "", fault.Newf(fault.System, "credential helper %s, named by %s, did not answer with a user and a secret", prog, place)
	}
	from := place + " through " + prog
	if got.Username == "<token>" {
		return authn.AuthConfig{IdentityToken: got.Secret}, from, nil
	}
	return authn.AuthConfig{Username: got.Username, Password: got.Secret}, from, nil
}
