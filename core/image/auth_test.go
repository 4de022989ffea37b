package image_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/image"
	"virtkit/core/logx"
)

func basic(user, pass string) string {
	return base64.StdEncoding.EncodeToString([]byte(user + ":" + pass))
}

// tokenAuth makes a registry ask for a bearer token, which its /token gives to
// one user.
func tokenAuth(reg *fakeRegistry, user, pass string) func(http.ResponseWriter, *http.Request, http.Handler) bool {
	return func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if r.URL.Path == "/token" {
			if u, p, _ := r.BasicAuth(); u != user || p != pass {
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
			fmt.Fprintf(w, `{"token":"T0KEN"}`)
			return true
		}
		if r.Header.Get("Authorization") != "Bearer T0KEN" {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="s",scope="repository:r:pull"`, reg.URL))
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		return false
	}
}

func TestCredentials(t *testing.T) {
	const secret = "s3cr3t-word"
	helpers := t.TempDir()
	script := "#!/bin/sh\nread host\n[ \"$1\" = get ] || exit 9\n"
	write := func(name, body string) {
		if err := os.WriteFile(filepath.Join(helpers, name), []byte(body), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write("docker-credential-good", script+`printf '{"ServerURL":"%s","Username":"joe","Secret":"`+secret+`"}' "$host"`)
	write("docker-credential-empty", script+"echo credentials not found in native keychain; exit 1")
	write("docker-credential-broken", script+"echo "+secret+"; exit 3")
	t.Setenv("PATH", helpers+":"+os.Getenv("PATH"))

	good := `{"auth":"` + basic("joe", secret) + `"}`
	for _, c := range []struct {
		name string
		job  string // DOCKER_AUTH_CONFIG; HOST is replaced
		file string
		cred []image.Credential
		from string // "" = must fail
		kind fault.Kind
		text string
	}{
		{name: "none", kind: fault.Denied, text: "denied access"},
		{name: "job variable", job: `{"auths":{"HOST":` + good + `}}`, from: "DOCKER_AUTH_CONFIG"},
		{name: "as a URL", job: `{"auths":{"https://HOST/v1/":` + good + `}}`, from: "DOCKER_AUTH_CONFIG"},
		{name: "user and password apart", job: `{"auths":{"HOST":{"username":"joe","password":"` + secret + `"}}}`, from: "DOCKER_AUTH_CONFIG"},
		{name: "longest path wins", job: `{"auths":{"HOST":{"auth":"` + basic("joe", "no") + `"},"HOST/r":` + good + `}}`, from: "DOCKER_AUTH_CONFIG"},
		{name: "other registries do not count", job: `{"auths":{"other.example":{"auth":"%%%"},"HOST":` + good + `}}`, from: "DOCKER_AUTH_CONFIG"},
		{name: "job variable before file", job: `{"auths":{"HOST":` + good + `}}`, file: `{"auths":{"HOST":{"auth":"` + basic("joe", "no") + `"}}}`, from: "DOCKER_AUTH_CONFIG"},
		{name: "file", job: `{"auths":{"other.example":` + good + `}}`, file: `{"auths":{"HOST":` + good + `}}`, from: "config.json"},
		{name: "job's own", cred: []image.Credential{{Registry: "HOST", Username: "joe", Password: secret}}, from: "the job's own registry credentials"},
		{name: "file before job's own", file: `{"auths":{"HOST":` + good + `}}`, cred: []image.Credential{{Registry: "HOST", Username: "joe", Password: "no"}}, from: "config.json"},
		{name: "helper", file: `{"credHelpers":{"HOST":"good"}}`, from: "docker-credential-good"},
		{name: "store", file: `{"auths":{"HOST":{}},"credsStore":"good"}`, from: "docker-credential-good"},
		{name: "store that knows nothing", job: `{"credsStore":"empty"}`, file: `{"auths":{"HOST":` + good + `}}`, from: "config.json"},
		{name: "missing helper", file: `{"credHelpers":{"HOST":"absent"}}`, kind: fault.Usage, text: "docker-credential-absent, which is not in PATH"},
		{name: "broken helper", job: `{"credsStore":"broken"}`, kind: fault.System, text: "docker-credential-broken, named by DOCKER_AUTH_CONFIG"},
		{name: "helper with a path", job: `{"credsStore":"../../x"}`, kind: fault.Usage, text: "no name of a program"},
		{name: "not JSON", job: secret, kind: fault.Usage, text: "DOCKER_AUTH_CONFIG is not valid"},
		{name: "bad auth", job: `{"auths":{"HOST":{"auth":"` + secret + `!"}}}`, kind: fault.Usage, text: "is not base64"},
		{name: "wrong password", job: `{"auths":{"HOST":{"auth":"` + basic("joe", secret+"x") + `"}}}`, kind: fault.Denied, text: "denied access"},
	} {
		t.Run(c.name, func(t *testing.T) {
			reg := newRegistry(t)
			reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x"})))
			reg.misbehave(tokenAuth(reg, "joe", secret))
			in := func(s string) string { return strings.ReplaceAll(s, "HOST", reg.host()) }
			file := filepath.Join(t.TempDir(), "config.json")
			if c.file != "" {
				if err := os.WriteFile(file, []byte(in(c.file)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			for i := range c.cred {
				c.cred[i].Registry = in(c.cred[i].Registry)
			}
			var mu sync.Mutex
			said := &strings.Builder{}
			s := openStore(t, image.Options{Retries: 2, Log: logx.New(said, -8, false)})
			img, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{
				Auth: image.Auth{DockerAuthConfig: in(c.job), ConfigFile: file, Job: c.cred},
				Progress: func(p image.Progress) {
					mu.Lock()
					defer mu.Unlock()
					said.WriteString(p.Text + "\n")
				},
			})
			all := said.String() + fmt.Sprint(err) + fault.HintOf(err)
			for _, bad := range []string{secret, basic("joe", secret), "T0KEN"} {
				if strings.Contains(all, bad) {
					t.Errorf("a secret is told: %s", all)
				}
			}
			if c.from != "" {
				if err != nil || img == nil {
					t.Fatal(err)
				}
				if !strings.Contains(all, "credentials for "+reg.host()+" from ") || !strings.Contains(all, c.from) {
					t.Errorf("the source %q is not told in: %s", c.from, all)
				}
				return
			}
			if fault.KindOf(err) != c.kind || err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error = (%s) %v; want (%s) with %q", fault.KindOf(err), err, c.kind, c.text)
			}
		})
	}
}

func TestDefaultConfigFile(t *testing.T) {
	env := map[string]string{"HOME": "/home/u"}
	get := func(k string) string { return env[k] }
	if got := image.DefaultConfigFile(get); got != "/home/u/.docker/config.json" {
		t.Errorf("with HOME = %q", got)
	}
	env["DOCKER_CONFIG"] = "/etc/d"
	if got := image.DefaultConfigFile(get); got != "/etc/d/config.json" {
		t.Errorf("with DOCKER_CONFIG = %q", got)
	}
}

// TestRedirectSecrets: a signed URL that a registry redirects to stays out of
// errors.
func TestRedirectSecrets(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x"})))
	reg.misbehave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		http.Redirect(w, r, "http://user:pw@127.0.0.1:1/blob?X-Signature=topsecret", http.StatusTemporaryRedirect)
		return true
	})
	s := openStore(t, image.Options{Retries: 1})
	_, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
	if err == nil || strings.Contains(err.Error(), "topsecret") || strings.Contains(err.Error(), "pw@") {
		t.Errorf("error = %v; want one without the signature", err)
	}
	reg.misbehave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		http.Redirect(w, r, "http://plain.invalid/blob", http.StatusTemporaryRedirect)
		return true
	})
	_, err = resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
	if err == nil || !strings.Contains(err.Error(), "plain HTTP") {
		t.Errorf("redirect to plain HTTP: %v; want a refusal", err)
	}
}
